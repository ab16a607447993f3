"""The worker processes of environments, from the trainer's side: turns in, answers out.

Nothing of the user's runs in the trainer: what comes back is JSON, whose values are checked here. No turn is dispatched
twice, because its effects outside may not be undone: a process that dies with a turn has failed it.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import queue
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.functions import UserFile, read_user_file
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.data.tool_calls import call_id
from jaxrl.data.turns import Between
from jaxrl.environments import worker
from jaxrl.environments.env import Action, Schema, Trajectory, is_answer
from jaxrl.environments.kinds import tool_message
from jaxrl.mechanisms.turns import Turns
from jaxrl.mechanisms.turns.agents import AgentPool
from jaxrl.mechanisms.turns.rule import Acting, Conversation, Observed, row_of
from jaxrl.rewards.pool import Pool
from jaxrl.rewards.pool_worker import PoolSettings
from jaxrl.rewards.reward_pool import named_variables
from jaxrl.rewards.scorers import Scored
from jaxrl.schema.declared import MAX_FLOAT, shown
from jaxrl.types import Prompt, SampleKey

SHIPPED = Path(worker.__file__).parent / "shipped"
"""Files that `environment.path` names without a path."""
VERIFIERS = Path(worker.__file__).with_name("verifiers_program.py")
_SLACK_S = 3.0  # beyond environment.timeout_s: the process itself reports a call that does not end
_ROWS = 50  # of the environment's own, asked for at once: an answer has a mebibyte at the most
_TIMEOUT = "environment.timeout_s"
_PLURAL = {"timeout": "timeouts", "crash": "crashes"}


class EnvironmentPool:
    """Implements `jaxrl.mechanisms.turns.rule.Acting`. Its processes begin to start when it is made. `log`: the file
    for what environments print; None: it is dropped. Raises ValueError: the file cannot be read, or `environment.env`
    names a variable that is not set."""

    keeps = True

    def __init__(self, config: Config, log: Path | None = None) -> None:
        options = config.environment
        assert options.kind != "none"
        self._kind, self._timeout_s, self._describes = options.kind, options.timeout_s, options.describe_tools
        self._template_kwargs = config.data.apply_chat_template_kwargs
        self._is_program = options.kind in ("openai", "verifiers")
        args: dict[str, Any] = options.args
        if options.kind == "verifiers":
            args = {"id": options.id, "args": args}
        file, python = _file(options), str(Path(options.python).expanduser()) if options.python else ""
        scorer = worker.EpisodeScorer(options.kind, file, options.name, args, python, options.group)
        of_turn, of_all = options.timeout_s + _SLACK_S, options.rollout_timeout_s
        limit = (of_all, "environment.rollout_timeout_s") if self._is_program else (of_turn, _TIMEOUT)
        settings = PoolSettings(
            scorer=pickle.dumps(scorer),
            loads=scorer.loads,
            num_workers=options.num_workers,
            start_timeout_s=config.reward.start_timeout_s,
            max_retries=0,
            limits={"": limit},
            max_memory_gib=options.max_memory_gib,
            env=named_variables("environment.env", options.env),
            log=str(log.resolve()) if log is not None else "",
            section="environment",
        )
        self._pool = Pool(settings)
        # the row, its environment's state, what the model said, and when it was asked
        self._pending: dict[Future[Scored], tuple[SampleKey, dict[str, Any], bytes | None, str, float]] = {}
        self._ended: queue.SimpleQueue[Future[Scored]] = queue.SimpleQueue()
        self._schemas: dict[str, Sequence[Schema]] = {}
        self._agents: AgentPool | None = None

    def conversation(self, tokenizer: Tokenizer, notes: list[str] | None = None) -> Conversation:
        """`notes` gets the start's message about a chat template that does not only append. Raises ConfigError where
        the model's chat template cannot write a second turn."""
        between = Between(tokenizer, self._template_kwargs)
        try:
            role = "tool" if self._kind != "native" else "user"
            between.answer([{"role": role, "content": "an answer", "tool_call_id": call_id(0)}])
        except ValueError as error:
            raise ConfigError(f"environment.kind: {error}") from None
        if notes is not None and (rewritten := between.rewritten()):
            notes.append(f"environment.kind: {rewritten}; here it stays in the conversation as it was drawn")
        acting: Acting = self
        if self._is_program:  # which asks for turns
            self.schemas({}, _TIMEOUT)
            acting = self._agents = AgentPool(self._pool, self._timeout_s, self._schemas[""])
        return Conversation(
            acting, lambda prompt: has_turns(prompt.extra), tokenizer.decode, between.answer, self.compared
        )

    # -- at the start ------------------------------------------------------------------------------------------------

    def schemas(self, row: Mapping[str, Any], where: str) -> list[Schema]:
        """The tools that the chat template describes in a row. Raises ValueError where the environment cannot be made,
        or the row asks for what is not there."""
        if not has_turns(row):
            return []
        _check_columns(row, where)
        name = row.get("environment") or ""
        try:
            if name not in self._schemas:
                self._schemas[name] = self._ask("schemas", name)["schemas"]
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if name else str(error)) from None  # the file's own is no row's
        try:
            found = worker.schemas_for(row, self._schemas[name])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return found if self._describes else []

    def problems(self, first: int, last: int, seed: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Rows of the environment's own by their numbers, each with the messages that begin its episode. Raises
        ValueError where it makes none."""
        for start in range(first, last, _ROWS):
            found = self._ask("problems", start, min(start + _ROWS, last), seed)
            yield from ((each["row"], each["messages"]) for each in found["problems"])

    def _ask(self, *request: Any) -> dict[str, Any]:
        self._pool.wait_ready()
        status, _, info, _ = self._pool.submit(pickle.dumps(request)).result()
        if status != "ok":
            named = "" if self._kind == "verifiers" else "environment.path: "  # its errors name the place
            raise ValueError(f"{named}{info.get('error', status)}")
        return info

    # -- turns -------------------------------------------------------------------------------------------------------

    def submit(self, key: SampleKey, prompt: Prompt, text: str, state: bytes | None) -> None:
        row = row_of(prompt)
        future = self._pool.submit(pickle.dumps(("turn", row, state, text, self._timeout_s)))
        self._pending[future] = key, row, state, text, time.monotonic()
        future.add_done_callback(self._ended.put)

    def cancel(self, keys: Collection[SampleKey]) -> None:
        for future in [future for future, (key, *_) in self._pending.items() if key in keys]:
            del self._pending[future]
            future.cancel()

    def completed(self, timeout_s: float = 0.0) -> list[Observed]:
        found: list[Observed] = []
        with contextlib.suppress(queue.Empty):
            while True:
                future = self._ended.get(timeout=0.0 if found else timeout_s)
                if (pending := self._pending.pop(future, None)) is not None:
                    key, row, before, text, since_s = pending
                    observed = self._observed(key, row, before, text, future.result())
                    found.append(replace(observed, seconds=time.monotonic() - since_s))
        return found

    def compared(self, asked: Sequence[tuple[Prompt, Sequence[Trajectory]]]) -> list[list[float] | str]:
        """As `Conversation.compared`; waits for it."""
        requests = [("compare", row_of(prompt), tuple(trajectories)) for prompt, trajectories in asked]
        futures = [self._pool.submit(pickle.dumps(request)) for request in requests]
        return [
            read_rewards(future.result(), len(trajectories), self._timeout_s)
            for (_, trajectories), future in zip(asked, futures, strict=True)
        ]

    def close(self) -> None:
        self._pending.clear()
        if self._agents is not None:
            self._agents.close()
        self._pool.close()

    def _observed(
        self, key: SampleKey, row: dict[str, Any], before: bytes | None, text: str, scored: Scored
    ) -> Observed:
        status, reward, info, _ = scored
        if status == "ok":
            try:
                return read_answer(key, reward, info)
            except ValueError as error:
                status, info = "error", {"error": str(error)}
        if status == "timeout":
            info = {"error": f"no answer within {_TIMEOUT} ({self._timeout_s:g} s)"}
        error = str(info.get("error", status))
        action = Action.of(text, self._schemas.get(row.get("environment") or "", ()))
        if status == "error" or self._kind == "native" or not (action.calls or action.is_unread):
            return Observed(key, True, status=status, error=error)
        messages = tuple(tool_message(f"Error: {error}", *each) for each in enumerate(action.calls or [None]))
        number = len(messages)
        counts = {"tool_calls": number, "tool_errors": number, f"tool_{_PLURAL[status]}": number}
        # nothing has changed but what it did outside
        return Observed(key, False, messages, state=before, metrics=counts)


def _check_columns(row: Mapping[str, Any], where: str) -> None:
    name, tools, args = (row.get(column) for column in ("environment", "tools", "env_args"))
    if not isinstance(name, str | None):
        raise ValueError(f"{where}: the column 'environment' must name a class, found {shown(name)}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)):
        raise ValueError(f"{where}: the column 'tools' must be a list of names, found {shown(tools)}")
    if not isinstance(args, Mapping | None):
        raise ValueError(f"{where}: the column 'env_args' must hold columns by name, found {shown(args)}")


def has_turns(row: Mapping[str, Any]) -> bool:
    """Whether a row of the data has an environment: all have, but those with nothing in a column `environment`."""
    return bool(row.get("environment", True))


def read_answer(key: SampleKey, reward: float, info: Mapping[str, Any]) -> Observed:
    """A process's answer to a turn, every value checked: it runs foreign code. Raises ValueError for what is no
    answer."""
    done, messages, state, metrics = (info.get(name) for name in ("done", "messages", "state", "metrics"))
    if not isinstance(done, bool) or not isinstance(messages, list) or not all(map(is_answer, messages)):
        raise ValueError(f"what its process has sent is no answer: {info!r:.200}")
    if not isinstance(metrics, dict) or not all(map(_is_finite, metrics.values())):
        raise ValueError(f"metrics must be finite numbers, found {metrics!r:.200}")
    if not isinstance(state, str) or not (done or messages):
        raise ValueError(f"what its process has sent is no answer: {info!r:.200}")
    numbers = {name: float(value) for name, value in metrics.items()}
    return Observed(key, done, tuple(messages), reward, base64.b64decode(state), numbers)


def read_rewards(scored: Scored, count: int, timeout_s: float) -> list[float] | str:
    """The rewards of `count` trajectories that a process sent, every value checked; or what went wrong."""
    status, _, info, _ = scored
    if status == "timeout":
        return f"no answer within {_TIMEOUT} ({timeout_s:g} s)"
    if status != "ok":
        return str(info.get("error", status))
    rewards = info.get("rewards")
    if isinstance(rewards, list) and len(rewards) == count and all(map(_is_finite, rewards)):
        return [float(each) for each in rewards]
    return f"compute_group_rewards must return {count} finite numbers, one for each trajectory, found {rewards!r:.200}"


def _is_finite(value: Any) -> bool:
    """JSON also has whole numbers that no float can hold."""
    return isinstance(value, int | float) and abs(value) <= MAX_FLOAT


def _file(options: Turns.Options) -> UserFile:
    """The file that `environment.path` names: one that comes with jaxrl, or the user's."""
    path = options.path
    shipped = VERIFIERS if options.kind == "verifiers" else SHIPPED / f"{path}.py"
    return read_user_file("environment.path", str(shipped) if "/" not in path and shipped.is_file() else path)
