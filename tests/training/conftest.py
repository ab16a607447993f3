"""Trainers of a tiny model, and batches for them."""

from trainer_fixtures import make_batch, make_config, make_trainer, model_config

__all__ = ["make_batch", "make_config", "make_trainer", "model_config"]
