"""Models whose sizes are worked out by hand, and configurations of them, for tests of what the plan says of memory."""

from jaxrl.config import from_mapping
from jaxrl.models.config import ModelConfig

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)
TINY = ModelConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=True,
)


def config(**sections):
    return from_mapping({"model": {"path": "m"}, **sections}).with_types("cpu")
