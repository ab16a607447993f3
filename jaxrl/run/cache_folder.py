"""Whether the compilation cache can be written, looked at before jax is loaded."""

from __future__ import annotations

import logging

from jaxrl.config import Config
from jaxrl.record.files import refuse_folder

_log = logging.getLogger(__name__)
_OPTION = "trainer.compilation_cache_dir"


def with_cache_folder(config: Config) -> Config:
    """The configuration, without a compilation cache where its default folder cannot be written; that is warned of.
    Raises ValueError where another folder was given, and cannot be written."""
    folder = config.trainer.compilation_cache_dir
    if not folder:
        return config
    try:
        refuse_folder(folder, _OPTION)
    except ValueError as error:
        if folder != Config().trainer.compilation_cache_dir:
            raise
        _log.warning("%s: programs are compiled anew at every start; name a folder to keep them", error)
        return config.replace(trainer=config.trainer.replace(compilation_cache_dir=""))
    return config
