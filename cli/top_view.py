"""Draw a view of ``mmrt top`` (pure)."""

from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..runtime.observe.request_names import short_name
from ..runtime.observe.trace_requests import RequestSpan
from ..runtime.supervisor.run_report import RunReport
from .status import STATE_STYLES, duration
from .top_watch import View

NUM_REQUESTS = 10
NUM_EVENTS = 5
_BAR_WIDTH = 12
_BARS_WIDTH = 96  # of a terminal that has room for the bars of processes
_SPARKS = "▁▂▃▄▅▆▇█"
_STAGE_STYLES = {
    "submitted": "bright_black",
    "queued": "bright_black",
    "fetching": "white",
    "analysing": "yellow",
    "prefilling": "blue",
    "decoding": "green",
    "delivering": "cyan",
    "failing": "red",
}
_STAGE_LETTERS = dict(zip(_STAGE_STYLES, ".qfaPD>!", strict=True))  # where there are no colours
_BLOCK = "█"


def render(view: View, width: int, *, has_colours: bool = True) -> Group:
    """Return the whole view for a terminal of so many columns. Without colours letters stand for stages."""
    report, counts = view.report, view.report.requests
    rate = view.rates[-1] if view.rates else 0.0
    head = Text.assemble(
        (report.state, "bold green" if report.ready else "bold yellow"),
        f"  {report.endpoint}  up {duration(report.uptime_s)}  ",
        (counts.words, "bold"),
    )
    tokens = Text.assemble(("tokens/s ", "bold"), f"{rate:6.0f}  ", (sparkline(view.rates, max(10, width - 20)), "green"))
    parts: list[RenderableType] = [
        head,
        tokens,
        Text(),
        _actors(view, width),
        Text(),
        _pools(report),
        Text(),
        *_requests(view, width, has_colours),
    ]
    events = [
        Text(f"{duration((view.now_ns - event.time_ns) / 1e9):>7} ago  {event.actor}: {event.text}", "dim")
        for event in view.events[-NUM_EVENTS:]
    ]
    return Group(*parts, Text(), *reversed(events))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the latest values as blocks of eight heights, the highest of them full."""
    shown = values[-width:]
    highest = max(shown, default=0.0)
    return "".join(_SPARKS[min(7, int(8 * value / highest))] if highest else _SPARKS[0] for value in shown)


def timeline(span: RequestSpan, now_ns: int, width: int, *, has_colours: bool = True) -> Text:
    """Return the stages of a request in proportion to their time: each cell has the colour, or letter, of the stage in its middle."""
    end_ns = span.end_ns or now_ns
    text = Text()
    for cell in range(width):
        at_ns = span.begin_ns + (end_ns - span.begin_ns) * (2 * cell + 1) // (2 * width)
        stage = next((stage for stage in reversed(span.stages) if stage.begin_ns <= at_ns), span.stages[0])
        text.append(_BLOCK if has_colours else _STAGE_LETTERS[stage.name], _STAGE_STYLES[stage.name])
    return text


def _legend(has_colours: bool) -> Text:
    text = Text("AGE: since the request came, or what it took. STAGES: ", "dim")
    for number, (name, style) in enumerate(_STAGE_STYLES.items()):
        text.append(", " if number else "", "dim")
        text.append(_BLOCK if has_colours else _STAGE_LETTERS[name], style)
        text.append(f" {name}", "dim")
    return text


def _table(left: str, *columns: str) -> Table:
    """Make a table. ``left``: the words among its headings whose columns go to the left."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left.split() or not column else "right", no_wrap=True)
    return table


def _actors(view: View, width: int) -> Table:
    has_bars = width >= _BARS_WIDTH
    table = _table("ACTOR STATE", "ACTOR", "STATE", "PID", "GEN", "RESTARTS", "CPU %", *[""] * has_bars, "QUEUE", "STEPS/S", "MB")
    for actor in view.report.actors:
        used = actor.cpu_percent
        table.add_row(
            actor.name,
            Text(actor.state, STATE_STYLES.get(actor.state, "yellow")),
            str(actor.pid or ""),
            str(actor.generation or ""),
            str(actor.restarts),
            "" if used is None else f"{used:.0f}",
            *[Bar(100, 0, min(100.0, used or 0.0), width=_BAR_WIDTH, color="blue")] * has_bars,
            str(actor.queue_depth),
            f"{view.steps.get(actor.name, 0.0):.0f}",
            "" if actor.memory_bytes is None else f"{actor.memory_bytes / 1e6:.0f}",
        )
    return table


def _pools(report: RunReport) -> Table:
    table = _table("POOL", "POOL", "", "PAGES", "OF")
    for name, pool in report.pools.items():
        bar = Bar(max(1, pool.pages), 0, pool.used, width=2 * _BAR_WIDTH, color="blue")
        table.add_row(name, bar, str(pool.used), str(pool.pages))
    return table


def _requests(view: View, width: int, has_colours: bool) -> list[RenderableType]:
    if not view.requests:
        return [Text("no requests yet", "dim")]
    table = _table("REQUEST STAGE STAGES", "REQUEST", "STAGE", "FIRST TEXT", "TOKENS", "AGE", "STAGES")
    for request in view.requests[:NUM_REQUESTS]:
        span = request.span
        first_ns = next((time_ns for text, time_ns in span.marks if text == "first text"), 0)
        end = "ended" if span.is_lost else f"failed ({span.status})" if span.status else "done"
        stage = end if span.end_ns else span.stages[-1].name
        table.add_row(
            short_name(span.request_id, f"{span.key:x}"),
            Text(stage, "red" if span.status else _STAGE_STYLES.get(stage, "dim")),
            _milliseconds(first_ns - span.begin_ns) if first_ns else "",
            str(span.num_sent),
            _milliseconds((span.end_ns or view.now_ns) - span.begin_ns),
            timeline(span, view.now_ns, max(8, min(40, width - 80)), has_colours=has_colours),
        )
    return [table, _legend(has_colours)]


def _milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:.0f} ms" if time_ns < 10_000_000_000 else f"{time_ns / 1e9:.0f} s"
