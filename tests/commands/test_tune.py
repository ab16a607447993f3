"""`jaxrl tune`: which factors win on which lengths, what it says and writes, what it reads of a run, and its errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxrl.cli import main
from jaxrl.commands.tune import tune
from jaxrl.config import from_mapping, to_mapping
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity

CONFIG: dict[str, Any] = {
    "model": {"path": "tiny"},
    "data": {"train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 512, "task_size": 100},
    "rollout": {"n": 4, "max_num_seqs": 32, "decode_steps": 8, "dtype": "bfloat16"},
    "actor": {"old_logprobs": "rollout"},
    "trainer": {"total_training_steps": 30},
    "simulate": {"num_devices": 1},
}
SIMULATED = {"platform": "simulated", "kind": "H100 (simulated)", "count": 1}


def heavy(prompt: int, sample: int) -> int:
    """One prompt in eight is long."""
    return 400 + 10 * sample if prompt % 8 == 0 else 20 + prompt % 5 + sample


def tailless(prompt: int, sample: int) -> int:
    return 50 + (prompt == 0)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes the record of a run with lengths by prompt and sample, of 64 prompts."""

    def written(
        length: Callable[[int, int], int],
        *,
        prompts: int = 64,
        samples: int = 2,
        devices: dict[str, Any] = SIMULATED,
        longest: float | None = None,
        **sections: dict[str, Any],
    ) -> str:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        config = {name: section | sections.get(name, {}) for name, section in CONFIG.items()} | {
            name: section for name, section in sections.items() if name not in CONFIG
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(from_mapping(config))))
        (folder / "run.json").write_text(json.dumps({"devices": devices}))
        rows = [
            {
                "step": prompt // 2 + 1,
                "prompt": f"prompt {prompt}",
                "response": "y" * length(prompt, sample),
                "reward": float(sample % 2),
                "length": length(prompt, sample),
                "finish_reason": "length" if length(prompt, sample) == 512 else "stop",
                "source": "made_up",
            }
            for prompt in range(prompts)
            for sample in range(samples)
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        known = max((length(p, s) for p in range(prompts) for s in range(samples)), default=1)
        metrics = {"step": 1, "time": 0.0, "response_length/max": longest or known}
        (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        return str(folder)

    return written


def search(run_dir: str, *overrides: str, **options: Any) -> tuple[Any, list[str]]:
    """The table, and what was said."""
    said: list[str] = []
    return tune(run_dir, overrides, **{"seeds": 2, "steps": 10, "say": said.append, **options}), said


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["tune", "--run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("jaxrl: ")


# ---------------------------------------------------------------- which values win


def test_a_heavy_tail_asks_for_more_and_none_for_least(write: Callable[..., str]):
    """One in eight prompts is twenty times as long as the rest: at 1.1 a short round still waits for some of them. With
    all lengths alike, whatever is launched beyond the batch is work for nothing."""
    room = "rollout.max_num_seqs=128"
    table, _ = search(write(heavy), room, values=(1.05, 1.5))
    assert table.best.factors == (1.5, 1.5)
    assert table.pays
    assert table.plain.mean("gen_s") > 1.3 * table.best.mean("gen_s")
    table, said = search(write(tailless), room, values=(1.05, 1.5))
    assert table.best.factors == (1.05, 1.05)
    assert not table.pays
    assert said[-1] == "options: rollout.tail_batching.enable=false"


def test_partial_rollout(write: Callable[..., str]):
    options = {"rule": "partial_rollout", "values": (1.5, 3.0), "steps": 20}
    table, said = search(write(heavy), "rollout.max_num_seqs=128", **options)
    assert [each.launched for each in table.tried] == [(12, 4), (24, 4)]
    assert table.pays
    assert said[-1].startswith("options: rollout.partial_rollout.enable=true rollout.partial_rollout.over_provision=")
    assert all(each.mean("long_share") == 0 for each in table.tried)
    assert table.plain.mean("queue") == 0 < table.best.mean("queue")
    assert (
        table.plain.mean("stale_share") == 0 < table.tried[0].mean("stale_share") < table.tried[1].mean("stale_share")
    )


# ---------------------------------------------------------------- what is run


def test_the_grid_the_seeds_and_the_baseline(write: Callable[..., str], tmp_path: Path):
    """The run itself had another rule, which the plain baseline must not have."""
    folder = write(heavy, rollout={"over_provisioning": {"enable": True, "prompt_factor": 2.0}})
    table, said = search(folder, steps=20, out=str(tmp_path / "found" / "table.json"))
    assert [each.factors for each in table.tried] == [(eta, eta) for eta in (1.1, 1.15, 1.3, 1.4)]
    assert [each.launched for each in (table.plain, *table.tried)] == [(8, 4), (9, 5), (10, 5), (11, 6), (12, 6)]
    assert all(len(each.trials) == 2 for each in (table.plain, *table.tried))
    assert all(len({one.step_s for one in each.trials}) == 2 for each in (table.plain, *table.tried)), "seeds differ"
    assert table.plain.mean("thrown_share") == table.plain.mean("long_share") == table.plain.mean("queue") == 0
    assert all(each.mean("stale_share") == 0 for each in table.tried), "tail batching stays on-policy"
    for each in table.tried:
        prompts = each.launched[0]
        assert each.mean("thrown_share") > 0
        # each short round defers what it launches beyond 8 prompts, and a long round takes 8
        assert each.mean("long_share") == pytest.approx((prompts - 8) / prompts, abs=1e-9)
    assert "  note: left out, since they launch what another value launches: 1.2, 1.25, 1.35" in said

    record = json.loads((tmp_path / "found" / "table.json").read_text())
    assert (record["run"], record["seeds"], record["steps"]) == (folder, 2, 20)
    assert record["costs"].startswith("roofline")
    assert "128 responses to 64 prompts" in record["lengths"]
    assert record["plain"]["trials"] == [dataclasses.asdict(one) for one in table.plain.trials]
    assert len(record["tried"]) == 4


def test_it_repeats_itself_in_any_number_of_processes(write: Callable[..., str]):
    folder = write(heavy)
    once, _ = search(folder, values=(1.1, 1.5))
    again, _ = search(folder, values=(1.1, 1.5), processes=2)
    assert once == again
    other, _ = search(folder, "trainer.seed=5", values=(1.1, 1.5))
    assert other != once


def test_a_grid_for_each_factor(write: Callable[..., str]):
    folder = write(heavy)
    table, _ = search(folder, prompt_factors=(1.0, 1.25, 1.5), response_factors=(1.0, 1.5), seeds=1)
    assert [each.launched for each in table.tried] == [(8, 6), (10, 4), (10, 6), (12, 4), (12, 6)], "(8, 4) is plain"
    table, _ = search(folder, response_factors=(1.25, 1.5), seeds=1)
    assert [each.launched for each in table.tried] == [(8, 5), (8, 6)]
    assert all(each.mean("queue") == 0 for each in table.tried), "no prompt is launched beyond the batch"


def test_lengths_from_a_distribution_in_place_of_the_record(write: Callable[..., str]):
    options = ("simulate.recorded_run=", "simulate.tasks.simulated.response.median=40")
    table, said = search(write(heavy), *options, values=(1.5,), steps=6)
    assert "median 40" in said[2]
    assert len({one.step_s for one in table.plain.trials}) == 2


# ---------------------------------------------------------------- what it reads of a run


def test_a_real_run_gives_its_devices(write: Callable[..., str]):
    gpus = {"platform": "gpu", "kind": "NVIDIA H200", "count": 4}
    simulate = {"num_devices": 0}
    _, said = search(write(heavy, devices=gpus, simulate=simulate), values=(1.5,), steps=6, seeds=1)
    assert "on 4 × H200" in said[0]
    (note,) = [line for line in said if "note: " in line]
    assert note.startswith("  note: the run was on 4 × NVIDIA H200, and these seconds are modelled")
    _, said = search(
        write(heavy, devices=gpus, simulate=simulate), "simulate.hardware=A100", values=(1.5,), steps=6, seeds=1
    )
    assert "on 4 × A100" in said[0]
    _, said = search(write(heavy, simulate=simulate), values=(1.5,), steps=6, seeds=1)
    assert "on 8 × H100" in said[0], "a simulated run's devices are in its options"


def test_a_degree_left_open_is_found(write: Callable[..., str]):
    options = ("simulate.num_devices=2", "rollout.tensor_model_parallel_size=auto")
    found, _ = search(write(heavy), *options, values=(1.5,), steps=6, seeds=1)
    fixed = [
        search(write(heavy), options[0], f"rollout.tensor_model_parallel_size={tp}", values=(1.5,), steps=6, seeds=1)[0]
        for tp in (1, 2)
    ]
    assert found in fixed


def test_a_real_run_s_own_latencies(write: Callable[..., str], tmp_path: Path):
    profile = tmp_path / "latencies.json"
    grid = [(batch, context) for batch in (1, 64) for context in (64, 1024)]
    decode = tuple(Measurement(1, batch, context, 0.5) for batch, context in grid)
    identity = ProfileIdentity("tiny", "", "made up", 1, "", "")
    table = Profile(identity, decode, tuple(Measurement(1, b, c, 0.001) for b, c in grid), ())
    profile.write_text(json.dumps(table.to_json()))
    gpus = {"platform": "gpu", "kind": "made up", "count": 1}
    measured = write(heavy, devices=gpus, rollout={"layout": {"profile": str(profile)}})
    found, said = search(measured, values=(1.5,), steps=6, seeds=1)
    assert f"table {profile} (tiny on made up)" in said[1]
    assert found.plain.mean("gen_s") > 400 * 0.5, "half a second for each token of a long response"
    named, said = search(
        write(heavy, devices=gpus), f"rollout.layout.profile={profile}", values=(1.5,), steps=6, seeds=1
    )
    assert named.plain.mean("gen_s") == found.plain.mean("gen_s"), "an override names the file as the run does"
    assert not any("modelled" in line for line in said)
    found, _ = search(measured, "simulate.profile=", values=(1.5,), steps=6, seeds=1)
    assert found.plain.mean("gen_s") < 100


def test_what_the_record_lacks_is_said(write: Callable[..., str]):
    _, said = search(write(heavy, longest=500.0), values=(1.5,), steps=6, seeds=1)
    assert not any("note" in line for line in said)
    _, said = search(write(heavy, longest=900.0), values=(1.5,), steps=6, seeds=1)
    assert "  note: the run's longest response had 900 tokens, the longest in its record 410: more steps help" in said
    _, said = search(write(heavy, rollout={"tail_batching": {"enable": True}}), values=(1.5,), steps=6, seeds=1)
    assert any("ended its slowest responses early" in line for line in said)


# ---------------------------------------------------------------- the command


def test_options_and_overrides_come_in_any_order(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    folder = write(heavy)
    for order in (
        ["--run", folder, "--seeds", "0", "rollout.n=4"],
        ["--seeds", "0", "rollout.n=4", "--run", folder],
        ["rollout.n=4", "--run", folder, "--seeds", "0"],
    ):
        assert main(["tune", *order]) == 2
        assert "--seeds must be a whole number from 1 to 1000, found 0" in capsys.readouterr().err


def test_the_command_prints_a_table(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    few = ("--seeds", "2", "--steps", "12")
    assert main(["tune", "--run", write(heavy), "rollout.n=4", "--values", "1.1,1.5", *few]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert lines[0].startswith("tail batching on ")
    assert "2 seeds × 12 simulated steps of 8 prompts × 4 samples on 1 × H100" in lines[0]
    head = next(i for i, line in enumerate(lines) if "seconds a step" in line)
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == ["plain", "1.1", "*"]
    (options,) = [line for line in lines if line.startswith("options: ")]
    typed = [*options.split()[1:], "--values", "1.5", "--seeds", "1", "--steps", "12"]
    assert main(["tune", "--run", write(heavy), *typed]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--values", "1"], "no value (1) launches more than plain batches do"),
        (["trainer.sed=1"], "did you mean trainer.seed?"),
        (["model.path=nothing"], "model.path (nothing) must be a folder"),
    ],
)
def test_options_that_do_not_fit(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], arguments: Sequence[str], words: str
):
    assert words in error(capsys, write(heavy), *arguments)


def test_records_that_say_nothing(write: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "is not a run directory: it holds no run.json" in error(capsys, str(tmp_path / "nothing"))
    assert "holds 18 finished responses, and a search needs at least 20" in error(capsys, write(heavy, prompts=9))
    assert "all 128 recorded responses have 512 tokens, the run's limit, so there is no tail" in error(
        capsys, write(lambda prompt, sample: 512)
    )
    assert "by_rank) needs prompts with two recorded responses" in error(capsys, write(heavy, samples=1))
    folder = write(heavy, prompts=0)
    assert "holds no finished response" in error(capsys, folder)
    (Path(folder) / "samples.jsonl").unlink()
    assert "samples.jsonl: no such file" in error(capsys, folder)


def test_too_few_steps_for_a_long_round(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    assert main(["tune", "--run", write(heavy), "--values", "1.1", "--steps", "3", "--seeds", "1"]) == 2
    assert "--steps (3) holds no long round, and 3 of the 8 prompts that make one wait" in capsys.readouterr().err
