"""What a run's newest checkpoint says of its prompts, before the checkpoint is compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxrl.config import Config, ConfigError, from_mapping, to_mapping
from jaxrl.data.prompts import PromptSource, load_train
from jaxrl.record.run_dir import RunDir
from jaxrl.run.beginnings import refuse_other_data
from jaxrl.training import manifest


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def apply_chat_template(self, messages: list[Any], /, add_generation_prompt: bool = True, **variables: Any) -> str:
        return messages[-1]["content"]


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., None]:
    """Has a run with one checkpoint, and looks whether it would go on with other options of `data`."""
    for name, count in (("a", 4), ("b", 6), ("same", 4)):
        rows = [json.dumps({"question": f"{i} + 1", "answer": i + 1, "from": "a"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def configured(**data: Any) -> Config:
        own = {"train_files": [str(tmp_path / "a.jsonl")], "source_key": "from"}
        return from_mapping({"model": {"path": "m"}, "data": own | data})

    def source(config: Config) -> PromptSource:
        return PromptSource(load_train(config), Bytes(), config)

    place, folder = tmp_path / "run" / "checkpoints" / "3", RunDir(tmp_path / "run")
    (place / "host").mkdir(parents=True)
    state = {"values": {"data": source(configured()).state()}}
    (place / "host" / "metadata").write_text(json.dumps(state))
    manifest.write(place, 2, 3)
    (folder.path / "config.yaml").write_text(yaml.safe_dump(to_mapping(configured())))

    def found(**data: Any) -> None:
        config = configured(**data)
        refuse_other_data(folder, source(config), config)

    return found


def test_other_data(look: Callable[..., None], tmp_path: Path):
    names = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with pytest.raises(ConfigError) as refused:
        look(train_files=[str(names[1])], train_batch_size=4)
    said = f"holds a run with other data (data.train_files: ['{names[0]}'] -> ['{names[1]}']; 4 prompts then, 6 now)"
    assert str(refused.value).startswith(f"{tmp_path}/run {said}: choose another trainer.run_dir")
    with pytest.raises(ConfigError, match=r"with its data in another order \(data\.seed: 0 -> 5\): choose another"):
        look(seed=5, train_batch_size=4)


def test_equal_data_goes_on(look: Callable[..., None], tmp_path: Path):
    look()
    look(train_files=[str(tmp_path / "same.jsonl")], train_batch_size=4, max_response_length=64)


def test_a_checkpoint_that_is_not_whole_is_told_of_later(look: Callable[..., None], tmp_path: Path):
    """A changed byte, or a pipe, which must not be waited for."""
    other, file = [str(tmp_path / "b.jsonl")], tmp_path / "run" / "checkpoints" / "3" / "host" / "metadata"
    written = file.read_text()
    with pytest.raises(ConfigError):
        look(train_files=other)
    file.write_text(written.replace('"num_prompts": 4', '"num_prompts": 5'))
    look()
    look(train_files=other)
    file.unlink()
    os.mkfifo(file)
    look(train_files=other)
    file.unlink()
    look(train_files=other)
