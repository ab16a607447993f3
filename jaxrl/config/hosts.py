"""The options of a run on several hosts (`hosts`). `checks` says what they exclude."""

from typing import Annotated

from annotated_types import Ge, Gt

from jaxrl.schema.declared import Cap
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import MAX_WAIT
from jaxrl.schema.section import Section

MAX_HOSTS = Cap(4096, "one process decides for all of them")


class HostsSection(Section):
    """Several hosts: a Ray actor on each, a mesh over all of them for training, and rollout workers on each."""

    num: Annotated[
        int,
        Ge(1),
        MAX_HOSTS,
        "Hosts of the run, each with as many devices; 1: this machine alone, without Ray; more: a Ray actor on each "
        "host.",
    ] = 1
    address: Annotated[
        str,
        "The address of the Ray cluster; auto: one that `ray start` has started on this machine; empty: the one that "
        "the environment variable RAY_ADDRESS names, or else a cluster of the run's own on this machine.",
    ] = ""
    devices_per_host: Annotated[
        int, Ge(0), MAX_DEVICES, "Devices that the run uses on each host; 0: all, and on CPUs one."
    ] = 0
    stall_timeout_s: Annotated[
        float,
        Gt(0),
        MAX_WAIT,
        "Seconds without progress on any host after which the run ends, names the silent ones, and starts again.",
    ] = 900.0
    max_restarts: Annotated[
        int,
        Ge(0),
        "How often all hosts are started again after one was lost, without a checkpoint in between, before it ends.",
    ] = 3
