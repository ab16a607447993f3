"""jaxrl: reinforcement-learning post-training of language models in JAX, without the wait for the longest response."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.api import ConfigError as ConfigError
    from jaxrl.api import Run as Run
    from jaxrl.api import dpo as dpo
    from jaxrl.api import sft as sft
    from jaxrl.api import train as train

__all__ = ["ConfigError", "Run", "dpo", "sft", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:  # they load the configuration: other imports of the package do without
        return getattr(import_module("jaxrl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
