"""What the benchmarks share: timing on a disturbed machine, ceilings, worker processes, records, yardsticks."""
