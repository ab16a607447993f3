"""Turns from their options."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.config import Config, ConfigError
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import call_id
from jaxrl.data.turns import Between
from jaxrl.mechanisms.turns.group_session import GroupSession
from jaxrl.mechanisms.turns.pool import EnvironmentPool, has_turns
from jaxrl.mechanisms.turns.rule import Limits
from jaxrl.mechanisms.turns.session import TurnSession
from jaxrl.record.journal import Journal
from jaxrl.scheduling.mechanism import Drawing, Mechanism


def build(
    config: Config,
    pool: EnvironmentPool,
    tokenizer: Tokenizer,
    journal: Journal | None = None,
    drawing: Drawing | None = None,
    tell: Callable[[int, str, float], None] = lambda *_: None,
    notes: list[str] | None = None,
) -> list[Mechanism]:
    """The mechanisms of a real run; an evaluation has no journal, and tells nobody. Arguments as in `TurnSession`.

    Args:
      pool: of the run's environments.
      notes: gets what a start says of a chat template that does not only append.

    Raises:
      ConfigError: the model's chat template cannot write a second turn.
    """
    between = _between(config, tokenizer)
    if notes is not None and (rewritten := between.rewritten()):
        notes.append(f"environment.kind: {rewritten}; here it stays in the conversation as it was drawn")
    turns = TurnSession(
        pool.acting(),
        lambda prompt: has_turns(prompt.extra),
        Limits.configured(config),
        tokenizer.decode,
        between.answer,
        journal,
        drawing,
        tell,
        pool.times,
    )
    return [turns, GroupSession(pool.compared, journal)] if config.environment.group else [turns]


def _between(config: Config, tokenizer: Tokenizer) -> Between:
    try:
        between = Between(tokenizer, config.data.apply_chat_template_kwargs)
        role = "tool" if config.environment.kind != "native" else "user"
        between.answer([{"role": role, "content": "an answer", "tool_call_id": call_id(0)}])
    except ValueError as error:
        raise ConfigError(f"environment.kind: {error}") from None
    return between
