"""`jaxrl explain-config --fit`: the first way that fits, as a file that loads; and hints that follow the cause."""

import pytest
import yaml

from jaxrl.cli import main
from jaxrl.config import from_mapping


@pytest.mark.parametrize(
    ("cards", "model", "length", "way", "options"),
    [
        ("1x80", "Qwen2.5-7B", "8192", "their optimizer lies in the host's memory", {"actor.offload_optimizer": True}),
        ("1x24", "Qwen2.5-7B", "4096", "four bits, rollout in int8", {"model.base_quantization": "nf4"}),
        ("8x80", "Qwen2.5-7B", "8192", "all weights are trained;", {"actor.offload_optimizer": False}),
    ],
)
def test_a_proposal(
    capsys: pytest.CaptureFixture[str], cards: str, model: str, length: str, way: str, options: dict[str, object]
) -> None:
    assert main(["explain-config", "--fit", cards, "--shape", model, "--length", length]) == 0
    text = capsys.readouterr().out
    assert way in text.splitlines()[0]
    config = from_mapping(yaml.safe_load(text), "train")
    assert (config.model.path, config.data.max_response_length) == (model, int(length))
    for option, value in options.items():
        section, _, name = option.partition(".")
        assert getattr(getattr(config, section), name) == value


def test_a_hint_follows_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 113 GiB of weights and state, a shorter response frees nothing."""
    sizes = ["--shape", "Qwen2.5-7B", "--devices", "1", "--device-gib", "73", "data.max_response_length=4096"]
    assert main(["explain-config", "--config", "configs/gsm8k.yaml", *sizes]) == 2
    said = capsys.readouterr().err
    assert "train adapters alone (model.lora_rank=16): 70.9 GiB less; or set actor.offload_optimizer=true" in said
    assert "lower" not in said
    assert main(["explain-config", "--config", "configs/gsm8k.yaml", *sizes, "actor.offload_optimizer=true"]) == 0
    assert "host memory: optimizer (adam m, v) 56.7 GiB" in capsys.readouterr().out
