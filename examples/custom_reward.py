"""A custom reward function with verl's signature: the final number decides, and its form earns a little.

    python examples/custom_reward.py                                        # a few answers and their scores
    python examples/custom_reward.py --truth 72 --answer "48 + 24 is 72. #### 72"

In a run, with problems that the run makes itself, or with GSM8K from a file::

    jaxrl train --config configs/quickstart.yaml trainer.run_dir=runs/custom \\
        reward.kind=custom reward.path=examples/custom_reward.py
    jaxrl train --config configs/gsm8k.yaml 'data.train_files=[path/to/gsm8k_train.jsonl]' \\
        reward.kind=custom reward.path=examples/custom_reward.py

The function runs in processes of its own (`reward.num_workers`), while other responses are still written, and for at
most `reward.timeout_s`. If it raises, that one response gets no reward, and the error is counted (`reward/errors`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

FORMAT_SHARE = 0.1  # of the reward: enough to learn the form from, too little to live on
NUMBER = re.compile(r"(?:(?<!\d)-)?\d{1,40}(?:\.\d{1,40})?")  # in "5-3" the 3 has no sign


def compute_score(
    data_source: str, solution_str: str, ground_truth: str | None, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """A score between 0 and 1. The other parts stay with the sample, and `jaxrl eval --out` writes them.

    Args:
      data_source: the prompt's data set or task.
      solution_str: the response.
      ground_truth: the reference answer; None where the data has none.
      extra_info: the prompt's other columns, and `prompt`, `question`, `epoch`, `index`, `finish_reason` and
        `response_length`.
    """
    truth = final_number(ground_truth or "")
    if truth is None:
        raise ValueError(f"{data_source}: the reference answer must be a number, found {ground_truth!r}")
    correct = float(final_number(solution_str) == truth)
    form = float(has_form(solution_str) and extra_info.get("finish_reason") != "length")
    return {"score": (1 - FORMAT_SHARE) * correct + FORMAT_SHARE * form, "correct": correct, "form": form}


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", or else the last number of the text. "1,234", "$72" and "72.0" are read."""
    _, mark, last = text.rpartition("####")  # without a mark, last is the whole text
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", last))
    if not found:
        return None
    return Decimal(found[0] if mark else found[-1])


def has_form(text: str) -> bool:
    """Whether there is some text, then "####" once, then only a number on the line. Several marks would be several
    guesses."""
    before, _, after = text.partition("####")
    return bool(before.strip()) and bool(NUMBER.fullmatch(after.strip().lstrip("$").replace(",", "").rstrip(".")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries the reward function on a few answers, or on yours.")
    parser.add_argument("--truth", default="72", help="the reference answer (default: 72)")
    parser.add_argument("--answer", action="append", help="a response to score; may be given several times")
    options = parser.parse_args()
    answers = options.answer or [
        "April: 48. May: 24. 48 + 24 is 72.\n#### 72",
        "48 + 24 = 72",
        "Half of 48 is 24.\n#### 24",
        "#### 70\n#### 71\n#### 72",
        "#### 72",
        "I do not know.",
    ]
    try:
        for answer in answers:
            parts = compute_score("example", answer, options.truth, {"finish_reason": "stop"})
            print("  ".join(f"{name} {value:.1f}" for name, value in parts.items()), repr(answer), sep="  ")
    except ValueError as error:
        parser.exit(2, f"custom_reward.py: {error}\n")


if __name__ == "__main__":
    main()
