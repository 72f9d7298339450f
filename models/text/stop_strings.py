"""Stop strings in a stream of text: the text that may be shown, and its end. The detokenizer has one matcher per request."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text before, or behind, the first stop string that is completed in it.

    The result depends on the text alone, not on how it was cut into pieces: the stop string whose last character comes first wins,
    and of those that end together the longest. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """``include_stop``: the stop string is part of the text."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.found = ""  # the stop string that was completed

    @property
    def stopped(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """Text that may be shown now. Once ``stopped``, nothing more."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.found = text[start:end]
            self._held = ""
            return text[: end if self._include_stop else start]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The held-back rest, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = max(0, len(text) - len(stop) + 1)
            while (start := text.find(stop[0], start)) >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start += 1
        return longest
