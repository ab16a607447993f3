"""jaxrl: reinforcement-learning post-training of language models in JAX, without the wait for the longest response."""

__version__ = "0.1.0"
