"""The programs of the rollout as a JetStream engine: prefill, insert and generate of `jetstream.engine.engine_api`.

`jaxrl serve --jetstream` is a server made of these parts; nothing else in jaxrl imports this module.

Source: google-jetstream 0.2.2 (the last release on PyPI of an archived project), `engine/engine_api.py` and the way
`core/orchestrator.py` drives it. There, prefill returns a prefix only, and `generate` returns every token of a
response.

Departures:

* A prefix carries its first token, drawn by prefill. A generate step returns the token that each slot drew last and
  draws the next one, so the first step after an insert returns the first token.
* The engine interface has no sampling options per request: `JetStreamConfig.sampling` holds for all of them. Request n
  (counted by prefill, from 0) is sampled as `SampleKey(0, n, 0)`, as `jaxrl.scheduling.tokens.engine.Engine` would.
* A slot has one response, and a prefix continues no other one: JetStream's own driver asks for neither.
* A slot always keeps its blocks, so attention spans `max_length` in each step and `free_resource` has nothing to do.
  One step per call is what the interface asks for; the executor's chunks of steps are faster.
* The driver decides when a response ends (`Tokenizer.stop_tokens` and its own limit on tokens). `valid` is 0 where a
  slot has no more tokens: after a stop token of `JetStreamConfig.sampling`, its `max_tokens`, or `max_length`.
* JetStream decodes text token by token: a character that spans several tokens comes out as replacement characters. The
  token ids are exact. JetStream puts a BOS token in front of a client's token ids, even for models without one.

`orchestrator.Driver` throws away an inserted prefix by `jax.tree_map`, which jax no longer has; the process then dies
(SIGKILL). `drive` makes a Driver that lives.

Dims: G dp groups (sharded), S slots per group; K key/value heads, N blocks, P positions per block, W blocks per table,
D head dim, C positions of a prefill.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import RANDOM, check_length, check_vocabulary, load_model
from jaxrl.rollout import kv_cache
from jaxrl.rollout.programs import (
    ExecutorConfig,
    Programs,
    RowState,
    fill_row,
    host_rows,
    row_state_shapes,
)
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.rules import pad_heads, to_rollout
from jaxrl.types import SampleKey, SamplingParams

try:
    from jetstream.engine import (  # pyright: ignore[reportMissingImports]  (an optional extra)
        engine_api,
        token_utils,
        tokenizer_api,
        tokenizer_pb2,
    )
except ImportError as error:
    raise ImportError(
        f"jaxrl.rollout.jetstream needs google-jetstream 0.2.2: pip install 'jaxrl[jetstream]' ({error})"
    ) from error

PREFILL_LENGTHS = tuple(16 << i for i in range(12))
"""The lengths that JetStream pads prompts to (`token_utils.pad_tokens`); `max_prefill_length` must be one of them."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 24)
"""The default: the likeliest token, for as long as the driver asks or the slot has room."""


@dataclass(frozen=True, slots=True)
class JetStreamConfig:
    """Sizes of a JetStream engine, and how it samples; the names of `ExecutorConfig` mean the same here.

    Attributes:
      max_prefill_length: tokens of the longest prompt, 16, 32, 64 ...; longer ones lose their beginning (JetStream).
    """

    num_slots: int
    block_size: int = 16
    max_length: int = 1024
    max_prefill_length: int = 512
    dtype: Any = jnp.float32
    seed: int = 0
    sampling: SamplingParams = GREEDY
    max_tp: int = 1


class Prefix(NamedTuple):
    """A request that was prefilled and has no slot yet.

    kv: per layer keys and values [K, N, P, D], the first block unused; row: a `RowState` [1, ...] with the first token.
    """

    kv: Any
    row: Any


class DecodeState(NamedTuple):
    """All slots: the KV pool, row state [G, S, ...], and per row [G, S] whether its last token is still to be returned,
    and how many were returned."""

    pool: kv_cache.Pool
    rows: RowState
    pending: jax.Array
    returned: jax.Array


def drive(engine: JetStreamEngine, params: Any) -> Any:
    """A running `jetstream.core.orchestrator.Driver`, whose `stop` ends its threads. `params`: from `load_params`."""
    from jetstream.core import orchestrator  # pyright: ignore[reportMissingImports]

    # its own asks jax for a function that is gone; a prefix goes when its last reference goes
    orchestrator.delete_pytree = lambda prefix: None
    return orchestrator.Driver([engine], [engine], [params], [params], interleaved_mode=True)


def add_service(driver: Any, server: Any) -> None:
    """Adds JetStream's gRPC service to a `grpc.aio.Server`."""
    from jetstream.core import orchestrator  # pyright: ignore[reportMissingImports]
    from jetstream.core.proto import jetstream_pb2_grpc  # pyright: ignore[reportMissingImports]

    servicer = orchestrator.LLMOrchestrator(driver=driver)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)


class JetStreamEngine(engine_api.Engine):
    """A model on a layout behind JetStream's interface.

    Example::

        engine = JetStreamEngine(config_of(path), Layout(make_mesh(), tp=1), JetStreamConfig(num_slots=8), path)
        params, state = engine.load_params(), engine.init_decode_state()
        prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=5)
        state = engine.insert(prefix, state, slot=0)
        state, result = engine.generate(params, state)
        result.convert_to_numpy().get_result_at_slot(0).tokens  # [1, 1]

    Args:
      path: of a model, as `jaxrl.models.loading.resolve_path` returns it, for `load_params` and the tokenizer.
    """

    def __init__(self, model: ModelConfig, layout: Layout, config: JetStreamConfig, path: str | Path) -> None:
        check_length(model, config.max_length, f"JetStreamConfig.max_length is {config.max_length} tokens", str(path))
        self.model = model
        self.layout = layout
        self.config = config
        self.path = str(path)
        self._width = -(-config.max_length // config.block_size)
        kv_heads = pad_heads(model.num_heads, model.num_kv_heads, config.max_tp)[1]
        num_blocks = 1 + config.num_slots * self._width
        self._cache = kv_cache.CacheShape(
            model.num_layers, kv_heads, model.head_dim, num_blocks, config.block_size, jnp.dtype(config.dtype)
        )
        sizes = ExecutorConfig(config.num_slots, decode_steps=1, dtype=config.dtype, max_tp=config.max_tp)
        self._programs = Programs(model, layout, sizes)
        self._truncate = config.sampling.truncates
        self._num_requests = itertools.count()
        by_row = self._programs.rows_sharding
        state = DecodeState(kv_cache.pool_sharding(layout, self._cache), by_row, by_row, by_row)  # pyright: ignore[reportArgumentType]
        prefix = self.get_prefix_destination_sharding()
        self._prefill = jax.jit(self._prefill_program, out_shardings=tuple(prefix))
        self._insert = jax.jit(self._insert_program, donate_argnums=0, out_shardings=state)
        self._generate = jax.jit(self._generate_program, donate_argnums=1, out_shardings=(state, by_row))

    # -- JetStream's interface ---------------------------------------------------------------------------------------

    def load_params(self) -> Any:
        """The weights at the engine's path, for `prefill` and `generate`."""
        dtype = "float64" if jnp.dtype(self.config.dtype) == jnp.float64 else "float32"
        params = load_model(self.path, self.mesh, dtype)[1]
        form = self._programs.form
        return to_rollout(params, self.model, self.layout, self.config.dtype, self.config.max_tp, **form)

    def prefill(self, *, params: Any, existing_prefix: None = None, padded_tokens: Any, true_length: int) -> Prefix:
        """Computes the KV of a prompt, and draws its first token.

        Args:
          padded_tokens: [C]; each C is compiled once.
          true_length: how many of them count; a number above C means all of them (JetStream cut the prompt).
        """
        assert existing_prefix is None, "no prefix is continued"
        length, most = min(int(true_length), padded_tokens.shape[0]), self.config.max_length
        sampling, row = self.config.sampling, host_rows(1, 1)
        key = SampleKey(0, next(self._num_requests), 0)
        fill_row(row, (0, 0), self.config.seed, key, sampling, min(length + sampling.max_tokens, most))
        return Prefix(*self._prefill(params, padded_tokens, np.int32(length), row))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefix into a slot and replaces its content. The given decode state is donated."""
        return self._insert(decode_state, prefix, np.int32(slot))

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """Returns the token that each slot drew last, and draws the next. The given decode state is used up."""
        decode_state, data = self._generate(params, decode_state)
        return decode_state, engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
        )

    def init_decode_state(self) -> DecodeState:
        """Empty slots."""
        shape, by_row = (self.layout.dp, self.config.num_slots), self._programs.rows_sharding
        host = (host_rows(*shape), np.zeros(shape, np.bool_), np.zeros(shape, np.int32))
        return DecodeState(kv_cache.allocate(self.layout, self._cache), *jax.device_put(host, by_row))

    def free_resource(self, slot: int) -> None:
        """A slot keeps its blocks: the next insert overwrites them."""

    def get_prefix_destination_sharding(self) -> Prefix:
        """Shardings of a prefix on this engine's mesh: heads split as in the pool, and a copy in every dp group."""
        heads = PartitionSpec(self.layout.kv_axes(self._cache.num_kv_heads) or None)
        return Prefix(NamedSharding(self.mesh, heads), NamedSharding(self.mesh, PartitionSpec()))

    def get_tokenizer(self) -> Any:
        """The tokenizer's path, as JetStream's message type."""
        path = self.path.removeprefix(RANDOM)
        return tokenizer_pb2.TokenizerParameters(path=path, extra_ids=0)  # pyright: ignore[reportAttributeAccessIssue]

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        """The tokenizer at `metadata.path`."""
        tokenizer = Tokenizer.from_path(metadata.path)
        check_vocabulary(tokenizer, self.model, metadata.path)
        return JetStreamTokenizer(tokenizer, self.model.eos_token_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.layout.dp * self.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.config.max_prefill_length

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # -- programs ----------------------------------------------------------------------------------------------------

    def _prefill_program(
        self, params: Any, tokens: jax.Array, length: jax.Array, fill: RowState
    ) -> tuple[kv_cache.Pool, RowState]:
        """Every dp group computes the same prefix, because its slot may be in any of them, and an idle group would only
        wait."""
        groups, cache = self.layout.dp, self._cache
        num_blocks = -(-tokens.shape[0] // cache.block_size)
        dims = (groups, cache.num_kv_heads, 1 + num_blocks, cache.block_size, cache.head_dim)
        sharding = kv_cache.pool_sharding(self.layout, cache)
        zeros = jax.lax.with_sharding_constraint(jnp.zeros(dims, cache.dtype), sharding)

        def row(values: Any) -> jax.Array:
            """The same values in the one row of each group, [G, 1, ...]."""
            values = jnp.asarray(values, jnp.int32)
            return jnp.broadcast_to(values, (groups, 1, *values.shape))

        fill = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape[1:])), fill)
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), row_state_shapes(groups, 1))
        arguments = (row(tokens), row(0), row(length), (row(jnp.arange(1, 1 + num_blocks)),), row(0), fill)
        pool = [(zeros, zeros)] * cache.num_layers
        made = self._programs.prefill(params, pool, state, *arguments, truncate=self._truncate)[:2]
        kv_axes = self.layout.kv_axes(cache.num_kv_heads) or None
        return jax.shard_map(
            lambda *trees: jax.tree.map(lambda x: x[0], trees),
            mesh=self.mesh,
            in_specs=(sharding.spec, PartitionSpec(self.layout.dp_axes or None)),
            out_specs=(PartitionSpec(kv_axes), PartitionSpec()),
            check_vma=False,  # the groups' values are equal
        )(*made)

    def _insert_program(self, state: DecodeState, prefix: Prefix, slot: jax.Array) -> DecodeState:
        """Copies the prefix's blocks into the slot's, in the dp group that has the slot."""
        group, place = slot // self.config.num_slots, slot % self.config.num_slots
        used = min(self._width, prefix.kv[0][0].shape[1] - 1)
        blocks = 1 + place * self._width + jnp.arange(used)
        dp_axes = self.layout.dp_axes

        def local(pool: kv_cache.Pool, kv: kv_cache.Pool, group: jax.Array, blocks: jax.Array) -> kv_cache.Pool:
            here = group == (jax.lax.axis_index(dp_axes) if dp_axes else 0)
            to = jnp.where(here, blocks, self._cache.num_blocks)  # beyond the last block: dropped
            return jax.tree.map(lambda x, new: x[0].at[:, to].set(new[:, 1 : 1 + used], mode="drop")[None], pool, kv)

        paged = kv_cache.pool_spec(self.layout, self._cache.num_kv_heads)
        pool = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(paged, self.get_prefix_destination_sharding().kv.spec, PartitionSpec(), PartitionSpec()),
            out_specs=paged,
            check_vma=False,
        )(state.pool, prefix.kv, group, blocks)
        mine = (jnp.arange(self.layout.dp)[:, None] == group) & (jnp.arange(self.config.num_slots) == place)

        def fill(old: jax.Array, new: jax.Array) -> jax.Array:
            # Elementwise, so that the dp groups need not communicate.
            return jnp.where(mine.reshape(*mine.shape, *[1] * (old.ndim - 2)), new, old)

        rows = jax.tree.map(fill, state.rows, prefix.row)
        return DecodeState(pool, rows, state.pending | mine, jnp.where(mine, 0, state.returned))

    def _generate_program(self, params: Any, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        """One step; the data is int32 [G * S, 3]: token, validity, tokens returned so far."""
        shape, row = state.pending.shape, jnp.arange(self.config.num_slots)
        tables = 1 + row[:, None] * self._width + jnp.arange(self._width)
        pool, rows, generated, _ = self._programs.decode(
            params,
            state.pool,
            state.rows,
            (jnp.broadcast_to(tables, (self.layout.dp, *tables.shape)),),
            jnp.broadcast_to(row, shape),
            jnp.zeros(shape, jnp.bool_),
            jnp.int32(1),
            jnp.int32(1 << 30),
            None,  # a window pays over several steps
            truncate=self._truncate,
        )
        returned = state.returned + state.pending
        data = jnp.stack([state.rows.token, state.pending.astype(jnp.int32), returned], axis=-1)
        return DecodeState(pool, rows, generated.counts > 0, returned), data.reshape(-1, 3)


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer behind JetStream's tokenizer interface.

    Text is encoded as it is: no chat template; special tokens in front only if the tokenizer itself adds them.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self._stop = {*tokenizer.stop_token_ids, *eos_token_ids}

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """(ids padded to one of JetStream's lengths, how many count); keywords as in `token_utils.pad_tokens`."""
        ids = self.tokenizer.encode(s, add_special_tokens=kwargs.pop("is_bos", True)) or [self.bos_id]
        return token_utils.pad_tokens(np.array(ids, np.int32), self.bos_id, self.pad_id, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self.tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return (*self.tokenizer.eos_token_ids, self.pad_id)[0]

    @property
    def bos_id(self) -> int:
        """The token that begins a text; in a vocabulary without one, the token that ends the text before it."""
        bos = self.tokenizer.bos_id
        return self.eos_id if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        return self._stop
