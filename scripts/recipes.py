#!/usr/bin/env python3
"""Runs a recipe, and says whether its last value lies in the band that earlier seeds span.

    python scripts/recipes.py NAME [--seed 3] [--out runs/recipes]
    python scripts/recipes.py NAME --record        # three seeds; writes docs/recipes/NAME.{json,md,svg}

`recipes.yaml` has them: commands of `jaxrl`, and a metric. Each command runs in a folder of its own below `--out`, with
`trainer.seed` and `data.seed`; `{0}` in a later command is the folder of the first, `{out}` one for other files: with
`rows`, `train.jsonl` and `val.jsonl` of that configuration's problems. A folder that is there resumes. The band is the
mean of the recorded seeds ± `WIDTH` standard deviations. A checksum is that of the weights which `jaxrl export` writes:
equal for a seed on machines with the same instructions and versions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from bench.failures import sha256_of
from bench.harness import command, describe, header

from jaxrl.config.files import load
from jaxrl.data.prompts import load_train, load_validation
from jaxrl.record.metrics import read_metrics

PAGES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
SEEDS = (0, 1, 2)
WIDTH = 3.0
RECIPES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
Recipe = Mapping[str, Any]


def write_rows(config: Path, out: Path) -> None:
    """The problems of a configuration, each with its answer as `completion` and as `chosen`, and a sentence with it as
    `rejected`."""
    given = load(config, [])
    learnt = load_train(given)
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", learnt), ("val", load_validation(given, learnt))):
        with (out / f"{name}.jsonl").open("w") as file:
            for problem in problems:
                said, wordy = str(problem.answer), f"The answer is {problem.answer}."
                row = {"prompt": problem.question, "completion": said, "chosen": said, "rejected": wordy}
                file.write(json.dumps(row) + "\n")


def train(name: str, recipe: Recipe, seed: int, out: Path) -> dict[str, Any]:
    """Runs the commands; returns the curve as [step, value], seconds of a step, and the weights' checksum."""
    folders, own = list[Path](), out / f"{name}-{seed}"
    if "rows" in recipe:
        write_rows(Path(recipe["rows"]), own)
    for number, line in enumerate(recipe["commands"]):
        folders.append(out / f"{name}-{seed}-{number}")
        words = [word.format(*folders, out=own) for word in shlex.split(line)]
        if words[0] in ("train", "sft", "dpo"):
            words += [f"trainer.run_dir={folders[-1]}", f"trainer.seed={seed}", f"data.seed={seed}"]
        print(f"> jaxrl {shlex.join(words)}", flush=True)
        subprocess.run([sys.executable, "-m", "jaxrl", *words], check=True, stdout=2)
    lines = read_metrics(folders[-1])
    curve = [[line["step"], line[recipe["metric"]]] for line in lines if recipe["metric"] in line]
    step_s = [line["timing_s/step"] - line.get("timing_s/testing", 0.0) for line in lines if "timing_s/step" in line]
    weights = sha256_of(folders[-1])
    return {"curve": curve, "step_s": round(statistics.median(step_s[1:]), 1), "sha256": weights}


def band(seeds: Mapping[str, Any]) -> tuple[float, float]:
    last = [found["curve"][-1][1] for found in seeds.values()]
    mean, spread = statistics.mean(last), WIDTH * statistics.stdev(last)
    return mean - spread, mean + spread


def picture(recipe: Recipe, seeds: Mapping[str, Any]) -> str:
    """A line for each seed, and the band at the last step."""
    curves = [found["curve"] for found in seeds.values()]
    last = max(step for curve in curves for step, _ in curve)

    def at(step: float, value: float) -> str:
        return f"{60 + 560 * step / last:.1f},{270 - 250 * min(max(value, 0.0), 1.0):.1f}"

    low, high = band(seeds)
    low, high = max(low, 0.0), min(high, 1.0)
    text = "font-family='sans-serif' font-size='13' fill='#555'"
    parts = [f"<rect width='640' height='310' fill='white'/><text x='60' y='305' {text}>step 0 to {last:g}</text>"]
    parts += [f"<text x='20' y='{275 - 250 * tick:g}' {text}>{tick:g}</text>" for tick in (0, 0.5, 1)]
    parts += [f"<path d='M{at(0, tick)} L{at(last, tick)}' stroke='#ddd'/>" for tick in (0, 0.5, 1)]
    parts.append(f"<path d='M{at(last, low)} L{at(last, high)}' stroke='#b8860b' stroke-width='9' opacity='.4'/>")
    for curve in curves:
        points = " ".join(at(*point) for point in curve)
        parts.append(f"<polyline points='{points}' fill='none' stroke='#2463a8' stroke-width='2'/>")
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 310'>{''.join(parts)}</svg>\n"


def page(name: str, record: Mapping[str, Any]) -> str:
    recipe, seeds, device = RECIPES[name], record["seeds"], record["device"]
    low, high = band(seeds)
    rows = "\n".join(
        f"| {seed} | {found['curve'][0][1]:.3f} | {found['curve'][-1][1]:.3f} | {found['step_s']} | "
        f"`{found['sha256'][:16]}` |"
        for seed, found in seeds.items()
    )
    commands = "\n".join(f"jaxrl {line}" for line in recipe["commands"])
    folders = "`{0}` is the folder of the first run, and the script writes the other files into `{out}`."
    folders = f"\n{folders}\n" if "{" in commands else ""
    return f"""\
# {recipe["title"]}

{recipe["about"]}

```bash
{commands}
```
{folders}
![{recipe["metric"]} over steps, a line for each seed]({name}.svg)

The last value of `{recipe["metric"]}` must lie in **{low:.3f} to {high:.3f}**: the mean of {len(seeds)} seeds ±
{WIDTH:g} standard deviations. `python scripts/recipes.py {name} --seed 3` runs another seed, and says whether it does.

| seed | first | last | seconds a step | SHA-256 of the weights ([whole]({name}.json)) |
| --- | --- | --- | --- | --- |
{rows}

{record["date"][:10]}, commit {record["commit"][:8]}, {device["kind"]} with {device["cores"]} cores, jax
{record["versions"]["jax"]}. The weights are those that `jaxrl export --dtype float32` writes.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    options = parser.parse_args()
    recipe, kept = RECIPES[options.name], PAGES / f"{options.name}.json"
    if options.record:
        seeds = {str(seed): train(options.name, recipe, seed, options.out) for seed in SEEDS}
        untrained, (low, high) = [found["curve"][0][1] for found in seeds.values()], band(seeds)
        if low <= max(untrained) and min(untrained) <= high:
            raise ValueError(f"{low:.3f} to {high:.3f} is no more than no training gives, {untrained}: take more steps")
        record = header("recipe", describe([]), command(sys.argv)) | recipe | {"seeds": seeds}
        PAGES.mkdir(exist_ok=True)
        kept.write_text(json.dumps(record, indent=1) + "\n")
        kept.with_suffix(".svg").write_text(picture(recipe, seeds))
        kept.with_suffix(".md").write_text(page(options.name, record))
        return 0
    if not kept.exists():
        parser.error(f"{options.name} has no band so far: --record makes one")
    low, high = band(json.loads(kept.read_text())["seeds"])
    found = train(options.name, recipe, options.seed, options.out)
    value = found["curve"][-1][1]
    inside = low <= value <= high
    print(f"{recipe['metric']} {value:.3f} is {'in' if inside else 'out of'} the band {low:.3f} to {high:.3f}; {found}")
    return 0 if inside else 1


if __name__ == "__main__":
    sys.exit(main())
