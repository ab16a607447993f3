#!/usr/bin/env python3
"""What process 0 of a run on several hosts does for the others: merging, deciding and publishing, timed.

    python scripts/bench_hosts.py [--hosts 16 64 128] [--rows 512] [--spread 0.1] [--plan-s 0.32] [--rounds 3] [--json]

Rounds of tail batching over as many hosts as are asked for, with a batch of as many responses as they have rows. The
hosts are made up (`scripts/bench/host_rounds.py`); process 0 is the run's own code but for its worker and the board.

- us per event: process 0's CPU time in a round over the events that the round has handled (ends, aborts, verdicts).
- share: that time over the rollout's, which is the plans of the fastest worker times --plan-s.
- bytes per event: of the stream; notices per batch: bytes.
- memory: resident, after a tenth of the rounds and after all, with --rounds of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import records
from bench.host_rounds import LeadingHost, RoundCost
from bench.measure import say

QUICK = {"hosts": [2, 4], "rows": 8, "samples": 4, "rounds": 3, "longest": 200, "median": 40.0}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--hosts", type=int, nargs="+", default=[16, 64, 128], help="hosts with a worker each (16 64 128)"
    )
    made.add_argument("--rows", type=int, default=512, help="of each worker (512)")
    made.add_argument("--samples", type=int, default=16, help="responses to a prompt (16)")
    made.add_argument(
        "--spread", type=float, default=0.1, help="how much slower the slowest worker is, as a share (0.1)"
    )
    made.add_argument("--plan-s", type=float, default=0.32, help="seconds of a plan of 16 decode steps (0.32)")
    records.length_options(made)
    made.add_argument("--rounds", type=int, default=3, help="of each number of hosts (3)")
    records.record_options(made, "few hosts and rows")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2: was asked for nonsense."""
    try:
        options = records.parse_counts(parser(), arguments, QUICK, ("hosts", "rows", "samples", "rounds", "longest"))
        if not 0 <= options.spread < 1:
            raise ValueError(f"--spread ({options.spread}) must be at least 0 and below 1")
        if min(options.hosts) * options.rows < options.samples:
            raise ValueError(f"--samples ({options.samples}) must be at most --hosts × --rows")
    except ValueError as error:
        print(f"bench_hosts: {error}", file=sys.stderr)
        return 2
    head = records.header("hosts", records.describe_host(), records.versions(), records.command(arguments))
    records.print_header(head, say)
    results = [_case(options, count) for count in options.hosts]
    if options.json is not None:
        print(f"appended to {records.append_record(options.json, head | {'results': results}).name}")
    return 0


def _case(options: argparse.Namespace, count: int) -> dict[str, Any]:
    leading = LeadingHost(count, options.rows, options.samples, options.spread, records.lengths_of(options))
    costs: list[RoundCost] = []
    memory: list[float] = []
    for _ in range(options.rounds):
        costs.append(leading.round())
        memory.append(resident_mib())
    case = {
        "hosts": count,
        "events": statistics.median(cost.events for cost in costs),
        "seconds": statistics.median(cost.seconds for cost in costs),
        "us_per_event": statistics.median(1e6 * cost.seconds / cost.events for cost in costs),
        "share": statistics.median(cost.seconds / (cost.plans * options.plan_s) for cost in costs),
        "stream_bytes_per_event": statistics.median(cost.stream_bytes / cost.events for cost in costs),
        "bytes_per_notice_batch": statistics.median(cost.notice_bytes / cost.batches for cost in costs),
        "keys_left": len(leading.board.values),
        "memory_mib": [memory[len(memory) // 10], memory[-1]],
    }
    say(
        f"{count:4} hosts  {case['events']:8.0f} events  {case['seconds']:7.2f} s  {case['us_per_event']:6.1f} us each"
        f"  {100 * case['share']:5.2f} % of the rollout  {case['stream_bytes_per_event']:5.0f} bytes each  "
        f"{case['bytes_per_notice_batch']:6.0f} bytes a batch of notices  {case['keys_left']} keys left  "
        f"{case['memory_mib'][0]:.0f} then {case['memory_mib'][1]:.0f} MiB"
    )
    return case


def resident_mib() -> float:
    """Resident memory of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
