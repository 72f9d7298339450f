"""A gateway that is the limit of its run says so, with the next step."""

import logging

import pytest

from mmrt.actors.gateway.watching.own_load import FULL, REPEAT_S, WINDOW_S, OwnLoad, advice_for
from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.config.sections import ServerSection


def test_it_says_so_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    load, used_s, said = OwnLoad(0.0, 5.0, "do this"), 5.0, []
    caplog.set_level(logging.WARNING)
    for window, share in enumerate([FULL - 0.01, 0.9, 1.0, *[0.95] * round(REPEAT_S / WINDOW_S)], 1):
        for part in (0.5, 1.0):
            used_s += share * WINDOW_S / 2
            load.tick((window - 1 + part) * WINDOW_S, used_s)
        if caplog.messages:
            said.append((window, *caplog.messages))
            caplog.clear()
    first = "this gateway computed for 90 % of the last 10 s: it is the limit; do this"
    assert said == [(2, first), (2 + REPEAT_S / WINDOW_S, first.replace("90", "95"))]


@pytest.mark.parametrize(
    ("layout", "advised"),
    [("E+P+D", "2G+E+P+D"), ("2G+EPD", "3G+EPD"), ("2EP+D", "2G+2EP+D"), ("EPD+G", "2G+EPD"), ("E+P+D+7G", "8G+E+P+D")],
)
def test_a_run_can_have_one_more(layout: str, advised: str) -> None:
    config = parse_config(f'[actors]\nlayout = "{layout}"\n')
    more = parse_config(f'[actors]\nlayout = "{advised}"\n')
    assert more.num_gateways == config.num_gateways + 1
    assert advice_for(config, has_supervisor=True) == f'the next start can have one more: actors.layout = "{advised}"'


def test_why_a_run_cannot_have_more() -> None:
    assert "TLS" in advice_for(RuntimeConfig(server=ServerSection(tls_cert="c", tls_key="k")), has_supervisor=True)
    assert "systemd" in advice_for(RuntimeConfig(), has_supervisor=False)
    assert "at most 8" in advice_for(parse_config('[actors]\nlayout = "8G+EPD"\n'), has_supervisor=True)
