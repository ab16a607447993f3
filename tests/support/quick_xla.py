"""XLA's flags of tests: most of the suite's time is spent in the compiler, on programs that run for milliseconds.

Trials of benchmarks, and tests of `jaxrl serve`, compile as users do.
"""

from importlib.metadata import version

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"  # the cores are busy with other tests
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # the older emitters take half as long; later versions lack them


def flags(devices: int) -> str:
    """Of a process with so many virtual CPU devices."""
    return f"--xla_force_host_platform_device_count={devices} {QUICK}"
