"""The battery's figures: where each stands in the records, what is expected of it on which card and why, and its bar.

This is the one place where expectations are written down; `docs/benchmarks/expected-gpu.md` and the page of results are
made from it (`gpu.page`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from gpu import cards, parts
from gpu.cards import Card
from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import named_shape

Record = Mapping[str, Any]
Unit = Literal["ms", "s", "%", "", "TB/s", "TFLOP/s"]
_SCALE = {"ms": 1e3, "s": 1.0, "%": 100.0, "": 1.0, "TB/s": 1e-12, "TFLOP/s": 1e-12}


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach, in the record's unit: at least, at most, or within a limit of zero."""

    sense: Literal[">=", "<=", "+-"]
    limit: float

    def is_met(self, value: float) -> bool:
        """A value that is no number meets no bar."""
        if self.sense == "+-":
            return abs(value) <= self.limit
        return value >= self.limit if self.sense == ">=" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the battery.

    Attributes:
      part: whose records hold it.
      text: what it is, in words; unique within its part.
      key: in a case of the record's results.
      where: what else the case must have.
      among: the list in `results` that holds the case, or `ceilings` for the record's own ceilings.
      unit: for print; values in records are in seconds, shares of one and so on.
      expected: on a card, before anything was measured; None where nothing can be said.
      how: where the expectation comes from.
      bar: what must be reached.
      everywhere: the bar holds on any device, a CPU included: it is about being right.
    """

    part: str
    text: str
    key: str
    unit: Unit = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    among: str = "cases"
    expected: Callable[[Card], float] | None = None
    how: str = ""
    bar: Bar | None = None
    everywhere: bool = False

    def value(self, records: Sequence[Record]) -> float | None:
        """From the newest record of its part that has the case; None if there is none that knows it."""
        for record in reversed(records):
            if record["part"] == self.part and record["bench"] != "part":
                for case in self._cases(record):
                    if all(case.get(name) == wanted for name, wanted in self.where.items()):
                        value = _number(case, self.key)
                        if value is not None:
                            return value
        return None

    def _cases(self, record: Record) -> Sequence[Record]:
        found = record["ceilings"] if self.among == "ceilings" else record["results"].get(self.among, ())
        return [found] if isinstance(found, Mapping) else found

    def shown(self, value: float | None) -> str:
        """With its unit; three digits, or more where they stand before the point."""
        if value is None:
            return "-"
        scaled = value * _SCALE[self.unit]
        digits = f"{scaled:.0f}" if abs(scaled) >= 100 and abs(scaled) < 1e6 else f"{scaled:.3g}"
        return f"{digits} {self.unit}".rstrip()


def _number(case: Record, key: str) -> float | None:
    """`a/b` is `b` in `a`."""
    found: Any = case
    for name in [key] if key in case else key.split("/"):
        found = None if found is None else found.get(name)
    return None if found is None else float(found)


def least(limit: float) -> Bar:
    return Bar(">=", limit)


def most(limit: float) -> Bar:
    return Bar("<=", limit)


def trial_figures() -> list[Figure]:
    """Those of the trial's parts, whatever their sizes: its shapes are others, and each part has one point."""
    names = {part.name for part in parts.trial_parts()}
    sizes = {"rows", "context", "tokens", "dtype"}
    found: dict[tuple[str, str], Figure] = {}
    for figure in figures():
        where = figure.where
        if figure.part != "check":
            where = {name: wanted for name, wanted in where.items() if name not in sizes}
        point = (figure.part, f"{figure.key} {sorted(where.items())}")
        if figure.part in names and point not in found:
            found[point] = replace(figure, where=where, expected=None)
    return list(found.values())


def figures() -> list[Figure]:
    """All of them, in the order of the parts."""
    return [
        *_ceilings(),
        *_tests_and_check(),
        *_decode("decode-1.5b", parts.SMALL, (64,), {1024: 0.75, 8192: 0.85}),
        *_decode("decode-7b", parts.LARGE, (64,), {1024: 0.85, 8192: 0.85}),
        *_training(),
        *_step(),
        *_rules(),
        *_sync(),
        *_attention(),
        *_decode("decode-1.5b-rows", parts.SMALL, (1, 16, 256), {}),
        *_decode("decode-7b-rows", parts.LARGE, (1, 16, 256), {}),
        *_mixed(),
        *_invariant(),
        *_torch(),
    ]


# -- each part ---------------------------------------------------------------------------------------------------------


def _ceilings() -> Iterator[Figure]:
    ceiling = partial(Figure, "ceilings", among="ceilings")
    yield ceiling(
        "copy, read and written",
        "copy_bytes_per_s",
        "TB/s",
        expected=lambda card: card.copy,
        how="90 % of the datasheet's bandwidth",
    )
    yield ceiling(
        "read",
        "read_bytes_per_s",
        "TB/s",
        expected=lambda card: 0.93 * card.sheet.memory_bytes_per_s,
        how="93 % of the datasheet's",
    )
    yield ceiling(
        "bfloat16 product of random data",
        "flops_per_s/bfloat16",
        "TFLOP/s",
        expected=lambda card: card.product,
        how="80 % of the datasheet's rate",
    )
    yield ceiling(
        "float32 product as programs get it (TF32)",
        "flops_per_s/float32",
        "TFLOP/s",
        expected=lambda card: 0.4 * card.sheet.flops_per_s,
        how="half of the bfloat16 rate",
    )


def _tests_and_check() -> Iterator[Figure]:
    yield Figure(
        "tests", "tests that failed", "failed", expected=lambda _: 0.0, how="none", bar=most(0), everywhere=True
    )
    yield Figure("tests", "tests that passed", "passed", bar=least(1))
    yield from _engine_check()
    yield from _trainer_check()


def _engine_check() -> Iterator[Figure]:
    for dtype in ("float32", "bfloat16"):
        is_wide = dtype == "float32"
        engine = partial(Figure, "check", where={"case": "engine", "dtype": dtype}, everywhere=True)
        if is_wide:
            yield engine(
                "float32 responses unlike the CPU's, per 1000 tokens",
                "unlike_per_thousand_tokens",
                expected=lambda _: 0.3,
                how="near-ties in the sampling race",
                bar=most(1),
            )
            yield engine(
                "float32 log-probability, worst error",
                "worst_error",
                expected=lambda _: 5e-6,
                how="rounding of float32: 1e-6 on a CPU",
                bar=most(1e-4),
            )
            yield engine(
                "float32 responses that few rows make differ, per 1000 tokens",
                "few_rows_unlike_per_thousand_tokens",
                expected=lambda _: 0.3,
                how="as above",
                bar=most(1),
            )
        else:
            yield engine(
                "bfloat16 log-probability, mean error",
                "mean_error",
                expected=lambda _: 0.008,
                how="a CPU has half of this",
                bar=most(0.02),
            )
        yield engine(
            f"{dtype} responses of a second run that are not equal",
            "again_unlike",
            expected=lambda _: 0.0,
            how="same programs, same data, no atomics",
            bar=most(0),
        )


def _trainer_check() -> Iterator[Figure]:
    for dtype, limit, guess in (("float32", 1e-4, 2e-6), ("bfloat16", 5e-2, 1.3e-2)):
        trainer = partial(
            Figure, "check", where={"case": "trainer", "dtype": dtype, "attention": "auto"}, everywhere=True
        )
        yield trainer(
            f"{dtype} gradient, error",
            "gradient_error",
            expected=lambda _, guess=guess: guess,
            how="what the CPU tests show, kernels interpreted",
            bar=most(limit),
        )
        yield trainer(
            f"{dtype} gradient of a second run, arrays that are not equal",
            "again_unlike",
            expected=lambda _: 0.0,
            how="no atomics",
            bar=most(0),
        )


def _decode(part: str, shape: str, row_counts: Sequence[int], bars: Mapping[int, float]) -> Iterator[Figure]:
    model = named_shape(shape)
    for context in (1024, 8192):
        for rows in row_counts:
            at = f"{rows} x {context // 1024}k: "
            point = (model, rows, context)
            figure = partial(Figure, part, where={"rows": rows, "context": context, "dtype": "bfloat16"})
            gigabytes = (cards.costs.weight_bytes(model, 2) + cards.cache_bytes(*point)) / 1e9
            yield figure(
                at + "a step",
                "step_s",
                "ms",
                expected=_fitting(cards.decode_seconds, point),
                how=f"{gigabytes:.1f} GB; {cards.kernels_of_step(model, context)} gaps; logits",
            )
            yield figure(
                at + "share of the copy bandwidth",
                "copy_fraction",
                "%",
                expected=_fitting(cards.decode_share, point),
                how="of the same",
                bar=least(bars[context]) if bars else None,
            )
            if bars:
                yield figure(
                    at + "the step less its kernels, over the step",
                    "gap_share",
                    "%",
                    expected=_fitting(cards.gap_share, point),
                    how=f"{cards.kernels_of_step(model, context)} gaps of {cards.GAP_S * 1e6:.1f} µs",
                    bar=most(0.10),
                )
                yield figure(
                    at + "host's share of a plan",
                    "host_share",
                    "%",
                    expected=_fitting(_host_share, point),
                    how="0.3 ms of Python for a plan of 16 steps",
                    bar=most(0.05),
                )


def _mixed() -> Iterator[Figure]:
    """A long row among short ones."""
    for part, shape in (("decode-1.5b-mixed", parts.SMALL), ("decode-7b-mixed", parts.LARGE)):
        for rows in parts.MIXED_ROWS:
            lengths = [1024] * (rows - 1) + [parts.LONGEST]
            point = {"model": named_shape(shape), "lengths": lengths}
            yield Figure(
                part,
                f"{rows - 1} x 1k and one at {parts.LONGEST // 1024}k: a step",
                "step_s",
                "ms",
                where={"rows": rows, "context": 1024, "dtype": "bfloat16"},
                expected=partial(cards.mixed_decode_seconds, **point),
                how="the bytes of all, and no program with more than its share",
            )


def _fitting(function: Callable[..., float], point: tuple[ModelConfig, int, int]) -> Callable[[Card], float]:
    """nan where weights and cache are more than 93 % of the card's memory."""
    model, rows, context = point
    needed = cards.costs.weight_bytes(model, 2) + cards.cache_bytes(model, rows, context)

    def expected(card: Card) -> float:
        return function(card, *point) if needed < 0.93 * card.sheet.memory_bytes else float("nan")

    return expected


def _host_share(card: Card, model: ModelConfig, rows: int, context: int) -> float:
    return 0.3e-3 / (16 * cards.decode_seconds(card, model, rows, context))


def _training() -> Iterator[Figure]:
    for part, rows, tokens, bar in (("train", 16, 1024, 0.5), ("train-row", 1, 8192, 0.4)):
        yield from _trained(part, rows, tokens, bar)


def _trained(part: str, rows: int, tokens: int, bar: float | None, case: str = "jaxrl") -> Iterator[Figure]:
    """An update of two microbatches of `rows` rows; without a bar, nothing is expected either."""
    model, at = named_shape(parts.SMALL), f"{rows} x {tokens // 1024}k"
    sizes = (model, rows, tokens, tokens - parts.PROMPT, 2)
    figure = partial(Figure, part, where={"case": case, "dtype": "bfloat16"})
    yield figure(
        f"{at}, two microbatches: an update",
        "seconds",
        "ms",
        expected=(lambda card: cards.train_seconds(card, *sizes)) if bar else None,
        how="products, attention, what lies between, logits, AdamW" if bar else "",
    )
    yield figure(
        f"{at}: MFU of the measured rate",
        "mfu",
        "%",
        expected=(lambda card: cards.train_mfu(card, *sizes, card.product)) if bar else None,
        how="of the same" if bar else "",
        bar=least(bar) if bar else None,
    )
    yield figure(
        f"{at}: MFU of the datasheet's rate",
        "mfu_datasheet",
        "%",
        expected=(lambda card: cards.train_mfu(card, *sizes, card.sheet.flops_per_s)) if bar else None,
        how="of the same; 50 % is the aim" if bar else "",
    )


def _step() -> Iterator[Figure]:
    model = named_shape(parts.SMALL)
    figure = partial(Figure, "step", where={"case": "jaxrl", "dtype": "bfloat16"})
    rows, prompt, new = 64, parts.PROMPT, 512
    microbatches = rows * (prompt + new) / 16384

    def generation(card: Card) -> float:
        return cards.generation_seconds(card, model, rows, prompt, new)

    def update(card: Card) -> float:
        return cards.train_seconds(card, model, round(rows / microbatches), prompt + new, new, 1) * microbatches

    what = "8 x 8 responses of 512 tokens: "
    yield figure(what + "generation", "timing_s/gen", "s", expected=generation, how="512 steps of 64 rows, and prompts")
    yield figure(what + "update", "timing_s/update_actor", "s", expected=update, how="2.5 microbatches of 16k tokens")
    yield figure(
        "the step's share in generation and update",
        "gen_and_update_share",
        "%",
        expected=lambda card: 1 - 0.03 / (generation(card) + update(card) + 0.03),
        how="30 ms for all else",
        bar=least(0.95),
    )
    yield figure(
        "recompiles", "recompiles", expected=lambda _: 0.0, how="all shapes compile ahead", bar=most(0), everywhere=True
    )
    yield figure(
        "warm-up, cold",
        "cold_warm_up_s",
        "s",
        expected=lambda _: 24 * cards.COMPILE_S / 8 + 10,
        how="24 programs of 13 s, eight at once; autotuning 10 s",
        bar=most(90),
    )
    yield figure(
        "warm-up from the cache", "warm_up_s", "s", expected=lambda _: 5.0, how="24 programs of 0.2 s", bar=most(10)
    )


def _rules() -> Iterator[Figure]:
    figure = partial(Figure, "rules", where={"case": "tail-batching", "dtype": "bfloat16"})
    yield figure(
        "tail batching, cap 1024: speed over plain batches",
        "speed",
        expected=lambda card: TAIL_SPEED[card.sheet.name],
        how="simulated, roofline costs",
        bar=least(1.0),
    )
    yield figure(
        "the same, off the simulator's prediction",
        "error",
        "%",
        expected=lambda _: 0.0,
        how="its own profile; CPUs: within 3 %",
        bar=Bar("+-", 0.10),
    )


TAIL_SPEED: Mapping[str, float] = {"H100": 1.97, "H200": 1.99}
"""Of 8 rounds of the part, by `bench.rule_rounds.simulated_rounds` over `CostModel(model, hardware(card))` with that
model's own efficiencies (2026-11-23). The part predicts anew, from a profile of the card that it runs on."""


def _sync() -> Iterator[Figure]:
    model = named_shape(parts.SMALL)
    figure = partial(Figure, "sync", where={"case": "weights"})
    yield figure(
        "weights to the rollout",
        "seconds",
        "ms",
        expected=lambda card: 1.15 * cards.sync_seconds(card, model),
        how="float32 read, bfloat16 written; 15 % for small copies",
    )
    yield figure(
        "the same over its bytes' time", "over_copy", expected=lambda _: 1.15, how="of the same", bar=most(1.5)
    )


def _attention() -> Iterator[Figure]:
    of_copy = partial(Figure, "attention", among="cases", unit="%")
    yield of_copy(
        "paged, 64 x 8k: share of the copy bandwidth",
        "copy_fraction",
        where={"what": "paged", "case": "jaxrl", "rows": 64, "context": 8192},
        expected=lambda _: cards.CACHE_OF_COPY,
        how="assumed of decoding as well",
        bar=least(0.85),
    )
    for number in (1, 4, 16):
        yield Figure(
            "attention",
            f"paged, 64 x 8k: speed over JAX's kernel, {number} parts",
            "speed",
            where={"what": "paged", "ratio": f"jaxrl / jax-{number}", "rows": 64, "context": 8192},
            among="ratios",
            expected=lambda _: 1.1,
            how="fewer padded queries",
            bar=least(1.0),
        )
    for rows, tokens in ((16, 1024), (1, 8192)):
        yield Figure(
            "attention",
            f"packed, {rows} x {tokens // 1024}k: both passes over cuDNN's",
            "both",
            where={"what": "packed", "ratio": "pallas / cudnn", "rows": rows, "tokens": tokens},
            among="ratios",
            expected=lambda _: cards.ATTENTION_OF_PRODUCT / cards.CUDNN_OF_PRODUCT,
            how="0.40 / 0.60 of products, assumed",
            bar=least(0.70),
        )


def _invariant() -> Iterator[Figure]:
    """`actor.numerics=invariant`, beside the same points with `fast`."""
    for part, shape in (("decode-1.5b-invariant", parts.SMALL), ("decode-7b-invariant", parts.LARGE)):
        for context in (1024, 8192):
            yield Figure(
                part,
                f"64 x {context // 1024}k: a step",
                "step_s",
                "ms",
                where={"rows": 64, "context": context, "dtype": "bfloat16"},
                expected=_fitting(cards.invariant_decode_seconds, (named_shape(shape), 64, context)),
                how="a tile of 128 rows; more and smaller kernels",
            )
    sizes = (named_shape(parts.SMALL), 16, 1024, 1024 - parts.PROMPT, 2)
    yield Figure(
        "train-invariant",
        "16 x 1k, two microbatches: an update",
        "seconds",
        "ms",
        where={"case": "jaxrl", "dtype": "bfloat16"},
        expected=lambda card: cards.invariant_train_seconds(card, *sizes),
        how="as with fast, and a forward pass in tiles",
    )


def _torch() -> Iterator[Figure]:
    """Training by torch, beside the parts above."""
    for name, rows, tokens in (("train", 16, 1024), ("train-row", 1, 8192)):
        yield from _trained(f"{name}-torch", rows, tokens, None, "torch")
        yield Figure(
            f"{name}-torch",
            f"{rows} x {tokens // 1024}k: tokens/s over torch's",
            "tokens_per_s",
            where={"dtype": "bfloat16"},
            among="ratios",
            expected=lambda _: 1.1,
            how="fusions",
            bar=least(1.0),
        )
