"""How memory is divided between the host and a device."""

import msgspec
import pytest

from mmrt.runtime.config.runtime_config import RuntimeConfig, parse_config
from mmrt.runtime.config.sections import MemorySection, ModelSection
from mmrt.runtime.errors import ConfigError
from mmrt.runtime.process.device_room import DeviceRoom
from mmrt.runtime.process.host_room import HostRoom
from mmrt.runtime.process.memory_layout import plan_layout, write_layout
from mmrt.runtime.supervisor.run_report import ComputeReport
from mmrt.runtime.supervisor.status_report import compute_of
from mmrt.schema.model_facts import ModelFacts
from mmrt.shm.run_directory import RunDirectory

FACTS = ModelFacts(kv_page_bytes=16 * 512, embedding_row_bytes=128, max_context=1000, patch_row_bytes=1176)


def test_on_cuda_the_pools_of_the_model_leave_shared_memory() -> None:
    memory = MemorySection(max_sequences=64)
    host = plan_layout(RuntimeConfig(memory=memory), FACTS, "float32")
    device = plan_layout(RuntimeConfig(model=ModelSection(device="cuda:1"), memory=memory), FACTS, "float32")
    assert [name for name, pool in device.pools.items() if pool.on_device] == ["embedding", "kv"]
    assert not any(pool.on_device for pool in host.pools.values())
    moved = host.pools["embedding"].num_bytes + host.pools["kv"].num_bytes
    assert moved > 0 and device.num_bytes == host.num_bytes - moved
    assert device.plan_slot_bytes == host.plan_slot_bytes


def test_the_streams_of_a_pipeline_are_counted() -> None:
    facts = msgspec.structs.replace(FACTS, stream_token_bytes=1000, num_layers=3)
    plain = parse_config('[actors]\nlayout = "E+3P+D"')
    pipeline = parse_config('[actors]\nlayout = "E+3P+D"\n[scheduling]\nprefill_pipeline = true\nprefill_budget_tokens = 5000')
    before, after = (plan_layout(config, facts, "float32").num_bytes for config in (plain, pipeline))
    assert after - before == 6 * 2 * 5000 * 1000, "six plans, each with what it leaves at two stages"


def test_a_stage_of_a_pipeline_has_a_layer() -> None:
    config = parse_config('[actors]\nlayout = "E+3P+D"\n[scheduling]\nprefill_pipeline = true')
    with pytest.raises(ConfigError, match=r'"E\+3P\+D" has 3 stages of prefill, the model has 2 layers: have 2 or fewer'):
        plan_layout(config, msgspec.structs.replace(FACTS, num_layers=2), "float32")


GIB = 1 << 30
QWEN_7B = ModelFacts(
    kv_page_bytes=16 * 57344,
    embedding_row_bytes=7168,
    max_context=32768,
    patch_row_bytes=1176,
    prefill_token_bytes=153_600,
    logits_bytes=912_384,
)
H200 = DeviceRoom(total_bytes=139 * GIB, free_bytes=123 * GIB)


def on_cuda(**memory: object) -> RuntimeConfig:
    return RuntimeConfig(model=ModelSection(device="cuda"), memory=MemorySection(**memory))  # type: ignore[arg-type]


def test_on_cuda_pools_take_what_the_device_has() -> None:
    layout = plan_layout(on_cuda(), QWEN_7B, "bfloat16", H200)
    taken = layout.pools["kv"].num_bytes + layout.pools["embedding"].num_bytes
    used = H200.total_bytes - H200.free_bytes
    assert 100 * GIB < taken < 0.9 * H200.total_bytes - used, "the rest is for contexts, activations and logits"
    assert layout.num_rows == 256 and layout.pools["embedding"].num_pages * 32 == 131072
    half = plan_layout(on_cuda(gpu_memory_utilization=0.45), QWEN_7B, "bfloat16", H200)
    assert layout.pools["kv"].num_bytes - half.pools["kv"].num_bytes == pytest.approx(0.45 * H200.total_bytes, rel=0.01)


def test_on_cuda_a_steps_experts_leave_less_for_kv() -> None:
    facts = msgspec.structs.replace(QWEN_7B, step_bytes=4 * GIB)
    without, with_experts = (plan_layout(on_cuda(), one, "bfloat16", H200).pools["kv"].num_bytes for one in (QWEN_7B, facts))
    assert without - with_experts == pytest.approx(1.25 * 4 * GIB, rel=0.001)


def on_host(gib: float, facts: ModelFacts = QWEN_7B, **memory: object) -> tuple[int, int]:
    """(KV tokens, embedding tokens) with ``gib`` available, 15 GiB of it for the weights."""
    config = RuntimeConfig(memory=MemorySection(**memory))  # type: ignore[arg-type]
    facts = msgspec.structs.replace(facts, weight_bytes=15 * GIB)
    pools = plan_layout(config, facts, "bfloat16", HostRoom(int(gib * GIB), 1 << 60)).pools
    return pools["kv"].num_pages * 16, pools["embedding"].num_pages * 32


def test_on_the_host_pools_take_a_share_of_what_is_available() -> None:
    kv, embedding = on_host(15 + 4 * 10)
    assert kv * 57344 + embedding * 7168 == pytest.approx(10 * GIB, rel=0.01), "a quarter of what the weights leave"
    assert embedding * 7168 == pytest.approx(0.02 * 10 * GIB, rel=0.01)
    assert on_host(15 + 2 * 4) == (65536, 16384), "running requests need so many"
    assert 15 << 10 < on_host(15 + 2 * 2)[0] < 65536, "half of what the weights leave, where memory is scarce"
    assert on_host(10) == on_host(0) == (32768, 16384), "never less than one context"
    assert on_host(4000)[0] == pytest.approx(65536 + 7.5 * GIB / 57344, rel=0.001), "half of the weights: the start stays quick"
    assert on_host(4000, msgspec.structs.replace(QWEN_7B, kv_page_bytes=16 * 512)) == (16 * 32768, 131072), "all that will be filled"
    assert on_host(4000, kv_tokens=1600, embedding_tokens=320) == (1600, 320)
    assert on_host(4000, kv_tokens=1600) == (1600, 131072)
    shared = HostRoom(memory_bytes=4000 * GIB, shared_bytes=1 * GIB)
    assert plan_layout(RuntimeConfig(), QWEN_7B, "bfloat16", shared).pools["kv"].num_pages * 16 == 32768


def test_wide_rows_of_embeddings_are_fewer() -> None:
    """As a model with deepstack has them."""
    for row_bytes, least, most in ((8192, 16384, 131072), (32768, 16384, 32768), (1 << 17, 16384, 16384)):
        facts = msgspec.structs.replace(QWEN_7B, embedding_row_bytes=row_bytes)
        assert (on_host(0, facts)[1], on_host(4000, facts)[1]) == (least, most)
        layout = plan_layout(RuntimeConfig(), facts, "bfloat16", HostRoom(4000 << 30, 1 << 60))
        assert layout.pools["embedding"].num_bytes == most * row_bytes
        device = plan_layout(on_cuda(), facts, "bfloat16", H200).pools
        assert device["embedding"].num_pages == most // 32
        assert device["kv"].num_bytes + device["embedding"].num_bytes < 0.9 * H200.total_bytes - (H200.total_bytes - H200.free_bytes)


def test_short_contexts_need_no_large_pool() -> None:
    facts = msgspec.structs.replace(QWEN_7B, max_context=128)
    assert on_host(4000, facts)[0] == 64 * 128, "as many as there are rows"
    assert on_host(0, facts, max_sequences=1)[0] == 128


def test_what_is_configured_is_taken_on_cuda_too() -> None:
    layout = plan_layout(on_cuda(kv_tokens=1600, embedding_tokens=320, max_sequences=5), QWEN_7B, "bfloat16", H200)
    assert (layout.pools["kv"].num_pages, layout.pools["embedding"].num_pages, layout.num_rows) == (100, 10, 5)


def test_a_device_without_room_for_one_context_is_refused() -> None:
    small = DeviceRoom(total_bytes=24 * GIB, free_bytes=5 * GIB)
    with pytest.raises(ConfigError, match=r"cuda has 5120 of 24576 MiB free .* 0 tokens of KV cache, one context has 32768"):
        plan_layout(on_cuda(), QWEN_7B, "bfloat16", small)


def test_status_says_what_the_model_is_computed_on(run: RunDirectory) -> None:
    assert compute_of(run) is None
    config = RuntimeConfig(model=ModelSection(device="cuda:1"), memory=MemorySection(kv_dtype="int8"))
    write_layout(run.path, plan_layout(RuntimeConfig(), FACTS, "float32"))
    assert compute_of(run) == ComputeReport("cpu", "float32", "float32", weights="float32")
    write_layout(run.path, msgspec.structs.replace(plan_layout(config, FACTS, "bfloat16"), sharing="MPS"))
    assert compute_of(run) == ComputeReport("cuda:1", "bfloat16", "int8", "MPS", weights="bfloat16")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device = \"{name}\""):
        parse_config(f'[model]\ndevice = "{name}"')


def test_each_device_has_a_kv_pool() -> None:
    """They share what one would have."""
    room = HostRoom(24 * GIB, 1 << 60)
    one = plan_layout(RuntimeConfig(), QWEN_7B, "bfloat16", room)
    two = plan_layout(parse_config('[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'), QWEN_7B, "bfloat16", room)
    assert [*two.pools] == ["media", "patch", "embedding", "kv", "kv.1"] and two.pools["kv"] == two.pools["kv.1"]
    assert two.pools["kv"].num_pages < one.pools["kv"].num_pages <= 2 * two.pools["kv"].num_pages + 1
    assert two.plan_slot_bytes == one.plan_slot_bytes, "plans name no KV pages"


WINDOWED = msgspec.structs.replace(  # as Gemma 4 31B, whose contexts are 8k
    FACTS,
    kv_page_bytes=16 * 880 << 10,
    window_page_bytes=16 * 800 << 10,
    window_tokens=1024,
    window_chunk_tokens=1120,
    max_context=8192,
)


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    def pools(text: str = "", facts: ModelFacts = WINDOWED) -> dict[str, tuple[int, int]]:
        found = plan_layout(parse_config(text), facts, "bfloat16", HostRoom(32 * GIB, 1 << 60)).pools
        return {name: (pool.num_pages * 16, pool.page_bytes) for name, pool in found.items() if name.startswith(("kv", "window"))}

    pair, of_row = 2 * 1024 + 1120 + 8 * 16, 1024 + 64
    assert pools("[memory]\nkv_tokens = 4096\n") == {"kv": (4096, 16 * 80 << 10), "window": (pair, 16 * 800 << 10)}, "a guidance pair"
    assert pools("[memory]\nkv_tokens = 2048\n")["window"][0] == 2048
    for context in (8192, 32768):
        facts = msgspec.structs.replace(WINDOWED, max_context=context)
        windows = [pools(f"[memory]\nkv_tokens = 65536\nmax_sequences = {rows}\n", facts)["window"][0] for rows in (1, 8, 64)]
        assert windows == [pair, pair + 7 * of_row, 32768], "all rows' windows, or those of requests that are as long as two"
        assert pools("[memory]\nkv_tokens = 262144\n", facts)["window"][0] == pair + 63 * of_row
    found, whole = pools(), pools(facts=msgspec.structs.replace(WINDOWED, window_page_bytes=0))
    assert set(whole) == {"kv"} and whole["kv"][1] == 16 * 880 << 10
    assert found == pools('[cache]\ndir = "/var/cache/mmrt"\n')
    assert found["kv"][0] > 1.8 * whole["kv"][0] and found["window"][0] > 0.9 * whole["kv"][0]
    taken = [sum(tokens // 16 * page for tokens, page in each.values()) for each in (found, whole)]
    assert abs(taken[0] - taken[1]) < 16 * 880 << 10, "of the same memory"
    devices = '[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'
    both, packed = pools(devices), pools(f'{devices}[memory]\nkv_transfer_dtype = "int8"\n')
    assert both.keys() == {"kv", "window", "kv.1", "window.1"} and both["kv.1"] == both["kv"] and both["window.1"] == both["window"]
    assert set(packed) == {"kv", "kv.1"}, "whole pages are packed"
    assert set(pools(facts=msgspec.structs.replace(WINDOWED, max_context=3000))) == {"kv"}, "a row would have as many"


def test_where_all_layers_have_a_window_kv_pages_are_places_alone() -> None:
    """As Mistral 7B v0.1's."""
    facts = msgspec.structs.replace(
        FACTS, kv_page_bytes=16 << 17, window_page_bytes=16 << 17, window_tokens=4096, window_chunk_tokens=4096, max_context=32768
    )

    def pools(gib: float, text: str = "", facts: ModelFacts = facts) -> list[tuple[str, int, int]]:
        found = plan_layout(parse_config(text), facts, "bfloat16", HostRoom(int(gib * GIB), 1 << 60)).pools
        return [(name, pool.num_pages * 16, pool.page_bytes) for name, pool in found.items() if name.startswith(("kv", "window"))]

    (one,) = pools(40, facts=msgspec.structs.replace(facts, window_page_bytes=0))
    assert pools(40) == [("kv", 8 * one[1], 64), ("window", one[1], 16 << 17)], "as many short requests, and eight times as many long"
    pair = 2 * 4096 + 4096 + 8 * 16
    assert [tokens for _, tokens, _ in pools(40, f"[memory]\nkv_tokens = {pair}\n")] == [8 * pair, pair]
    assert [tokens for _, tokens, _ in pools(40, f"[memory]\nkv_tokens = {pair - 16}\n")] == [pair - 16] * 2, "a row could not go on"
    assert [tokens for _, tokens, _ in pools(40, "[memory]\nkv_tokens = 32768\nmax_sequences = 2\n")] == [131072, 32768]
    assert [tokens for _, tokens, _ in pools(40, "[memory]\nkv_tokens = 65536\nmax_sequences = 1\n")] == [65536] * 2, "one pair"
    for num_rows in (1, 2, 30):
        places, held = (tokens for _, tokens, _ in pools(128, f"[memory]\nmax_sequences = {num_rows}\n"))
        assert places >= max(held, 65536), "each page can be found again, and a pair has room"
    assert facts.kv_bytes(32768, 16) == (4096 + 16) << 17


def test_what_a_request_keeps() -> None:
    assert WINDOWED.kv_bytes(8192, 16) == (8192 * 80 + (1024 + 16) * 800) << 10, "1.4 GiB"
    assert WINDOWED.kv_bytes(1000, 16) == 63 * WINDOWED.kv_page_bytes


HYBRID = msgspec.structs.replace(FACTS, state_bytes=8 << 20, log_bytes=4 << 20, state_grid=16)


def test_states_have_pools_of_their_own() -> None:
    def pools(gib: float, text: str = "") -> dict[str, int]:
        found = plan_layout(parse_config(text), HYBRID, "bfloat16", HostRoom(int(gib * GIB), 1 << 60)).pools
        return {name: pool.num_pages for name, pool in found.items() if name.startswith(("state", "log"))}

    assert pools(100) == {"state": 32 + 64, "log": 16}, "the most, and what half a GiB has room for"
    assert pools(0) == {"state": 4 + 2, "log": 2}, "a guidance pair, and what it begins from"
    assert 2 < pools(2.0)["log"] < 16
    assert pools(100, "[memory]\nmax_sequences = 40\nprefix_cache = false\n") == {"state": 80, "log": 40}
    assert pools(12, "[memory]\nmax_sequences = 30\n") == {"state": 60 + 21, "log": 30}, "what is left of the share"
    two = pools(100, '[actors]\nlayout = "EPD@a+EPD@b"\n[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n')
    assert [*two] == ["state", "log", "state.1", "log.1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[memory]\nkv_page_tokens = 32\n", "kv_page_tokens is 32: .* need 16"),
        ("[scheduling]\nprefill_budget_tokens = 8\n", "prefill_budget_tokens is 8: .* need 16 at least"),
    ],
)
def test_runs_that_cannot_keep_states_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_layout(parse_config(text), HYBRID, "bfloat16")
