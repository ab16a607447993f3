"""Environments of a policy: tools and games, over several turns."""
