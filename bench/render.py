"""Tables in the terminal. Called by the benches after they have measured."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..schema.policy_report import often
from .environment import Environment
from .serve.report import Distribution, GroupSummary, Report, Simulated, SloSummary, StallSummary, TurnSummary

_PERCENTILES = ("mean", "p50", "p90", "p99", "max")


def show_report(console: Console, report: Report) -> None:
    """The figures of ``bench serve``."""
    if report.simulated is not None:
        _show_simulated(console, report.simulated)
    if report.environment is not None:
        show_environment(console, report.environment)
    console.print(_requests_table(report))
    console.print(_latency_table(report.groups))
    if report.stall is not None:
        console.print(_stall_table(report.stall))
    if report.chat is not None:
        console.print(_chat_table(report.chat))
    if report.slo is not None:
        console.print(_slo_line(report.slo))
    if report.lag is not None and report.lag.p99 > 0.05:
        console.print(Text(f"The client itself was late by {_ms(report.lag.p99)} ms (P99): it was short of processor.", "yellow"))
    for message, count in report.failures.items():
        console.print(Text(f"{count} failed: {message}", "red"))


def show_environment(console: Console, environment: Environment) -> None:
    """One line above the tables."""
    commit = f", commit {environment.commit}" if environment.commit else ""
    load = environment.load_average[0]
    console.print(
        f"{environment.date}  {environment.cpu}, {environment.num_cpus} CPUs, load {load:.1f}; mmrt {environment.mmrt}{commit}",
        style="dim",
        soft_wrap=True,
        highlight=False,
    )


def _show_simulated(console: Console, simulated: Simulated) -> None:
    """Return the assumptions in words. A roofline is marked as never measured."""
    if simulated.origin == "measured":
        console.print(f"simulated with costs {simulated.costs}, measured there and then:", style="dim", highlight=False)
    else:
        console.print(f"simulated with costs {simulated.costs}: roofline, never measured", style="yellow", highlight=False)
    console.print(
        f"policy {simulated.policy}, layout {simulated.layout}. {simulated.note}", style="dim", soft_wrap=True, highlight=False
    )
    if simulated.endpoint:
        console.print(simulated.endpoint, style="dim", soft_wrap=True, highlight=False)
    if count := simulated.totals["overruled"]:
        console.print(f"the policy was overruled {often(count)}: unified planned in its place then", style="yellow", highlight=False)


def show_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table: the first column is left-aligned, the others right."""
    table = _table(title, *columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_targets(console: Console, targets: Mapping[str, bool]) -> None:
    """One line for each target: whether it was reached."""
    for name, reached in targets.items():
        console.print(f"{'reached' if reached else 'MISSED '}  {name}", style="green" if reached else "red", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return table


def _requests_table(report: Report) -> Table:
    title = f"{report.scenario}: {report.model}, {report.duration_s:.1f} s"
    table = _table(title, "group", "reqs", "failed", "req/s", "tok in", "tok out", "in/s", "out/s", "/chunk")
    for group in report.groups:
        table.add_row(
            group.group,
            str(group.num_requests),
            Text(str(group.num_failed), "red" if group.num_failed else ""),
            f"{group.requests_per_s:.2f}",
            str(group.num_input_tokens),
            str(group.num_output_tokens),
            f"{group.input_tokens_per_s:.1f}",
            f"{group.output_tokens_per_s:.1f}",
            f"{group.tokens_per_chunk:.2f}",
        )
    return table


def _latency_table(groups: Sequence[GroupSummary]) -> Table:
    table = _table("latency, ms (gap: between chunks)", "group", "", "count", *_PERCENTILES)
    for group in groups:
        for name, values in (("TTFT", group.ttft), ("TBT", group.tbt), ("gap", group.gap), ("E2E", group.e2e)):
            if name != "gap" or group.tokens_per_chunk > 1.005:
                table.add_row(group.group, name, *_cells(values))
        table.add_section()
    return table


def _stall_table(stall: StallSummary) -> Table:
    table = _table("stall: TBT of the text streams, ms", "", "count", *_PERCENTILES, "P99 ratio")
    for name, values, ratio in (
        (f"alone, {stall.alone_s:.0f} s", stall.alone, None),
        (f"with fresh, {stall.with_fresh_s:.0f} s", stall.with_fresh, stall.p99_ratio),
        ("one under way", stall.under_way, stall.p99_ratio_under_way),
    ):
        table.add_row(name, *_cells(values), _ratio(ratio))
    table.add_section()
    table.add_row("TTFT of fresh", *_cells(stall.fresh_ttft), "")
    return table


def _chat_table(turns: Sequence[TurnSummary]) -> Table:
    compared = ("no caches", "ratio") if any(turn.without_caches for turn in turns) else ()
    table = _table("chat: TTFT of turns, P50 in ms", "turn", "reqs", "tok in", "cached", "hits", "TTFT", "to turn 1", *compared)
    for turn in turns:
        cached = "not said" if turn.num_cached_tokens is None else f"{turn.num_cached_tokens:.0f}"
        cells = [str(turn.num_requests), f"{turn.num_prompt_tokens:.0f}", cached, str(turn.num_hits)]
        cells += [_median(turn.ttft), _ratio(turn.ttft_to_first)]
        if compared:
            cells += [_median(turn.without_caches), _ratio(turn.ttft_to_without)]
        table.add_row(str(turn.turn), *cells)
    return table


def _median(values: Distribution | None) -> str:
    return "" if values is None else _ms(values.p50)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _slo_line(slo: SloSummary) -> str:
    tbt = "" if slo.tbt_s is None else f" and 90 % of TBTs < {slo.tbt_s:g} s"
    return f"SLO TTFT < {slo.ttft_s:g} s{tbt}: {slo.attainment:.1%} attained, {slo.attained_requests_per_s:.2f} requests/s"


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["0", *("" for _ in _PERCENTILES)]
    return [str(values.count), *(_ms(getattr(values, name)) for name in _PERCENTILES)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
