"""`jaxrl generate`: the system message, and which prompt a response belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.text import TextEngine


def test_prompts_and_a_system_message(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[object] = []
    plain = TextEngine.generate

    def noted(self: TextEngine, prompts: list[object], *rest: object, **named: object) -> object:
        asked.extend(prompts)
        return plain(self, prompts, *rest, **named)  # pyright: ignore

    monkeypatch.setattr(TextEngine, "generate", noted)
    own = ("generate", "--model", f"random:{tiny_model}", "--max-tokens", "2")
    assert main([*own, "--system", "Be brief.", "--json", "one", "two"]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert asked == [[system, {"role": "user", "content": text}] for text in ("one", "two")]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert main([*own, "-n", "2", "one", "two\nlines"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("== one\n")
    assert out.count("\n== two lines\n") == 1
