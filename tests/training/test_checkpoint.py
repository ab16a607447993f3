"""Checkpoints come back bit for bit, on other meshes, and never half-written."""

import jax
import numpy as np
import pytest

from jaxrl.training import manifest
from jaxrl.training.checkpoint import Checkpointer, restore_params
from jaxrl.training.steps import whole_step


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_round_trip_onto_other_meshes(tmp_path, make_config, make_batch, make_trainer):
    config, batch = make_config(), make_batch()
    trainer = make_trainer(config, devices=8)
    trainer.accumulate(batch)
    trainer.apply()
    want = jax.tree.map(lambda x: np.array(x, copy=True), trainer.state())
    host = {"cursor": [1, 2], "of": {"queue": np.arange(5)}, "empty": np.zeros((0,), np.int32)}
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, trainer.state(), host)
        # the next update donates the buffers that the background writer was given
        trainer.accumulate(batch)
        trainer.apply()
        checkpoints.wait()
        for devices, sharing in ((8, 1), (1, 1), (8, 8)):
            other = make_trainer(make_config(actor__context_parallel_size=sharing), devices)
            state, found = checkpoints.restore(other.abstract_state())
            other.load_state(state)
            assert_same(other.state(), want)
            assert other.updates == 1
            assert found.pop("cursor") == host["cursor"]
            arrays = {name: host[name] for name in ("of", "empty")}
            assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, arrays)
            assert_same(found, arrays)
        # the same mesh goes on bit for bit
        again = make_trainer(config, devices=8)
        again.load_state(checkpoints.restore(again.abstract_state())[0])
        again.accumulate(batch)
        again.apply()
        assert_same(again.params, trainer.params)


def test_params_only(tmp_path, make_config, make_trainer):
    trainer = make_trainer(make_config(), devices=8)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, trainer.state())
    sharded = trainer.abstract_state()["params"]
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), sharded)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "3"):
        found = restore_params(whole_step(path), plain)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
        assert_same(found, trainer.params)
    found = restore_params(whole_step(tmp_path), sharded)
    jax.tree.map(lambda x, y: (x.sharding == y.sharding) or pytest.fail("sharding"), found, sharded)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        restore_params(whole_step(tmp_path / "nowhere"), plain)


def test_keeps_the_newest_and_refuses_what_it_cannot_read(tmp_path):
    state = {"params": {"a": np.arange(3.0)}}
    abstract = {"params": {"a": jax.ShapeDtypeStruct((3,), np.float64)}}
    with Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(FileNotFoundError):
            checkpoints.restore(abstract)
        for step in (1, 2, 3):
            checkpoints.save(step, state, {"step": step})
        checkpoints.wait()
        assert checkpoints.all_steps() == [2, 3]
        with pytest.raises(ValueError, match="exists already"):
            checkpoints.save(3, state)
        found, host = checkpoints.restore(abstract, 2)
        assert host == {"step": 2}
        assert_same(found, state)
        manifest.write(tmp_path / "2", schema_version=2, step=2)
        with pytest.raises(ValueError, match=r"/2 was written by an earlier jaxrl \(schema version 2, now 3\): begin"):
            checkpoints.restore(abstract, 2)
        assert_same(restore_params(whole_step(tmp_path, 2), abstract["params"]), state["params"])
    manifest.write(tmp_path / "3", schema_version=99, step=3)
    with pytest.raises(ValueError, match=r"checkpoint .*/3 has schema version 99; this jaxrl reads up to 3: update"):
        Checkpointer(tmp_path)
