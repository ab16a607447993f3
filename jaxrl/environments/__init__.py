"""What a policy acts in: tools and games, over several turns."""
