"""Rewards: scorers and the pool of processes that runs them beside the rollout."""
