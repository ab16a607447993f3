"""Seconds and bytes of a simulated machine's work: an analytic roofline, and measured inference in its place.

Every answer is for one dp group (one model copy on `tp` devices). Groups of a layout run in lockstep, so a plan takes
as long as its slowest one.

Source: the roofline of Williams et al. (2009) over the bytes and FLOPs of a dense decoder; decode as a function of
(batch, total context) is PAT §4.2 (Fig. 6); the move of KV is PAT §4.3 (equations 1-2); each method names the mechanism
behind its terms.

Departures: weights are resharded as docs/architecture.md says (a higher TP degree slices what is there, a lower one
gathers), where PAT gathers and slices either way. Norms, biases and rope count as parameters and are taken as split.
All factors by which software falls short of a peak are fields of `Efficiency`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import (
    Measurement,
    Profile,
    ProfileIdentity,
    SwitchCost,
    prefill_points,
    profile_points,
)
from jaxrl.sim.hardware import Hardware

_OPTIMIZER_BYTES = 28  # per parameter and update: master, two moments (read, written: 24) and the gradient (4) in fp32
_GRADIENT_BYTES = _MASTER_BYTES = 4  # float32
_LOGIT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Counts of a model's parameters: of all layers together; of those that a forward pass multiplies by (all but the
    input embedding, from which it takes single rows); of all, tied embeddings counted once; of experts; and of those
    experts that a token has not chosen."""

    layers: int
    read: int
    total: int
    experts: int
    unchosen: int

    @classmethod
    def of(cls, model: ModelConfig) -> ParameterCounts:
        embedding, total = model.vocab_size * model.hidden_size, model.num_params()
        read = total if model.tie_word_embeddings else total - embedding
        unchosen = total - model.num_active_params()
        return cls(read - embedding - model.hidden_size, read, total, model.num_expert_params(), unchosen)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of each peak that software reaches, and costs that do not depend on size; `scripts/papers`
    fits them.

    A reduction by one kernel: SGLang's custom all-reduce on H100 takes, for up to 16 kB, 3.7 to 3.9 µs over 2 devices,
    3.7 to 4.8 over 4 and 5.7 to 5.9 over 8. Its 4 MB in 20 to 34 µs are a `link` of 0.53 to 0.59. (sgl-project/sglang,
    pull request 2904; float32, no graph.)
    """

    memory: float = 0.8  # of the memory bandwidth, reading weights and activations
    kv: float = 0.6  # of it, reading KV (paged and ragged)
    compute: float = 0.5  # of the FLOP/s in inference
    link: float = 0.7  # of the bandwidth between devices, and from host memory
    mfu: float = 0.3  # of the FLOP/s in training, over everything between its first and last kernel
    launch_s: float = 40e-6  # per layer and pass: launches, small kernels
    step_s: float = 0.5e-3  # per decode step or prefill: host, sampling
    collective_s: float = 8e-6  # latency of one collective step between devices
    one_shot_s: float = 3.1e-6  # of a reduction by a single kernel (`Hardware.one_shot`): the kernel's latency
    one_shot_peer_s: float = 0.33e-6  # and what each device adds
    train_fixed_s: float = 5.0  # of a training step: phases, loading of optimizer states, imbalance
    sync_fixed_s: float = 1.0  # of a weight sync
    rollout_fixed_s: float = 0.0  # of a rollout: engines and pools are woken, and drained at the end
    switch_fixed_s: float = 0.5  # of a change of layout: graphs and programs of the new layout, pools


@dataclass(frozen=True, slots=True)
class TrainLoad:
    tokens: float  # prompt and response tokens of the batch
    pairs: float = 0.0  # (query, key) pairs of its attention; see `causal_pairs`
    updates: int = 1  # optimizer updates that the batch is cut into
    extra_forwards: int = 0  # besides forward and backward: old log-probabilities, the reference model


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times from sizes and peaks: max(bytes / bandwidth, FLOPs / peak) + fixed costs. Pure: equal arguments, equal
    answers.

    Attributes:
      number_bytes: of one number of the rollout's weights, activations and KV (2: bfloat16).
      layer_bytes: of one number of its layers' weights (1: `rollout.quantization`); 0: `number_bytes`. Factors of
        outputs, a thousandth of it, are left out.
      kv_head_bytes: of a key or value of one head at one position (`rollout.kv_cache_dtype`); 0: `number_bytes` for
        each of its numbers.
    """

    model: ModelConfig
    hardware: Hardware
    efficiency: Efficiency = Efficiency()
    number_bytes: int = 2
    layer_bytes: int = 0
    kv_head_bytes: int = 0
    params: ParameterCounts = field(init=False, repr=False, compare=False)
    # decode's coefficients by TP degree, and passes by rows, once each: a simulation asks for millions of steps
    _decode: dict[int, tuple[float, float, float, float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _passes: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", ParameterCounts.of(self.model))

    # Inference, one dp group

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        """Seconds of one decode step of `batch` rows with `context` tokens of context together; 0 rows: 0."""
        if batch <= 0:
            return 0.0
        weights_s, row_memory_s, token_memory_s, row_compute_s, token_compute_s = self._decode_terms(tp)
        seen = self._seen(batch, context)
        memory = weights_s - self._unread_s(tp, batch) + row_memory_s * batch + token_memory_s * seen
        busy = max(memory, row_compute_s * batch + token_compute_s * seen)
        return busy + self._decode_pass_s(tp, batch)

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        """`decode_step_s` of many steps at once, equal to the last bit: [S], [S] -> [S]."""
        return self._steps_s(tp, batch_S, 0, context_S)

    def verify_steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        """Seconds of steps that verify `width` proposed tokens a row, each row with one token more: [S], [S] -> [S].

        Weights are read once, and a row's KV once for all of its queries; products, activations and reductions go by
        tokens. Each query attends to the context and to the proposed tokens before it.
        """
        return self._steps_s(tp, batch_S, width, context_S)

    def _steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        weights_s, row_memory_s, token_memory_s, row_compute_s, token_compute_s = self._decode_terms(tp)
        tokens_S, context_S = batch_S * (1 + width), self._seen(batch_S, context_S)
        pairs_S = context_S * (1 + width) + batch_S * (width * (width + 1) / 2)
        unread_S = [self._unread_s(tp, tokens) for tokens in tokens_S.tolist()] if self.model.num_experts else 0.0
        memory_S = weights_s - np.array(unread_S) + row_memory_s * tokens_S + token_memory_s * context_S
        busy_S = np.maximum(memory_S, row_compute_s * tokens_S + token_compute_s * pairs_S)
        return busy_S + np.array([self._decode_pass_s(tp, tokens) for tokens in tokens_S.tolist()])

    def _seen(self, tokens: Any, pairs: Any) -> Any:
        """(query, key) pairs inside a layer's window, averaged over the layers, of `tokens` equal queries that have
        `pairs` without windows: numbers, or arrays."""
        if not self.model.sliding_window:
            return pairs
        ends = [self.model.kind(layer).window for layer in range(self.model.num_layers)]
        return sum((np.minimum(pairs, tokens * end) if end else pairs) for end in ends) / len(ends)

    def _decode_pass_s(self, tp: int, batch: int) -> float:
        pass_s = self._passes.get((tp, batch))
        if pass_s is None:
            pass_s = self._passes[tp, batch] = self._pass_s(tp, batch)
        return pass_s

    def _unread_s(self, tp: int, tokens: int) -> float:
        """Seconds for reading the experts that none of `tokens` tokens chooses, if each token chooses at random."""
        model = self.model
        if not model.num_experts:
            return 0.0
        share = (1 - model.num_experts_per_tok / model.num_experts) ** tokens
        num_bytes = share * self.params.experts / tp * (self.layer_bytes or self.number_bytes)
        return num_bytes / (self.hardware.memory_bytes_per_s * self.efficiency.memory)

    def _decode_terms(self, tp: int) -> tuple[float, float, float, float, float]:
        """Seconds to read the weights; of memory traffic per row and context token; of computing per row and token."""
        terms = self._decode.get(tp)
        if terms is None:
            hw, eff, read = self.hardware, self.efficiency, self.params.read
            bandwidth, flops = hw.memory_bytes_per_s, hw.flops_per_s * eff.compute * tp
            terms = self._decode[tp] = (
                self.device_bytes(tp, read) / (bandwidth * eff.memory),
                self._activation_bytes(tp, 1, logits=1) / (bandwidth * eff.memory),
                self.kv_bytes_per_token(tp) / (bandwidth * eff.kv),
                2.0 * (read - self.params.unchosen) / flops,
                self._attention_flops(1) / flops,
            )
        return terms

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        """Seconds to prefill `tokens` tokens in one pass, attending `pairs` (query, key) pairs; 0 tokens: 0."""
        if tokens <= 0:
            return 0.0
        hw, eff = self.hardware, self.efficiency
        layers = self.params.layers  # the output head runs for last positions only: left out
        weights = self.device_bytes(tp, layers)
        memory = (weights + self._activation_bytes(tp, tokens, logits=0)) / eff.memory
        memory -= self._unread_s(tp, tokens) * hw.memory_bytes_per_s
        memory += tokens * self.kv_bytes_per_token(tp) / eff.kv
        flops = (2.0 * (layers - self.params.unchosen) * tokens + self._attention_flops(self._seen(tokens, pairs))) / tp
        busy = max(memory / hw.memory_bytes_per_s, flops / (hw.flops_per_s * eff.compute))
        return busy + self._pass_s(tp, tokens)

    def all_reduce_s(self, tp: int, num_bytes: float) -> float:
        """Seconds of one all-reduce over `tp` devices, the best of what there is.

        Ring: 2 (tp - 1) steps, each sending 1/tp of the bytes. Recursive doubling: log2(tp) steps, each sending all
        (Thakur et al. 2005). Where `Hardware.one_shot` holds also one shot: a kernel reads all bytes of all others; and
        two shots: a part of all, and then the sums of the other parts (TensorRT-LLM's, vLLM's and SGLang's kernels).
        """
        if tp == 1:
            return 0.0
        hw, eff = self.hardware, self.efficiency
        bandwidth = hw.bytes_per_s(tp) * eff.link
        steps, doublings = 2 * (tp - 1), math.ceil(math.log2(tp))
        ring = steps * (eff.collective_s + num_bytes / tp / bandwidth)
        doubling = doublings * (eff.collective_s + num_bytes / bandwidth)
        if not hw.one_shot or tp > hw.node_size:
            return min(ring, doubling)
        shot_s = eff.one_shot_s + eff.one_shot_peer_s * tp
        one = shot_s + (tp - 1) * num_bytes / bandwidth
        two = 2 * shot_s + steps * num_bytes / tp / bandwidth
        return min(ring, doubling, one, two)

    def _pass_s(self, tp: int, tokens: float) -> float:
        """The cost of a pass beside the roofline: launches, and two all-reduces of [tokens, hidden] per layer."""
        model, eff = self.model, self.efficiency
        reduce = self.all_reduce_s(tp, tokens * model.hidden_size * self.number_bytes)
        return eff.step_s + model.num_layers * (eff.launch_s + 2 * reduce)

    def _activation_bytes(self, tp: int, tokens: float, logits: float) -> float:
        """Activations written and read again once: per layer the residual twice, q, k, v, attention out, MLP."""
        model = self.model
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        mlp = 3 * model.intermediate_size * max(model.num_experts_per_tok, 1)
        per_layer = 4 * model.hidden_size + (heads + mlp) / tp
        written = tokens * model.num_layers * per_layer * self.number_bytes
        return 2 * (written + logits * model.vocab_size / tp * _LOGIT_BYTES)

    # Training and everything between, all devices

    def train_step_s(self, load: TrainLoad, num_devices: int) -> float:
        """Seconds of the update of one training step on all of `num_devices`: 6 FLOPs per parameter and token (2
        forward, 4 backward), the optimizer's bytes, and gradients and weights across devices (a reduce-scatter in
        float32 and an all-gather per update)."""
        hw, eff, total = self.hardware, self.efficiency, self.params.total
        forward = 2.0 * (self.params.read - self.params.unchosen) * load.tokens + self._attention_flops(load.pairs)
        flops = forward * (3 + load.extra_forwards)
        compute = flops / (num_devices * hw.flops_per_s * eff.mfu)
        optimizer = _OPTIMIZER_BYTES * total / num_devices / (hw.memory_bytes_per_s * eff.memory)
        crossing = (num_devices - 1) / num_devices * total * (_GRADIENT_BYTES + self.number_bytes)
        exchange = crossing / (hw.bytes_per_s(num_devices) * eff.link)
        return compute + load.updates * (optimizer + exchange) + eff.train_fixed_s

    def forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        """Seconds of one forward pass over a batch for log-probabilities, on all of `num_devices`."""
        flops = 2.0 * (self.params.read - self.params.unchosen) * tokens + self._attention_flops(pairs)
        return flops / (num_devices * self.hardware.flops_per_s * self.efficiency.mfu)

    def gradients_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        """Seconds of a forward and a backward pass over a part of a batch, without an update: three forward passes."""
        return 3 * self.forward_s(tokens, pairs, num_devices)

    def regroup_s(self, num_devices: int, part: int) -> float:
        """Seconds to bring a float32 number for each parameter, split over `num_devices`, to `part` of them alone,
        split over those; or back. Each of the `part` takes in what the others have of its share."""
        taken = (1 / part - 1 / num_devices) * self.params.total * _GRADIENT_BYTES
        return taken / (self.hardware.bytes_per_s(num_devices) * self.efficiency.link)

    def swap_s(self, num_devices: int) -> float:
        """Seconds to load the reference's weights (in the rollout's numbers) from host memory in place of the policy's
        (float32), and those back again, both split over `num_devices`."""
        loaded = self.params.total * (self.number_bytes + _MASTER_BYTES) / num_devices
        return loaded / (self.hardware.host_bytes_per_s * self.efficiency.link)

    def weight_sync_s(self, tp: int, num_devices: int) -> float:
        """Seconds until the trained weights are the rollout's. Training splits them over all devices, rollout over
        `tp`: the rest is gathered."""
        hw, eff = self.hardware, self.efficiency
        total = self.device_bytes(1, self.params.total)
        kept = self.device_bytes(tp, self.params.total)
        gathered = (kept - total / num_devices) / (hw.bytes_per_s(num_devices) * eff.link)
        written = kept / (hw.memory_bytes_per_s * eff.memory)
        return max(gathered, 0.0) + written + eff.sync_fixed_s

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        """The cost of changing the TP degree (PAT's equations 1-2). KV that is computed again costs a prefill instead.

        A higher TP degree merges `new_tp / tp` groups: each device keeps `tp / new_tp` of the KV it has and sends the
        rest. A lower one splits a group, and takes in as much.
        """
        hw, eff = self.hardware, self.efficiency
        link = hw.bytes_per_s(max(tp, new_tp)) * eff.link
        held = [self.device_bytes(t, self.params.total) for t in (tp, new_tp)]
        gathered = max(held[1] - held[0], 0.0) / link
        copied = 2 * held[1] / (hw.memory_bytes_per_s * eff.memory)
        growth = new_tp / tp
        share = 1 - min(growth, 1 / growth)
        widest = max(self.kv_bytes_per_token(tp), self.kv_bytes_per_token(new_tp) * growth)
        return SwitchCost(tp, new_tp, gathered + copied, widest * share / link, eff.switch_fixed_s)

    def move_s_per_token(self, tp: int, new_tp: int, num_devices: int) -> float:
        """Seconds to send a token's KV from a dp group of one worker to one of another, with `num_devices` together:
        every device of the smaller group sends, or takes in, its share of the heads."""
        link = self.hardware.bytes_per_s(num_devices) * self.efficiency.link
        return self.kv_bytes_per_token(min(tp, new_tp)) / link

    # What lies on one device

    def kv_bytes_per_token(self, tp: int) -> int:
        model = self.model
        heads = model.num_kv_heads // self._kv_split(tp)
        return 2 * model.num_layers * heads * (self.kv_head_bytes or model.head_dim * self.number_bytes)

    def device_params(self, tp: int, params: int) -> float:
        """How many of `params` parameters lie on one of `tp` devices; copied key/value heads count in full."""
        model = self.model
        kv = 2 * model.num_layers * model.hidden_size * model.num_kv_heads * model.head_dim
        return (params - kv) / tp + kv / self._kv_split(tp)

    def device_bytes(self, tp: int, params: int) -> float:
        """The bytes of `params` rollout parameters, those of all layers among them, on one of `tp` devices."""
        whole = self.device_params(tp, params) * self.number_bytes
        if not self.layer_bytes:
            return whole
        return whole - self.device_params(tp, self.params.layers) * (self.number_bytes - self.layer_bytes)

    def _kv_split(self, tp: int) -> int:
        """Over how many of `tp` devices the key/value heads are split; over the rest they are copied."""
        return math.gcd(self.model.num_kv_heads, tp)

    def _attention_flops(self, pairs: float) -> float:
        """FLOPs of scores and weighted sums, over all layers, for that many (query, key) pairs."""
        return 4.0 * self.model.num_layers * self.model.num_heads * self.model.head_dim * pairs

    def num_kv_blocks(
        self,
        tp: int,
        block_size: int,
        memory_fraction: float,
        reserved_bytes: float = 0.0,
        num_layers: int | None = None,
    ) -> int:
        """KV blocks of a dp group that fit beside the weights, the reserved one included.

        Args:
          memory_fraction: of a device's memory, for weights and KV together (`rollout.memory_fraction`).
          reserved_bytes: other memory in use on each device during rollout.
          num_layers: of a block (`jaxrl.models.kv_layers`); None means all.
        """
        weights = self.device_bytes(tp, self.params.total)
        left = self.hardware.memory_bytes * memory_fraction - weights - reserved_bytes
        layers = self.model.num_layers
        block_bytes = block_size * self.kv_bytes_per_token(tp) // layers * (num_layers or layers)
        return max(int(left // block_bytes), 0)


@dataclass(frozen=True, slots=True)
class TableCost(CostModel):
    """Decode, prefill and changes of layout as `jaxrl profile` measured them; the rest by the roofline.

    Measured values hold for the devices that they were measured on and are not scaled to another number of devices.
    """

    predictor: LatencyPredictor = field(kw_only=True)

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return self.predictor.decode_step_s(tp, batch, context) if batch > 0 else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return self.predictor.decode_steps_s(tp, batch_S, context_S)

    def verify_steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        """The measured steps of that many rows, at their width; where there are none, the measured decode step times
        what the roofline gives for their ratio."""
        if width and self.predictor.profile.verify_widths(tp):
            steps = zip(batch_S.tolist(), context_S.tolist(), strict=True)
            return np.array([self.predictor.verify_step_s(tp, rows, context) for rows, context in steps])
        longer_S = self._steps_s(tp, batch_S, width, context_S) / self._steps_s(tp, batch_S, 0, context_S)
        return self.decode_steps_s(tp, batch_S, context_S) * longer_S

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        return self.predictor.prefill_s(tp, tokens, pairs) if tokens > 0 else 0.0

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        return self.predictor.switch_cost(tp, new_tp)


def modelled_profile(
    cost: CostModel, name: str, degrees: Sequence[int], num_devices: int, max_batch: int, max_context: int
) -> Profile:
    """The profile that `jaxrl profile` would measure on modelled devices (PAT §4.2), labelled as synthetic.

    So a simulated run chooses its layouts from a table of points, as a real run does, and not from the cost model that
    charges its time.

    Args:
      name: of the modelled devices.
      max_batch: the most live rows of all dp groups together. max_context: tokens of a row.
    """
    points = profile_points(max_batch, max_batch * max_context, degrees, num_devices, max_context)
    decode = tuple(
        Measurement(p.tp, p.batch, p.context, cost.decode_step_s(p.tp, p.batch, p.batch * p.context)) for p in points
    )
    prefill = tuple(
        Measurement(
            p.tp, p.batch, p.context, cost.prefill_s(p.tp, p.batch * p.context, p.batch * causal_pairs(p.context))
        )
        for p in prefill_points(points)
    )
    switches = tuple(cost.switch_cost(tp, new_tp) for tp in degrees for new_tp in degrees if tp != new_tp)
    return Profile(ProfileIdentity("", "", name, num_devices, "", ""), decode, prefill, switches, source="synthetic")
