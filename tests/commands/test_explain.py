"""Counts and memory of a configuration, checked against numbers worked out by hand and against real arrays."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.commands.explain import explain, explain_config, render
from jaxrl.config import from_mapping
from jaxrl.config.options import total_steps
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init
from jaxrl.models.shapes import SHAPES
from jaxrl.rollout.draft_books import book_shapes
from jaxrl.runtime.drafting import drafting_of
from jaxrl.runtime.memory import memory_plan, memory_problem, plan_num_blocks
from jaxrl.runtime.update_memory import device_numbers, plan_remat, update_phases
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import to_rollout, train_shardings
from jaxrl.train.programs import TrainPrograms

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)
TINY = ModelConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=True,
)
MIB = 1 << 20


def config(**sections):
    return from_mapping({"model": {"path": "m"}, **sections})


def test_counts():
    c = config(
        data={"task": "t", "task_size": 100, "train_batch_size": 8, "max_prompt_length": 24, "max_response_length": 40},
        rollout={"n": 4, "max_num_seqs": 16, "tensor_model_parallel_size": 2, "val_kwargs": {"n": 3}},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 200},
        trainer={"total_epochs": 2},
    )
    e = explain(c, TINY, num_devices=4)
    assert (e.dp, e.tp) == (2, 2)
    counts = e.counts
    assert (counts.step_prompts, counts.step_samples) == (8, 32)
    assert (counts.step_max_response_tokens, counts.step_max_tokens) == (32 * 40, 32 * 64)
    assert (counts.update_prompts, counts.update_samples, counts.update_max_tokens) == (2, 8, 8 * 64)
    assert counts.updates_per_step == 4 * 2
    assert counts.microbatch_device_tokens == 64  # an update has no more than 94 for each of 4 devices
    assert (counts.microbatch_device_samples, counts.microbatch_samples) == (1, 4)
    assert counts.update_max_microbatches == 2
    assert counts.rollout_rows == 32
    assert counts.evaluation_samples == 300
    assert (counts.epoch_prompts, counts.epoch_steps, counts.total_steps) == (100, 12.5, 25)


def test_a_critic():
    """A second model's weights and moments, without the vocabulary head, on the devices of the trainer."""
    sections: dict = {
        "data": {"train_batch_size": 8, "max_prompt_length": 24, "max_response_length": 40},
        "critic": {"ppo_mini_batch_size": 4, "ppo_epochs": 3},
        "trainer": {"total_training_steps": 5},
    }
    plain, gae = (explain(config(**sections, algorithm={"adv_estimator": name}), TINY, 2) for name in ("grpo", "gae"))
    tree = init(replace(TINY, scalar_head=True), jax.random.key(0))
    mesh = make_mesh(jax.devices()[:2])
    shardings = train_shardings(replace(TINY, scalar_head=True), mesh)
    one = sum(
        math.prod(sharding.shard_shape(x.shape)) * 4
        for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    )
    added = {name: size for name, size in gae.memory.resident.items() if name not in plain.memory.resident}
    assert added == {"critic: master weights": one, "critic: optimizer (adam m, v)": 2 * one}
    assert gae.memory.update == plain.memory.update, "what an update of the policy adds is more than its own does"
    assert "critic: 6 updates per step, of 4 prompts each\n" in render(gae)
    assert "critic" not in render(plain)
    offloaded = explain(
        config(**sections, algorithm={"adv_estimator": "gae"}, actor={"offload_optimizer": True}), TINY, 2
    )
    assert set(offloaded.memory.resident) == {"master weights", "critic: master weights"}


def test_what_a_critics_gradient_takes_beside_the_policys():
    """The plan has the policy's alone: the critic's temporaries must not be more."""
    for model in (TINY, replace(TINY, tie_word_embeddings=True)):
        taken = {}
        for name, own in (("actor", model), ("critic", replace(model, scalar_head=True))):
            programs = TrainPrograms(config(), own, make_mesh(jax.devices()[:1]))
            rows, tokens = programs.microbatches[-1]
            analysis = programs.program(("accumulate", rows, tokens)).memory_analysis()
            taken[name] = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        assert taken["critic"] < taken["actor"]


def test_a_policy_that_would_never_be_trained():
    for trainer, prompts in (({"total_training_steps": 4}, None), ({}, 32)):
        c = config(algorithm={"adv_estimator": "gae"}, trainer={"critic_warmup": 4, **trainer})
        said = (
            r"trainer\.critic_warmup \(4 steps\) must be less than the run's 4 steps: the policy would never be trained"
        )
        with pytest.raises(ValueError, match=said):
            total_steps(c, prompts)
    assert total_steps(config(trainer={"critic_warmup": 4, "total_training_steps": 4}), None) == 4, "there is no critic"


@pytest.mark.parametrize(
    ("steps", "epochs", "prompts", "total"),
    [(7, 1, None, 7), (7, 1, 100, 7), (0, 1, None, None), (0, 1, 100, 12), (0, 3, 100, 37), (0, 1, 3, 1)],
)
def test_total_steps(steps, epochs, prompts, total):
    c = config(trainer={"total_training_steps": steps, "total_epochs": epochs})
    assert total_steps(c, prompts) == total


def test_memory_of_smollm2_on_one_device():
    e = explain(config(actor={"use_kl_loss": True}), SMOLLM2, 1)
    size = SMOLLM2.num_params() * 4
    assert e.num_params == 134_515_008
    assert e.memory.resident == {
        "master weights": size,
        "optimizer (adam m, v)": 2 * size,
        "reference weights": size,
    }
    # 24 blocks hold 384 tokens; 30 layers, keys and values, 3 heads of 64, 16 positions, float32
    assert e.memory.num_blocks == 32 * 24 + 1
    assert e.memory.rollout == {"rollout weights": size, "KV pool": (32 * 24 + 1) * 2 * 30 * 3 * 64 * 16 * 4}
    assert e.memory.update["gradients"] == size
    assert e.memory.pool_requests == 32
    assert e.memory.pool_tokens == 32 * 384
    assert e.memory.rollout_bytes == 5 * size + e.memory.rollout["KV pool"]
    assert e.warnings == ()


def test_how_each_domain_is_scored_is_said():
    reward = {"domains": {"gsm8k": {"kind": "math", "weight": 2.0}}, "parts": {"tags": {"pattern": "x"}}}
    text = str(explain(config(data={"answer_key": "answer"}, reward=reward), TINY, 1))
    table = [" ".join(line.split()) for line in text.partition("reward of")[2].splitlines()]
    assert table[0] == "scorer time limit at once weight"
    assert table[1] == "gsm8k math 2 s a sample 1 of 1 process 2"
    assert table[2].startswith("other sources auto: math")
    assert table[3] == "plus 1 × tags: format, x"


def test_offload_leaves_the_optimizer_on_the_host_until_gradients_are_there():
    here, away = (explain(config(actor={"offload_optimizer": offload}), SMOLLM2, 1).memory for offload in (False, True))
    assert here.rollout_bytes - away.rollout_bytes == 2 * SMOLLM2.num_params() * 4
    assert here.update_bytes - away.update_bytes == 2 * SMOLLM2.num_params() * 4
    few = {
        "actor": {"offload_optimizer": True, "ppo_max_token_len_per_gpu": 64},
        "data": {"max_prompt_length": 32, "max_response_length": 32},
    }
    assert "optimizer (adam m, v), from the host" in explain(config(**few), SMOLLM2, 1).memory.update


def test_a_chunk_of_logits_takes_half_of_what_is_left():
    c = config(actor={"logprob_chunk_tokens": "auto"})
    room = {gib: explain(c, SMOLLM2, 1, gib << 30).memory for gib in (3, 5, 8, 80)}
    chunks = [memory.chunk_tokens for memory in room.values()]
    assert chunks == sorted(chunks)
    assert (chunks[0], chunks[-1]) == (128, 4096)
    assert 128 < chunks[1] < 4096
    assert explain(c, SMOLLM2, 1).memory.chunk_tokens == 1024
    fixed = config(actor={"logprob_chunk_tokens": 300})
    assert explain(fixed, SMOLLM2, 1, 80 << 30).memory.chunk_tokens == 300
    assert "logits of 4096 tokens at a time, remat dots" in str(explain(c, SMOLLM2, 1, 80 << 30))


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_activations_are_near_what_xla_reports(remat):
    parts = update_phases(config(actor={"remat": remat}), SMOLLM2, 1, "cpu", remat, 128)["layers"]
    names = (f"activations kept (remat {remat}, estimate)", "one layer at work (estimate)")
    # what XLA reports as temporaries of the gradient, see the module's docstring
    reported = {"full": 265, "dots": 1375, "none": 3710}[remat]
    # reported for 1920 tokens; a microbatch has 2048
    assert sum(parts[name] for name in names) / MIB * 1920 / 2048 == pytest.approx(reported, rel=0.15)
    assert not any("scores" in name for name, size in parts.items() if size)


def test_remat_auto_keeps_what_fits():
    c = config(actor={"ppo_max_token_len_per_gpu": 8192})
    most = explain(config(actor={"remat": "dots", "ppo_max_token_len_per_gpu": 8192}), SMOLLM2, 1).memory.update_bytes
    assert plan_remat(c, SMOLLM2, 1, None, "gpu") == "dots"
    assert plan_remat(c, SMOLLM2, 1, int(most / 0.8) + 1, "gpu") == "dots"
    assert plan_remat(c, SMOLLM2, 1, int(most / 0.8) - 1, "gpu") == "full"
    assert plan_remat(config(actor={"remat": "none"}), SMOLLM2, 1, 1, "gpu") == "none"
    tight = explain(c, SMOLLM2, 1, int(most / 0.8) - 1)
    assert "activations kept (remat full, estimate)" in tight.memory.update


def layers(c, platform):
    """Bytes of what an update of SmolLM2 adds while the layers' gradients are made."""
    return {name: size for name, size in update_phases(c, SMOLLM2, 1, platform, "dots", 128)["layers"].items() if size}


BUDGET = {"ppo_max_token_len_per_gpu": 384}  # of a row


@pytest.mark.parametrize(("attention", "platform", "held"), [("reference", "cpu", True), ("pallas", "gpu", False)])
def test_the_scores_of_attention_follow_the_option(attention, platform, held):
    """Rows of 384 tokens: long enough for tiles on CPU, and on GPUs auto is the kernels; the option says otherwise."""
    of = {name: layers(config(actor={"attention": name} | BUDGET), platform) for name in ("auto", attention)}
    names = {name: [part for part in parts if "scores" in part] for name, parts in of.items()}
    assert names["auto"] == []
    assert names[attention] == (["attention scores (actor.attention: reference)"] if held else [])


def test_kernels_on_a_cpu_are_refused_by_the_plan():
    with pytest.raises(ValueError, match=r"actor\.attention \(pallas\) must be auto or reference on cpu"):
        explain(config(actor={"attention": "pallas"}), SMOLLM2, 1, platform="cpu")


def test_rows_too_short_for_tiles_hold_their_scores():
    """Rows are as long as the budget, where that is long enough for tiles."""
    lengths = {"max_prompt_length": 24, "max_response_length": 40}
    short, long = (
        layers(config(data=lengths, actor={"ppo_max_token_len_per_gpu": budget}), "cpu") for budget in (64, 512)
    )
    name = "attention scores (rows too short for tiles)"
    assert name not in long
    assert short[name] == 9 * 64 * 64 * 4 * 3


@pytest.mark.parametrize("model", [TINY, SMOLLM2], ids=["tiny", "smollm2"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_weights_are_as_large_as_the_shardings_make_them(model, tp):
    layout = Layout(make_mesh(jax.devices()[:8]), tp)
    trained = [
        math.prod(sharding.shard_shape(weight.shape))
        for sharding, weight in zip(
            jax.tree.leaves(train_shardings(model, layout.mesh)),
            jax.tree.leaves(model.weights(), is_leaf=lambda x: hasattr(x, "hf_name")),
            strict=True,
        )
    ]
    assert device_numbers(model, 8) == sum(trained)
    if model is TINY:
        params = jax.device_put(init(model, jax.random.key(0)), train_shardings(model, layout.mesh))
        rolled = to_rollout(params, model, layout, jnp.float32)
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(rolled))
        e = explain(config(rollout={"tensor_model_parallel_size": tp}), model, 8)
        assert e.memory.rollout["rollout weights"] == 4 * held


def test_the_pool_takes_what_is_left():
    c = config(rollout={"memory_fraction": 0.5, "max_num_seqs": 512})
    block = 2 * 30 * 3 * 64 * 16 * 4
    taken = 4 * SMOLLM2.num_params() * 4
    memory = 8 << 30
    blocks = plan_num_blocks(c, SMOLLM2, 1, memory)
    assert blocks == (memory // 2 - taken) // block
    assert blocks * block + taken <= memory // 2 < (blocks + 1) * block + taken
    assert plan_num_blocks(c, SMOLLM2, 1, None) == 512 * 24 + 1  # all that the rows can use
    assert plan_num_blocks(c, SMOLLM2, 1, 1 << 40) == 512 * 24 + 1
    e = explain(c, SMOLLM2, 1, memory)
    assert e.memory.pool_requests == (blocks - 1) // 24
    assert "requests will be preempted" in e.warnings[0]


def test_a_larger_tp_splits_blocks_and_weights():
    sizes = []
    for tp in (1, 2):
        c = config(rollout={"tensor_model_parallel_size": tp})
        e = explain(c, TINY, 2)
        sizes.append((e.memory.rollout["KV pool"], e.memory.num_blocks))
    assert sizes[0][0] == 2 * sizes[1][0]
    assert sizes[0][1] == sizes[1][1]


def test_what_is_set_is_taken():
    assert plan_num_blocks(config(rollout={"num_blocks": 99}), SMOLLM2, 1, 1 << 20) == 99


def test_what_does_not_fit():
    with pytest.raises(
        ValueError, match=r"rollout\.memory_fraction \(0\.85\) of 2\.0 GiB leaves .* one request of 384"
    ):
        plan_num_blocks(config(), SMOLLM2, 1, 2 << 30)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size \(2\) must divide the number of devices \(3\)"):
        explain(config(rollout={"tensor_model_parallel_size": 2}), TINY, 3)
    e = explain(config(rollout={"num_blocks": 400}), SMOLLM2, 1, 2 << 30)
    assert any("the update phase needs about" in text for text in e.warnings)


@pytest.mark.parametrize(
    ("rollout", "prompts", "samples"),
    [
        ({}, 8, 64),
        ({"tail_batching": {"enable": True}}, 10, 100),
        ({"over_provisioning": {"enable": True, "prompt_factor": 1.5, "response_factor": 1.0}}, 12, 96),
        ({"partial_rollout": {"enable": True}}, 16, 128),
        ({"tail_batching": {"enable": True}, "max_active_requests": 20}, 10, 20),
    ],
)
def test_what_a_round_has_under_way(rollout, prompts, samples):
    e = explain(config(data={"task": "t"}, rollout=rollout), SMOLLM2, 1)
    assert (e.counts.launched_prompts, e.counts.launched_samples) == (prompts, samples)
    assert ("a round has under way" in str(e)) == (samples != 64)


def test_the_text():
    text = str(explain(config(data={"task": "t"}), SMOLLM2, 8, 16 << 30))
    for part in (
        "134.5M parameters; 8 devices, rollout dp 8 × tp 1",
        "a step                          8         64           24,576",
        "1,250 steps; an epoch of 10,000 prompts takes 1,250.0",
        "KV pool per dp group: 769 blocks (one reserved), 12,288 tokens, 32 requests of the longest length",
        "rows stay empty",
        "of 16.0 GiB 16.0 GiB",
    ):
        assert " ".join(part.split()) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    assert "not known before the files are read" in str(explain(config(), SMOLLM2, 1))


def test_devices_of_the_rollouts_own_hold_no_training_state():
    """Four devices train as four alone would; the other four roll out with all their memory for weights and KV."""
    shared = explain(config(data={"task": "t"}), SMOLLM2, 4, 4 << 30).memory
    own = {"num_devices": 4, "tensor_model_parallel_size": 2}
    e = explain(config(data={"task": "t"}, rollout=own, trainer={"one_step_off": True}), SMOLLM2, 8, 4 << 30)
    assert (e.dp, e.tp) == (2, 2)
    assert e.memory.update == shared.update
    assert e.memory.resident == shared.resident
    assert e.memory.rollout_bytes == sum(e.memory.rollout.values())
    assert "8 devices, rollout alone on 4: dp 2 × tp 2" in str(e)
    assert re.search(r"^  master weights {30,}\S+ \S+$", str(e), re.MULTILINE)
    with pytest.raises(ValueError, match=r"rollout\.num_devices \(4\) must be below the number of devices \(4\)"):
        explain(config(rollout=own, trainer={"one_step_off": True}), SMOLLM2, 4)


def test_workers_have_equal_shares():
    """A device holds the same whether its dp group is in a worker with others or alone."""
    together = explain(config(data={"task": "t"}, rollout={"tensor_model_parallel_size": 2}), SMOLLM2, 8, 4 << 30)
    cut = {"num_workers": 2, "tensor_model_parallel_size": 2}
    e = explain(config(data={"task": "t"}, rollout=cut), SMOLLM2, 8, 4 << 30)
    assert (e.memory.rollout, e.memory.num_blocks) == (together.memory.rollout, together.memory.num_blocks)
    assert (e.dp, e.tp, e.counts) == (4, 2, together.counts)
    workers = e.memory.workers
    assert (workers.count, workers.num_devices, workers.dp, workers.tp, workers.num_rows) == (2, 4, 2, 2, 32)
    assert "rollout dp 4 × tp 2, as 2 workers of dp 2 × tp 2" in str(e)
    assert "each of 2 workers: 4 devices, rollout weights of" in str(e)
    assert f"rows for 64 samples and KV for {2 * e.memory.pool_requests} of the longest length" in str(e)
    assert "about 32 of the 64 samples under way are its own" in str(e)
    assert max(map(len, str(e).splitlines())) <= 120
    assert "worker" not in str(together)


def test_a_worker_whose_pool_holds_no_request_is_refused():
    cut = {"num_workers": 4, "tensor_model_parallel_size": 2}
    c = config(data={"task": "t"}, rollout=cut)
    message = r"one request of 384 .* fewer workers \(rollout.num_workers: 4\) for a larger tp"
    with pytest.raises(ValueError, match=message):
        explain(c, SMOLLM2, 8, 800 << 20)
    wider = config(data={"task": "t"}, rollout=cut | {"num_workers": 2, "tensor_model_parallel_size": 4})
    assert explain(wider, SMOLLM2, 8, 800 << 20).memory.pool_requests >= 1
    with pytest.raises(ValueError, match=r"raise rollout.tensor_model_parallel_size"):
        explain(config(data={"task": "t"}, rollout=cut | {"num_workers": 2}), SMOLLM2, 8, 800 << 20)
    with pytest.raises(ValueError, match=r"size \(4\) must divide .* devices \(8\) / rollout.num_workers \(4\)"):
        explain(config(data={"task": "t"}, rollout=cut | {"tensor_model_parallel_size": 4}), SMOLLM2, 8)


def problem(bytes_each, trains=True, **sections):
    c = config(**sections)
    plan = memory_plan(c, SMOLLM2, 1, None, "cpu")
    return memory_problem(c, SMOLLM2, plan, 1, bytes_each, trains)


def test_a_pool_that_no_memory_holds_is_refused_with_the_option():
    assert problem(64 << 30) is None
    # 384 tokens of 30 layers, 3 heads of 64 numbers, keys and values, four bytes: 16.9 MiB for each of 2048 rows
    text = problem(16 << 30, rollout={"max_num_seqs": 2048})
    assert text is not None
    assert text.endswith(
        "rollout.memory_fraction (0.85) leaves 13.6 GiB on each of 1: lower rollout.max_num_seqs (2048 rows of up to "
        "384 tokens per dp group, where a step has 64 samples)"
    )
    text = problem(16 << 30, rollout={"num_blocks": 1_000_000})
    assert text is not None
    assert text.endswith("lower rollout.num_blocks (1000000 blocks of 16 tokens)")


@pytest.mark.parametrize(
    ("shape", "num_devices", "tp"),
    [
        *(("SmolLM2-135M", 1, 1), ("SmolLM2-135M", 8, 1), ("Qwen2.5-1.5B", 1, 1), ("Qwen2.5-1.5B", 8, 2)),
        *(("Qwen2.5-7B", 4, 1), ("Qwen2.5-7B", 8, 4), ("Llama-3.1-8B", 4, 2), ("Llama-3.1-8B", 8, 1)),
    ],
)
@pytest.mark.parametrize("rows", [64, 1024])
def test_a_pool_that_the_plan_chose_is_not_refused(shape, num_devices, tp, rows):
    """The plan fills `rollout.memory_fraction` to the last block; logits are temporary and lie in what it leaves."""
    model, gib = SHAPES[shape], 80 << 30
    for response in (256, 1024):
        lengths = {"max_prompt_length": 256, "max_response_length": response}
        c = config(data=lengths, rollout={"tensor_model_parallel_size": tp, "max_num_seqs": rows})
        plan = memory_plan(c, model, num_devices, gib, "gpu")
        assert memory_problem(c, model, plan, num_devices, gib) is None
        assert memory_problem(c, model, plan, num_devices, gib, trains=False) is None
        text = memory_problem(c, model, plan, num_devices, plan.rollout_bytes - 1)
        assert text is not None, "less than weights and pool"
        assert "rollout.memory_fraction (0.85) leaves " in text


SPECULATION = {"speculation": {"enable": True}}


def test_indexes_on_the_devices_are_counted_beside_the_pool():
    """Eight responses of 128 tokens: places of four bytes, and one index for each of 512 rows."""
    rollout, memory = {"memory_fraction": 0.5, "max_num_seqs": 512}, 8 << 30
    before = explain(config(rollout=rollout), SMOLLM2, 1, memory).memory
    c = config(rollout=rollout | SPECULATION)
    e = explain(c, SMOLLM2, 1, memory)
    drafting = drafting_of(c, "gpu")
    assert drafting is not None
    books = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(book_shapes(drafting, 512)))
    assert e.memory.rollout["draft indexes"] == books
    assert "draft indexes" in str(e)
    assert "draft indexes" not in before.rollout
    block = 2 * 30 * 3 * 64 * 16 * 4
    fewer = before.num_blocks - e.memory.num_blocks
    assert abs(fewer * block - books) <= block
    assert e.memory.rollout_bytes <= memory // 2
    few = config(rollout=rollout | {"speculation": {"enable": True, "num_indexes": 2}})
    assert explain(few, SMOLLM2, 1, memory).memory.rollout["draft indexes"] * 256 == books


def test_indexes_that_no_memory_holds_are_refused_with_the_option():
    long = {"max_response_length": 4096}
    text = problem(
        64 << 30,
        data=long,
        actor={"ppo_max_token_len_per_gpu": 8192},
        rollout={
            "max_num_seqs": 8,
            "num_blocks": 300,
            "speculation": {"enable": True, "num_indexes": 16384, "epochs": 4},
        },
    )
    assert text is not None
    assert text.endswith("lower rollout.speculation.num_indexes (16384 per dp group) or rollout.speculation.epochs (4)")
    with pytest.raises(ValueError, match=r"of draft indexes with them, but one .*: lower rollout.speculation.num_ind"):
        plan_num_blocks(config(rollout={"speculation": {"enable": True, "num_indexes": 16384}}), SMOLLM2, 1, 3 << 30)


def test_the_logits_of_drafts_are_counted():
    """65536 drafted tokens of a step, 49152 float32 numbers each, twice: 24 GiB."""
    few = {"num_blocks": 1000}
    assert problem(20 << 30, rollout=few) is None
    assert problem(20 << 30, rollout=few | {"speculation": {"enable": True, "verify_tokens": 65536}}) is not None


def test_logits_that_no_memory_holds_are_refused():
    """16384 rows of 49152 float32 numbers, twice: 6 GiB beside a small pool; two devices of a group have half each."""
    sizes = {"num_blocks": 1000, "max_num_seqs": 16384}
    text = problem(6 << 30, rollout=sizes)
    assert text is not None
    assert "and each of 1 has 6.0 GiB: lower rollout.max_num_seqs (16384 rows of up to 384 tokens" in text
    c = config(rollout=sizes | {"tensor_model_parallel_size": 2})
    assert memory_problem(c, SMOLLM2, memory_plan(c, SMOLLM2, 2, None, "cpu"), 2, 6 << 30) is None


def test_an_update_that_no_memory_holds_is_refused_where_there_is_one():
    many = {"train_batch_size": 20_000}
    text = problem(16 << 30, actor={"ppo_max_token_len_per_gpu": 10_000_000}, data=many)
    assert text is not None
    assert "lower actor.ppo_max_token_len_per_gpu (10000000 tokens)" in text
    assert problem(16 << 30, trains=False, actor={"ppo_max_token_len_per_gpu": 10_000_000}) is None
    assert problem(1 << 20) is not None, "weights alone are more"


@pytest.mark.parametrize(
    ("num_devices", "memory", "words"),
    [
        (-1, None, r"^--devices must be at least 0, found -1$"),
        (
            1_000_000,
            None,
            r"^--devices must be at most 16384 \(no machine has more, and each is listed\), found 1000000$",
        ),
        (8, -(1 << 30), r"^--device-gib must be from 1 to 1125899906842624 bytes, found -1073741824$"),
        (8, 1 << 80, r"^--device-gib must be from 1 to 1125899906842624 bytes, found 1208925819614629174706176$"),
    ],
)
def test_numbers_that_no_machine_has(num_devices, memory, words):
    with pytest.raises(ValueError, match=words):
        explain_config(config(), num_devices, memory)


def test_a_named_shape_is_explained():
    c = from_mapping({"model": {"path": "SmolLM2-135M"}})
    assert explain_config(c, 8, 80 << 30).num_params == SMOLLM2.num_params()


@pytest.mark.parametrize("num_devices", [1, 6])
def test_devices_without_halves_have_no_stream(num_devices: int):
    sections = {"trainer": {"stream": {"enable": True}}, "rollout": {"num_workers": 2}}
    streaming = from_mapping({"model": {"path": "SmolLM2-135M"}, **sections})
    with pytest.raises(ValueError, match=f"must be a power of two, found {num_devices}$"):
        explain_config(streaming, num_devices, None)


def test_memory_of_gradients_beside_the_rollout():
    """On a freed device: the trainer's own, and on half of the devices weights, sums and a microbatch's gradients."""
    stream, options = {"stream": {"enable": True}}, {"rollout": {"num_workers": 2}}
    plain, e = (explain(config(trainer=trainer, **options), SMOLLM2, 4) for trainer in ({}, stream))
    assert plain.memory.stream == {}
    assert (e.memory.resident, e.memory.rollout, e.memory.update) == (
        plain.memory.resident,
        plain.memory.rollout,
        plain.memory.update,
    )
    on_two = explain(config(), SMOLLM2, 2).memory
    assert e.memory.stream["weights of the half"] == on_two.resident["master weights"]
    assert e.memory.stream["gradients"] == on_two.update["gradients"]
    assert e.memory.stream_bytes == sum(e.memory.resident.values()) + sum(e.memory.stream.values())
    assert "stream" in render(e)
    assert "stream" not in render(plain)
    plan, c = e.memory, config(trainer=stream, **options)
    assert memory_problem(c, SMOLLM2, plan, 4, 2 * plan.stream_bytes) is None
    short = replace(plan, rollout={"rollout weights": 0, "KV pool": 0}, update={})
    text = memory_problem(c, SMOLLM2, short, 4, plan.stream_bytes // 2)
    assert text is not None
    assert text.startswith("gradients beside the rollout need about ")
    assert "switch trainer.stream.enable off, set actor.offload_optimizer, or lower actor.ppo_max_token" in text
