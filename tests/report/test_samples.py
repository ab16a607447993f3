"""The table of samples: which are on the page, what is shown of each, and what the script needs."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

import pytest

from jaxrl.report.samples import MOST, samples_section


def sample(step: int, reward: Any, **more: Any) -> dict[str, Any]:
    head = {"step": step, "prompt": "?", "response": f"r{step}", "answer": "4", "reward": reward, "length": 9}
    return head | {"finish_reason": "stop", "source": "gsm8k"} | more


@pytest.mark.parametrize(
    ("rewards", "order"),
    [
        ([0.0, 1.0, 0.5], [1, 2, 0]),
        ([None, -1.0, float("nan"), 2], [3, 1, 0, 2]),
        ([1.0, 1.0], [0, 1]),
    ],
)
def test_samples_of_a_step_begin_with_the_best(rewards: list[Any], order: list[int]):
    rows = [sample(1, reward) | {"response": f"at {i}."} for i, reward in enumerate(rewards)]
    text = samples_section(rows)
    assert [int(at) for at in re.findall(r"at (\d)\.", text)] == order


def test_a_long_run_shows_the_best_and_the_worst_and_some_of_all_its_steps():
    rewards = {step: float(step % 7) for step in range(1, 1001)} | {500: -1.0, 600: 9.0}
    text = samples_section([sample(step, reward) for step, reward in rewards.items()])
    found = [int(step) for step in re.findall(r">r(\d+)<", text)]
    assert len(found) == MOST
    assert {500, 600} <= set(found)
    assert max(b - a for a, b in itertools.pairwise(sorted(found))) <= 8


CHATML = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (CHATML.format("What is 3 + 4?"), "What is 3 + 4?"),
        ("<start_of_turn>user\nHow?\n<end_of_turn>\n<start_of_turn>model\n", "How?"),
        ("<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant", "Why?"),
        ("<s>[INST] Who? [/INST]", "Who?"),
        (CHATML.format("first") + "so<|im_end|>\n" + CHATML.format("second"), "second"),
    ],
)
def test_the_chat_template_is_folded(prompt: str, shown: str):
    text = samples_section([sample(1, 0.5) | {"prompt": prompt}])
    first, _, folded = text.partition("<details>")
    assert f"<pre tabindex=0>{shown}</pre>" in first
    assert html.escape(prompt) in folded.partition("</details>")[0]


def test_a_conversation_is_shown_turn_by_turn():
    said = {"text": "5<6", "reward": 0.5, "seconds": 1.25, "answer": [{"role": "user", "content": "<Higher>"}]}
    tokens = [["5", -0.2], ["<", -0.9], ["6", -3.5], ["!", -70]]
    text = samples_section([sample(1, 1, turns=[said | {"tokens": tokens}, said | {"answer": []}])])
    assert "turn 1: reward 0.5, answered in 1.25 s" in text
    assert "turn 2: reward 0.5</p>" in text
    assert text.count("above 37 %") == 1, "the legend"
    shaded = re.findall(r"<span class=p(\d) title[^>]*>(.*?)</span>", text)
    assert [(shade, html.unescape(piece)) for shade, piece in shaded] == [("0", "5<"), ("3", "6"), ("4", "!")]
    assert text.count("<pre class=answer>&lt;Higher&gt;</pre>") == 1
    assert "<pre tabindex=0>5&lt;6</pre>" in text, "without its tokens, as text"
    assert "r1" not in text, "once is enough"
