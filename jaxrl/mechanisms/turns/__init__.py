"""Trajectories of several turns: what a model says is answered by tools and games, and it goes on."""
