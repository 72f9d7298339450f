"""The preset ``monolithic``: one process that does one thing at a time, with the answers of any other layout."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Media, Oracle
from mmrt.tests.end_to_end.test_media import check, image_part, picture, text
from mmrt.tests.end_to_end.test_restart import LONG, PROMPT
from mmrt.tests.end_to_end.test_tools import trace_of

ROUNDING_US = 1.0
WORK = ("encode", "prefill", "step")


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layout"), [("monolithic", "2EPD"), ("split", "2EP+2D")])
def test_several_instances_of_a_baseline_share_the_work(
    launch: Callable[..., Server], oracle: Oracle, preset: str, layout: str
) -> None:
    """TI16: each engine has its share, in turn."""
    settings = f'[scheduling]\npreset = "{preset}"\nrouting = "round_robin"\n[actors]\nlayout = "{layout}"\n'
    server = launch(settings=settings)
    for seed in range(4):
        pixels = picture(seed, 56, 56)
        check(server, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))
    steps = {actor["name"]: actor["steps"] for actor in server.status()["actors"]}
    assert all(steps[name] for name in ("encoder", "encoder.1", "prefill", "prefill.1", "decode", "decode.1")), steps
    server.down()


@pytest.mark.slow
def test_a_monolithic_run_does_one_thing_at_a_time(launch: Callable[..., Server], oracle: Oracle) -> None:
    server = launch(settings='[scheduling]\npreset = "monolithic"\n')
    pixels = picture(3, 56, 56)
    check(server, oracle, [image_part(pixels), text("What is it?")], Media(images=[pixels]))
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(server.chat, PROMPT, **LONG) for _ in range(2)]
        for seed in range(10, 14):
            server.chat([image_part(picture(seed, 150, 200)), text("What is it?")])
        assert streams[0].result() == streams[1].result()
    server.wait_until_empty()
    _, events = trace_of(server)
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event["ph"] == "X" and event["name"] in WORK
    )
    assert {name for _, _, name in work} == set(WORK)
    overlaps = [(first, second) for first, second in pairwise(work) if first[1] > second[0] + ROUNDING_US]
    assert not overlaps
    assert len({server.pid(name) for name in ("encoder", "prefill", "decode")}) == 1
    server.down()
