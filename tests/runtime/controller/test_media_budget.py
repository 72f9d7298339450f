"""The budget of a request's new pictures: those that a cache has cost nothing."""

import pytest

from mmrt.runtime.bus import messages as m
from mmrt.runtime.controller.rows.media_budget import check_pixels
from mmrt.runtime.errors import CONTEXT_EXCEEDED, RequestError
from mmrt.schema.page_key import KEY_BYTES
from mmrt.tests.runtime.controller.test_machine import IMAGE, Driver, sent
from mmrt.tests.runtime.controller.test_media_sharing import ROOM, end, fill, work

LIMIT = 1000


def turns(*pixels: int) -> m.RequestSpec:
    """A conversation with a picture in each turn. The content of each is its place and its pixels."""
    items = [
        m.MediaItem("image", 10, path=f"at {at}", num_pixels=size, content=b"%d %d" % (at, size)) for at, size in enumerate(pixels)
    ]
    return m.RequestSpec(
        m.Generation("r"), [1, 2, *[token for at in range(len(items)) for token in (IMAGE, 10 + at, 4, 5)], 6], items, 1
    )


def serve(driver: Driver, spec: m.RequestSpec, key: int) -> None:
    fill(driver, spec, key)
    work(driver)
    end(driver, key)


def refused(driver: Driver, spec: m.RequestSpec) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_pixels(driver.state, spec)
    return caught.value


def test_new_pictures_have_a_limit() -> None:
    driver = Driver(**ROOM, max_request_pixels=LIMIT)
    (failed,) = sent(driver.submit(turns(600, 400, 1)), m.Failed)
    said = "at 2: makes 1001 pixels in all new pictures of the request, the limit is 1000 (media.max_request_pixels)"
    assert (failed.status, failed.message, failed.param) == (400, said, "at 2")
    check_pixels(driver.state, turns(600, 400))


@pytest.mark.parametrize("caches", [{"prefix_cache": True}, {"prefix_cache": False}])
def test_a_conversation_goes_on_beyond_it(caches: dict[str, bool]) -> None:
    driver = Driver(**ROOM, max_request_pixels=LIMIT, **caches)
    sizes = (900, 800, 700, 950, 600)
    for number in range(1, 1 + len(sizes)):
        serve(driver, turns(*sizes[:number]), number)
    assert driver.is_empty
    assert "makes 1200 pixels" in refused(driver, turns(*sizes, 600, 600)).message
    other = turns(*sizes[:2], 999)
    other.items[0] = m.MediaItem("image", 10, path="new", num_pixels=900, content=b"another")
    assert refused(driver, other).param == "at 2"


def test_the_prefix_alone_counts_too() -> None:
    driver = Driver(**ROOM, max_request_pixels=LIMIT, prefix_cache=True)
    serve(driver, turns(900), 1)
    serve(driver, turns(900, 800), 2)
    driver.state.pools["embedding"].forget_idle()
    check_pixels(driver.state, turns(900, 800, 700))
    driver.state.pools["kv"].forget_idle()
    assert "makes 1700 pixels" in refused(driver, turns(900, 800, 700)).message


def test_pages_of_files_count_too() -> None:
    driver = Driver(**ROOM, max_request_pixels=LIMIT, prefix_cache=True)
    serve(driver, turns(900), 1)
    serve(driver, turns(900, 800), 2)
    embeddings = driver.state.pools["embedding"].cache
    keys = [key for page in range(64) if (key := embeddings.key_of(page)) is not None]
    for pool in ("embedding", "kv"):
        driver.state.pools[pool].forget_idle()
    driver.state.saved["embedding"].learn(dict.fromkeys(keys, 0))
    check_pixels(driver.state, turns(900, 800, 700))


def test_other_tenants_and_unknown_contents_are_new() -> None:
    driver = Driver(**ROOM, max_request_pixels=LIMIT, prefix_cache=True)
    serve(driver, turns(900), 1)
    serve(driver, turns(900, 800), 2)
    foreign = turns(900, 800)
    refused(driver, m.RequestSpec(m.Generation("r"), foreign.prompt_ids, foreign.items, 1, salt=b"other"))
    unnamed = [m.MediaItem("image", 10, num_pixels=900)] * 2
    refused(driver, m.RequestSpec(m.Generation("r"), foreign.prompt_ids, unnamed, 1))
    driver.state.era = bytes(KEY_BYTES)
    refused(driver, foreign)


def test_a_prompt_beyond_the_context_is_not_built() -> None:
    """Its known pictures alone are more than the context has: whoever sends them again and again makes no work."""
    driver = Driver(**ROOM, max_request_pixels=LIMIT, prefix_cache=True)
    serve(driver, turns(900), 1)
    (item,) = turns(900).items
    number = driver.state.limits.max_context
    many = m.RequestSpec(m.Generation("r"), [1, *[IMAGE] * number, 6], [item] * number, 1)
    error = refused(driver, many)
    assert error.code == CONTEXT_EXCEEDED and error.param == "messages"
