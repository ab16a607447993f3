"""The mechanism that CONTRIBUTING.md adds, as it stands there, in a simulated round."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sim_machine import Machine, key, known, prompt, sizes

from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.round import Round
from jaxrl.schema.section import walk
from jaxrl.types import SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def toy() -> Any:
    section = PAGE.read_text(encoding="utf-8").partition("### A mechanism\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 25
    names: dict[str, Any] = {"__name__": "toy"}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names["TailShare"]


def test_the_toy_of_the_page_measures_a_tail():
    tail_share = toy()
    assert [name for name, _ in walk(tail_share.Options)] == ["enable", "share"]
    lengths = {key(index): 10 + 70 * (index == 3) for index in range(4)}
    machine = Machine(known(lengths), sizes(num_blocks=90), decode_steps=5)

    def built(**options: Any) -> Any:
        config = SimpleNamespace(rollout=SimpleNamespace(tail_share=tail_share.Options(**options)))
        return tail_share.build(SimpleNamespace(config=config, workers=machine.run.workers))

    assert built() is None, "its switch is off"
    backend = RolloutBackend(replace(machine.run, mechanisms=(built(enable=True, share=0.25),)))
    backend.enter_rollout(0)
    current = Round.of([prompt(index) for index in range(4)], 1)
    backend.begin(RoundInfo(1), SamplingParams(max_tokens=100, stop_token_ids=(1,)))
    while not current.done:
        backend.apply(current.handle(backend.wait()))
    assert 0.6 < backend.end()["rollout/tail_share"] < 1, "one response of 80 tokens, beside three of 10"
