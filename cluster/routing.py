"""The nodes as the front knows them (pure): what each has to do, and which beginnings and media it has seen.

A request with media goes where the fewest tokens of media wait, a text where the fewest tokens wait (MS2). A node that has seen its
beginning or its media gets it unless it has ``SLACK_TOKENS`` more to do than the least busy one. What goes on with a stored response
goes to the node that has it. Nothing is asked of the nodes: the front counts what it has sent and what has come back.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from ..runtime.controller.scheduling.routing import choose
from .request_features import Features

SLACK_TOKENS = 4096.0
MAX_KNOWN = 1 << 16  # beginnings, media and responses whose node is remembered; the least recent are forgotten


class Load:
    """The work that waits at a node, in tokens."""

    def __init__(self) -> None:
        self.tokens = 0.0  # of prompts whose answers have not begun, and of answers that have not ended
        self.media_tokens = 0.0  # of requests whose answers have not begun


class Routed:
    """A request at a node. ``begun`` and ``ended`` take its load away; each counts once."""

    def __init__(self, node: str, load: Load, features: Features) -> None:
        self.node = node
        self._load = load
        self._prompt_tokens = features.text_tokens + features.media_tokens
        self._media_tokens = features.media_tokens
        self._answer_tokens = features.answer_tokens
        load.tokens += self._prompt_tokens + self._answer_tokens
        load.media_tokens += self._media_tokens

    def begun(self) -> None:
        """Note the first byte of the answer: the prompt is done."""
        self._load.tokens -= self._prompt_tokens
        self._load.media_tokens -= self._media_tokens
        self._prompt_tokens = self._media_tokens = 0

    def ended(self) -> None:
        """Note the end, whatever it is."""
        self.begun()
        self._load.tokens -= self._answer_tokens
        self._answer_tokens = 0


class Router:
    """Chooses nodes. ``urls`` are those of the nodes that are there now."""

    def __init__(self) -> None:
        self.urls: Mapping[str, str] = {}
        self._loads: dict[str, Load] = {}
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def set_nodes(self, urls: Mapping[str, str]) -> None:
        """Take the nodes that are there. What an old one had to do is forgotten with it."""
        self.urls = urls
        self._loads = {node: self._loads.get(node) or Load() for node in urls}

    def route(self, features: Features, tried: Collection[str] = ()) -> Routed | None:
        """Choose a node that is not in ``tried``, and count the request to it. None: there is no such node."""
        loads = {node: load for node, load in self._loads.items() if node not in tried}
        if not loads:
            return None
        pending = {node: (load.media_tokens, load.tokens) if features.media else (load.tokens,) for node, load in loads.items()}
        node = self._known.get(features.response.encode(), "")  # no other has the response
        if node not in loads:
            node = choose(pending, self._known_tokens(features), SLACK_TOKENS)
        self._note((*(key for key, _ in features.keys), *(digest for digest, _ in features.media)), node)
        return Routed(node, loads[node], features)

    def note_response(self, id: str, node: str) -> None:
        """Note that the node may have stored a response of this id."""
        self._note((id.encode(),), node)

    def _note(self, keys: Iterable[bytes], node: str) -> None:
        for key in keys:
            self._known[key] = node
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _known_tokens(self, features: Features) -> dict[str, float]:
        """Return the tokens of the request that each node has seen: its longest beginning, or its media if they are more."""
        known: dict[str, float] = {}
        for digest, tokens in features.media:
            if digest in self._known:
                known[self._known[digest]] = known.get(self._known[digest], 0) + tokens
        for key, tokens in features.keys:
            if key in self._known:
                known[self._known[key]] = max(known.get(self._known[key], 0), tokens)
        return known
