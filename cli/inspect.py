"""``mmrt inspect``: live requests from outside, from shared memory alone; the run notices nothing, and its processes may be dead."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from ..actors.controller.journal import read_journal
from ..runtime.errors import RunError
from ..runtime.observe.breakdown import PARTS
from ..runtime.observe.inspect import Inspector
from ..runtime.observe.inspect_report import ItemReport, RequestReport, RunView
from ..runtime.observe.request_names import is_named, short_name
from ..shm.errors import MissingError
from ..shm.run_directory import RunDirectory
from .options import RunName, model_run_path
from .terminal import print_columns

_SHOWN_RANGES = 12  # of pages
_HEADINGS = ["REQUEST", "STAGE", "AGE s", "ROW", "PROMPT", "PREFILLED", "COMMITTED", "SENT", "KV", "PLANS", "MEDIA READY"]
_LEFT = (0, 1, len(_HEADINGS) - 1)


def register(app: typer.Typer) -> None:
    @app.command()
    def inspect(
        request: Annotated[
            str | None,
            typer.Argument(
                metavar="REQUEST", help="The id that the client was given (chatcmpl-…, cmpl-…), the key, or how one begins."
            ),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
        run: RunName = None,
    ) -> None:
        """Show live requests, and how long their stages took.

        Also where each is, what it holds, and what is being done for it.
        """
        view, ended = look(run)
        if request is None:
            print(msgspec.json.encode(view).decode()) if json else _print_table(view)
            return
        found = find(request, view.requests, ended)
        print(msgspec.json.encode(found).decode()) if json else _print_request(found, view)


def look(run: str | None) -> tuple[RunView, list[RequestReport]]:
    """The live requests of a run, and those that are over but still recorded. Raises RunError when no run is up."""
    path = model_run_path(run)
    try:
        with RunDirectory.attach(path, timeout_s=0.5) as directory:
            inspector = Inspector(directory, lambda: read_journal(path))
            try:
                return inspector.look(), inspector.ended()
            finally:
                inspector.close()
    except MissingError as error:
        what = "no run is up" if not RunDirectory.is_alive(path) else f"the run is only just starting, or ending ({error})"
        raise RunError(f"{what} in {path} (mmrt up)") from None


def find(name: str, live: Sequence[RequestReport], ended: Sequence[RequestReport]) -> RequestReport:
    """The request of this id or key, or the only one whose id or key begins so; live ones first. Raises RunError."""
    wanted = name.removeprefix("0x")
    for requests in (live, ended):
        if exact := [request for request in requests if wanted in (request.request_id, request.key)]:
            return exact[-1]
        begins = [request for request in requests if is_named(wanted, request.request_id, request.key)]
        if len(begins) == 1:
            return begins[0]
        if begins:
            raise RunError(f"{name!r} is ambiguous: {', '.join(request.request_id or request.key for request in begins[:8])}")
    known = ", ".join(short_name(request.request_id, request.key) for request in live[:8]) or "none"
    raise RunError(f"no request {name!r}, neither live nor recorded (live are: {known})")


def _print_table(view: RunView) -> None:
    print(_shared(view))
    if not view.requests:
        print("no requests")
        return
    print_columns([_HEADINGS, *map(_cells, view.requests)], _LEFT)


def _shared(view: RunView) -> str:
    pools = ", ".join(f"{name} {used}/{pages}" for name, (used, pages) in view.pools.items())
    cached = ", ".join(f"{name} {count}" for name, count in view.cached_pages.items())
    return (
        f"{view.waiting} waiting, {view.preparing} preparing, {view.running} running; epoch {view.epoch}; budgets: prefill"
        f" {view.prefill_budget_tokens} tokens, encode {view.encode_budget_rows} rows; {_between_tokens(view)}\n"
        f"pages used: {pools}; cached: {cached or 'none'}\n"
        f"policy: {view.policy}"
    )


def _between_tokens(view: RunView) -> str:
    said = f"{view.tbt_ms:.1f} ms between tokens"
    if view.tbt_p99_ms is None or view.late_share is None:
        return said
    return f"{said}, P99 {view.tbt_p99_ms:.0f} ms, {view.late_share:.1%} over {view.tbt_objective_ms:.0f} ms"


def _cells(request: RequestReport) -> list[str]:
    first = request.members[0] if request.members else None
    return [
        short_name(request.request_id, request.key),
        request.stage,
        f"{request.age_s:.1f}",
        str(request.row) if request.row >= 0 else "",
        str(first.prompt_tokens) if first else "",
        str(first.prefilled_tokens) if first else "",
        f"{request.committed_tokens}/{request.max_new_tokens}" if request.max_new_tokens else "",
        str(request.sent_tokens),
        str(sum(len(member.block_table) for member in request.members)),
        str(len(request.plans)),
        ", ".join(map(_readiness, request.items)),
    ]


def _readiness(item: ItemReport) -> str:
    if item.grid is None:
        return item.kind
    return f"{item.kind} {sum(segment.state in ('ready', 'prefilled') for segment in item.segments)}/{len(item.segments)}"


def _print_request(request: RequestReport, view: RunView) -> None:
    deadline = f", deadline in {request.deadline_s:.0f} s" if request.deadline_s is not None else ""
    lines = [
        f"{request.request_id or '(no id)'}  key {request.key}  {request.stage}",
        f"  age          {request.age_s:.3f} s{deadline}",
    ]
    if request.failure:
        lines.append(f"  failure      {request.failure}")
    if request.live and request.phase:
        running = f"in the running set of {request.decode}" if request.in_running_set else "not in a running set"
        end = f", ended: {request.end}" if request.end else ""
        lines += [
            f"  row          {request.row}, generation {request.row_generation}, phase {request.phase}, {running}{end}",
            f"  gateway      generation {request.gateway_generation}, arrival {request.arrival}",
            f"  policy       counts it as {request.kind}, priority {request.priority}",
        ]
    if request.live:
        budgets = f"prefill {view.prefill_budget_tokens} tokens, encode {view.encode_budget_rows} rows per plan"
        lines.append(f"  budgets      {budgets}; {_between_tokens(view)}")
    lines.append(f"  tokens       {request.committed_tokens} committed of {request.max_new_tokens}, {request.sent_tokens} sent")
    if request.cached_tokens:
        lines.append(f"  cache        {request.cached_tokens} tokens of the prompt were in pages of earlier requests")
    for name, member in zip(("conditional", "companion"), request.members, strict=False):
        lines.append(
            f"  {name:<12} {member.prompt_tokens} prompt tokens, {member.ready_tokens} ready, {member.prefilled_tokens} prefilled;"
            f" block table of {_pages(member.block_table)}"
        )
    for index, item in enumerate(request.items):
        grid = "not analysed yet" if item.grid is None else f"grid {item.grid}, {item.tokens} tokens"
        lines.append(f"  medium {index + 1:<5} {item.kind}, {item.num_bytes} bytes in {_pages(item.media_pages)}; {grid}")
        for number, segment in enumerate(item.segments):
            place = f"tokens [{segment.start}, {segment.start + segment.tokens})" if segment.start >= 0 else f"{segment.tokens} tokens"
            held = [f"{what} {_pages(p)}" for what, p in (("patch", segment.patch_pages), ("embedding", segment.embedding_pages)) if p]
            lines.append(
                f"    segment {number:<3} {segment.state:<9} {segment.rows} rows, {place}{'; ' if held else ''}{', '.join(held)}"
            )
    for plan in request.plans:
        lines.append(
            f"  plan         {plan.plan_id:#x} in slot {plan.slot}: {plan.what}, {plan.units} units,"
            f" [{plan.first}, {plan.last}], {plan.actor}: {plan.state}"
        )
    for timing in request.timings:
        lines.append(f"  {timing.stage:<12} {1000 * timing.seconds:10.1f} ms{'' if timing.over else ' so far'}")
    for work in request.work:
        waits = f"{1000 * work.queued_seconds:.1f} ms in the queue"
        lines.append(f"    {work.what:<16} {work.plans} plans, {1000 * work.seconds:.1f} ms of work, {waits}")
    if request.breakdown.total_s:
        parts = [(name, getattr(request.breakdown, field)) for field, name in PARTS.items()]
        lines.append(f"  in parts     {', '.join(f'{name} {1000 * seconds:.1f} ms' for name, seconds in parts if seconds)}")
    for what, seconds in request.marks:
        lines.append(f"  {what:<12} {1000 * seconds:10.1f} ms after its begin")
    print("\n".join(lines))


def _pages(pages: Sequence[int]) -> str:
    """Format the number of pages and the pages: neighbours as ranges, upwards or downwards."""
    ranges: list[str] = []
    index = 0
    while index < len(pages):
        step = pages[index + 1] - pages[index] if index + 1 < len(pages) else 0
        last = index
        while abs(step) == 1 and last + 1 < len(pages) and pages[last + 1] - pages[last] == step:
            last += 1
        ranges.append(str(pages[index]) if last == index else f"{pages[index]}-{pages[last]}")
        index = last + 1
    more = ["…"] if len(ranges) > _SHOWN_RANGES else []
    shown = f" ({', '.join([*ranges[:_SHOWN_RANGES], *more])})" if pages else ""
    return f"{len(pages)} page{'' if len(pages) == 1 else 's'}{shown}"
