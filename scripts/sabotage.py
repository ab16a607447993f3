"""Puts faults into copies of the tree, one at a time, and says which test of the default suite finds each.

    python scripts/sabotage.py                      # all of them: a quarter of an hour on two cores
    python scripts/sabotage.py stale "a lost"       # those whose description has one of these words in it

A fault is one that a person makes: a sign, an off-by-one, a lost prompt, a swallowed signal, a wrong mask, stale
weights. Each is a text in a file, in a room of its own, and what stands there instead. The tests of that room run
first; if they find nothing, the whole default suite runs. A test that fails without the fault as well ends it all with
an error. The exit status is 1 if a fault was not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from jaxrl.processes.process_tree import adopt_orphans, kill_descendants

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 1200  # for the suite; a fault may also be one that makes it hang


@dataclass(frozen=True)
class Fault:
    """`old` stands once in `file`, and `new` is wrong there: `what`. `tests` are those of its room."""

    what: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "products of a decode step leave out the factors of quantised weights",
        "jaxrl/rollout/fused_step.py",
        "return out if scale is None else out * scale.reshape(-1)",
        "return out",
        "tests/rollout/test_fused_step.py",
    ),
    Fault(
        "new keys and values are cut to whole codes, and not rounded",
        "kernels/decode_pallas.py",
        "codes_1D = _rounded(codes_1D)",
        "codes_1D = codes_1D * 1",
        "tests/kernels/test_decode_pallas.py",
    ),
    Fault(
        "all outputs of a matrix have one factor",
        "sharding/narrow_weights.py",
        "magnitudes = jnp.max(jnp.abs(array), axis=axes, keepdims=True, initial=_SMALLEST)",
        "magnitudes = jnp.max(jnp.abs(array), initial=_SMALLEST)[(None,) * array.ndim]",
        "tests/sharding/test_narrow_weights.py",
    ),
    Fault(
        "the loss has the wrong sign",
        "jaxrl/train/losses.py",
        "plain, clipped = -advantages * ratio, -advantages * within",
        "plain, clipped = advantages * ratio, advantages * within",
        "tests/train",
    ),
    Fault(
        "a group's standard deviation is the biased one",
        "jaxrl/train/advantages.py",
        "scores.std(ddof=1)",
        "scores.std()",
        "tests/train",
    ),
    Fault(
        "the mask of what is learnt from is one token late",
        "jaxrl/train/packing.py",
        "loss_mask=mask,",
        "loss_mask=np.roll(mask, 1) * (np.arange(len(mask)) > 0),",
        "tests/train",
    ),
    Fault(
        "what is found of rows that devices share stays in the order of their pieces",
        "jaxrl/train/programs.py",
        "found = [np.asarray(x)[:, np.argsort(dealt(x.shape[1], self.layout.tp))] for x in results]",
        "found = [np.asarray(x) for x in results]",
        "tests/train",
    ),
    Fault(
        "keys and values of rows that devices share have the gradient of one device",
        "jaxrl/train/programs.py",
        "return (split.shard(d_x.astype(jnp.promote_types(d_x.dtype, reduce_dtype))).astype(d_x.dtype),)",
        "return (jnp.split(d_x, jax.lax.axis_size(split.axes), axis=1)[0],)",
        "tests/train",
    ),
    Fault(
        "a checkpoint gets its name before its manifest is there",
        "jaxrl/train/checkpoint.py",
        "            manifest.write(self._temporary(step), SCHEMA_VERSION, step, self._progress)\n",
        "",
        "tests/train",
    ),
    Fault(
        "block accounting is off by one: the block of a prompt's last token is shared",
        "jaxrl/scheduling/tokens/blocks.py",
        "return max(prompt_len - 1, 0) // self.block_size",
        "return prompt_len // self.block_size",
        "tests/scheduling",
    ),
    Fault(
        "of several groups, one is called certain that may lose its place",
        "jaxrl/scheduling/rounds/race.py",
        "others[: self.limits.batch.num_prompts - len(due)]",
        "others[: self.limits.batch.num_prompts]",
        "tests/scheduling",
    ),
    Fault(
        "a lost prompt: the first that a round leaves over",
        "jaxrl/scheduling/rounds/batches.py",
        "sorted((*left_over, *self.queue), key",
        "sorted((*left_over[1:], *self.queue), key",
        "tests/mechanisms/tail_batching",
    ),
    Fault(
        "prompts that wait are lost when others join them",
        "jaxrl/scheduling/rounds/batches.py",
        "sorted((*left_over, *self.queue), key",
        "sorted(left_over or self.queue, key",
        "tests/mechanisms/partial_rollout",
    ),
    Fault(
        "a rejection leaves the window as it is",
        "jaxrl/mechanisms/speculation/rule.py",
        "xp.where(accepted == drafted, grown, self.least)",
        "xp.where(accepted == drafted, grown, window)",
        "tests/mechanisms/speculation",
    ),
    Fault(
        "the sums of a round that was given up stay in the gradient",
        "jaxrl/mechanisms/stream_trainer/gradients.py",
        "        _delete(self._sums)\n        self._sums = None\n",
        "",
        "tests/mechanisms/stream_trainer",
    ),
    Fault(
        "time limits have no upper bound",
        "jaxrl/mechanisms/reward_timeouts.py",
        "min(max(self.min_s, self.factor * anchor_s), self.max_s)",
        "max(self.min_s, self.factor * anchor_s)",
        "tests/mechanisms/reward_timeouts",
    ),
    Fault(
        "the planner doubles tp though preemptions only stayed",
        "jaxrl/mechanisms/adaptive_layouts/planner.py",
        "preemptions > RISE * state.last",
        "preemptions >= state.last",
        "tests/mechanisms/adaptive_layouts",
    ),
    Fault(
        "ranking groups never take turns",
        "jaxrl/mechanisms/ranking_groups/rule.py",
        "return list(range(num_workers)) if step % 2 else list(reversed(range(num_workers)))",
        "return list(range(num_workers))",
        "tests/mechanisms/ranking_groups",
    ),
    Fault(
        "verdicts of two samples draw with the same keys",
        "jaxrl/mechanisms/judge/device.py",
        "sample_index=sample.key.sample_index * count + number",
        "sample_index=sample.key.sample_index + number",
        "tests/mechanisms/judge",
    ),
    Fault(
        "groups without a difference are kept",
        "jaxrl/mechanisms/dynamic_sampling.py",
        "return any(value != values[0] for value in values)",
        "return len(values) > 0",
        "tests/mechanisms/dynamic_sampling",
    ),
    Fault(
        "the update beside a round is run before it",
        "jaxrl/mechanisms/one_step_off.py",
        "            ahead = step.collect(groups)\n",
        "            learned = step.learn()\n            ahead = step.collect(groups)\n"
        "            return ahead, (step.leave_rollout(), learned)[1]\n",
        "tests/mechanisms/one_step_off",
    ),
    Fault(
        "a wrong mask: a token does not see itself",
        "kernels/reference.py",
        "visible_RCS = jnp.arange(span) <= positions_RC[..., None]",
        "visible_RCS = jnp.arange(span) < positions_RC[..., None]",
        "tests/kernels tests/rollout",
    ),
    Fault(
        "the layout's lanes are stacked in the wrong order when a pool moves",
        "sharding/kv_migration.py",
        "        source_index = source_index[own]\n",
        "        source_index = source_index[own[::-1]]\n",
        "tests/sharding",
    ),
    Fault(
        "a second attempt draws the tokens of the first",
        "jaxrl/rollout/sampling.py",
        "for part in (key.epoch, key.prompt_index, key.sample_index, key.attempt):",
        "for part in (key.epoch, key.prompt_index, key.sample_index):",
        "tests/rollout",
    ),
    Fault(
        "stale weights: the rollout keeps those that the run began with",
        "jaxrl/commands/train.py",
        "weights=lambda: host.params,",
        "weights=lambda first=__import__('jax').tree.map(lambda leaf: leaf + 0, host.params): first,",
        "tests/commands",
    ),
    Fault(
        "rotary angles turn the other way",
        "jaxrl/models/decoder.py",
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "tests/models",
    ),
    Fault(
        "a resumed run leaves out a prompt",
        "jaxrl/data/prompts.py",
        'self.position = int(state["position"])',
        'self.position = int(state["position"]) + 1',
        "tests/data",
    ),
    Fault(
        "every letter is the right choice",
        "jaxrl/rewards/math.py",
        'return chosen == choice, "choice"',
        'return True, "choice"',
        "tests/rewards",
    ),
    Fault(
        "programs under test may have a thousand times the memory",
        "jaxrl/rewards/sandbox/locks.py",
        "mapped + limits.memory_mib * MIB",
        "mapped + limits.memory_mib * MIB * 1024",
        "tests/rewards",
    ),
    Fault(
        "grandchildren outlive a worker",
        "jaxrl/processes/process_tree.py",
        "                pending.append(child)\n",
        "",
        "tests/rewards",
    ),
    Fault(
        "a swallowed signal: one that comes while files are written",
        "jaxrl/runtime/stop.py",
        "                self._waiting = number\n",
        "",
        "tests/runtime",
    ),
    Fault(
        "a decision of the step after a checkpoint is cut from the journal",
        "jaxrl/record/journal.py",
        "if place[0] > step}",
        "if place[0] > step + 1}",
        "tests/record",
    ),
    Fault(
        "an upper bound of an option is not checked",
        "jaxrl/schema/declared.py",
        "yield Le(self.most)",
        "yield from ()",
        "tests/schema tests/config",
    ),
    Fault(
        "the order of arrival is not written down",
        "jaxrl/runtime/arrival.py",
        'self._journal.append(step, KIND, key, {"worker": worker}, sync=False)',
        "pass",
        "tests/runtime/test_arrival.py",
    ),
    Fault(
        "an end is delivered before another worker's earlier one is known",
        "jaxrl/scheduling/tokens/local_workers.py",
        "low_watermark is None or self._held[0][0][0] <= low_watermark",
        "True",
        "tests/scheduling",
    ),
    Fault(
        "a simulated step is not charged for its context",
        "jaxrl/sim/cost_model.py",
        "row_memory_s * batch + token_memory_s * seen\n        busy = max",
        "row_memory_s * batch\n        busy = max",
        "tests/sim",
    ),
    Fault(
        "options in which two runs differ are not told",
        "jaxrl/report/comparison.py",
        "if len(set(values)) > 1}",
        "if len(set(values)) > 2}",
        "tests/report",
    ),
)


def put_in(fault: Fault, tree: Path) -> None:
    """Raises ValueError where the text is not there exactly once: the fault is to be written anew."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} must have {fault.old!r} once, found {text.count(fault.old)}: {fault.what}")
    path.write_text(text.replace(fault.old, fault.new))
    forget_bytecode(path)


def forget_bytecode(source: Path) -> None:
    """Python knows it by the source's second and size, and a fault may come and go within one second."""
    Path(cache_from_source(str(source))).unlink(missing_ok=True)


def copy_tree(to: Path) -> None:
    """What git has, or would have with `git add`, as it stands now; in a repository of its own, which tests ask."""
    to.chmod(0o755)  # some tests run programs of it as another user
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)
    git = ("git", "-c", "user.name=sabotage", "-c", "user.email=sabotage@localhost")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "The tree")):
        subprocess.run([*git, *command], cwd=to, check=True)


def variables(tree: Path) -> dict[str, str]:
    """For tests of a copy: its own modules, and the data of the tree that it is a copy of."""
    data = os.environ.get("JAXRL_DATA", str(ROOT.parent / "shared" / "data"))
    return {"PYTHONPATH": str(tree), "JAXRL_DATA": data, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def first_failure(tree: Path, tests: list[str], processes: int) -> str | None:
    """The first test that fails, and why in a line; None: all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE", *tests]
    command += ["--numprocesses", str(processes), "--dist", "worksteal"]
    with tempfile.TemporaryFile("w+") as said:  # a pipe would be held open by what a fault leaves behind
        started = subprocess.Popen(
            command, cwd=tree, env=os.environ | variables(tree), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            status = started.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            started.kill()
            return f"the tests have no end within {PATIENCE_S} s"
        said.seek(0)
        text = said.read()
    if status == 0:
        return None
    found = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return found[0] if found else f"pytest ended with status {status}: {text[-300:]}"


def found_by(fault: Fault, tree: Path, processes: int) -> str | None:
    """What finds a fault that is in the tree, and is taken out of it again; None: nothing."""
    found = first_failure(tree, fault.tests.split(), processes) or first_failure(tree, [], processes)
    shutil.copy(ROOT / fault.file, tree / fault.file)
    forget_bytecode(tree / fault.file)
    if found is not None and found.startswith(("FAILED ", "ERROR ")):
        test = found.split(" ", 1)[1].split(" - ")[0]
        if first_failure(tree, [test], 0) is not None:
            raise ValueError(f"{test} fails without a fault as well: mend it first")
    return found


def main(words: list[str], processes: int) -> int:
    adopt_orphans()
    wanted = [fault for fault in FAULTS if not words or any(word in fault.what for word in words)]
    missed = 0
    for fault in wanted:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sabotage-") as folder:
            tree = Path(folder)
            copy_tree(tree)
            put_in(fault, tree)
            found = found_by(fault, tree, processes)
            kill_descendants()  # a fault may be one that leaves processes behind
        missed += found is None
        print(
            f"{'MISSED' if found is None else 'found'}  {time.monotonic() - started:4.0f} s  {fault.file}: {fault.what}"
        )
        print(f"        {found or 'no test of the default suite fails'}", flush=True)
    print(f"{len(wanted) - missed} of {len(wanted)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose description has one of these in it")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4), help="that share the tests")
    arguments = parser.parse_args()
    sys.exit(main(arguments.words, arguments.processes))
