"""What the stream trainer gets beside a round, and in which parts: by logical time, never by a clock.

Purpose: `StreamPace` is asked before each turn which prompts' gradients begin, and which of them together. It knows
what has ended by then, and takes the freed devices to compute so many tokens per decode step of the others. How fast
they really are, and when verdicts come, decides only when the parts are computed: all of them are, before the update.

Source: RollPacker §4.4. Departure: its trainer takes what is there whenever it has room, so that a clock decides in
which parts gradients add up, and two runs differ in their last bits.

The default pace: a decode step of one copy of the weights waits for them to be read, 2 P bytes for P parameters, and
the gradient of a token takes 6 P operations on the same devices, 12 P with the passes for log-probabilities and
recomputation. At 990e12 FLOP/s and 3.35e12 bytes/s (H100), a quarter to a third of the one and all of the other
reached, these are 12 to 33 tokens per step and copy; what begins too late is lost to the stream, what begins too early
holds up the update: 16. A CPU reads no faster than it computes; 4 is what it did in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.scheduling.rounds.round import PromptKey


class StreamPace:
    """The parts of one round.

    Args:
      max_prompts: of a part; 0: all that wait.
      tokens_per_step: that the freed devices are taken to compute in a decode step of the others.
    """

    def __init__(self, max_prompts: int, tokens_per_step: float) -> None:
        self._max_prompts, self._tokens_per_step = max_prompts, tokens_per_step
        self._waiting: dict[PromptKey, float] = {}  # since that step
        self._chosen: set[PromptKey] = set()
        self._free_at = 0.0  # the step at which the parts so far should be done

    def parts(self, step: float, tokens: Mapping[PromptKey, int]) -> list[list[PromptKey]]:
        """The parts that have begun by now, since the last look.

        Args:
          step: decode steps since the devices were freed, counted by logical time.
          tokens: of all prompts that are certain to be in the batch, chosen before or not; in the order of the batch.
        """
        for key in tokens:
            if key not in self._chosen:
                self._waiting.setdefault(key, step)
        found: list[list[PromptKey]] = []
        while self._waiting and (begins := max(self._free_at, next(iter(self._waiting.values())))) <= step:
            part = [key for key, since in self._waiting.items() if since <= begins][: self._max_prompts or None]
            self._free_at = begins + sum(tokens[key] for key in part) / self._tokens_per_step
            self._chosen.update(part)
            for key in part:
                del self._waiting[key]
            found.append(part)
        return found
