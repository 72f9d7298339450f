"""A model's card: what the front knows of a model without loading it. ``mmrt model check --json`` writes it, and the front reads it."""

import msgspec

from ..actors.gateway.reading.validation import Limits
from ..schema.media import MediaKind


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """``needs_bytes``: host memory of a run: pools, tables, weights and processes. ``weight_bytes``: of the checkpoint's files.
    ``problems``: why the model is not served; none where it is, and then the other fields are known."""

    family: str = ""
    kinds: tuple[MediaKind, ...] = ()
    takes_tools: bool = False
    thinks: bool = False
    max_context: int = 0
    hidden_size: int = 0
    weight_bytes: int = 0
    needs_bytes: int = 0
    problems: tuple[str, ...] = ()

    def limits(self, name: str) -> Limits:
        """Return what lists of models are made of; limits of requests are the run's."""
        return Limits(
            model_name=name,
            family=self.family,
            kinds=self.kinds,
            takes_tools=self.takes_tools,
            thinks=self.thinks,
            max_context=self.max_context,
            hidden_size=self.hidden_size,
            weight_bytes=self.weight_bytes,
        )
