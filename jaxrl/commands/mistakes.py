"""All mistakes of a command's input in one answer: who mends one should not meet the next only at another start.

A command ends at the first mistake that it meets. What it would have read after that is then read here, by the same
readers, so that a mistake has one sentence wherever it is found.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.commands.options import options_text
from jaxrl.commands.port import port
from jaxrl.commands.simulate import folder_of
from jaxrl.commands.tune import start_of
from jaxrl.config import Config
from jaxrl.config.files import load
from jaxrl.data.files import data_files
from jaxrl.data.hub import hub_name
from jaxrl.data.prompts import load_train, load_validation, refuse_sources
from jaxrl.data.tasks import draw_task
from jaxrl.mechanisms import batch_rule
from jaxrl.report.runs import read_run
from jaxrl.rewards.domains import build_scorer
from jaxrl.run.answer import answer
from jaxrl.run.training import refuse_run_dir
from jaxrl.sim import configured
from jaxrl.training.steps import find_step

Look = Callable[..., Any]
"""Calls a reader with arguments, unless the first of them is None or empty, and keeps its sentences if it raises.
Returns the reader's result; of a wrong configuration, the valid part."""


def all_mistakes(options: Namespace, error: BaseException, config_of: Callable[..., Config]) -> list[str]:
    """The sentences of an error, and those of all that is wrong beside it. `options`: of the command, None where a
    value was wrong; `config_of`: the configuration of a command that reads one."""
    found: list[str] = []

    def add(error: BaseException) -> None:
        said = answer(error)
        if said is None:
            raise error
        sentences = getattr(error, "problems", said[:1])
        # an option with a wrong value is not missing
        found.extend([each for each in sentences if each.partition(" is missing")[0] not in " ".join(found)])

    def look(reader: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if arguments[0] in (None, "", []):
            return None
        try:
            return reader(*arguments, **named)
        except Exception as error:
            add(error)
            return getattr(error, "rest", None)

    add(error)
    if "config" in options:
        config = look(config_of, options, lambda note: None)
        if options.command == "score":
            look(data_files, [options.responses], "--responses")
        if config is not None and options.is_whole:
            _of_config(look, config, options)
    else:
        _of_arguments(look, options)
    return found


def _of_arguments(look: Look, options: Namespace) -> None:
    """What a command names that reads no file of options."""
    given = vars(options).get
    look(lambda overrides: load(None, overrides, is_whole=False), given("overrides"))
    look(_refuse_model, given("model"), "--model" if options.command == "explain-layout" else "model.path")
    match options.command:  # what needs jax is imported by who needs it: that takes a second
        case "serve":
            from jaxrl.commands.serve import read_key

            if options.source and not Path(options.source, "config.yaml").is_file():
                look(_refuse_model, options.source)
            look(read_key, options.api_key_file)
        case "export":
            from jaxrl.commands.export import place_of

            look(place_of, options.source)
        case "replay":
            from jaxrl.commands.replay import config_file

            look(config_file, options.run_dir)
        case "report":
            for folder in [options.run_dir, *options.others]:
                look(read_run, folder)
        case "tune":
            look(start_of, options.run_dir)
        case "options":
            look(options_text, options.section)
        case "port":
            look(port, options.library, options.source, options.devices or 1)


def _of_config(look: Look, config: Config, options: Namespace) -> None:
    """What a configuration names."""
    command, data = options.command, config.data
    trains = command in ("train", "sft", "dpo")
    if command in ("train", "simulate"):
        look(batch_rule, config)
    if command == "simulate":
        look(folder_of, config)
        modelled = look(configured.with_simulated_hosts, config)
        look(configured.workload_of, modelled)
        if config.simulate.model or config.model.path:
            look(configured.machine, modelled)
            look(configured.cost_model, modelled)
        return
    if trains:
        look(refuse_run_dir, config)
    if command in ("train", "eval", "score"):
        look(build_scorer, config)
    if command in ("train", "eval") and data.task:
        look(draw_task, data, held_out=False, count=1)
    elif command in ("train", "eval") and not config.environment.is_on:
        problems = look(load_train, config) if command == "train" else None
        held_out = look(load_validation, config, problems or [])
        if problems and held_out is not None:
            look(refuse_sources, config, problems, held_out)
    elif trains:
        look(data_files, data.train_files, "data.train_files")
        look(data_files, data.val_files, "data.val_files")
    if command == "eval":
        look(find_step, options.checkpoint)
    elif trains:
        look(find_step, config.trainer.init_from, option="trainer.init_from")
    if command not in ("score", "explain-config"):
        look(_refuse_model, config.model.path)


def _refuse_model(path: str, option: str = "model.path") -> None:
    """Raises ValueError for a model that is not here; one of the Hub is fetched later, and a package found."""
    if ":" not in path and not Path(path).expanduser().exists() and hub_name(path) is None:
        from jaxrl.models.loading import checked_path

        checked_path(path, option)
