#!/usr/bin/env python
"""How often the math reward knows right answers as right and wrong ones as wrong, on real data.

    python scripts/check_math.py --gsm8k gsm8k_train.jsonl --deepmath deepmath_1980.jsonl
    python scripts/check_math.py --pairs

GSM8K: every reference solution is a right response; so is its answer in other forms, and its answer altered is wrong.
DeepMath: every ground truth verifies against itself, and in other LaTeX; a number altered does not. One line per check,
with its rate; then what failed, ten at most.

Pairs (`math_pairs.jsonl`): answers and references of thirteen kinds, half of them the same value in two spellings, the
others the value and one that is nearly it. A grammar that knew which are the same has drawn them. Each is judged by the
reward and by math-verify alone, both texts in `\\boxed{}`; one line per kind, then every pair on which the two disagree
or both are wrong, with what is wrong with it or how it is spelled, and which of them is right.

The exit status is 1 if anything failed, where math-verify's verdicts do not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from jaxrl.rewards.math import equal, score, to_number

Case = tuple[str, str]  # what is judged, and the reference
SHOWN = 10


def gsm8k_checks(solutions: Sequence[str]) -> Iterator[tuple[str, bool, list[Case]]]:
    """(name, whether each case is right, cases) over solutions that end in `#### answer`."""
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    yield "reference solutions", True, list(zip(solutions, golds, strict=True))
    for name, form in (
        ("boxed", r"So it is \boxed{{{}}}."),
        ("in a sentence", "So the answer is {}."),
        ("with a unit", "#### {} dollars"),
        ("bold", "#### **{}**"),
        ("with a reason", "#### {}, because 1 + 1 = 2"),
        ("price", "#### ${}/week"),
        ("glued", "答案是{}。"),
    ):
        yield name, True, [(form.format(gold), gold) for gold in golds]
    yield "next number", False, [(f"#### {_plus(gold, 1)}", gold) for gold in golds]
    yield "ten times", False, [(rf"\boxed{{{gold}0}}", gold) for gold in golds if gold != "0" and "." not in gold]
    yield "two answers", False, [(f"#### {gold} or {_plus(gold, 1)}", gold) for gold in golds]


def deepmath_checks(truths: Sequence[str]) -> Iterator[tuple[str, bool, list[Case]]]:
    """The same for ground truths of any kind: numbers, expressions, words, sets, matrices."""
    yield "itself", True, [(truth, truth) for truth in truths]
    yield "itself, boxed", True, [(rf"$\boxed{{{truth}}}$", truth) for truth in truths]
    yield "other LaTeX", True, [(spelled, truth) for truth in truths if (spelled := _other_latex(truth)) != truth]
    numbers = [(truth, value) for truth in truths if (value := to_number(truth)) is not None]
    yield "as 1/2", True, [(_ratio(value), truth) for truth, value in numbers]
    yield "next number", False, [(_ratio(value + 1), truth) for truth, value in numbers]
    yield "negative", False, [(_ratio(-value), truth) for truth, value in numbers if value]
    yield (
        "another's",
        False,
        [(truths[i - 1], truth) for i, truth in enumerate(truths) if _letters(truths[i - 1]) != _letters(truth)],
    )


def _ratio(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}" if value.denominator > 1 else str(value.numerator)


def _other_latex(truth: str) -> str:
    """The same with other commands and spaces, and simple fractions with a slash."""
    text = re.sub(r"\\[dt]?frac\{(\w+)\}\{(\w+)\}", r"{\1/\2}", truth)
    text = text.replace("(", r"\left(").replace(")", r"\right)") if r"\left" not in text else text
    text = text.replace(r"\dfrac", r"\frac").replace("+", " + ")
    return text if r",\!" in text else text.replace(",", ", ")


def _letters(text: str) -> str:
    return "".join(sorted(re.sub(r"[^\w]", "", text.casefold())))


def _plus(gold: str, number: int) -> str:
    value = to_number(gold.replace(",", ""))
    assert value is not None, gold
    return _ratio(value + number)


def check(title: str, checks: Iterable[tuple[str, bool, list[Case]]], judge: Callable[[str, str], bool]) -> int:
    """Prints a line for each check; returns how many cases came out wrong."""
    wrong = 0
    for name, expected, cases in checks:
        failed = [case for case in cases if judge(*case) != expected]
        rate = f"{len(cases) - len(failed):6d} of {len(cases):6d}"
        print(f"{title:9} {name:20} {'right' if expected else 'wrong':5}  {rate}", flush=True)
        for text, reference in failed[:SHOWN]:
            print(f"    {text[-120:]!r} against {reference!r}")
        wrong += len(failed)
    return wrong


def check_pairs() -> int:
    """Prints a line for each kind of pair, and each pair that one of the two judges wrongly; returns how many the
    reward did."""
    counts: Counter[tuple[str, str]] = Counter()
    told: list[str] = []
    for line in Path(__file__).with_name("math_pairs.jsonl").read_text(encoding="utf-8").splitlines():
        kind, how, right, answer, reference = json.loads(line)
        ours = score(rf"So it is \boxed{{{answer}}}.", reference)[0] == 1.0
        theirs = _math_verify_alone(answer, reference)
        wrong = [name for name, said in (("ours", ours), ("math-verify", theirs)) if said != right]
        for which in (kind, "in all"):
            counts.update([(which, "pairs"), *((which, name) for name in wrong)])
        if wrong:
            truth = "the same" if right else "not the same"
            told.append(f"    {kind}, {how}: {answer!r}, {reference!r}: {truth}; wrong: {' and '.join(wrong)}")
    print(f"{'pairs':16}{'':>6}   wrongly judged, and by math-verify alone")
    for kind in [*dict.fromkeys(kind for kind, _ in counts if kind != "in all"), "in all"]:
        print(f"{kind:16}{counts[kind, 'pairs']:6d}{counts[kind, 'ours']:17d}{counts[kind, 'math-verify']:25d}")
    print("\n".join(told), flush=True)
    return counts["in all", "ours"]


def _math_verify_alone(answer: str, reference: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    sides = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer)]  # pyright: ignore[reportArgumentType]
    return verify(sides[0], sides[1], timeout_seconds=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gsm8k", metavar="FILE", help="JSON lines with `answer`, whose solutions end in `#### 72`")
    parser.add_argument("--deepmath", metavar="FILE", help="JSON lines with `ground_truth`")
    parser.add_argument("--pairs", action="store_true", help="those of math_pairs.jsonl")
    options = parser.parse_args(arguments)
    wrong = check_pairs() if options.pairs else 0
    if options.gsm8k:
        wrong += check("GSM8K", gsm8k_checks(_column(options.gsm8k, "answer")), lambda a, b: score(a, b)[0] == 1.0)
    if options.deepmath:
        wrong += check("DeepMath", deepmath_checks(_column(options.deepmath, "ground_truth")), _is_equal)
    return int(wrong > 0)


def _is_equal(text: str, reference: str) -> bool:
    return score(text, reference)[0] == 1.0 if r"\boxed" in text else equal(text, reference)[0]


def _column(path: str, name: str) -> list[str]:
    with open(path, encoding="utf-8") as lines:
        return [str(json.loads(line)[name]) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
