"""Compiles programs for an H100 or a TPU on a machine without one, and reads what XLA made of them.

JAX makes compile-only devices from a description of the hardware (`jax.experimental.topologies`) with the CUDA plugin
alone; CUDA and a driver are not needed. Fusions, copies, aliasing, loops, CUDA graphs and buffer sizes are those that a
machine with the GPU would get. Autotuning needs a device and is off, so tilings of products are guesses, and whether a
product goes to cuBLAS or to Triton may differ. For TPUs libtpu is the whole compiler, and nothing is off.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

KIND = "NVIDIA H100 80GB HBM3"
_TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{KIND}"
"""
TPUS = {"v5e": ("v5e:2x4", "TPU v5 lite"), "v5p": ("v5p:2x2x2", "TPU v5")}
"""Of each kind of TPU a machine of eight, and what JAX calls one of them."""
_BYTES = {"f64": 8, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1, "f8e4m3fn": 1}  # else 4
_NO_KERNEL = ("kSequential", "kWhile", "kConditional", "kCommandBuffer")
_ARITHMETIC = r"^\s*(?:@!?%p\d+ )?((?:add|sub|mul|div|fma|mad|max|ex2|tanh|mma|wgmma|atom|red)\.[\w.]+)"
_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<name>\S*)")


def devices(count: int = 1, chip: str = "H100") -> list[Any]:
    """Compile-only H100s, or TPUs (8 at most), linked with each other in one machine.

    Raises:
      RuntimeError: this JAX has no CUDA plugin, or no libtpu.
    """
    if chip in TPUS:
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip][0])
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise RuntimeError(f"no libtpu to compile with ({error}): pip install 'jaxrl[tpu]'") from error
        if count > len(found.devices):
            raise ValueError(f"{count} devices of {chip}: there are {len(found.devices)}")
        return list(found.devices)[:count]
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=_TARGET, topology=f"1x1x{count}")
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"no CUDA plugin to compile with ({error}): pip install 'jaxrl[compile-gpu]'") from error
    return list(found.devices)


@dataclass(slots=True)
class Thunk:
    """A step of a compiled program: a kernel, a copy, a loop with what its condition and its body run, a CUDA graph."""

    kind: str
    name: str
    inner: list[Thunk] = field(default_factory=list)

    def walk(self) -> Iterator[Thunk]:
        yield self
        for each in self.inner:
            yield from each.walk()


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA made of one program.

    Attributes:
      thunks: what the program runs, in order.
      text: the optimised HLO.
      copies: arrays of more than a megabyte that are written anew without a computation: (computation, name, bytes);
        on TPUs gathered ones too.
      memory: bytes of `arguments`, `results`, `aliased` and `temporaries`, and of `host_arguments`.
      arithmetic: of each kernel by name, its instructions (PTX) that compute with floats, counted.
    """

    thunks: list[Thunk]
    text: str
    copies: list[tuple[str, str, int]]
    memory: Mapping[str, int]
    arithmetic: Mapping[str, Mapping[str, int]]

    def all_thunks(self) -> Iterator[Thunk]:
        for thunk in self.thunks:
            yield from thunk.walk()

    @property
    def graphs(self) -> int:
        """CUDA graphs."""
        return sum(thunk.kind == "kCommandBuffer" for thunk in self.all_thunks())

    @property
    def host_loops(self) -> list[str]:
        """Loops that the host runs, reading a predicate back for each turn: those outside of CUDA graphs."""

        def outside(thunks: list[Thunk]) -> Iterator[str]:
            for thunk in thunks:
                if thunk.kind == "kWhile":
                    yield thunk.name
                if thunk.kind != "kCommandBuffer":
                    yield from outside(thunk.inner)

        return list(outside(self.thunks))

    @property
    def kernels(self) -> Counter[str]:
        """Kernels and copies by name, each counted once however often its loop turns; numbers of names dropped."""
        found = [thunk for thunk in self.all_thunks() if thunk.kind not in _NO_KERNEL]
        return Counter(re.sub(r"[._]\d+$", "", thunk.name) for thunk in found)

    @property
    def kernels_of_turn(self) -> int:
        """Of the first loop, kernels and copies of its condition and its body: those of a step, in a rollout's plan."""
        loop = next((thunk for thunk in self.all_thunks() if thunk.kind == "kWhile"), Thunk("", ""))
        return sum(thunk.kind not in _NO_KERNEL for inner in loop.inner for thunk in inner.walk())


def compile_program(lowered: Any, options: Mapping[str, Any] | None = None, chip: str = "H100") -> Compiled:
    """Compiles what `jax.jit(...).lower(...)` gave, for the devices of its shardings, which are of this kind.

    Args:
      options: XLA's, beside those that the product sets itself.
    """
    if chip in TPUS:
        executable = lowered.compile(compiler_options=dict(options or {}))
        text = executable.as_text()
        names = re.findall(r"%([\w.\-]+) = .*custom_call_target=\"tpu_custom_call\"", text)
        thunks = [Thunk("kCustomCall", name) for name in names]
        return Compiled(thunks, text, list(_copies(text, _TPU_COPY)), _memory(executable), {})
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "^ptx$"}
        dump["xla_gpu_autotune_level"] = 0
        return read(lowered.compile(compiler_options=dump | dict(options or {})), Path(folder))


def with_host_memory(lowered: Any, same: Any) -> Any:
    """A program some of whose arguments lie in the host's memory, for compile-only devices.

    Those devices know no kinds of memory. So the program is traced for a CPU and lowered for CUDA, where its module has
    everything that a GPU's has; then it takes the place of the module that was lowered for the devices.

    Args:
      lowered: `jax.jit(...).trace(...).lower(lowering_platforms=("cuda",))`, on one CPU device.
      same: the same function of the same shapes, lowered for one compile-only device.
    """
    same._lowering._hlo = lowered.compiler_ir("stablehlo")
    return same


def read(executable: Any, folder: Path) -> Compiled:
    """What is in an executable, and in XLA's dump of its compilation."""
    dumped = {path.name.split(".", 2)[2]: path for path in folder.glob("*thunk_sequence*.txt")}
    last = next((dumped[name] for name in sorted(dumped, key=len, reverse=True)), None)
    if last is None:
        raise RuntimeError("XLA wrote no sequence of thunks: its dump has another form than this reads")
    text, arithmetic = executable.as_text(), dict(_arithmetic(path.read_text()) for path in folder.glob("*.ptx"))
    return Compiled(_thunks(last.read_text()), text, list(_copies(text)), _memory(executable), arithmetic)


def _memory(executable: Any) -> dict[str, int]:
    stats = executable.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "host_arguments": stats.host_argument_size_in_bytes,
    }


def _arithmetic(ptx: str) -> tuple[str, Counter[str]]:
    """The last kernel of a module, and how often it has each instruction on floats."""
    words = re.findall(_ARITHMETIC, ptx, re.MULTILINE)
    names = re.findall(r"\.entry (\w+)", ptx)
    return names[-1] if names else "", Counter(word for word in words if re.search(r"\.b?f(16|32)\b", word))


def _thunks(text: str) -> list[Thunk]:
    """A dumped sequence of thunks as a tree: what is indented further belongs to the thunk before it."""
    roots: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk]] = []
    for line in text.splitlines():
        match = _THUNK.match(line)
        if match is None:
            continue
        indent, thunk = len(match["indent"]), Thunk(match["kind"], match["name"])
        while open_thunks and open_thunks[-1][0] >= indent:
            open_thunks.pop()
        (open_thunks[-1][1].inner if open_thunks else roots).append(thunk)
        open_thunks.append((indent, thunk))
    return roots


def host_copies(text: str) -> list[tuple[str, int]]:
    """The order in which copies from the host's memory begin and end, and products with what they bring run, in the
    computation that has most of them: ("begin" | "end" | "product", number of the copy)."""
    best: list[tuple[str, int]] = []
    for body in re.split(r"^\}", text, flags=re.MULTILINE):
        numbers: dict[str, int] = {}
        events: list[tuple[str, int]] = []
        for line in body.splitlines():
            found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line)
            if found is None:
                continue
            name, rest = found[1], found[2].split(", metadata")[0]
            used = [numbers[each] for each in re.findall(r"%([\w.\-]+)", rest) if each in numbers]
            if " copy-start(" in rest and "S(5)" in rest:
                numbers[name] = len(set(numbers.values()))
                events.append(("begin", numbers[name]))
            elif " copy-done(" in rest and used:
                numbers[name] = used[0]
                events.append(("end", used[0]))
            elif " bitcast(" in rest and used:
                numbers[name] = used[0]
            elif used and re.search(r" (fusion|custom-call|dot)\(", rest):
                events += [("product", number) for number in used]
        best = max(best, events, key=len)
    return best


_COLLECTIVE = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<result>.*?) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
)
_WORK = re.compile(r" (fusion|custom-call|while|conditional)\(")


def _group_size(line: str) -> int:
    """How many devices a collective joins: of `{{0,1},..}`, `[4,2]<=[8]` or `mesh['a'=4,'b'=2] {'b'}`, two."""
    group = re.search(
        r"replica_groups=(?:\{\{(?P<members>[\d,]+)\}|\[\d+,(?P<size>\d+)\]|mesh\[(?P<mesh>.*?)\] \{(?P<axes>.*?)\})",
        line,
    )
    assert group is not None, f"groups in another form than this reads: {line}"
    if group["size"]:
        return int(group["size"])
    if group["members"]:
        return len(group["members"].split(","))
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", group["mesh"])}
    return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", group["axes"]))


def collectives(text: str) -> list[dict[str, Any]]:
    """What devices send each other: of each kind, dtype and size the `bytes` of the whole array, how often a run of the
    program has it (`times`, in loops of a known length as often as they turn), and whether the schedule has other work
    between its start and its end (`overlaps`)."""
    turns = {each[1]: int(each[2]) for each in re.finditer(r"body=%?([\w.\-]+).*?known_trip_count\D*(\d+)", text)}
    calls = {each[2]: each[1] for each in re.finditer(r"%?([\w.\-]+) = .* async-start\(.*calls=%?([\w.\-]+)", text)}
    overlapped, place_of = set[str](), dict[str, str]()
    computation, pending = "", dict[str, bool]()
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation, pending = head[1], {}
        elif begun := re.match(r"\s+%?([\w.\-]+) = .*-start\(", line):
            pending[begun[1]], place_of[begun[1]] = False, computation
        elif ended := re.search(r"-done\(%?([\w.\-]+)\)", line):
            overlapped |= {ended[1]} if pending.pop(ended[1], False) else set()
        elif _WORK.search(line):
            pending = dict.fromkeys(pending, True)
    computation, found = "", Counter[tuple[str, str, int, bool]]()
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = head[1]
        if (match := _COLLECTIVE.match(line)) is None:
            continue
        shapes = [(dtype, _size(dtype, dims)) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match["result"])]
        sizes = [size for _, size in shapes]
        if match["start"] and match["kind"] in ("all-gather", "reduce-scatter"):  # a tuple of operands and results
            half = len(sizes) // 2
            sizes = sizes[half:] if match["kind"] == "all-gather" else sizes[:half]
        elif match["kind"] == "reduce-scatter":
            sizes = [size * _group_size(line) for size in sizes]
        start = calls.get(computation, match["name"])
        key = match["kind"], shapes[0][0], sum(sizes), start in overlapped
        found[key] += turns.get(place_of.get(start, computation), 1)
    names = ("kind", "dtype", "bytes", "overlaps")
    return [dict(zip(names, key, strict=True)) | {"times": times} for key, times in found.items()]


_COPY = r"\s+(?:ROOT )?%?([\w.\-]+) = (\S+) (?:copy|transpose)\("
# A fusion is named after what is in it. Elsewhere a gather is a part of larger fusions.
_TPU_COPY = _COPY + r"|\s+(?:ROOT )?%?((?:(?:gather|copy|slice|bitcast|transpose)_)+fusion[\d.]*) = (\S+) fusion\("


def _copies(text: str, pattern: str = _COPY) -> Iterator[tuple[str, str, int]]:
    """Copies and transposes in computations that run as they are (not inside a fusion)."""
    computation = ""
    for line in text.splitlines():
        if found := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = found[1]
        found = re.match(pattern, line)
        if found is None or "fus" in computation:
            continue
        name, shape = filter(None, found.groups())
        size = sum(_size(dtype, dims) for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape))
        if size > 1 << 20:
            yield computation, name, size


def _size(dtype: str, dims: str) -> int:
    size = _BYTES.get(dtype, 4)
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def as_default_device(chip: str = "H100") -> Any:
    """A context in which what is traced is traced for such a device: Pallas asks for its kind."""
    from jax.sharding import AbstractDevice, AbstractMesh

    kind, platform = (TPUS[chip][1], "tpu") if chip in TPUS else (KIND, "gpu")
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, platform))
    return jax.sharding.use_abstract_mesh(mesh)
