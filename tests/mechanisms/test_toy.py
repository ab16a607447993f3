"""The mechanism that CONTRIBUTING.md adds, as it stands there, in a simulated round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim_machine import Machine, key, known, sizes

from jaxrl.runtime.backend import RolloutBackend, Surroundings
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.round import Round
from jaxrl.schema.declared import walk
from jaxrl.types import Prompt, SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def toy() -> dict[str, Any]:
    section = PAGE.read_text(encoding="utf-8").partition("### A mechanism\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert block.count("\n") <= 50
    names: dict[str, Any] = {"__name__": "toy"}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_the_toy_of_the_page_measures_a_tail():
    names = toy()
    options = names["TailShareSection"](True, 0.25)
    assert [name for name, _ in walk(type(options))] == ["enable", "share"]
    assert names["ROOM"].name == "tail share"
    lengths = {key(index, 0): 10 + 70 * (index == 3) for index in range(4)}
    machine = Machine(known(lengths), sizes(num_devices=1, num_slots=4, num_blocks=90), decode_steps=5)
    parts = machine.engine, machine.executor, machine.scoring, str, lambda: None
    backend = RolloutBackend(*parts, [names["TailShare"](options)], Surroundings(clock=lambda: machine.clock.now_s))
    backend.enter_rollout(0)
    current = Round([Prompt(0, index, (1, 2), "?", "s") for index in range(4)], 1)
    backend.begin(RoundInfo(1), SamplingParams(max_tokens=100, stop_token_ids=(1,)))
    while not current.done:
        backend.apply(current.handle(backend.wait()))
    assert 0.6 < backend.end()["rollout/tail_share"] < 1, "one response of 80 tokens, beside three of 10"
