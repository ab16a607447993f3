"""Text of a response while it grows: whole characters only, and nothing of a stop string.

Source: the way in which vLLM and text-generation-inference detokenize: the text of a token depends on a few before it
(a word's blank, the bytes of one character), so a window is decoded with and without the new tokens, and the difference
is new. A window that ends in half a character waits for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.data.tokenizer import Tokenizer

HALF = "\ufffd"  # bytes that are no character yet


class GrowingText:
    """The text of a response, piece by piece. All pieces together are the text of all tokens, cut before the first
    stop string.

    Attributes:
      text: all that was handed out.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._ids: list[int] = []
        self._start = self._read = 0  # the window, and how much of it has been decoded
        self._longest = max(map(len, self._stops), default=0)

    def add(self, token_ids: Sequence[int], *, ends: bool) -> str:
        """What these tokens add to the text; `ends`: they are the last."""
        self._ids.extend(token_ids)
        self._held += self._decoded(ends)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            new, self._held = self._held[: min(found)], ""
        else:
            kept = 0 if ends else self._num_held()
            new, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self.text += new
        return new

    def _decoded(self, ends: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if not ends and (after.endswith(HALF) or len(after) <= len(before)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _num_held(self) -> int:
        """Characters at the end of what is held that may begin a stop string."""
        most = min(self._longest - 1, len(self._held))
        ends = (self._held[len(self._held) - count :] for count in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
