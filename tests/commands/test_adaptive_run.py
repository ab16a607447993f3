"""Whole runs of a tiny model on eight virtual devices with a layout that adapts: with the machine's own profile, and
with one that was made up so that it switches; and the profiler itself.

The model has 9 query and 3 key/value heads, so weights of layouts that adapt are padded. In float64 tokens do not
depend on the layout, and training weights have one layout only: so a run that switches ends as one at tp 1, to the bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import yaml
from runs import MADE_UP_PROFILE, PLAIN_REWARD, end, state_of
from runs import Runs as TinyRuns
from tiny import write_tiny_model

from jaxrl.record.layouts import read_layouts
from jaxrl.record.metrics import read_metrics
from jaxrl.scheduling.layouts.latency_profile import Profile

DEGREES = (1, 2, 4, 8)
STEPS = 10


class Runs(TinyRuns):
    """Starts commands on eight devices that share a model, data, and a compilation cache."""

    def __init__(self, folder: Path) -> None:
        sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "num_hidden_layers": 1}
        super().__init__(folder, write_tiny_model(folder / "model", **sizes))
        problems = [{"question": "x" * (1 + 2 * i), "answer": str(i)} for i in range(7)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
        (folder / "reward.py").write_text(PLAIN_REWARD)
        self.profile = folder / "profile.json"
        self.config["data"] |= {"max_prompt_length": 48, "max_response_length": 48}
        self.config["rollout"] = {
            "n": 4,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "decode_steps": 2,
            "dtype": "float64",
            "warmup": False,
            "layout": {"switch": True, "profile": str(self.profile), "min_gain": 0.0, "cooldown": 2},
        }
        self.config["actor"] = {
            "optim": {"lr": 0.01},
            "ppo_max_token_len_per_gpu": 256,
            "dtype": "float64",
            "param_dtype": "float64",
        }
        self.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 5}

    def run(self, command: str, *arguments: str) -> str:
        """A command with the configuration; returns what it printed."""
        program = ("-m", "jaxrl", command)
        return end(self.start(self.folder / "unnamed", *arguments, devices=8, program=program))

    def make_up_profile(self, file: Path, *options: str) -> None:
        """One by which a smaller batch is faster the larger tp is, and a switch costs next to nothing."""
        program = (MADE_UP_PROFILE, f"--out={file}")
        end(self.start(self.folder / "unnamed", *options, devices=8, program=program))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("adaptive"))


def assert_same_parameters(run_dir: Path, other: Path) -> None:
    """Every array of the training state, not those of layouts."""
    with jax.enable_x64(True):
        (found, values), (expected, _) = state_of(run_dir), state_of(other)
    assert values["step"] == STEPS
    names = {name for name in expected if not name.startswith("host.")}
    assert names == {name for name in found if not name.startswith("host.")}
    for name in names:
        assert found[name].tobytes() == expected[name].tobytes(), f"{name} differs"


@pytest.mark.slow
def test_two_workers_switch_each_by_itself_and_ten_updates_are_those_of_one(runs: Runs):
    one, cut = runs.folder / "one", runs.folder / "cut"
    profile = runs.folder / "of_half.json"
    several = ("rollout.num_workers=2", f"rollout.layout.profile={profile}")
    runs.make_up_profile(profile, *several)
    runs.run("train", f"trainer.run_dir={one}", "rollout.layout.switch=false")
    runs.run("train", f"trainer.run_dir={cut}", "rollout.layout.allow_synthetic=true", *several)
    assert_same_parameters(cut, one)
    rounds = read_layouts(cut)
    assert {each["worker"] for each in rounds} == {0, 1}
    for worker in (0, 1):
        switches = [switch for each in rounds if each["worker"] == worker for switch in each["switches"]]
        assert switches, f"worker {worker} never switched"
        assert {switch["to_tp"] for switch in switches} <= {2, 4}, "a worker has four devices"
    at = [[(switch["dispatch"], switch["to_tp"]) for switch in each["switches"]] for each in rounds]
    assert any(left != right for left, right in zip(at[::2], at[1::2], strict=True)), "each at times of its own"


@pytest.mark.slow
def test_a_synthetic_profile_makes_it_switch_and_ten_updates_are_those_of_tp_1(runs: Runs):
    plain, adaptive = runs.folder / "plain", runs.folder / "adaptive"
    runs.make_up_profile(runs.profile)
    runs.run("train", f"trainer.run_dir={plain}", "rollout.layout.switch=false")
    runs.run("train", f"trainer.run_dir={adaptive}", "rollout.layout.allow_synthetic=true")
    assert_same_parameters(adaptive, plain)
    lines = read_metrics(adaptive)
    assert sum(line["rollout/layout/switches"] for line in lines) >= STEPS
    assert all(line["rollout/layout/failed_switches"] == 0 for line in lines)
    assert not any(name.startswith("rollout/layout/") for line in read_metrics(plain) for name in line)
    rounds = read_layouts(adaptive)
    assert [each["step"] for each in rounds] == list(range(1, STEPS + 1))
    assert {each["source"] for each in rounds} == {"synthetic"}
    switches = [switch for each in rounds for switch in each["switches"]]
    assert all(switch["to_tp"] > switch["from_tp"] and switch["num_live"] > 0 for switch in switches)
    assert any(switch["how"] == "migrate" and switch["num_moved"] > 0 for switch in switches)
    assert all(each["points"][0][2] == 1 for each in rounds), "every round starts at tp 1 again"
    page = (adaptive / "report.html").read_text()
    assert "made up to try switches out, not measured" in page
    events = json.loads((adaptive / "timeline.json").read_text())
    drawn = [event for event in events if event.get("ph") == "X" and event["name"].startswith("tp 1 to ")]
    assert drawn
    assert {"num_moved", "predicted_cost_s", "cost_s", "predicted_step_s", "step_s"} <= set(drawn[0]["args"])


@pytest.mark.slow
def test_evaluations_of_a_one_step_off_run_decide_for_themselves(runs: Runs):
    """An evaluation comes after the next step's training round; neither hears the other's switches in the journal."""
    runs.make_up_profile(runs.profile)
    off, held_out = runs.folder / "off", runs.folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"question": "y" * (1 + 2 * i), "answer": "1"}) + "\n" for i in range(5)))
    runs.run(
        "train",
        f"trainer.run_dir={off}",
        f"data.val_files=['{held_out}']",
        "rollout.layout.allow_synthetic=true",
        "rollout.layout.planner=true",
        "rollout.val_kwargs={n: 4, temperature: 1.0}",
        "trainer.one_step_off=true",
        "trainer.test_freq=2",
        "trainer.save_freq=0",
        "trainer.total_training_steps=5",
    )
    rounds = {(each["step"], each["kind"]): each for each in read_layouts(off)}
    assert list(rounds) == [
        *((1, "plain"), (2, "plain"), (3, "plain"), (2, "eval")),
        *((4, "plain"), (5, "plain"), (4, "eval"), (5, "eval")),
    ]
    assert all(each["round"] == int(kind == "eval") for (_, kind), each in rounds.items()), "places in the journal"
    assert sum(len(each["switches"]) for (_, kind), each in rounds.items() if kind == "plain") >= 5


@pytest.mark.slow
def test_a_run_chooses_its_degree_from_the_profile_and_keeps_it(runs: Runs):
    """16 rows: at tp 1, 2, 4, 8 a dp group has 2, 4, 8 and twice 8 of them. Then the table is gone."""
    runs.make_up_profile(runs.profile)
    run_dir = runs.folder / "auto"
    auto = (
        "rollout.tensor_model_parallel_size=auto",
        "rollout.layout.allow_synthetic=true",
        "rollout.layout.switch=false",
        "rollout.max_num_seqs=8",
    )
    train = ("train", f"trainer.run_dir={run_dir}", *auto)
    assert "auto is 2 by " in runs.run(*train, "trainer.total_training_steps=1")
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["rollout"]["tensor_model_parallel_size"] == 2
    held_out = runs.folder / "auto.jsonl"
    held_out.write_text(json.dumps({"question": "y", "answer": "1"}) + "\n")
    assert "auto is 2 by " in runs.run("eval", *auto, f"data.val_files=['{held_out}']")
    runs.profile.unlink()
    output = runs.run(*train, "trainer.total_training_steps=2")
    assert "auto stays 2, as this run began" in output
    assert "changed since: rollout.tensor" not in output


@pytest.mark.slow
def test_the_profiler_and_a_run_with_what_it_measured(runs: Runs):
    runs.profile.unlink(missing_ok=True)
    sizes = ["--max-context=32", "--token-budget=256", "--repeats=1"]
    output = runs.run("profile", *sizes)
    table = Profile.from_json(json.loads(runs.profile.read_text()))
    assert table.source == "measured"
    assert table.degrees == DEGREES
    assert {(cost.from_tp, cost.to_tp) for cost in table.switches} == {
        (a, b) for a in DEGREES for b in DEGREES if a != b
    }
    assert f"{len(table.decode)} decode points" in output
    sizes_of = {rows.tp: rows.sizes for rows in table.row_sizes}
    assert tuple(sizes_of) == DEGREES
    assert all(point.batch in sizes_of[point.tp] for point in table.decode), "no batch that would be padded"
    # resumed: nothing is measured twice, and what is missing is
    partial = table.to_json() | {"decode": table.to_json()["decode"][1:]}
    runs.profile.write_text(json.dumps(partial))
    runs.run("profile", *sizes)
    again = Profile.from_json(json.loads(runs.profile.read_text()))
    assert set(table.decode[1:]) <= set(again.decode)
    assert {entry.point for entry in again.decode} == {entry.point for entry in table.decode}
    assert (again.prefill, again.switches) == (table.prefill, table.switches)
    honest = runs.folder / "honest"
    runs.run("train", f"trainer.run_dir={honest}", "trainer.total_training_steps=3", "rollout.layout.planner=true")
    lines = read_metrics(honest)
    assert all(line["rollout/layout/step_correction"] > 0 for line in lines), "real steps were seen"
    assert [each["source"] for each in read_layouts(honest)] == ["measured"] * 3
    foreign = again.to_json()
    foreign["identity"]["jax_version"] = "0.0.1"
    runs.profile.write_text(json.dumps(foreign))
    with pytest.raises(AssertionError, match=r"is of something else: jax_version is '0\.0\.1' there"):
        runs.run("profile", *sizes)


@pytest.mark.slow
def test_the_profiler_measures_steps_that_verify_drafts_and_plans_ask_them(runs: Runs):
    path = runs.folder / "drafts.json"
    options = (
        "rollout.speculation.enable=true",
        "rollout.tensor_model_parallel_size=4",
        "rollout.layout.degrees=[4, 8]",
        "rollout.layout.switch=false",
    )
    sizes = ("--max-context=32", "--token-budget=256", "--repeats=1", f"--out={path}")
    output = runs.run("profile", *sizes, *options)
    assert "4 that verify" in output
    table = Profile.from_json(json.loads(path.read_text()))
    # 16 drafted tokens a step on a CPU, shared by the rows of a dp group: two at tp 4, four at tp 8
    assert (table.verify_widths(4), table.verify_widths(8)) == ({2: 8}, {4: 4})
    assert {(entry.tp, entry.context) for entry in table.verify} == {(4, 8), (4, 32), (8, 8), (8, 32)}
    partial = table.to_json() | {"verify": table.to_json()["verify"][1:]}
    path.write_text(json.dumps(partial))
    runs.run("profile", *sizes, *options)
    again = Profile.from_json(json.loads(path.read_text()))
    assert set(table.verify[1:]) < set(again.verify), "nothing is measured twice"
    assert {entry.point for entry in again.verify} == {entry.point for entry in table.verify}
    with pytest.raises(AssertionError, match=r"was measured with steps that verify other numbers of tokens"):
        runs.run("profile", *sizes, *options, "rollout.speculation.verify_tokens=8")
    trained = runs.folder / "drafts"
    steps = ("data.train_batch_size=7", "trainer.total_training_steps=2")  # seven problems: two epochs
    runs.run("train", f"trainer.run_dir={trained}", f"rollout.layout.profile={path}", *steps, *options)
    assert "rollout/spec/plans_share" in read_metrics(trained)[1]
    other = ("rollout.speculation.verify_tokens=8", f"trainer.run_dir={runs.folder / 'other'}")
    with pytest.raises(AssertionError, match=r"run `jaxrl profile` with the same rollout.speculation options"):
        runs.run("train", f"rollout.layout.profile={path}", *steps, *options, *other)
