"""The environment variables that say which process this is and which devices it gets; nothing heavy is loaded."""

COORDINATOR, PROCESS_ID = "JAXRL_COORDINATOR", "JAXRL_PROCESS_ID"
"""What a launcher sets: host:port of process 0, and the number of the process."""
VISIBLE, FLAGS, PLATFORMS = "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "JAX_PLATFORMS"
COUNT_FLAG = "--xla_force_host_platform_device_count"
"""In `FLAGS`: the number of devices that XLA makes up on a CPU."""
