"""The report page: what it shows of a realistic run, and of runs with pieces missing."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.config import from_mapping, to_mapping
from jaxrl.mechanisms import page_parts
from jaxrl.record.batches import BatchLog
from jaxrl.record.metrics import MetricsWriter, hidden_shares, length_metrics, read_metrics, spread, step_phases
from jaxrl.record.numbers import number
from jaxrl.record.timeline import Timeline
from jaxrl.report.charts import step_labels, thin, ticks_of
from jaxrl.report.page import write_report
from jaxrl.types import Group, Prompt, Sample, SampleKey

STEPS = 120


def groups_of(rewards: np.ndarray, lengths: np.ndarray) -> list[Group]:
    """Groups of eight samples with these rewards and lengths."""
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        ids, zeros = np.zeros(length, np.int32), np.zeros(length, np.float32)
        samples.append(Sample(SampleKey(0, i // 8, i % 8), ids, zeros, zeros, ids, "stop", reward=float(reward)))
    return [Group(Prompt(0, i, (1,), "?", "src"), samples[8 * i : 8 * i + 8]) for i in range(len(samples) // 8)]


def fake_run(folder: Path, steps: int = STEPS) -> Path:
    """A run that learns: reward rises, lengths have a tail, phases take their time, one gradient is not finite."""
    rng = np.random.default_rng(0)
    config = from_mapping(
        {
            "model": {"path": "models/SmolLM2-135M-Instruct"},
            "data": {"task": "basic_arithmetic", "train_batch_size": 16, "max_response_length": 512},
            "actor": {"use_kl_loss": True, "optim": {"lr": 1e-5}, "ppo_max_token_len_per_gpu": 4096},
            "rollout": {"stop": ["</answer>"], "max_num_seqs": 64},
            "trainer": {"total_training_steps": 150, "test_freq": 20, "experiment_name": "smollm2-arithmetic"},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    batches = BatchLog(folder / "batches.jsonl", -1, 512)
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            progress = 1 - math.exp(-step / 40)
            rewards = (rng.random(128) < 0.08 + 0.7 * progress).astype(float) * rng.choice([1.0, 0.9], 128)
            lengths = np.minimum(rng.lognormal(4.1 + 0.7 * progress, 0.8, 128), 512).astype(int)
            writer.write(step, fake_metrics(step, progress, rewards, lengths, rng))
            batches.write(step, groups_of(rewards, lengths))
    batches.close()
    write_samples(folder / "samples.jsonl", (1, 60, steps))
    info = {
        "config": to_mapping(config),
        "versions": {"jaxrl": "0.1.0", "jax": "0.10.2", "python": "3.11.9"},
        "commit": "0123456789abcdef",
        "devices": {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 8},
        "started": "2026-11-21 11:42:07",
        "command": "jaxrl train configs/arithmetic.yaml trainer.seed=1",
    }
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def fake_metrics(
    step: int, progress: float, rewards: np.ndarray, lengths: np.ndarray, rng: np.random.Generator
) -> dict[str, float]:
    """What a step with these rewards and lengths reports; `progress` goes from 0 to 1 as the run learns."""
    gen, update = 0.02 * lengths.max() + 2, 4 + rng.random()
    timing = {"gen": gen, "reward": 0.6, "old_log_prob": 1.3, "ref": 1.2, "adv": 0.01, "update_actor": update}
    timing |= {"sync": 0.4} | ({"save": 2.5} if step % 10 == 0 else {})
    metrics = spread("critic/rewards", rewards) | length_metrics(lengths, 512)
    metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
    metrics |= {
        "timing_s/step": sum(timing.values()) + 0.7,
        "rollout/bubble_ratio": 0.35 + 0.2 * float(rng.random()) * progress,
        "actor/entropy": 1.1 - 0.6 * progress + 0.03 * float(rng.normal()),
        "actor/ppo_kl": 2e-4 * float(rng.normal()),
        "actor/kl_loss": 4e-3 * progress,
        "actor/teacher_kl": 2.0 - progress,
        "actor/distillation_loss": 1.0 - 0.5 * progress,
        "actor/grad_norm": math.nan if step == 50 else 0.4 + 0.1 * float(rng.random()),
        "actor/pg_clipfrac": 0.01 * progress,
        "actor/lr": 1e-5,
        "actor/skipped_updates": float(step == 50),
        "critic/mixed_reward_groups": 0.8 - 0.5 * progress,
        "rollout_corr/k3_kl": 1e-3 * (1 + 0.1 * float(rng.random())),
        "rollout_corr/log_ppl_abs_diff": 2e-3,
        "rollout_corr/logprob_abs_diff_max": 0.3,
        "training/off_policy/mean_staleness": 0.5,
        "training/off_policy/max_staleness": 1.0,
        "training/off_policy/share": 0.5,
        "perf/throughput": 900 + 60 * float(rng.normal()),
        "perf/total_num_tokens": float(lengths.sum()),
    }
    if step % 20 == 0:
        metrics["val-core/basic_arithmetic/acc/mean@1"] = 0.1 + 0.68 * progress
    return metrics


def write_samples(path: Path, steps: Sequence[int]) -> None:
    """Two samples of each step: a long one without a reward, and a right one."""
    with open(path, "w") as file:
        for step in steps:
            for index, reward in enumerate((0.0, 1.0)):
                think = "First add the tens, then the ones: 40 + 30 = 70 and 7 + 8 = 15, so 85. " * (6 if index else 30)
                sample = {
                    "step": step,
                    "prompt": "<|im_start|>user\nWhat is 47 + 38? Answer with <answer>…</answer>.<|im_end|>\n",
                    "response": f"{think}\n<answer>{85 if reward else 75}</answer> 日本語 & <script>alert(1)</script>",
                    "answer": "85",
                    "reward": reward,
                    "length": 512 if not index else 98,
                    "finish_reason": "stop" if index else "length",
                    "source": "basic_arithmetic",
                }
                file.write(json.dumps(sample) + "\n")


class _Checker(HTMLParser):
    """Every element that is opened is closed, and nothing is fetched or run."""

    VOID = frozenset(["input", "meta", "polyline", "polygon", "wbr"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(text)
    assert not checker.open
    assert checker.seen.count("script") <= 1, "that of the samples"
    assert "NaN" not in text
    assert "nan," not in text.split("<h2>")[0]
    return text


def page_of(folder: Path, lines: Iterable[dict[str, float]], **options: Any) -> str:
    """The page of a run whose steps have these metrics."""
    with MetricsWriter(folder) as writer:
        for step, line in enumerate(lines, 1):
            writer.write(step, line)
    return check(write_report(folder, **options))


def figure_of(page: str, title: str) -> str:
    return page[page.index(title) :].partition("</figure>")[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The page of a run that learns, with the parts of all mechanisms; it has none of them on."""
    folder = fake_run(tmp_path_factory.mktemp("runs") / "plain")
    path = write_report(folder, parts=page_parts())
    assert path == folder / "report.html"
    assert not list(folder.glob("*.tmp"))
    return check(path)


def test_a_whole_run(plain):
    text = plain
    assert text.count("<svg") == 22
    assert "not recorded" not in text
    assert "smollm2-arithmetic" in text
    assert "120 of 150" in text
    assert re.search(r"from 0\.\d+, best 0\.\d+ at step \d+<", text), "held out"
    assert "actor.optim.lr" in text  # names are breakable after "_"
    assert "1e-05" in text
    assert "rollout.temperature" not in text  # has its default
    assert "&lt;script&gt;alert(1)" in text
    assert [f"data-step={step} " in text for step in (1, 60, 120)] == [True] * 3
    for title in (
        *("Groups with mixed rewards", "Clipped tokens", "Learning rate", "Skipped updates", "Rewards of groups"),
        *("Rollout against trainer", "Staleness of trained tokens", "Histogram of lengths"),
    ):
        assert f"<h3>{title} " in text
    assert "step 50: updates were skipped here" in figure_of(text, "<h3>Gradient norm")
    assert "jaxrl train configs/arithmetic.yaml" in text
    assert text.count("8 × NVIDIA H100 80GB HBM3") == 2, "in the head, and where and when"
    assert (
        "<code>actor.use_<wbr>kl_<wbr>loss</code></td><td><code>true</code></td><td class=sub><code>false</code>"
        in text
    )


def test_rounds_are_drawn_by_kind(tmp_path):
    def line(step: int) -> dict[str, float]:
        is_long = step % 4 == 0
        return {
            "rollout/long_round": float(is_long),
            "rollout/queue_length": 0.0 if is_long else float(step % 4),
            "rollout/queue_age_steps/max": float(step % 4),
            "timing_s/gen": 28.0 if is_long else 9.0,
            "timing_s/reward": 2.0,
            "timing_s/step": 10.0 if is_long else 30.0,  # one-step-off: of another round
            "response_length/max": 900.0 if is_long else 100.0,
        }

    page = page_of(tmp_path, map(line, range(1, 9)), parts=page_parts())
    for title in ("Rollout time by round", "Longest response by round", "Long-prompt queue"):
        assert title in page
    figure = figure_of(page, "Rollout time by round")
    assert figure.count("<circle class=c1") == 6, "short rounds"
    assert figure.count("<circle class=c2") == 2, "long rounds"
    assert "<polyline" not in figure, "steps of a kind are not one after another"
    assert "step 8: 30" in figure


def test_drafts_and_ranking_groups_are_drawn_with_the_epochs(tmp_path, plain):
    def line(step: int) -> dict[str, float]:
        epoch = (step - 1) // 4
        spec = {"accept_rate": 0.2 * epoch, "drafted_share": 0.1 * epoch, "tokens_per_step": 1 + epoch}
        spec |= {"plans_share": float(epoch > 0)}
        values = {f"rollout/spec/{name}": value for name, value in spec.items()}
        shares = {f"rollout/ranking/{name}_share": 0.01 * step for name in ("idle", "moved", "carried")}
        return values | shares | {"training/epoch": epoch}

    page = page_of(tmp_path, map(line, range(1, 13)), parts=page_parts())
    assert "Drafts" not in plain
    assert "ranking groups" not in plain
    for title in ("Drafts from history", "Tokens of a step that verifies", "Workers of ranking groups"):
        figure = figure_of(page, title)
        assert figure.count("an epoch begins</title>") == 2
        assert "step 5: an epoch begins" in figure
        assert "step 9: an epoch begins" in figure


def test_a_step_that_rolls_out_for_the_next_one_is_drawn_once(tmp_path):
    """One-step-off: a line has its batch's round, which ran before the step, and the seconds of the next one."""
    each = {"timing_s/gen": 40.0, "timing_s/reward": 3.0, "timing_s/update_actor": 20.0, "timing_s/ahead": 43.0}
    first = each | {"timing_s/overlap": 19.0, "timing_s/step": 87.0}
    later = each | {"timing_s/overlap": 20.0, "timing_s/step": 43.0, "timing_s/earlier": 43.0}
    for line in (first, later):
        parts = {name: seconds for name, seconds in line.items() if name != "timing_s/step"}
        assert sum(step_phases(parts).values()) == line["timing_s/step"]
    figure = figure_of(page_of(tmp_path, [first, later, later]), "Step time by phase")
    drawn = dict(re.findall(r"<title>step 2: (.+?) ([0-9.]+)</title>", figure))
    assert drawn == {"next rollout": "23", "update_actor": "20"}
    assert figure.count("<li class") == 5, "gen, reward, next rollout, update_actor, and what both would take in turns"
    assert "next rollout" in figure
    assert "in turns" in figure
    assert "other" not in figure


@pytest.mark.parametrize("one_step_off", [False, True])
def test_what_of_the_update_was_hidden_under_the_rollout(tmp_path, one_step_off):
    """6 of 6 + 2 seconds in step 2, nothing in step 3. With one-step-off the round beside an update is the next step's,
    so its seconds are in the next line."""

    def line(step: int) -> dict[str, float]:
        found = {"timing_s/update_actor": 1.5, "timing_s/ref": 0.5, "timing_s/gen": 9.0, "timing_s/step": 11.0}
        found |= {"actor/streamed_share": 0.25} if step > 1 else {}
        found |= {"timing_s/ahead": 1.0} if one_step_off else {}
        hidden_s = {2: 6.0, 3: 0.0}.get(step - int(one_step_off))
        return found if hidden_s is None else found | {"rollout/scale_down/hidden_s": hidden_s}

    page = page_of(tmp_path, map(line, (1, 2, 3)))
    assert hidden_shares(read_metrics(tmp_path)) == [(2, 0.75), (3, 0.0)]
    figure = figure_of(page, "Update hidden under the rollout")
    assert figure.count("<li class") == 2, "seconds and prompts"
    assert "of its prompts" in figure
    assert "<dt>update hidden</dt><dd>38%</dd>" in page, "the median of 75 and 0"


def test_an_update_on_devices_of_its_own_is_hidden_too(tmp_path, plain):
    line = {"timing_s/update_actor": 20.0, "timing_s/step": 43.0}
    page = page_of(tmp_path, [line | {"timing_s/overlap": 15.0}, line])
    assert hidden_shares(read_metrics(tmp_path)) == [(1, 0.75)]
    assert "Update hidden under the rollout" in page
    assert "Update hidden" not in plain


def test_each_kl_is_called_what_it_is_and_noise_is_flat(tmp_path):
    """A KL of 1e-9 is a line at 0, not a landscape; the reference's has a chart of its own."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"actor": {"kl_loss_type": "low_var_kl"}}}))
    page = page_of(tmp_path, ({"actor/ppo_kl": 1e-9 * (-1) ** i, "actor/kl_loss": 0.01 * i} for i in range(1, 20)))
    update = figure_of(page, "KL of the update, old to new policy")
    assert ">-1e-4<" in update
    heights = {float(point.partition(",")[2]) for point in re.findall(r"points='(.*?)'", update)[0].split()}
    assert max(heights) - min(heights) < 1
    assert "nats per token, low_var_kl" in page[page.index("KL to the reference") :].partition("</h3>")[0]
    assert "<h3>KL <" not in page


def test_a_phase_that_took_no_time_is_not_in_the_legend(tmp_path):
    line = {"timing_s/gen": 9.0, "timing_s/ref": 0.0, "timing_s/reward": 1e-6, "timing_s/update_actor": 1.0}
    line |= {"timing_s/step": 10.0, "timing_s/save": 0.0}
    figure = figure_of(page_of(tmp_path, [line] * 3 + [line | {"timing_s/save": 2.0}]), "Step time by phase")
    assert re.findall(r"<li class='\w+'>([\w ]+)", figure) == ["gen", "update_actor", "save"]


def test_a_simulated_run_names_what_was_simulated_and_misses_nothing(tmp_path):
    config = {"model": {"path": "Qwen"}, "simulate": {"model": "SmolLM2-135M"}}
    source = {"cost_model": "roofline of H100", "workload": "modelled: lengths"}
    devices = {"platform": "simulated", "kind": "H100 (simulated)", "count": 8}
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "devices": devices, "simulation": source}))
    line = {"critic/rewards/mean": 0.5, "timing_s/step": 5.0, "timing_s/gen": 5.0, "simulated": 1}
    page = page_of(tmp_path, [line])
    assert "simulated SmolLM2-135M" in page
    assert "Qwen" not in page.partition("</header>")[0]
    assert "of modelled devices, not measured; cost model: roofline of H100; workload: modelled: lengths." in page
    assert "not recorded: actor" not in page
    config["simulate"]["model"] = ""
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "devices": devices}))
    assert "simulated Qwen" in check(write_report(tmp_path)).partition("</header>")[0]


def test_the_rows_of_the_last_round_are_drawn(tmp_path):
    now = [0.0]
    (tmp_path / "run.json").write_text("{}")
    with Timeline(tmp_path / "timeline.json", clock=lambda: now[0]) as timeline:
        for step in (1, 2):
            with timeline.phase("step", step=step):
                for i in range(3):
                    more = {"tokens": 7} if i else {}
                    timeline.row(
                        f"0.{i}", i, f"0.{step}.{i}", now[0], now[0] + i + 1, end="stop" if i else "abort", **more
                    )
                now[0] += 4.0
                with timeline.phase("testing"):
                    timeline.row("0.9", 9, "0.0.0", now[0], now[0] + 1, end="stop")
                    now[0] += 1.0
    figure = figure_of(check(write_report(tmp_path)), "<h3>Rows in step 2 ")
    titles = re.findall(r"<title>(.*?)</title>", figure)
    assert titles == [
        "row 0.0: 0.2.0, 0 to 1 s, aborted",
        "row 0.1: 0.2.1, 0 to 2 s, ended, 7 tokens",
        "row 0.2: 0.2.2, 0 to 3 s, ended, 7 tokens",
    ]
    widths = [float(width) for width in re.findall(r"<rect class=\w+ x=0.00% y=\S+ width=(\S+)%", figure)]
    assert widths == pytest.approx([100 / 3, 200 / 3, 100], abs=0.1), "of the width, so that it fits a phone"
    assert "viewBox" not in figure
    assert "until the end of the plan (rollout.decode_steps tokens) in which it ended" in figure
    assert re.findall(r"<li class='\w+'>(\w+)", figure) == ["ended", "aborted"]


def test_out_names_the_file(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert write_report(fake_run(run, 3), tmp_path / "pages" / "a.html") == tmp_path / "pages" / "a.html"
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"metrics.jsonl": ""}, "no step has been finished|samples.jsonl is missing"),
        ({"run.json": "{}"}, "metrics.jsonl is missing"),
        ({"run.json": "{"}, "run.json could not be read"),
        ({"run.json": "[]"}, "must hold an object"),
        ({"run.json": "{}", "config.yaml": "a: [\n"}, "config.yaml could not be read"),
        ({"run.json": "{}"}, "config.yaml is missing"),
        ({"run.json": '{"config": 3, "versions": [], "devices": null}'}, "does not hold the configuration"),
        ({"samples.jsonl": '{"step": 1}\n{"ste'}, "data-step=1 "),
        (
            {"samples.jsonl": "nonsense\n"},
            "samples.jsonl, line 1: damaged (JSONDecodeError: Expecting value: line 1 column 1 (char 0)), and left out",
        ),
        ({"metrics.jsonl": "nonsense\n"}, "metrics.jsonl, line 1: damaged"),
        ({"metrics.jsonl": '{"step": 1, "time": 1}\n'}, "not recorded: critic/rewards/mean"),
        ({"metrics.jsonl": '{"step": 1, "time": 1, "actor/entropy": "nan"}\n'}, "not recorded: actor/entropy"),
        ({"metrics.jsonl": '{"step": 1, "time": 1, "actor/entropy": 0}\n'}, "<circle"),
        ({"metrics.jsonl": '{"step": 1, "time": 1, "timing_s/step": 2.5}\n'}, "<rect"),
    ],
)
def test_missing_pieces_are_said(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    text = check(write_report(tmp_path))
    for part in said.split("|"):
        assert part in text


def test_a_damaged_run_is_said_where_the_command_was_given(tmp_path, capsys):
    """And not on the page alone: its numbers are gone."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        folder.mkdir()
        fake_run(folder, 3)
        (folder / "config.yaml").write_text("model: {path: m}\n")
    assert main(["report", str(whole)]) == 0
    assert capsys.readouterr().err == ""
    (run / "config.yaml").write_bytes(bytes(range(128, 256)))
    (run / "metrics.jsonl").unlink()
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"jaxrl: {run}: metrics.jsonl is missing"
    assert said[1].startswith(f"jaxrl: {run}: config.yaml could not be read: ")
    assert main(["report", str(whole), str(run), "--out", str(tmp_path / "both.html")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "run: metrics.jsonl is missing run: config.yaml could not be read" in out


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has none of"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a run"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 512, [0, 200, 400, 600]),
        (3, 3, [1, 2, 3, 4, 5]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
        (-2e-4, 3e-4, [-2e-4, 0, 2e-4, 4e-4]),
        (-3, -3, [-5, -4, -3, -2, -1]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert ticks_of(low, high) == pytest.approx(ticks)


def test_step_labels_are_whole_steps():
    assert step_labels(1, 1) == [1]
    assert step_labels(1, 2) == [1, 2]
    assert step_labels(1, 120) == [50, 100]
    assert step_labels(0, 4) == [0, 1, 2, 3, 4]


def test_long_runs_are_averaged():
    points = [(float(x), float(x % 2)) for x in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert all(y == 0.5 for _, y in thinned)
    assert thin(points[:100], 100) == points[:100]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (1234, "1234"),
        (12345, "12.3k"),
        (2.5e9, "2.5G"),
        (-1.2e-5, "-1.2e-5"),
        (1e-4, "1e-4"),
        (4.567e-14, "4.57e-14"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def failing(folder: Path, failed: int, scored: int = 100) -> str:
    """The page of a run of one step in which this many rewards failed."""
    folder.mkdir()
    counts = {"num_scored": scored, "errors": failed, "timeouts": 0, "crashes": 0}
    line = {"step": 1, **{f"reward/{name}": float(count) for name, count in counts.items()}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    errors = [["ZeroDivisionError: <no> (bad/raises.py, line 2, in compute_score)", failed]] if failed else []
    batch = {"step": 1, "groups": [0.0], "limit": 8, "lengths": [1] * 32, "errors": errors}
    (folder / "batches.jsonl").write_text(json.dumps(batch) + "\n")
    text = check(write_report(folder))
    return text.partition("<main>")[2].replace("<wbr>", "")


def test_a_run_whose_rewards_failed_says_so_at_its_head(tmp_path: Path):
    assert "rewards failed</b>" not in failing(tmp_path / "none", 0)
    all_of_them, few = failing(tmp_path / "all", 100), failing(tmp_path / "few", 1)
    assert (
        "</header><p class='note alarm'><b>100 of 100 rewards failed</b> and count as 0: 100 errors. Most often: "
        "<code>ZeroDivisionError: &lt;no&gt; (bad/raises.py, line 2, in compute_score)</code>.</p>"
    ) in all_of_them
    assert "<p class='note'><b>1 of 100 rewards failed</b> and count as 0: 1 error. Most" in few
