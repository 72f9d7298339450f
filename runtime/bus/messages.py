"""Every message on the bus and every record that one process leaves for another in shared memory, except plans (``plans``).

Wire types are ``msgspec.Struct``s, tagged, encoded as MessagePack arrays; one union and one decoder per direction. They evolve by
appending defaulted fields. Messages can be lost, repeated and reordered: each is idempotent, a waiting process resends or checks
again on a timer, and shared memory is authoritative.

Identifiers: ``key`` is the gateway's random 63-bit name of a request; ``(row, row_generation)`` names its row in the sequence
table; ``plan_id`` only grows; ``generation`` counts the starts of one actor; ``epoch`` is the controller's generation.
Times are seconds of CLOCK_MONOTONIC, which all processes of one machine share.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...schema.media import ItemShape, MediaKind, MediaOptions, MediaSpan
from ..pools import PoolName
from .sampling import Sampling
from .wire import Record, Wire, checked

FinishReason = Literal["stop", "length", "abort", "error", "grammar"]
Pooling = Literal["last", "mean"]  # over the last hidden states of a prompt


# parts


class MediaItem(Record, frozen=True):
    """One medium of a request, as the gateway received it: ``num_bytes`` of compressed data in media pages. ``path``: its field in the
    client's request, for error messages. For images, and for videos that come as frames, ``num_pixels`` comes from headers and ``work``
    is the approximate decoding cost in pixels; -1 and 0 where not known. ``content``: SHA-256 of the bytes, the kind and the options;
    empty where not known, and then nothing computed from it is found again."""

    kind: MediaKind
    num_bytes: int
    mime: str = ""
    options: MediaOptions = MediaOptions()
    path: str = "messages"
    num_pixels: int = -1
    work: int = 0
    content: bytes = b""


class Generation(Record, frozen=True):
    """What is generated, and how: the part of a request that the gateway reads and the controller passes on as it is, for prefill,
    decode and the detokenizer to obey. ``pooling``: the vector of the prompt that is asked for, None if none is."""

    request_id: str
    sampling: Sampling = Sampling()
    deadline_s: float = 0.0  # monotonic; 0 is none
    stop: list[str] = []
    stop_token_ids: list[int] = []  # end the answer, besides the model's own
    include_stop: bool = False  # the stop string that ends the answer is part of it
    ignore_eos: bool = False
    return_token_ids: bool = False
    pooling: Pooling | None = None


Borders = tuple[int, int, int]
"""Where other prompts are likely to part from one, as numbers of ``prompt_ids``: the ends of its first message, of its last one, before
what opens the answer, and of its last medium; 0: none. A wrong one costs a state that nobody finds, never a wrong answer."""


class RequestSpec(Record, frozen=True):
    """A submitted request. ``prompt_ids`` holds one placeholder id per medium, in order; companion ids hold none. Caches serve a
    request only what requests of the same ``salt`` have left in them. A request of lower ``priority`` goes first."""

    generation: Generation
    prompt_ids: list[int]
    items: list[MediaItem]
    max_new_tokens: int | None  # None: up to the end of the context; 0: no answer, only what prefill finds out about the prompt
    companion_ids: list[int] | None = None  # CF2: the unconditional prompt, when guidance_scale != 1
    salt: bytes = b""
    priority: int = 0
    clamp_max_new_tokens: bool = False  # where they do not fit, as many as do
    borders: Borders = (0, 0, 0)

    @property
    def is_prefill_only(self) -> bool:
        """Return whether it has no answer, and never goes to decode."""
        return self.max_new_tokens == 0

    def asking(self, **changes: Any) -> "RequestSpec":
        """Return the request with other values of these fields of its generation."""
        return msgspec.structs.replace(self, generation=msgspec.structs.replace(self.generation, **changes))


class PageRun(Record, frozen=True):
    """Pages of one pool, in reading order, with each page's generation when it was granted."""

    pages: list[int]
    generations: list[int]


class SequenceSpec(Record, frozen=True):
    """The immutable part of a row, written by the controller before the row leaves phase PREPARE (sequence table: spec).

    Prompt ids (expanded: each placeholder repeated num_tokens times) are in the row's own arrays, not here.
    """

    key: int
    generation: Generation
    num_prompt_tokens: int
    num_companion_tokens: int  # 0: no companion
    max_new_tokens: int  # those that fit
    spans: list[MediaSpan]
    gateway_generation: int


# to any actor


class Welcome(Wire, frozen=True):
    """Answer to Hello: the controller's epoch."""

    epoch: int


class Run(Wire, frozen=True):
    """Do the plan in this slot of the plan table, or answer with the stored result if it is done already.

    From ``deadline_s`` on (monotonic; 0 is never) no request needs it: the answer is Skipped.
    """

    epoch: int
    slot: int
    plan_id: int
    deadline_s: float = 0.0


# to decode


class Admit(Wire, frozen=True):
    """Add the row to the running set. A hint: decode also checks the table on a timer and at its start."""

    epoch: int
    row: int
    row_generation: int


class Drop(Wire, frozen=True):
    """Remove the row from the running set and answer Dropped with the same ticket, even if it was not in the set.

    A row can be preempted twice under one generation: without the ticket a late answer to the first Drop would free pages that
    decode is writing.
    """

    epoch: int
    row: int
    row_generation: int
    ticket: int = 0


# to gateway


class Granted(Wire, frozen=True):
    """The request is journaled and admitted; fill these media pages (one run per item, maybe none) and answer Filled."""

    epoch: int
    key: int
    runs: list[PageRun]


class Queued(Wire, frozen=True):
    """The request is journaled and waits for admission."""

    epoch: int
    key: int
    position: int


class Prepared(Wire, frozen=True):
    """Analysis is done and the request fits: response headers may go out. ``num_cached_tokens``: of the prompt, those whose KV pages
    were found in the cache; -1 before the request has KV pages. It is sent again when it gets them. ``num_sound_frames``: mel frames
    of its sounds. ``media_share``: the least share of tokens that one of its pictures or videos has."""

    epoch: int
    key: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_sound_frames: int = 0
    media_share: float = 1.0


class Computed(Wire, frozen=True):
    """The prompt of a request without an answer is prefilled, and what it asks for lies in its row. Answer Delivered.
    ``media_share``: as of Prepared."""

    epoch: int
    key: int
    row: int
    row_generation: int
    num_prompt_tokens: int
    num_cached_tokens: int
    media_share: float = 1.0


class Failed(Wire, frozen=True):
    """The request was refused, or failed after it was accepted. Answer Delivered."""

    epoch: int
    key: int
    status: int
    message: str
    error_type: str
    param: str | None = None
    retry_after_s: int | None = None
    code: str | None = None


class Released(Wire, frozen=True):
    """The request's resources are freed, or will be without the gateway: forget it."""

    epoch: int
    key: int


class Unknown(Wire, frozen=True):
    """Answer to Query: the controller does not know the key (it was never journaled, or it has ended)."""

    epoch: int
    key: int


class ClearedPool(Record, frozen=True):
    """Pages of a pool whose contents the cache has forgotten, and pages that it keeps since requests hold them."""

    pool: PoolName
    num_forgotten: int
    num_held: int


class Cleared(Wire, frozen=True):
    """Answer to ClearCaches."""

    epoch: int
    pools: list[ClearedPool]


ToActor = Welcome | Run | Admit | Drop | Granted | Queued | Prepared | Computed | Failed | Released | Unknown | Cleared


# to controller


class Hello(Wire, frozen=True):
    """An actor generation is present; ``active`` once it holds its role lock, which proves that every older one is gone. ``code``: a
    number for the source that it has loaded; 0 if not known. ``adopted``: nothing that an older one had under way will be gone on with
    any more, unless it has been by now."""

    actor: str
    generation: int
    pid: int
    active: bool
    code: int = 0
    adopted: bool = True


class Analysed(Wire, frozen=True):
    shape: ItemShape


class Done(Wire, frozen=True):
    """A plan that has no specific result is done."""


class Loaded(Wire, frozen=True):
    """A plan to load pages is done. ``ends``: for each of its parts, the token up to which pages were loaded, of a segment all or none.
    ``more``: for each, that the files may have the pages behind those: all that was asked for was there, or time was short.
    ``num_bytes``: that came from the pool of another device. ``states``: for each chunk, whether it has loaded the
    state, or the pages of windows, at its end too."""

    ends: list[int]
    more: list[bool]
    num_bytes: int = 0
    states: list[bool] = []


class Transferred(Wire, frozen=True):
    """A plan to copy KV pages is done: so many bytes of them."""

    num_bytes: int


class ItemError(Wire, frozen=True):
    """The medium cannot be used; the request fails with this status and message."""

    status: Annotated[int, Meta(ge=400, le=599)]
    message: Annotated[str, Meta(max_length=65_536)]


class Skipped(Wire, frozen=True):
    """The plan was not done: its requests have all ended or are past their deadlines."""


class Died(Wire, frozen=True):
    """The plan is not done: the previous process crashed in it (runtime/process/crash_cause.py)."""


class Overran(Wire, frozen=True):
    """The plan is not done: its work is larger than estimated, and others wait for its thread."""


Result = Analysed | Done | Loaded | Transferred | ItemError | Skipped | Died | Overran


class PlanDone(Wire, frozen=True):
    """A plan's result; sent again whenever the plan is sent again."""

    actor: str
    generation: int
    plan_id: int
    elapsed_s: Annotated[float, Meta(ge=0, le=1e6)]  # costs are learned from it, and kept for later runs
    result: Result


class Dropped(Wire, frozen=True):
    """decode: the row is not, or no longer, in the running set, and decode will not write it."""

    generation: int
    row: int
    row_generation: int
    ticket: int = 0


class SequenceEnded(Wire, frozen=True):
    """decode: a hint that the row's end word is set."""

    generation: int
    row: int
    row_generation: int


class Submit(Wire, frozen=True):
    """gateway: a new request; sent again until Queued, Granted or Failed."""

    generation: int
    key: int
    spec: RequestSpec


class Filled(Wire, frozen=True):
    """gateway: all granted media pages of the request hold their bytes; sent again until Prepared or Failed."""

    generation: int
    key: int


class Cancel(Wire, frozen=True):
    """gateway: the client is gone or the deadline has passed; sent again until Released."""

    generation: int
    key: int


class Delivered(Wire, frozen=True):
    """gateway: the last delta or the error has gone out; sent again until Released."""

    generation: int
    key: int


class Query(Wire, frozen=True):
    """gateway: ask for a request's state. Answered with Queued, Granted, Prepared, Computed, Failed, Released or
    Unknown."""

    generation: int
    key: int


class ClearCaches(Wire, frozen=True):
    """The command line, which is no actor: forget the contents of all pages that no request holds. Sent again until Cleared."""


ToController = Hello | PlanDone | Dropped | SequenceEnded | Submit | Filled | Cancel | Delivered | Query | ClearCaches


# records in rings


class Delta(Record, frozen=True):
    """detokenizer -> gateway: ``data`` is UTF-8 text of the request starting at ``byte_offset`` of its whole text.

    ``token_index`` counts the completion tokens of the text up to the end of this delta; the last delta of a request
    carries ``finish``. The gateway drops bytes that it has already sent, so deltas may repeat or overlap.
    """

    key: int
    row_generation: int
    byte_offset: int
    token_index: int
    data: bytes
    finish: FinishReason | None = None
    ids: list[int] = []  # with return_token_ids: the ids from the end of the last delta up to token_index
    row: int = -1  # of the sequence table
    stop: str = ""  # with finish: the stop string that ended the text


decode_to_actor = checked(msgspec.msgpack.Decoder(ToActor).decode)
decode_to_controller = checked(msgspec.msgpack.Decoder(ToController).decode)
decode_sequence_spec = checked(msgspec.msgpack.Decoder(SequenceSpec).decode)
decode_delta = checked(msgspec.msgpack.Decoder(Delta).decode)
