"""Turns: a response that ends a turn goes to its environment, and resumes behind the answer.

A response that stops ends a turn. Its row is free for others while the environment works, and its KV stays parked
(`jaxrl.scheduling.tokens.blocks`). When the answer comes, its tokens are appended, and the response resumes as a
request of the same conversation. The round receives a trajectory when it has ended.

Answers are a clock's. Each takes effect between two plans, while no verdict is awaited and no event waits for the
round; before that it is written to the journal, with its place: how often workers were served in the round, and how
many commands the round has given. A step that runs again takes it from there, at that place, and asks nothing. A round
that has ended is noted as well: when it runs again, an answer that came too late for it must not come in time.
"""

from __future__ import annotations

import base64
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge, Gt

from jaxrl.mechanisms.turns.rule import Observed, max_trajectory_tokens, tokens_crc32, trajectory_metrics
from jaxrl.scheduling.mechanism import WORKERS, Mechanism, RoundEnd, RoundInfo, RoundState
from jaxrl.scheduling.rounds.events import Command, Launch
from jaxrl.schema.declared import Cap, Names
from jaxrl.schema.limits import MAX_GIB, MAX_LENGTH, MAX_WAIT
from jaxrl.schema.section import JsonObject, Section
from jaxrl.types import ENVIRONMENT, Episode, Prompt, Sample, SampleKey, Turn

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.run.run import Run
    from jaxrl.scheduling.tokens.engine import Finished
    from jaxrl.scheduling.tokens.plan import Request

_MAX_WORKERS = Cap(1024, "each is a process")
_KIND, _OVER = "turn", "turns_over"  # of entries in the journal
_CALLED = re.compile(r'"name": *"(\w+)"')  # a tool, for people
_KEPT = ("done", "messages", "reward", "state", "metrics", "seconds", "status", "error")  # of an answer
_WAIT_S = 0.005  # for an answer, where nothing else is to be done


@dataclass(frozen=True, slots=True)
class _Waiting:
    finished: Finished  # the response up to its end
    text: str  # what was said in the turn
    since_s: float
    place: tuple[int, ...]  # in the journal
    is_recorded: bool  # the journal has its answer

    @property
    def sample(self) -> Sample:
        return self.finished.sample


class Turns(Mechanism):
    """The mechanism. Samples are parked while their environments work (`jaxrl.scheduling.mechanism.Parking`)."""

    class Options(Section):
        """Tools and games: an environment answers what the model says, over several turns."""

        kind: Annotated[
            Literal["none", "tools", "class", "native", "openai", "verifiers"],
            "What path holds; none: responses have one turn, tools: functions that the model may call, class: a "
            "class whose methods are tools, native: an `Env`, openai: a function that asks for turns itself, by "
            "OpenAI's API; verifiers: the environment of that library that id names, without a path.",
        ] = "none"
        path: Annotated[
            str,
            Names("file"),
            "A Python file, or one that comes with jaxrl: `calculator`, `python`, `search`, `number_guessing`, "
            "`wordle`, `frozen_lake`, `gymnasium` or `openenv`.",
        ] = ""
        id: Annotated[str, "With kind verifiers, the name of the taskset."] = ""
        python: Annotated[
            str,
            Names("file"),
            "With the kinds openai and verifiers, another Python that runs the program; empty: this one.",
        ] = ""
        name: Annotated[
            str,
            "The class in path, of the kinds class and native; a row's column `environment` names another. Of the kind "
            "openai the function; empty: run.",
        ] = ""
        args: Annotated[
            JsonObject,
            "Columns that every row has, such as a game's size; a row's own `env_args` go before them.",
        ] = {}
        describe_tools: Annotated[
            bool,
            "Have the chat template describe the tools; false: data.system_prompt does, for a template that cannot.",
        ] = True
        num_problems: Annotated[
            int, Ge(1), Cap(10_000_000, "they are kept"), "Training prompts, where the environment makes its own."
        ] = 1000
        max_turns: Annotated[int, Ge(0), "Turns of the model in a trajectory; 0: no limit."] = 0
        max_trajectory_tokens: Annotated[
            int,
            Ge(0),
            MAX_LENGTH,
            "Tokens of a trajectory behind its prompt, answers with them; 0: data.max_response_length.",
        ] = 0
        rollout_timeout_s: Annotated[
            float, Ge(0), MAX_WAIT, "Seconds after which a trajectory ends where it is between two turns; 0: no limit."
        ] = 0.0
        timeout_s: Annotated[
            float, Gt(0), MAX_WAIT, "Seconds until the calls of a turn are given up, each for itself."
        ] = 10.0
        num_workers: Annotated[int, Ge(1), _MAX_WORKERS, "Processes that answer turns, one at a time each."] = 8
        max_memory_gib: Annotated[float, Ge(0), MAX_GIB, "GiB that each of them may take; 0: no limit."] = 4.0
        env: Annotated[list[str], "Environment variables of the run that they get."] = []
        group: Annotated[
            str,
            "With the kinds tools, class and native, the class in path that compares the trajectories of a prompt, "
            "each of which is given more or less for it; empty: none does.",
        ] = ""
        reward: Annotated[
            Literal["sum", "last"],
            "What reward.kind=environment makes of the rewards of turns; last: that of the last turn alone.",
        ] = "sum"

        @property
        def is_on(self) -> bool:
            return self.kind != "none"

        def problems(self, config: Any) -> Iterator[str]:
            if not self.is_on:
                if config.algorithm.adv_estimator == "grpo_turns":
                    yield (
                        "algorithm.adv_estimator=grpo_turns needs environment.kind, which is none: there are no turns"
                    )
                return
            if self.kind == "verifiers":
                if not self.id or not self.python:
                    yield (
                        "environment.kind=verifiers needs environment.id, the environment's name, and "
                        "environment.python, the Python of a separate environment with verifiers in it"
                    )
                data = config.data
                if data.system_prompt or data.prompt_template != "{question}":
                    yield (
                        "data.system_prompt and data.prompt_template exclude environment.kind=verifiers: its "
                        "environments begin with prompts of their own"
                    )
            elif self.python and self.kind != "openai":
                yield (
                    f"environment.python ({self.python}) needs environment.kind openai or verifiers, found {self.kind}"
                )
            elif not self.path:
                yield f"environment.path is missing: environment.kind is {self.kind}, which needs a Python file"
            if self.group:
                if self.kind in ("openai", "verifiers"):
                    yield (
                        f"environment.group ({self.group}) needs environment.kind tools, class or native, found "
                        f"{self.kind}"
                    )
                for option, is_on in (
                    ("algorithm.filter_groups.enable", config.algorithm.filter_groups.enable),
                    ("trainer.stream.enable", config.trainer.stream.enable),
                ):
                    if is_on:
                        yield (
                            f"environment.group excludes {option}, which needs a sample's whole reward before its "
                            "round has ended: only then are trajectories compared"
                        )
            if not config.data.apply_chat_template:
                yield "environment.kind needs data.apply_chat_template: turns are written in the model's chat template"
            if "tools" in config.data.apply_chat_template_kwargs:
                yield (
                    "data.apply_chat_template_kwargs.tools excludes environment.kind, which gives the template its "
                    "tools"
                )
            longest = config.data.max_response_length
            if self.max_trajectory_tokens > longest:
                yield (
                    f"environment.max_trajectory_tokens ({self.max_trajectory_tokens} tokens) must be at most "
                    f"data.max_response_length ({longest} tokens), for which rows and batches have room"
                )
            if config.algorithm.adv_estimator == "grpo_turns" and self.reward == "last":
                yield (
                    "algorithm.adv_estimator=grpo_turns excludes environment.reward=last: it gives each turn its own "
                    "reward"
                )
            if config.rollout.stop:
                yield "rollout.stop excludes environment.kind: a turn ends where the chat template says so"

        def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
            if not self.is_on:
                names = frozenset(type(self).model_fields) - {"kind"}
                yield names, "environment.kind is none"
                return
            if self.kind == "tools":
                yield frozenset({"name"}), "environment.kind is tools"
            if self.kind == "verifiers":
                yield frozenset({"path", "name"}), "environment.kind is verifiers"
            else:
                yield frozenset({"id"}), f"environment.kind is {self.kind}"
            if "environment" not in config.reward.kinds:
                yield frozenset({"reward"}), "no reward's kind is environment"
            if config.data.task or config.data.train_files:
                yield frozenset({"num_problems"}), "data.task or data.train_files has the problems"

    title = "turns"
    option = "environment.kind"
    changes = frozenset({WORKERS})  # a turn goes to the worker that has the conversation's KV
    evaluates = True
    has_begun = False  # nothing of a next round

    @classmethod
    def is_on(cls, config: Config) -> bool:
        return config.environment.is_on

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        if config.rollout.ranking_groups.enable:
            return (
                "rollout.ranking_groups.enable excludes environment.kind: workers are shared out by the tokens that "
                "prompts' responses had, and time that goes to tools is none of them"
            )
        return None

    @classmethod
    def build(cls, run: Run) -> Self | None:
        if not cls.is_on(run.config):
            return None
        return cls(run)

    def __init__(self, run: Run) -> None:
        conversation = run.conversation
        assert conversation is not None, "environment.kind is on, and nothing answers turns"
        self._conversation, self._acting = conversation, conversation.acting
        self._options, self._longest = run.config.environment, max_trajectory_tokens(run.config)
        self._journal, self._tracer, self._on_waiting = run.journal, run.timeline, run.on_waiting
        self.parking = self
        if run.config.environment.group:
            from jaxrl.mechanisms.turns.group_rewards import GroupRewards

            self.group_rewards = GroupRewards(conversation.compared, run.journal)
        self._round: RoundState
        self._info = RoundInfo(-1)
        self._prompts: dict[SampleKey, Prompt] = {}  # of trajectories under way
        self._begun_s: dict[SampleKey, float] = {}
        self._unanswered: dict[SampleKey, _Waiting] = {}
        self._came: deque[Observed] = deque()  # answers that have not taken effect
        self._recorded: deque[Mapping[str, Any]] = deque()  # the same of the journal, in their order
        self._later: dict[tuple[int, ...], int] = {}  # places that the journal has in later steps, with checksums
        self._resumed: dict[SampleKey, Sample] = {}  # that were cut off while they waited for an answer
        self._kept: dict[SampleKey, tuple[int, Observed | None]] = {}  # the answers to these, or None: not yet there
        self._num_served = 0  # how often workers had their turn in the round
        self._is_over = False  # the journal has all answers of the round
        self._idle_s = 0.0

    def attach(self, state: RoundState) -> None:
        self._round = state

    @property
    def _place(self) -> tuple[int, int]:
        """In the round, by logical time."""
        return self._num_served, self._round.num_commands

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        self._info, self._num_served, self._idle_s = info, 0, 0.0
        entries = () if self._journal is None else self._journal.since(info.step, _KIND)
        own = [entry for entry in entries if entry["key"][0] == info.index]
        self._recorded = deque(entry for entry in own if entry["step"] == info.step)
        self._later = {(*entry["key"],): entry["crc32"] for entry in own if entry["step"] > info.step}
        self._is_over = self._journal is not None and self._journal.find(info.step, _OVER, (info.index,)) is not None

    def on_commands(self, commands: Sequence[Command]) -> Sequence[Command]:
        for command in commands:
            if isinstance(command, Launch) and self._conversation.has_turns(command.prompt):
                self._launched(command)
        return commands

    def _launched(self, launch: Launch) -> None:
        resumed = {sample.key for sample in launch.resumed}
        for key in launch.keys:
            self._prompts[key], self._begun_s[key] = launch.prompt, self._round.clock()
            if self._info.is_training and key not in resumed:  # it may have begun before
                before = (key, replace(key, attempt=key.attempt - 1))
                self._acting.cancel([each for each in before if self._kept.pop(each, None) is not None])
        for sample in launch.resumed:
            if sample.episode is not None and sample.episode.awaits:
                self._resumed[sample.key] = sample

    def adopt(self, key: SampleKey) -> Finished | None:
        sample = self._resumed.pop(key, None)
        if sample is None:
            return None
        from jaxrl.scheduling.tokens.engine import Finished

        episode = replace(sample.episode or Episode(), awaits=False)
        return Finished(-1, replace(sample, finish_reason="stop", episode=episode), self._last_plan, 0, 0)

    def on_request(self, request: Request, prompt: Prompt) -> Request:
        if request.key not in self._prompts:
            return request
        params = replace(request.params, max_tokens=self._longest)
        return replace(request, session=request.key, params=params)

    def round_ends(self, end: RoundEnd) -> Mapping[str, float]:
        found = trajectory_metrics(sample for group in end.scored for sample in group.samples)
        if self._journal is not None and not self._is_over:
            self._journal.append(self._info.step, _OVER, (self._info.index,), {})
        return {**found, "environment/idle_s": self._idle_s} if found else {}

    def round_cancelled(self) -> None:
        self._acting.cancel([*map(self._named, self._prompts)])
        for key in [*self._prompts]:
            self._forget(key)
        for kept in (self._unanswered, self._came, self._recorded, self._resumed):
            kept.clear()

    # -- turns -------------------------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        return bool(self._unanswered) and not self._round.awaited

    def park(self, finished: Finished) -> bool:
        sample, key = finished.sample, finished.sample.key
        if key not in self._prompts:
            return False
        episode = sample.episode or Episode()
        start = episode.turns[-1].end if episode.turns else 0
        text = self._conversation.text_of(sample.token_ids[start:][sample.drawn[start:]].tolist())
        if sample.finish_reason != "stop":
            episode = replace(episode, turns=(*episode.turns, Turn(len(sample), text)))
            self._end(finished, episode, "max_trajectory_tokens")
            return True
        place = (self._info.index, *astuple(key), len(episode.turns))
        crc32 = tokens_crc32(sample)
        is_recorded = any((*entry["key"],) == place and entry["crc32"] == crc32 for entry in self._recorded)
        self._unanswered[key] = _Waiting(finished, text, self._round.clock(), place, is_recorded)
        self._round.requests.pop(key, None)
        if not is_recorded and self._later.get(place) != crc32:
            self._ask(self._unanswered[key], episode.state)
        self._draw()
        return True

    def before_plan(self, worker: int | None) -> None:
        if worker is None:
            self._look(is_idle=False)

    def after_plan(self, worker: int | None) -> None:
        self._num_served += 1

    def while_waiting(self) -> None:
        if self._unanswered:
            since_s = self._round.clock()
            self._look(is_idle=True)
            self._idle_s += self._round.clock() - since_s

    def release(self, key: SampleKey, *, keep: bool) -> Sample | None:
        waiting = self._unanswered.pop(key, None)
        if waiting is None:
            return None
        if keep and self._acting.keeps:  # what takes longer than a round would never end otherwise
            self._kept[key] = tokens_crc32(waiting.sample), None
        return replace(waiting.sample, episode=replace(waiting.sample.episode or Episode(), awaits=True))

    def on_aborted(self, key: SampleKey, *, keep: bool) -> None:
        if not (keep and self._acting.keeps):
            self._acting.cancel([self._named(key)])
        self._forget(key)

    def _ask(self, waiting: _Waiting, state: bytes | None) -> None:
        """Requests the answer to a turn, unless an earlier round has done so."""
        key = waiting.sample.key
        crc32, answer = self._kept.pop(key, (None, None)) if self._info.is_training else (None, None)
        if crc32 != tokens_crc32(waiting.sample):
            self._acting.submit(self._named(key), self._prompts[key], waiting.text, state)
        elif answer is not None:
            self._came.append(answer)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _look(self, *, is_idle: bool) -> None:
        """Applies answers, up to the first one that the round must receive."""
        while not self._round.awaited and (answer := self._next(is_idle=is_idle)) is not None:
            if self._answered(self._unanswered.pop(answer.key), answer):
                return
            is_idle = False

    def _next(self, *, is_idle: bool) -> Observed | None:
        """The next answer that may take effect. While the journal has some, it is one of those: what runs again has to
        come to where it was before anything new may happen."""
        while self._recorded:
            entry = self._recorded[0]
            key = SampleKey(*entry["key"][1:-1])
            waiting = self._unanswered.get(key)
            is_due = waiting is not None and waiting.is_recorded and waiting.place == (*entry["key"],)
            if not is_idle and not (is_due and self._place >= (entry["served"], entry["commands"])):
                return None
            self._recorded.popleft()  # where nothing else can happen, what is not due never will be
            if is_due:
                return _replayed(entry, key)
        if self._is_over and not is_idle:
            return None
        if not self._came and self._unanswered:
            self._came += [*self._acting.completed(_WAIT_S if is_idle else 0.0), *self._overdue()]
        while self._came:
            answer = self._came.popleft()
            key = self._named(answer.key)
            if answer.key in self._kept:
                self._kept[answer.key] = self._kept[answer.key][0], answer
            elif (waiting := self._unanswered.get(key)) is not None and self._named(key) == answer.key:
                self._note(waiting, answer)
                return replace(answer, key=key)
        return None

    def _named(self, key: SampleKey) -> SampleKey:
        """How environments know a sample, and the other way round: an evaluation may have prompts of the same key as
        what is carried from one training round to the next."""
        return key if self._info.is_training else replace(key, epoch=-1 - key.epoch)

    def _overdue(self) -> list[Observed]:
        limit_s, now_s = self._options.rollout_timeout_s, self._round.clock()
        late = [self._named(key) for key in self._unanswered if limit_s and now_s - self._begun_s[key] > limit_s]
        self._acting.cancel(late)
        return [Observed(key, done=True, status="rollout_timeout") for key in late]

    def _note(self, waiting: _Waiting, answer: Observed) -> None:
        if self._journal is not None:
            served, commands = self._place
            place = {"served": served, "commands": commands, "crc32": tokens_crc32(waiting.sample)}
            self._journal.append(self._info.step, _KIND, waiting.place, place | _entry(answer))

    def _answered(self, waiting: _Waiting, answer: Observed) -> bool:
        """Applies an answer; returns whether the round must receive it first."""
        key, sample = answer.key, waiting.sample
        episode = sample.episode or Episode()
        stop = answer.status if answer.status != "ok" else "done" if answer.done else ""
        error, token_ids = answer.error, ()
        turn = Turn(len(sample), waiting.text, answer.messages, answer.reward, answer.seconds, answer.metrics)
        episode = Episode((*episode.turns, turn), answer.state)
        if not stop:
            try:
                token_ids = self._conversation.tokens_of(answer.messages, sample.token_ids.tolist())
            except ValueError as refused:
                stop, error = "error", str(refused)
        if not stop and 0 < self._options.max_turns <= len(episode.turns):
            stop = "max_turns"
        if not stop and len(sample) + len(token_ids) >= self._longest:  # one token has to have room behind the answer
            stop = "max_trajectory_tokens"
        self._draw()
        if stop:
            turns = (*episode.turns[:-1], replace(turn, messages=()))
            self._end(waiting.finished, replace(episode, turns=turns, error=error), stop)
            return True
        longer = replace(_appended(sample, token_ids), episode=episode)
        self._round.requests[key] = self._round.start(self._prompts[key], key, self._home(key), longer)
        return False

    def _end(self, finished: Finished, episode: Episode, stop: str) -> None:
        self._acting.cancel([self._named(finished.sample.key)])
        self._forget(finished.sample.key)
        reason = "length" if stop == "max_trajectory_tokens" else "stop"
        episode = replace(episode, state=None, stop=stop)
        sample = replace(finished.sample, finish_reason=reason, episode=episode)
        self._round.deliver([replace(finished, sample=sample, dispatch=max(finished.dispatch, self._last_plan))])

    def _forget(self, key: SampleKey) -> None:
        for kept in (self._prompts, self._begun_s):
            kept.pop(key, None)
        for engine in self._round.workers.engines:
            engine.batcher.blocks.forget(key)

    def _home(self, key: SampleKey) -> int | None:
        """The worker with the trajectory's KV; None: none has it, or one that takes no more."""
        workers = self._round.workers
        engines = enumerate(workers.engines)
        there = [i for i, engine in engines if engine.batcher.blocks.parked_in(key) is not None and workers.is_open(i)]
        return there[0] if there and len(workers.engines) > 1 else None

    @property
    def _last_plan(self) -> int:
        return self._round.workers.counters.plans - 1

    def _draw(self) -> None:
        if self._tracer is not None:
            self._tracer.counter("turns", waiting=len(self._unanswered))
        first = next(iter(self._unanswered.values()), None)  # the order is that in which turns have ended
        if first is None:
            self._on_waiting(0, "", 0.0)
        else:
            key = first.sample.key
            who = f"prompt {key.prompt_index}, sample {key.sample_index}"
            called = _CALLED.search(first.text)
            self._on_waiting(len(self._unanswered), f"{who} ({called[1]})" if called else who, first.since_s)


def _entry(answer: Observed) -> dict[str, Any]:
    state = None if answer.state is None else base64.b64encode(answer.state).decode()
    plain = {"messages": [dict(message) for message in answer.messages], "metrics": dict(answer.metrics)}
    return {name: getattr(answer, name) for name in _KEPT} | plain | {"state": state}


def _replayed(entry: Mapping[str, Any], key: SampleKey) -> Observed:
    kept = {name: entry[name] for name in _KEPT}
    state = None if kept["state"] is None else base64.b64decode(kept["state"])
    return Observed(key, **kept | {"messages": tuple(kept["messages"]), "state": state})


def _appended(sample: Sample, token_ids: Sequence[int]) -> Sample:
    import numpy as np

    nothing = np.zeros(len(token_ids), np.float32)
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.asarray(token_ids, np.int32)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, nothing]),
        sampled_logprobs=np.concatenate([sample.sampled_logprobs, nothing]),
        versions=np.concatenate([sample.versions, np.full(len(token_ids), ENVIRONMENT, np.int32)]),
        finish_reason=None,
    )
