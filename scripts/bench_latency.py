#!/usr/bin/env python3
"""How well a latency profile predicts decode steps that it does not hold: other batches, real mixed lengths.

    jaxrl profile --config run.yaml --out profile.json
    python scripts/bench_latency.py --config run.yaml --profile profile.json [--points 40] [section.option=value ...]

Each held-out point is a tp degree, a number of rows per dp group that was not profiled (where one lies between those
that were), and lengths drawn lognormally around a context that was not profiled either. Printed: the distribution of
|predicted - measured| / measured, over all points and for each degree; with and without the online correction, which
sees the points in the order in which they were drawn. The exit status is 1 where --limit is given and the corrected
mean exceeds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say

from jaxrl.commands.profile import adaptive
from jaxrl.config import files as config_files
from jaxrl.rollout.profiler import Profiler
from jaxrl.rollout.profiles import identity_of, load_profile
from jaxrl.runtime.build import build_executor, read_tokenizer_and_model
from jaxrl.runtime.devices import prepare_jax
from jaxrl.runtime.memory import layout_degrees
from jaxrl.runtime.weights import load_weights
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Profile
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, submeshes


def held_out(profile: Profile, count: int, seed: int) -> list[tuple[int, list[int]]]:
    """(tp, lengths of a dp group's rows), within what was profiled."""
    random = np.random.default_rng(seed)
    drawn: list[tuple[int, list[int]]] = []
    for i in range(count):
        tp = profile.degrees[i % len(profile.degrees)]
        own = [point for point in profile.decode if point.tp == tp]
        known = sorted({point.batch for point in own})
        between = [batch for batch in range(known[0], known[-1] + 1) if batch not in known]
        batch = int(random.choice(between or known))
        above = [point for point in own if point.batch >= batch]
        longest = max(point.context for point in above if point.batch == min(each.batch for each in above))
        shortest = min(point.context for point in own)
        middle = float(np.exp(random.uniform(np.log(shortest + 1), np.log(longest))))
        lengths = np.clip(random.lognormal(np.log(middle), 0.5, batch), shortest, longest)
        drawn.append((tp, [int(length) for length in lengths]))
    return drawn


def describe(name: str, errors: Sequence[float]) -> str:
    values = np.asarray(errors)
    p50, p90 = np.percentile(values, [50, 90])
    return f"{name:<22} mean {values.mean():6.1%}   p50 {p50:6.1%}   p90 {p90:6.1%}   worst {values.max():6.1%}"


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--config", required=True)
    made.add_argument("--profile", required=True)
    made.add_argument("--points", type=int, default=40, help="that are held out (40)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--limit", type=float, default=0.0, help="on the corrected mean (none)")
    made.add_argument("overrides", nargs="*")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    config = adaptive(config_files.load(options.config, options.overrides))
    mesh = submeshes(make_mesh(prepare_jax(config)), config.rollout.num_workers)[0]  # a profile is of one worker
    config = config.replace(rollout=config.rollout.replace(num_workers=1))
    _, model = read_tokenizer_and_model(config)
    params = load_weights(config, model, mesh)
    profile = load_profile(options.profile)
    profile.check(identity_of(config, model, mesh))
    executor = build_executor(config, model, Layout(mesh, layout_degrees(config, mesh.size)[0]))
    executor.sync_weights(params, 0)
    executor.allocate()
    profiler, predictor = Profiler(executor), LatencyPredictor(profile)
    with session.on(records.describe_devices(list(mesh.devices.flat)), is_timed=False):
        identity = profile.identity
        say(f"{identity.model}, {mesh.size} devices of {identity.device_kind}, jax {identity.jax_version}")
        plain: dict[int, list[float]] = {}
        corrected: dict[int, list[float]] = {}
        for tp, lengths in sorted(held_out(profile, options.points, options.seed), key=lambda each: each[0]):
            real_s = profiler.mixed(tp, lengths)
            load = (tp, len(lengths), float(sum(lengths)))
            predicted_s = predictor.decode_step_s(*load)
            plain.setdefault(tp, []).append(abs(predicted_s / predictor.ratio(tp) - real_s) / real_s)
            corrected.setdefault(tp, []).append(abs(predicted_s - real_s) / real_s)
            predictor.observe(*load, real_s)
            rows = f"tp {tp}, {len(lengths):3} rows, {sum(lengths):6} tokens"
            say(f"{rows}: {real_s * 1e3:8.2f} ms, predicted {predicted_s * 1e3:8.2f}")
        for name, errors in (("profile alone", plain), ("corrected online", corrected)):
            for tp, values in errors.items():
                say(describe(f"{name}, tp {tp}", values))
            say(describe(name, [value for values in errors.values() for value in values]))
    mean = float(np.mean([value for values in corrected.values() for value in values]))
    cases = {"alone": plain, "corrected": corrected}
    return session.record(
        {name: {str(tp): values for tp, values in errors.items()} for name, errors in cases.items()}
        | {"corrected_mean": mean, "limit": options.limit}
    )


def _missed(record: Record) -> Iterable[str]:
    mean, limit = record["results"]["corrected_mean"], record["results"]["limit"]
    if limit and mean > limit:
        yield f"the corrected mean is {mean:.1%}, more than --limit ({limit:.1%})"


BENCHMARK = Benchmark("latency", __doc__, _measure, _options, None, ("points",), promises=_missed, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
