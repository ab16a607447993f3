"""All mistakes of a command's input in one answer: who mends one should not meet the next only at another start.

A command ends at the first mistake that it meets. What it would have read after that is then read here, by the same
readers, so that a mistake has one sentence wherever it is found.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.run.answer import answer

if TYPE_CHECKING:
    from jaxrl.config import Config

Look = Callable[..., Any]
"""Calls a reader, and keeps its sentences if it raises; returns what it has read, of a configuration what is right."""


def all_mistakes(options: Namespace, error: BaseException, config_of: Callable[..., Config]) -> list[str]:
    """The sentences of an error, and those of all that is wrong beside it.

    Args:
      options: of the command, None where a value was wrong.
      config_of: the configuration of a command that reads one.
    """
    found: list[str] = []

    def add(error: BaseException) -> None:
        said = answer(error)
        if said is None:
            raise error
        sentences = getattr(error, "problems", said[:1])
        # an option with a wrong value is not missing
        found.extend([each for each in sentences if each.partition(" is missing")[0] not in " ".join(found)])

    def look(read: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return read(*arguments, **named)
        except Exception as error:
            add(error)
            return getattr(error, "rest", None)

    add(error)
    _of_command(look, options, config_of)
    return found


def _of_command(look: Look, options: Namespace, config_of: Callable[..., Config]) -> None:
    given, command = vars(options).get, options.command
    match command:
        case "train" | "sft" | "dpo" | "simulate" | "eval" | "score" | "profile" | "explain-config":
            config = look(config_of, options, lambda note: None)
            if command == "score" and given("responses"):
                from jaxrl.data.files import data_files

                look(data_files, [options.responses], "--responses")
            if config is not None and options.is_whole:
                _of_config(look, config, options)
            return
    if given("overrides"):
        from jaxrl.config.files import load

        look(load, None, options.overrides, is_whole=False)
    if given("model"):
        look(_refuse_model, options.model, "--model" if command == "explain-layout" else "model.path")
    match command:
        case "serve" if options.source and not Path(options.source, "config.yaml").is_file():
            look(_refuse_model, options.source)
        case "export" if options.source:
            from jaxrl.commands.export import place_of

            look(place_of, options.source)
        case "report":
            from jaxrl.report.runs import read_run

            for folder in filter(None, [options.run_dir, *options.others]):
                look(read_run, folder)
        case "tune" if options.run_dir:
            from jaxrl.commands.tune import start_of

            look(start_of, options.run_dir)
        case "replay" if options.run_dir:
            from jaxrl.commands.replay import config_file

            look(config_file, options.run_dir)
    if given("api_key_file"):
        from jaxrl.commands.serve import read_key

        look(read_key, options.api_key_file)


def _of_config(look: Look, config: Config, options: Namespace) -> None:
    """What a configuration names."""
    command, data = options.command, config.data
    if command in ("train", "simulate"):
        from jaxrl.mechanisms import batch_rule

        look(batch_rule, config)
    if command == "simulate":
        from jaxrl.commands.simulate import folder_of
        from jaxrl.sim import configured

        look(folder_of, config)
        if (modelled := look(configured.with_simulated_hosts, config)) is not None:
            look(configured.workload_of, modelled)
            if config.simulate.model or config.model.path:
                look(configured.machine, modelled)
                look(configured.cost_model, modelled)
        return
    if command in ("train", "sft", "dpo"):
        from jaxrl.run.training import refuse_run_dir

        look(refuse_run_dir, config)
    if command in ("train", "eval", "score"):
        from jaxrl.rewards.domains import build_scorer

        look(build_scorer, config)
    if command in ("train", "eval") and not config.environment.is_on:
        _of_problems(look, config, trains=command == "train")
    if command in ("sft", "dpo"):
        from jaxrl.data.files import data_files

        look(data_files, data.train_files, "data.train_files")
        look(data_files, data.val_files, "data.val_files")
    if checkpoint := getattr(options, "checkpoint", None) or config.trainer.init_from:
        from jaxrl.training.steps import find_step

        look(find_step, checkpoint, option="" if command == "eval" else "trainer.init_from")
    if command not in ("score", "explain-config"):
        look(_refuse_model, config.model.path)


def _of_problems(look: Look, config: Config, *, trains: bool) -> None:
    """The files of problems, with their columns; of a task, whether there is one of that name."""
    from jaxrl.data.prompts import load_train, load_validation, refuse_sources
    from jaxrl.data.tasks import draw_task

    if config.data.task:
        look(draw_task, config.data, held_out=False, count=1)
        return
    training = look(load_train, config) if trains else []
    held_out = look(load_validation, config, training or [])
    if training and held_out is not None:
        look(refuse_sources, config, training, held_out)


def _refuse_model(path: str, option: str = "model.path") -> None:
    """Raises ValueError for a model that is not here; one of the Hub is fetched later, and a package found."""
    if path and ":" not in path and not Path(path).expanduser().exists():
        from jaxrl.data.hub import hub_name

        if hub_name(path) is None:
            from jaxrl.models.loading import checked_path, resolve_path

            checked_path(resolve_path(path, option), option)
