"""Turns of a run: what has ended with a turn is handed to its environment, and goes on behind the answer.

Purpose: a response that stops ends a turn. Its row is free for others while the environment thinks, and its KV stays
parked (`jaxrl.scheduling.tokens.blocks`). When the answer comes, its tokens are appended, and the response goes on as a
request of the same conversation. The round hears of a trajectory when it is over.

Answers are a clock's. Each takes effect between two plans, while no verdict is awaited and no event waits for the
round; before that it is written to the journal, with its place: how often workers were served in the round, and how
many commands the round has given. A step that runs again takes it from there, at that place, and asks nothing. A round
that has ended is noted as well: when it runs again, an answer that came too late for it must not come in time.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from jaxrl.mechanisms.turns.rule import Acting, CallTimes, Limits, Observed, trajectory_metrics
from jaxrl.record.journal import Journal
from jaxrl.scheduling.mechanism import Drawing, Mechanism, RoundEnd, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Abort, AwaitVerdict, CancelScore, Command, Event, Launch, Verdict
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import ENVIRONMENT, Episode, Prompt, Sample, SampleKey, Turn

_KIND, _OVER = "turn", "turns_over"  # of entries in the journal
_CALLED = re.compile(r'"name": *"(\w+)"')  # a tool, for people
_WAIT_S = 0.005  # for an answer, where nothing else is to be done


@dataclass(frozen=True, slots=True)
class _Acted:
    """A turn that has ended and is not answered.

    Attributes:
      finished: the response up to its end; text: what was said in it.
      since_s: when it ended.
      place: in the journal. is_recorded: its answer is there.
    """

    finished: Finished
    text: str
    since_s: float
    place: tuple[int, ...]
    is_recorded: bool

    @property
    def sample(self) -> Sample:
        return self.finished.sample


class TurnSession(Mechanism):
    """The mechanism.

    Args:
      acting: answers turns.
      has_turns: whether a prompt has an environment.
      limits: of a trajectory.
      text_of: makes text of a turn's tokens.
      tokens_of: the tokens of an answer, given its messages and those of the response; raises ValueError where the chat
        template refuses it.
      journal: where answers go; None: nowhere.
      drawing: where turns that wait are counted; None: nowhere.
      tell: told how many turns wait, which one for longest, and since when.
      times: how long calls may take, of which checkpoints keep what is known.
    """

    name = "turns"

    def __init__(
        self,
        acting: Acting,
        has_turns: Callable[[Prompt], bool],
        limits: Limits,
        text_of: Callable[[Sequence[int]], str],
        tokens_of: Callable[[Sequence[Mapping[str, Any]], Sequence[int]], Sequence[int]],
        journal: Journal | None = None,
        drawing: Drawing | None = None,
        tell: Callable[[int, str, float], None] = lambda *_: None,
        times: CallTimes | None = None,
    ) -> None:
        self._acting, self._has_turns, self._limits = acting, has_turns, limits
        self._text_of, self._tokens_of, self._journal = text_of, tokens_of, journal
        self._drawing, self._tell_waiting, self._times = drawing, tell, times
        self._under_way: UnderWay
        self._info = RoundInfo(-1)
        self._prompts: dict[SampleKey, Prompt] = {}  # of trajectories under way
        self._begun_s: dict[SampleKey, float] = {}
        self._max_tokens: dict[SampleKey, int] = {}
        self._acted: dict[SampleKey, _Acted] = {}
        self._came: deque[Observed] = deque()  # answers that have not taken effect
        self._recorded: deque[Mapping[str, Any]] = deque()  # the same of the journal, in their order
        self._later: dict[tuple[int, ...], int] = {}  # places that the journal has in later steps, with checksums
        self._resumed: dict[SampleKey, Sample] = {}  # that were cut off while they waited for an answer
        self._kept: dict[SampleKey, tuple[int, Observed | None]] = {}  # the answers to these, or None: not yet there
        self._awaited: set[SampleKey] = set()  # verdicts
        self._keeps = False  # what is being ended may go on in a later round
        self._place = (0, 0)  # how often workers were served in the round, and its commands
        self._is_over = False  # the journal has all answers of the round
        self._idle_s = 0.0

    def attach(self, under_way: UnderWay) -> None:
        self._under_way = under_way

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        self._info, self._place, self._idle_s = info, (0, 0), 0.0
        entries = () if self._journal is None else self._journal.since(info.step, _KIND)
        own = [entry for entry in entries if entry["key"][0] == info.index]
        self._recorded = deque(entry for entry in own if entry["step"] == info.step)
        self._later = {(*entry["key"],): entry["crc32"] for entry in own if entry["step"] > info.step}
        self._is_over = self._journal is not None and self._journal.find(info.step, _OVER, (info.index,)) is not None

    def commanded(self, command: Command) -> None:
        self._place = self._place[0], self._place[1] + 1
        if isinstance(command, AwaitVerdict):
            self._awaited.add(command.key)
        elif isinstance(command, CancelScore):
            self._awaited -= set(command.keys)
        elif isinstance(command, Abort):
            self._keeps = command.keep

    def handed(self, event: Event) -> None:
        if isinstance(event, Verdict):
            self._awaited.discard(event.key)

    def launched(self, launch: Launch) -> None:
        if not self._has_turns(launch.prompt):
            return
        for key in launch.keys:
            self._prompts[key], self._begun_s[key] = launch.prompt, self._under_way.clock()
            self._max_tokens[key] = self._limits.max_tokens(0, 0)
            self._kept.pop(replace(key, attempt=key.attempt - 1), None)  # it has begun anew
        for sample in launch.resumed:
            self._max_tokens[sample.key] = self._limits.max_tokens(len(sample), sample.num_drawn)
            if sample.episode is not None and sample.episode.awaits:
                self._resumed[sample.key] = sample

    def begun(self, key: SampleKey) -> Finished | None:
        sample = self._resumed.pop(key, None)
        if sample is None:
            return None
        episode = replace(sample.episode or Episode(), awaits=False)
        return Finished(-1, replace(sample, finish_reason="stop", episode=episode), self._last_plan, 0, 0)

    def request(self, request: Request, prompt: Prompt) -> Request:
        longest = self._max_tokens.get(request.key)
        if longest is None:
            return request
        return replace(request, session=request.key, params=replace(request.params, max_tokens=longest))

    def round_ends(self, end: RoundEnd) -> Mapping[str, float]:
        groups = () if end.result is None else (*end.result.groups, *end.result.filtered)
        found = trajectory_metrics(sample for group in groups for sample in group.samples)
        if self._journal is not None and not self._is_over:
            self._journal.append(self._info.step, _OVER, (self._info.index,), {})
        return {**found, "environment/idle_s": self._idle_s} if found else {}

    def cancelled(self) -> None:
        self._acting.cancel([*map(self._named, self._prompts)])
        for key in [*self._prompts]:
            self._forget(key)
        for kept in (self._acted, self._came, self._recorded, self._resumed, self._awaited):
            kept.clear()

    def state_dict(self) -> dict[str, Any] | None:
        return {"longest_s": dict(self._times.longest_s)} if self._times is not None and self._times.adapts else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._times is not None:
            self._times.longest_s = dict(state.get("longest_s", {}))

    # -- turns -------------------------------------------------------------------------------------------------------

    @property
    def awaits(self) -> bool:
        return bool(self._acted) and not self._awaited

    def keeps(self, finished: Finished) -> bool:
        sample, key = finished.sample, finished.sample.key
        if key not in self._prompts:
            return False
        episode = sample.episode or Episode()
        start = episode.turns[-1].end if episode.turns else 0
        text = self._text_of(sample.token_ids[start:][sample.drawn[start:]].tolist())
        if sample.finish_reason != "stop":
            cut = 0 < self._limits.max_sampled_tokens <= sample.num_drawn
            episode = replace(episode, turns=(*episode.turns, Turn(len(sample), text)))
            self._tell(finished, episode, "max_sampled_tokens" if cut else "max_trajectory_tokens")
            return True
        place = (self._info.index, *astuple(key), len(episode.turns))
        crc32 = tokens_crc32(sample)
        is_recorded = any((*entry["key"],) == place and entry["crc32"] == crc32 for entry in self._recorded)
        self._acted[key] = _Acted(finished, text, self._under_way.clock(), place, is_recorded)
        self._under_way.requests.pop(key, None)
        if not is_recorded and self._later.get(place) != crc32:
            self._ask(self._acted[key], episode.state)
        self._draw()
        return True

    def before_turn(self) -> None:
        self._look(is_idle=False)

    def after_plan(self, worker: int | None) -> None:
        self._place = self._place[0] + 1, self._place[1]

    def while_waiting(self) -> None:
        if self._acted:
            since_s = self._under_way.clock()
            self._look(is_idle=True)
            self._idle_s += self._under_way.clock() - since_s

    def given_up(self, key: SampleKey, *, keep: bool) -> Sample | None:
        acted = self._acted.pop(key, None)
        if acted is None:
            return None
        if keep and self._acting.keeps:  # what takes longer than a round would never end otherwise
            self._kept[key] = tokens_crc32(acted.sample), None
        return replace(acted.sample, episode=replace(acted.sample.episode or Episode(), awaits=True))

    def aborted(self, key: SampleKey) -> None:
        if not (self._keeps and self._acting.keeps):
            self._acting.cancel([self._named(key)])
        self._forget(key)

    def _ask(self, acted: _Acted, state: bytes | None) -> None:
        """Has a turn answered, unless that is under way since an earlier round."""
        key = acted.sample.key
        crc32, answer = self._kept.pop(key, (None, None)) if self._info.is_training else (None, None)
        if crc32 != tokens_crc32(acted.sample):
            self._acting.submit(self._named(key), self._prompts[key], acted.text, state)
        elif answer is not None:
            self._came.append(answer)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _look(self, *, is_idle: bool) -> None:
        """Has answers take effect, up to the first that the round has to hear of."""
        while not self._awaited and (answer := self._next(is_idle=is_idle)) is not None:
            if self._answered(self._acted.pop(answer.key), answer):
                return
            is_idle = False

    def _next(self, *, is_idle: bool) -> Observed | None:
        """The next answer that may take effect. While the journal has some, it is one of those: what runs again has to
        come to where it was before anything new may happen."""
        while self._recorded:
            entry = self._recorded[0]
            key = SampleKey(*entry["key"][1:-1])
            acted = self._acted.get(key)
            is_due = acted is not None and acted.is_recorded and acted.place == (*entry["key"],)
            if not is_idle and not (is_due and self._place >= (entry["served"], entry["commands"])):
                return None
            self._recorded.popleft()  # where nothing else can happen, what is not due never will be
            if is_due:
                return _replayed(entry, key)
        if self._is_over and not is_idle:
            return None
        if not self._came and self._acted:
            self._came += [*self._acting.completed(_WAIT_S if is_idle else 0.0), *self._overdue()]
        while self._came:
            answer = self._came.popleft()
            key = self._named(answer.key)
            if answer.key in self._kept:
                self._kept[answer.key] = self._kept[answer.key][0], answer
            elif (acted := self._acted.get(key)) is not None and self._named(key) == answer.key:
                return self._noted(acted, replace(answer, key=key))
        return None

    def _named(self, key: SampleKey) -> SampleKey:
        """How environments know a sample, and the other way round: an evaluation may have prompts of the same key as
        what is carried from one training round to the next."""
        return key if self._info.is_training else replace(key, epoch=-1 - key.epoch)

    def _overdue(self) -> list[Observed]:
        """What becomes of trajectories that take too long."""
        limit_s, now_s = self._limits.rollout_timeout_s, self._under_way.clock()
        late = [key for key in self._acted if limit_s and now_s - self._begun_s[key] > limit_s]
        named = [*map(self._named, late)]
        self._acting.cancel(named)
        return [Observed(key, done=True, status="rollout_timeout") for key in named]

    def _noted(self, acted: _Acted, answer: Observed) -> Observed:
        """An answer that is new, in the journal."""
        if self._journal is not None:
            served, commands = self._place
            place = {"served": served, "commands": commands, "crc32": tokens_crc32(acted.sample)}
            self._journal.append(self._info.step, _KIND, acted.place, place | _entry(answer))
        return answer

    def _answered(self, acted: _Acted, answer: Observed) -> bool:
        """An answer takes effect; returns whether the round has to hear of that first."""
        key, sample = answer.key, acted.sample
        episode = sample.episode or Episode()
        stop, error, token_ids = "done" if answer.done else "", answer.error, ()
        if answer.status != "ok":
            stop = answer.status
        turn = Turn(len(sample), acted.text, answer.messages, answer.reward, answer.seconds, answer.metrics)
        episode = Episode((*episode.turns, turn), answer.state)
        if not stop:
            try:
                token_ids = self._tokens_of(answer.messages, sample.token_ids.tolist())
            except ValueError as refused:
                stop, error = "error", str(refused)
        stop = stop or self._limits.over(episode, len(sample), sample.num_drawn, len(token_ids))
        self._draw()
        if stop:
            unanswered = replace(turn, messages=())
            turns = (*episode.turns[:-1], unanswered)
            self._tell(acted.finished, replace(episode, turns=turns, error=error), stop)
            return True
        longer = replace(_appended(sample, token_ids), episode=episode)
        self._max_tokens[key] = self._limits.max_tokens(len(longer), longer.num_drawn)
        self._under_way.requests[key] = self._under_way.start(self._prompts[key], key, self._home(key), longer)
        return False

    def _tell(self, finished: Finished, episode: Episode, stop: str) -> None:
        """A trajectory is over."""
        self._acting.cancel([self._named(finished.sample.key)])
        self._forget(finished.sample.key)
        reason = "length" if stop in ("max_trajectory_tokens", "max_sampled_tokens") else "stop"
        episode = replace(episode, state=None, stop=stop)
        sample = replace(finished.sample, finish_reason=reason, episode=episode)
        self._under_way.deliver([replace(finished, sample=sample, dispatch=max(finished.dispatch, self._last_plan))])

    def _forget(self, key: SampleKey) -> None:
        for kept in (self._prompts, self._begun_s, self._max_tokens):
            kept.pop(key, None)
        for engine in self._under_way.workers.engines:
            engine.batcher.blocks.forget(key)

    def _home(self, key: SampleKey) -> int | None:
        """The worker with the trajectory's KV; None: none has it, or one that takes no more."""
        workers = self._under_way.workers
        engines = enumerate(workers.engines)
        there = [i for i, engine in engines if engine.batcher.blocks.parked_in(key) is not None and workers.is_open(i)]
        return there[0] if there and len(workers.engines) > 1 else None

    @property
    def _last_plan(self) -> int:
        return self._under_way.workers.counters.plans - 1

    def _draw(self) -> None:
        if self._drawing is not None:
            self._drawing.counter("turns", waiting=len(self._acted))
        first = next(iter(self._acted.values()), None)  # the order is that in which turns have ended
        if first is None:
            self._tell_waiting(0, "", 0.0)
        else:
            key = first.sample.key
            who = f"prompt {key.prompt_index}, sample {key.sample_index}"
            called = _CALLED.search(first.text)
            self._tell_waiting(len(self._acted), f"{who} ({called[1]})" if called else who, first.since_s)


def tokens_crc32(sample: Sample) -> int:
    """What is in the journal about a sample is about these tokens."""
    return zlib.crc32(np.ascontiguousarray(sample.token_ids, np.int32).tobytes())


def _entry(answer: Observed) -> dict[str, Any]:
    """What the journal keeps of an answer: all of it."""
    return {
        "done": answer.done,
        "messages": [dict(message) for message in answer.messages],
        "reward": answer.reward,
        "state": None if answer.state is None else base64.b64encode(answer.state).decode(),
        "metrics": dict(answer.metrics),
        "seconds": answer.seconds,
        "status": answer.status,
        "error": answer.error,
    }


def _replayed(entry: Mapping[str, Any], key: SampleKey) -> Observed:
    """The answer that an entry of the journal tells of."""
    state = None if entry["state"] is None else base64.b64decode(entry["state"])
    names = ("done", "reward", "metrics", "seconds", "status", "error")
    return Observed(key, messages=tuple(entry["messages"]), state=state, **{name: entry[name] for name in names})


def _appended(sample: Sample, token_ids: Sequence[int]) -> Sample:
    """The sample with an answer behind it."""
    nothing = np.zeros(len(token_ids), np.float32)
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.asarray(token_ids, np.int32)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, nothing]),
        sampled_logprobs=np.concatenate([sample.sampled_logprobs, nothing]),
        versions=np.concatenate([sample.versions, np.full(len(token_ids), ENVIRONMENT, np.int32)]),
        finish_reason=None,
    )
