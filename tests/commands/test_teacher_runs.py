"""Runs with a teacher: the policy comes near it, resumed to the same bits, with each rule, and streamed."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_server import Handler, chat_server, status
from prompt_logprobs import gives_prompt_logprobs
from runs import PLAIN_REWARD, WIDE, Runs, assert_same_end, copied_after, state_of
from tiny import write_tiny_model

from jaxrl.cli import main
from jaxrl.models import decoder
from jaxrl.models.loading import config_of, load_model
from jaxrl.models.safetensors import export_hf
from jaxrl.record.metrics import read_metrics

STEPS = 4
ALONE = ("algorithm.adv_estimator=none", "actor.ppo_mini_batch_size=0", "actor.ppo_max_token_len_per_gpu=2048")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With a teacher of another family and other sizes, which prefers some tokens wherever they stand: its values have
    a bias, so all that it sees of a text is small beside a constant."""
    folder = tmp_path_factory.mktemp("teacher")
    runs, place = Runs(folder, write_tiny_model(folder / "model")), folder / "teacher"
    (folder / "reward.py").write_text(PLAIN_REWARD)
    write_tiny_model(place, architectures=["Qwen2ForCausalLM"], model_type="qwen2", num_hidden_layers=3)
    model = config_of(place)
    params = jax.tree.map(np.array, decoder.init(model, jax.random.key(7), jnp.float32))
    params["layers"]["v_bias"] += np.random.default_rng(0).normal(size=params["layers"]["v_bias"].shape)
    params["layers"]["o"] *= 50
    params["embed"] *= 15
    export_hf(params, model, place, dtype=jnp.float32)
    runs.config["algorithm"] = {"teacher": {"path": str(place)}}
    runs.config["trainer"] |= {"total_training_steps": STEPS, "save_freq": 1}
    return runs


def teacher_kl(run_dir: Path) -> list[float]:
    return [line["actor/teacher_kl"] for line in read_metrics(run_dir)]


@pytest.mark.slow  # 20 s; tests/train/test_teacher.py has what a teacher says and what is made of it
def test_the_policy_learns_its_teacher_and_a_killed_run_ends_with_the_same_bits(runs: Runs):
    whole, killed = runs.folder / "whole", runs.folder / "killed"
    longer = (*ALONE, "trainer.total_training_steps=7", "algorithm.teacher.offload=true", "actor.optim.lr=0.03")
    longer += ("rollout.n=8", "rollout.max_num_seqs=32", "rollout.num_blocks=300")
    with copied_after({4: killed}):
        runs.here(whole, *longer)
    found = teacher_kl(whole)
    assert len(found) == 7
    assert found[0] > 1
    assert found[-1] < 0.5 * found[0], found
    for line in read_metrics(whole):
        assert line["timing_s/teacher"] > 0
        assert line["critic/advantages/mean"] == pytest.approx(-line["actor/teacher_kl"], rel=1e-5)
    runs.here(killed, *longer)
    assert_same_end(killed, whole)
    assert teacher_kl(killed) == found


def test_the_policy_learns_distributions_and_a_killed_run_ends_with_the_same_bits(runs: Runs):
    """By a loss with a gradient, of the teacher's likeliest tokens: advantages have nothing of it."""
    whole, killed = runs.folder / "jsd-whole", runs.folder / "jsd-killed"
    options = (*ALONE, "algorithm.teacher.top_k=20", "algorithm.teacher.beta=0.2", "actor.optim.lr=0.03")
    with copied_after({2: killed}):
        runs.here(whole, *options)
    losses = [line["actor/distillation_loss"] for line in read_metrics(whole)]
    assert losses[-1] < 0.7 * losses[0], losses
    for line in read_metrics(whole):
        assert line["actor/pg_loss"] == line["critic/advantages/mean"] == 0
        assert line["actor/teacher_kl"] != 0
    runs.here(killed, *options)
    assert_same_end(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "devices"),
    [
        (("rollout.tail_batching.enable=true",), 1),
        (("rollout.partial_rollout.enable=true", "rollout.stale_tokens=mask"), 1),
        (("trainer.one_step_off=true", "algorithm.filter_groups.enable=true"), 1),
        (("trainer.one_step_off=true", "rollout.num_devices=1"), 2),
        (("rollout.num_workers=2",), 2),
        (("algorithm.adv_estimator=gae",), 1),
        (("model.lora_rank=4", "actor.use_kl_loss=true"), 1),
        (("algorithm.teacher.top_k=7", "algorithm.adv_estimator=gae", "rollout.partial_rollout.enable=true"), 2),
    ],
)
def test_rules(runs: Runs, rule: tuple[str, ...], devices: int, request: pytest.FixtureRequest):
    """Beside a reward."""
    name = "".join(each if each.isalnum() else "-" for each in request.node.name)
    whole, killed = runs.folder / f"{name}-whole", runs.folder / f"{name}-killed"
    with copied_after({2: killed}):
        runs.here(whole, *rule, devices=devices)
    assert all(np.isfinite(teacher_kl(whole)))
    runs.here(killed, *rule, devices=devices)
    assert_same_end(killed, whole)


@pytest.mark.slow
def test_a_policy_taught_by_itself_with_the_answer(runs: Runs):
    """The teacher is the policy as it began, and is told what the question's answer is."""
    place, whole, killed = runs.folder / "itself", runs.folder / "told", runs.folder / "told-killed"
    runs.here(runs.folder / "first", "trainer.total_training_steps=1")
    assert main(["export", str(runs.folder / "first"), str(place), "--dtype=float32"]) == 0
    told = f"algorithm={{adv_estimator: none, teacher: {{path: {place}, context_key: answer, max_context_length: 8}}}}"
    options = (told, f"model={{path: {place}, random_init: false}}", "actor.ppo_mini_batch_size=0")
    with copied_after({2: killed}):
        runs.here(whole, *options)
    found = teacher_kl(whole)
    assert all(0 < abs(value) < 1 for value in found), "near, and not the same"
    runs.here(killed, *options)
    assert_same_end(killed, whole)


@pytest.mark.slow
def test_the_base_of_adapters_told_the_answer(runs: Runs):
    """It is the teacher as it stands, with the bits of one that is read again, and beside a rollout too."""
    place, copied, whole = runs.folder / "base", runs.folder / "base-copied", runs.folder / "base-whole"
    runs.here(runs.folder / "base-first", "trainer.total_training_steps=1")
    assert main(["export", str(runs.folder / "base-first"), str(place), "--dtype=float32"]) == 0
    shutil.copytree(place, copied)

    def train(run_dir: Path, teacher: Path, *options: str) -> None:
        section = f"{{path: {teacher}, context_key: answer, max_context_length: 8}}"
        told = f"algorithm={{adv_estimator: none, teacher: {section}}}"
        model = f"model={{path: {place}, random_init: false, lora_rank: 4}}"
        runs.here(run_dir, told, model, "actor.ppo_mini_batch_size=0", *options, devices=2)

    train(whole, place)
    again = runs.folder / "base-again"
    train(again, copied)
    assert_same_end(again, whole)
    assert teacher_kl(again) == teacher_kl(whole)
    sizes = ("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "rollout.num_workers=2")
    sizes += ("data.max_response_length=96", "rollout.stop=[a, b, c, d, e, f]", *WIDE)
    plain, streamed = runs.folder / "base-plain", runs.folder / "base-streamed"
    train(plain, place, *sizes, "algorithm.teacher.dtype=float64")
    train(streamed, place, *sizes, "algorithm.teacher.dtype=float64", "trainer.stream={enable: true, pace: 2.0}")
    assert max(line["actor/streamed_share"] for line in read_metrics(streamed)) > 0
    np.testing.assert_allclose(teacher_kl(streamed), teacher_kl(plain), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 7])
def test_gradients_beside_the_rollout_are_those_of_the_whole_batch(top_k: int, runs: Runs):
    """Its weights take turns with the policy's on the freed devices."""
    sizes = (
        *("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "data.max_response_length=96"),
        *("actor.ppo_mini_batch_size=0", "actor.use_kl_loss=true", "rollout.stop=[a, b, c, d, e, f]", *WIDE),
        *("rollout.num_workers=2", "algorithm.teacher.dtype=float64", f"algorithm.teacher.top_k={top_k}"),
    )
    plain, streamed = runs.folder / f"plain-{top_k}", runs.folder / f"streamed-{top_k}"
    runs.here(plain, *sizes, devices=2)
    runs.here(streamed, *sizes, "trainer.stream={enable: true, pace: 2.0}", devices=2)
    assert max(line["actor/streamed_share"] for line in read_metrics(streamed)) > 0
    np.testing.assert_allclose(teacher_kl(streamed), teacher_kl(plain), rtol=1e-6)
    (arrays, _), (others, _) = state_of(streamed), state_of(plain)
    names = [name for name in others if "'params'" in name]
    assert names
    for name in names:
        assert np.linalg.norm(arrays[name] - others[name]) <= 1e-6 * np.linalg.norm(others[name]), name


@pytest.mark.slow
def test_a_teacher_at_an_endpoint(runs: Runs):
    """The run is that with the same model on the devices, but for rounding; where the endpoint fails, it ends with a
    sentence, and goes on to the same bits when the endpoint is there again."""
    place = runs.config["algorithm"]["teacher"]["path"]
    model, params = load_model(place)
    options = (*ALONE, "algorithm.teacher.top_k=5", "trainer.total_training_steps=3")
    near, whole, broken = (runs.folder / f"endpoint-{name}" for name in ("near", "whole", "broken"))
    runs.here(near, *options)
    with chat_server(default=gives_prompt_logprobs(params, model)) as server:
        section = f"path: '', endpoint: '{server.url}', endpoint_model: m, max_retries: 0, top_k: 5"
        asked = (*ALONE, f"algorithm.teacher={{{section}}}", "trainer.total_training_steps=3")
        runs.here(whole, *asked)
        gives, server.seen = server.default, []

        def fails_later(handler: Handler) -> None:
            (gives if len(server.seen) < 1 + 16 + 5 else status(503, "gone"))(handler)

        server.default = fails_later
        output = runs.here(broken, *asked, status=1)
        assert f"algorithm.teacher.endpoint ({server.url}): status 503: gone" in output
        server.default = gives
        runs.here(broken, *asked)
        assert_same_end(broken, whole)
    for name in ("actor/teacher_kl", "actor/distillation_loss"):
        ours, theirs = ([line[name] for line in read_metrics(run_dir)] for run_dir in (whole, near))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4)
    refused = ("trainer.stream.enable=true", "actor.ppo_mini_batch_size=0", "rollout.num_workers=2")
    output = runs.here(runs.folder / "endpoint-refused", *asked, *refused, devices=2, status=2)
    assert "trainer.stream.enable excludes algorithm.teacher.endpoint: the rollout would wait for the" in output


def test_the_stream_trainer_refuses_layers_in_the_hosts_memory(runs: Runs):
    options = ("trainer.stream.enable=true", "actor.ppo_mini_batch_size=0", "rollout.num_workers=2")
    output = runs.here(runs.folder / "refused", *options, "algorithm.teacher.offload=true", devices=2, status=2)
    assert "trainer.stream.enable excludes algorithm.teacher.offload: the teacher's layers lie in the host's" in output
