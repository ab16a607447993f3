"""Adaptive layouts of a run: built from its options, and joined with its journal, timeline and log.

Purpose: `build_layouts` reads the profile, checks that it is of this machine, and puts the rules together;
`LayoutSession` is what a backend calls around its rounds and plans (`jaxrl.backend.Layouts`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.journal import Journal
from jaxrl.layout_log import LayoutLog
from jaxrl.memory_plan import layout_degrees
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.engine import Engine
from jaxrl.scheduling.latency import CorrectionConfig, LatencyPredictor
from jaxrl.scheduling.latency_profile import Profile, ProfileIdentity
from jaxrl.scheduling.layout_control import Decision, LayoutControl, LengthHistory
from jaxrl.scheduling.layout_switch import LayoutSwitchConfig, LayoutSwitchRule
from jaxrl.scheduling.round_layouts import RoundLayouts
from jaxrl.scheduling.tp_planner import TpPlanner, TpPlannerConfig
from jaxrl.timeline import Timeline

KIND = "layout"


def identity_of(config: Config, model: ModelConfig, mesh: Mesh) -> ProfileIdentity:
    """What a profile of this run's rollout is a profile of."""
    shapes = {name: (weight.shape, weight.dims) for name, weight in _named(model.weights())}
    device = mesh.devices.ravel()[0]
    cores = f" ({os.cpu_count()} cores)" if device.platform == "cpu" else ""
    return ProfileIdentity(
        model=Path(config.model.path.partition(":")[2] or config.model.path).name,
        fingerprint=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
        device_kind=device.device_kind + cores,
        device_count=mesh.size,
        jax_version=jax.__version__,
        dtype=config.rollout.dtype,
    )


def _named(weights: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in weights.items():
        found += _named(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return found


def load_profile(path: str | Path) -> Profile:
    """Reads a table. Raises ConfigError for a file that is none, or of another version."""
    try:
        return Profile.from_json(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"rollout.layout.profile: {path} does not exist: make it with `jaxrl profile`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"rollout.layout.profile: {path} cannot be used: {error}") from None


def checked_profile(config: Config, model: ModelConfig, mesh: Mesh) -> Profile:
    """`rollout.layout.profile`, refused with the reason where it is of another model or machine, or made up."""
    path = config.rollout.layout.profile
    profile = load_profile(path)
    if profile.source == "synthetic" and not config.rollout.layout.allow_synthetic:
        raise ConfigError(
            f"rollout.layout.profile: {path} was made up (source: synthetic): decisions that rest on it say nothing of "
            "this machine; rollout.layout.allow_synthetic=true takes it all the same"
        )
    try:
        profile.check(identity_of(config, model, mesh))
    except ValueError as error:
        raise ConfigError(f"rollout.layout.profile: {path}: {error}") from None
    return profile


def build_layouts(
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    engine: Engine,
    row_sizes: Mapping[int, Sequence[int]],
    journal: Journal,
    timeline: Timeline,
    log: LayoutLog,
) -> LayoutSession:
    """The session of a run whose `rollout.layout` adapts. Raises ConfigError for a profile that cannot be used."""
    options, tp = config.rollout.layout, config.rollout.tensor_model_parallel_size
    degrees = layout_degrees(config, mesh.size)
    predictor, rule = None, None
    if options.switch:
        correction = CorrectionConfig(options.correction_weight, options.correction_max_factor)
        predictor = LatencyPredictor(checked_profile(config, model, mesh), correction, row_sizes)
        switching = LayoutSwitchConfig(
            degrees=degrees,
            bound=options.bound,
            direction=options.direction,
            min_gain=options.min_gain,
            cooldown=options.cooldown,
            reversal_factor=options.reversal_factor,
            state=options.state,
            headroom_tokens=options.headroom_tokens,
        )
        rule = LayoutSwitchRule(switching, predictor)
    planner: TpPlanner | int = tp
    if options.planner:
        planning = TpPlannerConfig(degrees, tp, degrees[-1], options.planner_rise, options.planner_quiet_rounds)
        planner = TpPlanner(planning)
    history = LengthHistory() if options.bound == "expected" else None
    control = LayoutControl(engine, RoundLayouts(planner, rule), degrees, predictor, history)
    return LayoutSession(control, journal, timeline, log, predictor)


class LayoutSession:
    """Implements `jaxrl.backend.Layouts` for one worker."""

    def __init__(
        self,
        control: LayoutControl,
        journal: Journal,
        timeline: Timeline,
        log: LayoutLog,
        predictor: LatencyPredictor | None = None,
    ) -> None:
        self.control = control
        self._journal, self._timeline, self._log = journal, timeline, log
        self._predictor = predictor
        self._at = (0, 0)
        self._kind = self._likely = "plain"  # of this round, and of the next training round, as far as one can know
        self._spans: list[tuple[float, float]] = []  # of the round's switches, in the timeline's clock

    def enter(self) -> None:
        """A rollout phase begins, with neither weights nor pool: the layout of the next round, free of charge."""
        engine = self.control.engine
        if isinstance(engine.executor, MeshExecutor):
            engine.executor.start_in(self.control.layouts.degree(self._likely))
            engine.follow_executor()

    def begin(self, step: int, round_index: int, kind: str) -> None:
        """A round begins, with an idle engine."""
        self._at, self._kind, self._spans = (step, round_index), kind, []
        self._likely = self._likely if kind == "eval" else kind
        entries = [e for e in self._journal.entries(step, KIND) if e["key"][0] == round_index]

        def write(decision: Decision) -> None:
            self._journal.append(step, KIND, (round_index, decision.dispatch), decision.to_json())

        self.control.start(kind, [Decision.from_json(entry) for entry in entries], write)

    def before_plan(self) -> None:
        """Switches if it pays. Raises SwitchFailed where nothing can go on."""
        began = time.perf_counter()
        if self.control.consider() is not None:
            self._spans.append((began, time.perf_counter()))

    def after_plan(self) -> None:
        self.control.note(time.monotonic())
        self._timeline.counter("tp", tp=self.control.tp)

    def finished(self, length: int) -> None:
        """A response ended by itself."""
        self.control.finished(length)

    def end(self, preemptions: int) -> dict[str, float]:
        """The round is over; its metrics. Draws and logs its switches."""
        metrics = self.control.end(preemptions)
        for (began, ended), episode in zip(self._spans, self.control.episodes, strict=True):
            told = episode.to_json()
            name = f"tp {told['from_tp']} to {told['to_tp']} ({told['how']})"
            self._timeline.complete("layout", name, began, ended, **told)
        source = "none" if self._predictor is None else self._predictor.profile.source
        self._log.write(*self._at, self._kind, source, self.control.picture())
        return metrics

    def cancel(self) -> None:
        """The round is dropped."""
        self.control.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint."""
        state = self.control.layouts.state_dict()
        return state if self._predictor is None else state | {"correction": self._predictor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; without a state, where it starts."""
        self.control.layouts.load_state_dict(dict(state))
        if self._predictor is not None and "correction" in state:
            self._predictor.load_state_dict(state["correction"])
