"""Accelerators: what a device can do at best, from its vendor's data sheet. How much of a peak software reaches is an
efficiency factor of `jaxrl.sim.cost_model`, never mixed in here.

Source: each entry's docstring names the data sheet of each number. FLOP/s are dense bfloat16 (data sheets print twice
that "with sparsity"). Bandwidths are bytes per second in one direction; data sheets add up both directions of a link.
1 GB is 1e9 bytes, as on the data sheets; but a data sheet's GB of device memory are taken as 2**30 bytes each.

Departures: bandwidth between nodes belongs to a cluster, not to a device; the entries hold that of the vendor's usual
eight-device server (one network card per device), and `dataclasses.replace` sets another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PLATFORM = "gpu"
"""The platform of simulated devices, for options with a default by platform."""

GIB = 1 << 30
_GBIT_BYTES = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device, eight (or `node_size`) of them to a node. Bandwidths are of one direction.

    `one_shot`: whether reductions inside a node by a single kernel are modelled. Every device must read every other's
    memory over links or a switch (over PCIe engines turn such kernels off), and the latency must be published: it is
    for the H100 (`jaxrl.sim.cost_model.Efficiency`), and taken to be the same for the H200, with its links.
    """

    name: str  # as on the data sheet
    flops_per_s: float  # dense bfloat16
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float  # from one device to the others of its node
    inter_node_bytes_per_s: float  # one device's share of its node's network
    host_bytes_per_s: float  # from host memory to one device
    node_size: int = 8
    one_shot: bool = False

    def bytes_per_s(self, num_devices: int) -> float:
        """One device's bandwidth in one direction in a group of `num_devices`: inside a node or between nodes."""
        if num_devices <= self.node_size:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, self.inter_node_bytes_per_s)


A40 = Hardware(
    name="A40",
    flops_per_s=149.7e12,
    memory_bytes_per_s=696e9,
    memory_bytes=48 * GIB,
    link_bytes_per_s=32e9,
    inter_node_bytes_per_s=100 * _GBIT_BYTES / 8,
    host_bytes_per_s=32e9,
)
"""NVIDIA A40 data sheet: BF16 tensor core 149.7 TFLOPS dense, 48 GB GDDR6, 696 GB/s, PCIe Gen4 64 GB/s (both
directions). Its NVLink joins pairs only and is left out. Network: 100 Gb/s for a node (PAT §5.1), an eighth each."""

A100 = Hardware(
    name="A100",
    flops_per_s=312e12,
    memory_bytes_per_s=2039e9,
    memory_bytes=80 * GIB,
    link_bytes_per_s=300e9,
    inter_node_bytes_per_s=200 * _GBIT_BYTES,
    host_bytes_per_s=32e9,
)
"""NVIDIA A100 data sheet, 80GB SXM: BF16 tensor core 312 TFLOPS dense, 80 GB HBM2e, 2,039 GB/s, NVLink 600 GB/s, PCIe
Gen4 64 GB/s (both directions). Network: DGX A100 data sheet, eight 200 Gb/s cards for eight devices."""

H100 = Hardware(
    name="H100",
    flops_per_s=989.4e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80 * GIB,
    link_bytes_per_s=450e9,
    inter_node_bytes_per_s=400 * _GBIT_BYTES,
    host_bytes_per_s=64e9,
    one_shot=True,
)
"""NVIDIA H100 data sheet, SXM: BF16 tensor core 1,979 TFLOPS with sparsity (989.4 dense, Hopper architecture white
paper), 80 GB HBM3, 3.35 TB/s, NVLink 900 GB/s, PCIe Gen5 128 GB/s (both directions). Network: DGX H100 data sheet,
eight 400 Gb/s cards."""

H800 = replace(H100, name="H800", link_bytes_per_s=200e9, one_shot=False)
"""NVIDIA H800 SXM: the H100 SXM's data sheet but for NVLink, 400 GB/s (both directions; server makers' H800 product
briefs: NVIDIA publishes no data sheet for it). Network: as for the H100."""

H200 = replace(H100, name="H200", memory_bytes_per_s=4.8e12, memory_bytes=141 * GIB)
"""NVIDIA H200 data sheet, SXM: BF16 tensor core 1,979 TFLOPS with sparsity (989.4 dense), 141 GB HBM3e, 4.8 TB/s,
NVLink 900 GB/s, PCIe Gen5 128 GB/s (both directions). Network: DGX H200 data sheet, eight 400 Gb/s cards."""

MI300X = Hardware(
    name="MI300X",
    flops_per_s=1307.4e12,
    memory_bytes_per_s=5.3e12,
    memory_bytes=192 * GIB,
    link_bytes_per_s=448e9,
    inter_node_bytes_per_s=400 * _GBIT_BYTES,
    host_bytes_per_s=64e9,
)
"""AMD Instinct MI300X data sheet: BF16 matrix 1,307.4 TFLOPS dense, 192 GB HBM3, 5.3 TB/s peak, PCIe
Gen5 x16 128 GB/s (both directions). AMD Instinct MI300X
Platform data sheet: 896 GB/s of xGMI links per device (seven of 128 GB/s, both directions). Network: eight 400 Gb/s
cards, as in AMD's reference server. A transfer between two devices uses one of the seven links; collectives use all."""

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in (A40, A100, H100, H800, H200, MI300X)}


def hardware(name: str) -> Hardware:
    for known, entry in HARDWARE.items():
        if known.lower() == name.lower():
            return entry
    raise ValueError(f"hardware {name!r} must be one of {', '.join(HARDWARE)} (or give a Hardware of your own)")
