"""Runs with a teacher: the policy comes near it, resumed to the same bits, with each rule, and streamed."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_server import Handler, chat_server, status
from prompt_logprobs import gives_prompt_logprobs
from runs import PLAIN_REWARD, Runs, assert_same_end
from tiny import write_tiny_model

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
