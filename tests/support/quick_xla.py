"""XLA's flags of tests: most of the suite's time is spent in the compiler, on programs that run for milliseconds.

Trials of benchmarks, and tests of `jaxrl serve`, compile as users do.
"""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"  # the cores are busy with other tests
QUICK += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"  # the older emitters take a third as long


def flags(devices: int) -> str:
    """Of a process with so many virtual CPU devices."""
    return f"--xla_force_host_platform_device_count={devices} {QUICK}"
