"""Views that a policy may meet: any requests, pages, credit and measurements."""

import hypothesis.strategies as st

from mmrt.runtime.controller.scheduling.facts import KINDS, Cost, Facts, Objective
from mmrt.runtime.controller.scheduling.types import MemberView, RequestView, SegmentStage, SegmentView, View

NOW_S = 100.0


@st.composite
def requests(draw: st.DrawFn, index: int) -> RequestView:
    members = []
    for _ in range(draw(st.integers(1, 2))):
        target = draw(st.integers(0, 40))
        ready = draw(st.integers(0, target))
        members.append(MemberView(draw(st.integers(0, ready)), ready, target))
    stages = draw(st.lists(st.integers(SegmentStage.PENDING, SegmentStage.ENCODING), max_size=4))
    segments = tuple(
        SegmentView(0, number, SegmentStage(stage), draw(st.integers(1, 20)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        for number, stage in enumerate(stages)
    )
    return RequestView(
        index,
        index,
        has_kv=draw(st.booleans()),
        prefill_in_flight=draw(st.booleans()),
        members=tuple(members),
        unanalysed=tuple(range(draw(st.integers(0, 2)))),
        segments=segments,
        patch_held=draw(st.integers(0, 4)),
        embedding_held=draw(st.integers(0, 4)),
        alone=draw(st.booleans()),
        video_in_flight=draw(st.integers(0, 1)),
        video_since_s=NOW_S - draw(st.floats(0, 10)),
        arrived_s=NOW_S - draw(st.floats(0, 10)),
        kind=draw(st.sampled_from(KINDS)),
        objective=Objective(draw(st.floats(0.1, 5))),
    )


costs = st.builds(Cost, st.floats(0, 0.1), st.floats(0, 0.01), st.integers(0, 100))


@st.composite
def views(draw: st.DrawFn) -> View:
    small = st.integers(0, 8)
    num_decoding = draw(st.integers(0, 2))
    return View(
        tuple(draw(requests(index)) for index in range(draw(st.integers(0, 5)))),
        Facts(NOW_S, draw(costs), draw(costs), tbt_s=draw(st.floats(0, 1))),
        video_credit=draw(st.integers(0, 2)),
        encoder_credit=draw(st.integers(0, 2)),
        prefill_credit=draw(st.integers(0, 2)),
        encode_in_flight=draw(st.integers(0, 1)),
        prefill_in_flight=draw(st.integers(0, 1)),
        num_decoding=num_decoding,
        num_decode_tokens=num_decoding * draw(st.integers(1, 2)),
        num_encoders=draw(st.integers(1, 2)),
        num_turns=draw(st.integers(1, 3)),
        num_patch_pages=8,
        num_free_patch_pages=draw(small),
        num_embedding_pages=8,
        num_free_embedding_pages=draw(small),
        last=draw(st.sampled_from(["encode", "prefill"])),
    )
