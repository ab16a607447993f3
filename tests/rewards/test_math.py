"""Answer extraction and comparison."""

import json
import subprocess
import sys
import time
from pathlib import Path

from jaxrl.rewards.math import equal, extract_answer, score

ANSWERS = [
    (r"\boxed{1} then \boxed{\frac{1}{2}} #### 3 <answer>4</answer> 5", "auto", r"\frac{1}{2}", "boxed"),
    ("<answer>4</answer> 5\n#### 1,000 \nmore 7", "auto", "1,000", "####"),
    ("<answer>3</answer> or <answer> 4 </answer> 5", "auto", "4", "answer_tag"),
    ("four plus one is 5 in all", "auto", "5", "last_number"), ("nothing", "auto", None, "last_number"),
    (r"\boxed{12", "auto", "12", "last_number"),  # cut off by the token limit
    (r"\boxed{a \} b}", "boxed", r"a \} b", "boxed"), (r"12", "boxed", None, "boxed"),
    ("12", "answer_tag", None, "answer_tag"),
    ("<answer>first <answer>second</answer>", "answer_tag", "second", "answer_tag"),
    (" the lot 5\n", "none", "the lot 5", "none"), ("", "none", None, "none"),
]  # fmt: skip


def test_extract():
    for text, how, *expected in ANSWERS:
        assert extract_answer(text, how) == tuple(expected), text


def test_score_says_what_it_saw():
    seen = {"extracted": "72", "extracted_by": "last_number", "compared_by": "text"}
    assert score("So it is 72.", "72") == (1.0, seen)
    assert score("I cannot tell.", "72") == (0.0, {"extracted": None, "extracted_by": "last_number"})


def test_works_outside_the_main_thread():
    """math-verify's own timeouts are signals, which only the main thread may set."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score, r"\boxed{1+x^2}", "x^2+1").result()[0] == 1.0


def test_gsm8k_references_score_themselves(data_folder: Path):
    """Every reference solution, taken as a response, is correct, and never needs sympy."""
    with (data_folder / "gsm8k_test.jsonl").open() as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    for answer in answers:
        reward, info = score(answer, answer.rpartition("####")[2].strip())
        assert reward == 1.0, (answer, info)
        assert info["compared_by"] in ("text", "number")


LONG = 20_000
PIECES = (
    "\\boxed{", "\\boxed{1}", "{", "\\{", "####", "#### \n", "<answer>", "<answer>a", "answer is ", "1", "1,", "1 ",
    "1/", "1,111", "111 ", "\\frac{", "\\frac{1}{2", "\\frac 1", "\\text{", "**", "**a ", "_", " ", "\n", "$", "-",
    "--1", "1e", ".", "1.", ",", "\\", "\\,", "(", "(1,", "\\{1,", "±", "=", "x=", "12 a", "½", "⁰", "inf", "10^",
    "!", "\\boxed{1},", "</think>", "(1,2)", "\\{1", "\\lbrace", "**2", "7 (seven", "8:30 AM", "30^\\circ", "1.5",
    ",\\,", "12=", " or ", "\\boxed 1", "\\boxed 1{", "\\langle 1,", "<1,", "5 mod ", "5 (mod ", "1_", "base ",
    "answer: \n", "a", "a, b", "<", "≡", "mod ", "\\begin{pmatrix}", "\\begin{pmatrix}1\\\\", "\n\n", "$$\n",
)  # fmt: skip


def test_time_grows_with_the_length_alone():
    """At this length a quadratic search takes many seconds; each of these some hundredths."""
    for piece in PIECES:
        text = piece * (LONG // len(piece))
        began_s = time.process_time()  # of this process alone, whatever else runs
        for how in ("auto", "boxed", "answer_tag", "last_number"):
            extract_answer(text, how)
        assert equal(text, "12")[0] is False
        for reference in ("12", "x+1"):
            score(text, reference)
        short = text[: LONG // 10]
        equal(short, f"{short}1")  # a reference as long is compared
        assert time.process_time() - began_s < 3, piece


def test_what_is_not_computed_takes_no_memory():
    """In a process of its own, whose address space would not hold what these stand for."""
    code = (
        "import resource, sys\n"
        "from jaxrl.rewards.math import equal, load\n"
        "load()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20),) * 2)\n"
        "for text in sys.argv[1:]:\n"
        "    print(equal(text, '7')[0], equal('7', text)[0])\n"
    )
    towers = ("9^{9^{9}}", "9^9^9", "(9^9)^{9^9}", "(10!)!", "((3!)!)!!!", "10^{10^{10}}!", r"\binom{10^9}{10^8}")
    towers += (r"\prod_{k=1}^{10^{9}} k", r"\Gamma(10^8)", "2^{2^{40}}+1", "(x+y+z+1)^{300}", "e^{e^{e^{50}}}")
    small = ("2^{1000}", "1000!", r"\binom{100}{50}", "x^{100}", "e^{100}", "(x+1)^{30}", r"\pi^{100}", "9^{99}")
    texts = (*towers, "1e99999999", *small)
    done = subprocess.run([sys.executable, "-c", code, *texts], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False"] * 2 * len(texts), done.stderr[-2000:]
