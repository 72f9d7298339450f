"""Layers with experts: against transformers, in both spellings of files and all formats of weights; what a token's bits depend on."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmrt.cpu_kernels import kernel
from mmrt.models.architecture import MoeConfig, WeightFormat
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.lm import matrices
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.experts import route, sum_by_expert, sum_by_mask
from mmrt.models.lm.feed_forwards import Moe
from mmrt.models.lm.kv_pages import KvPages
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.layer_ops import CpuOperations
from mmrt.tests.models.guarded import Fenced
from mmrt.tests.models.kept import exact, keep
from mmrt.tests.models.logits import our_logits
from mmrt.tests.models.test_text_families import ABSENT, check, close, edit, save

FORMS = ("float32", "bfloat16", "float16", "int8", "int8g", "int4")
HIDDEN = 64


@pytest.mark.parametrize(
    "fields",
    [{"norm_topk_prob": True}, {"decoder_sparse_step": 2, "mlp_only_layers": []}, {"num_experts_per_tok": 8, "mlp_only_layers": []}],
    ids=lambda fields: next(iter(fields)),
)
def test_logits_equal_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = check(tmp_path, save(tmp_path, "qwen3_moe", **fields))
    has_experts = [isinstance(layer.feed_forward, MoeConfig) for layer in config.language.layers]
    assert has_experts == ([False, True, False] if "decoder_sparse_step" in fields else [True, "norm_topk_prob" not in fields, True])


@torch.inference_mode()
def test_eight_rows_at_once(tmp_path: Path) -> None:
    reference = save(tmp_path, "qwen3_moe")
    config = load_model_config(tmp_path)
    ids = torch.randint(0, 300, (8, 30), generator=torch.Generator().manual_seed(4))
    expected = reference(input_ids=ids, use_cache=False).logits
    close(our_logits(tmp_path, config, ids, 21), expected[:, 20:29])


@pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_logits_of_a_row_are_the_same_bits_alone_and_beside_others(tmp_path: Path, form: WeightFormat) -> None:
    save(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    config = load_model_config(tmp_path, weights=form)
    lm = LanguageModel(config, read_weights(tmp_path, config), torch.zeros(64, config.kv_page_bytes(8), dtype=torch.uint8), 8)
    ids, tables = torch.randint(0, 300, (8, 20), generator=torch.Generator().manual_seed(4)), torch.arange(32).view(8, 4)
    places = torch.arange(19).expand(3, -1)
    for row in range(8):
        lm.prefill([Chunk(lm.embed(ids[row, :19]), places, 0, tables[row])])

    def step(rows: Tensor) -> Tensor:
        return lm.decode(ids[rows, 19], torch.full((3, len(rows)), 19), torch.full((len(rows),), 20), tables[rows])

    together = step(torch.arange(8))
    for rows in (torch.tensor([3]), torch.tensor([7, 3]), torch.arange(7, -1, -1)):
        assert torch.equal(step(rows), together[rows])


def test_files_with_one_tensor_for_all_experts(tmp_path: Path) -> None:
    reference = save(tmp_path, "qwen3_moe")
    apart = read_weights(tmp_path, load_model_config(tmp_path))
    assert check_weights(tmp_path, load_model_config(tmp_path)).unread == ()
    reference.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    edit(tmp_path, num_experts=8, num_local_experts=ABSENT)  # as transformers 4 wrote it
    stacked = read_weights(tmp_path, load_model_config(tmp_path))
    assert check_weights(tmp_path, load_model_config(tmp_path)).unread == ()
    assert apart.keys() == stacked.keys() and all(torch.equal(apart[name], stacked[name]) for name in apart)


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _cut(name: str, size: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:size].clone()})


PREFIX = "model.layers.2.mlp."
OURS = "language.layers.2.mlp."


@pytest.mark.parametrize(
    ("stacked", "change", "said"),
    [
        (False, _drop(f"{PREFIX}experts.7.up_proj.weight"), rf"{OURS}experts.7.up_proj.weight' of shape \[48, 64\] is missing"),
        (
            False,
            _cut(f"{PREFIX}experts.3.down_proj.weight", 9),
            r"experts.3.down_proj.weight' has shape \[9, 48\], expected \[64, 48\]",
        ),
        (False, _cut(f"{PREFIX}gate.weight", 4), rf"{OURS}gate.weight' has shape \[4, 64\], expected \[8, 64\]"),
        (True, _cut(f"{PREFIX}experts.gate_up_proj", 6), r"experts.gate_up_proj' has shape \[6, 96, 64\], expected \[8, 96, 64\]"),
        (True, _drop(f"{PREFIX}experts.down_proj"), r"experts.0.down_proj.weight' of shape \[64, 48\] is missing"),
    ],
)
def test_missing_experts_and_wrong_sizes_are_refused_by_name(
    tmp_path: Path, stacked: bool, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    save(tmp_path, "qwen3_moe").save_pretrained(tmp_path, save_original_format=not stacked)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read_weights(tmp_path, load_model_config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'softmax'; other routers"),
        ({"n_group": 4}, "n_group is 4, expected 1"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size is 32, expected 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected an integer from 1 to 8"),
        ({"num_local_experts": ABSENT}, "num_experts is missing"),
        ({"num_experts_per_tok": ABSENT}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"mlp_only_layers": [1.5]}, r"mlp_only_layers is \[1.5\], expected integers"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_routers_of_other_kinds_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    save(tmp_path, "qwen3_moe")
    edit(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


def test_neutral_fields_of_other_routers_are_taken(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_moe")
    edit(tmp_path, scoring_func="softmax", n_group=1, routed_scaling_factor=1.0, n_shared_experts=None)
    assert load_model_config(tmp_path).family == "qwen3_moe"


def test_of_equal_experts_the_first_are_chosen() -> None:
    config = MoeConfig(num_experts=6, top_k=3, expert_size=16)
    logits = torch.tensor([[0.0] * 6, [1.0, 2, 2, 2, 2, 0], [-900.0, -900, 0, -900, -900, -900], [0, 3, 1, 2, 0, 5]])
    routes = route(logits, config)
    assert routes.numbers.tolist() == [[0, 1, 2], [1, 2, 3], [0, 1, 2], [1, 3, 5]]
    torch.testing.assert_close(routes.weights, torch.softmax(logits.gather(1, routes.numbers), 1))
    plain = route(logits.bfloat16(), msgspec.structs.replace(config, renormalise=False))
    torch.testing.assert_close(plain.weights, logits.softmax(1).gather(1, routes.numbers).bfloat16().float(), rtol=0, atol=0)


class Layer:
    """A layer's experts in a format, with everything else in ``dtype``."""

    def __init__(self, path: Path, form: str, dtype: torch.dtype, shared: int = 0, num_experts: int = 8, inner: int = 96) -> None:
        self.config = MoeConfig(num_experts=num_experts, top_k=2, expert_size=inner, shared_size=shared, renormalise=not shared)
        save(path, "qwen3_moe")
        model = load_model_config(path, "float32" if dtype == torch.float32 else "bfloat16")
        layer = msgspec.structs.replace(model.language.layers[0], feed_forward=self.config)
        self.language = msgspec.structs.replace(model.language, layers=(layer,))
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "router": (num_experts, HIDDEN),
            "experts_gate_up": (num_experts * 2 * inner, HIDDEN),
            "experts_down": (num_experts * HIDDEN, inner),
        }
        if shared:
            shapes |= {"shared_gate_up": (2 * shared, HIDDEN), "shared_down": (HIDDEN, shared), "shared_router": (1, HIDDEN)}
        self.exact = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
        self.weights: dict[str, Tensor] = {}
        for name, values in self.exact.items():
            self.weights |= keep(values, str(dtype).removeprefix("torch.") if "router" in name else form, f"layers.0.{name}")
        kv = torch.zeros(1, msgspec.structs.replace(model, language=self.language).kv_page_bytes(8), dtype=torch.uint8)
        self.operations = CpuOperations(self.language, [KvPages(self.language, kv, 8, dtype)])
        self.moe = Moe(self.config, "layers.0.", self.weights, self.operations)
        self.x = torch.randn(700, HIDDEN, generator=generator).to(dtype)

    def sums(self, tokens: slice | Tensor, logits: Tensor) -> Tensor:
        """Of experts that these logits of the router choose."""
        return self.operations.experts(self.x[tokens], logits, self.moe._experts)

    def values(self, name: str) -> Tensor:
        """A matrix as it is kept, float64."""
        return exact(self.weights, f"layers.0.{name}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_the_same_bits_beside_any_others(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    layer = Layer(tmp_path, form if dtype == torch.float32 or form.startswith("int") else "bfloat16", dtype)
    expected = torch.cat([layer.moe(layer.x[row : row + 1]) for row in range(40)])
    for first, last in ((0, 2), (3, 11), (1, 40), (0, 40)):
        assert torch.equal(layer.moe(layer.x[first:last]), expected[first:last]), (first, last)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.moe(layer.x[order]), expected[order])


FORMS_BY_DTYPE = [(form, torch.float32) for form in FORMS] + [(form, torch.bfloat16) for form in ("bfloat16", "int8", "int8g", "int4")]


@pytest.mark.parametrize(("form", "dtype"), FORMS_BY_DTYPE, ids=lambda value: str(value).removeprefix("torch."))
def test_a_row_of_a_step_is_the_same_bits_beside_any_others(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    """Also where an expert has more rows than one kernel multiplies best, and where rows have outliers."""
    layer = Layer(tmp_path, form, dtype, inner=64)
    layer.operations.attentions[0].is_decoding = True
    layer.x[::7, 3] = 90.0
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(80, 8, generator=generator)
    logits[20:, 2] = logits[20:, 5] = 9.0
    logits, rows = logits.to(dtype), torch.arange(80)
    expected = torch.cat([layer.sums(rows[row : row + 1], logits[row : row + 1]) for row in rows])
    for chosen in (rows[:2], rows[3:11], rows[20:], rows, torch.randperm(80, generator=generator)):
        assert torch.equal(layer.sums(chosen, logits[chosen]), expected[chosen])


@pytest.mark.parametrize(("form", "dtype"), FORMS_BY_DTYPE, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 700])
def test_sums_are_exact_but_for_rounding(
    tmp_path: Path, form: str, dtype: torch.dtype, has_kernels: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, prompts, and a processor without kernels; 700 tokens are several calls for all experts."""
    if not has_kernels:
        monkeypatch.setattr(matrices, "most_rows", lambda *values: 0)
        monkeypatch.setattr(matrices.int8_kernels, "most_rows", lambda *values: 0)
        monkeypatch.setattr(matrices.int4_kernels, "has_kernel", lambda values: False)
        monkeypatch.setattr(matrices.int8g_kernels, "has_kernel", lambda values: False)
        monkeypatch.setattr(matrices.panel_kernels, "can_multiply", lambda values: False)
    layer = Layer(tmp_path, form, dtype, inner=64)
    x, logits = layer.x[:num_tokens].double(), torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = torch.einsum("nh,eih->eni", x, layer.values("experts_gate_up").view(8, 128, HIDDEN)).chunk(2, -1)
    outs = torch.einsum("eni,ehi->neh", torch.nn.functional.silu(gate) * up, layer.values("experts_down").view(8, HIDDEN, 64))
    weights = torch.zeros(num_tokens, 8, dtype=torch.float64)
    routes = route(logits, layer.config)
    expected = torch.einsum("ne,neh->nh", weights.scatter_(1, routes.numbers, routes.weights.double()), outs)
    layer.operations.attentions[0].is_decoding = num_tokens == 3
    found = layer.sums(slice(num_tokens), logits)
    assert found.dtype == torch.float32
    error = (found.double() - expected).abs().max() / expected.std()
    limit = {"int8": 0.15, "int8g": 0.15, "int4": 0.15}.get(form, 1e-5 if dtype == torch.float32 else 0.05)
    assert error < limit, float(error)


class Reads:
    """The rows of stored tensors that kernels are led over: name, first row and number of rows, sorted."""

    def __init__(self, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int, int]] = []
        run = kernel.Kernel._run

        def note(self_: kernel.Kernel, num_products: int, num_words: int, words: bytes, num_threads: int) -> None:
            for product in np.frombuffer(words, np.int64).reshape(num_products, num_words).tolist():
                for name, tensor in weights.items():
                    row_bytes, first = tensor.stride(0) * tensor.element_size(), tensor.data_ptr()
                    places = (word - first for word in product[3:])
                    self.found += [(name, place // row_bytes, product[1]) for place in places if 0 <= place < tensor.nbytes]
            run(self_, num_products, num_words, words, num_threads)

        monkeypatch.setattr(kernel.Kernel, "_run", note)

    def take(self) -> list[tuple[str, int, int]]:
        found, self.found = sorted(self.found), []
        return found


@pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
@pytest.mark.parametrize(("form", "dtype"), FORMS_BY_DTYPE, ids=lambda value: str(value).removeprefix("torch."))
def test_a_step_reads_the_experts_that_rows_chose_once_each(
    tmp_path: Path, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(tmp_path, form, dtype, inner=64)
    layer.operations.attentions[0].is_decoding = True
    layer.x[::3, 3] = 90.0  # an outlier: in int8 such a row has two parts
    names = {f"layers.0.experts_{name}": rows for name, rows in (("gate_up", 128), ("down", HIDDEN))}
    stored = {name: part for name, part in layer.weights.items() if name in names}
    reads, generator = Reads(stored, monkeypatch), torch.Generator().manual_seed(3)
    of_expert = sum(stored[name][:rows].nbytes for name, rows in names.items())
    all_alike = torch.tensor([[0, 5, 1, 0, 9, 2, 0, 0.0]]).expand(4, 8)
    for logits in (torch.randn(1, 8, generator=generator), torch.randn(4, 8, generator=generator), all_alike):
        layer.sums(slice(len(logits)), logits.to(dtype))
        found = reads.take()
        chosen = sorted(set(route(logits.to(dtype), layer.config).numbers.flatten().tolist()))
        assert found == sorted((name, rows * number, rows) for name, rows in names.items() for number in chosen)
        num_bytes = sum(stored[name][first : first + rows].nbytes for name, first, rows in found)
        assert num_bytes == len(chosen) * of_expert < 8 * of_expert
    assert chosen == [1, 4]  # of four rows: as many bytes as of one


@pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
@pytest.mark.parametrize("form", FORMS)
def test_a_step_reads_no_byte_of_other_experts(tmp_path: Path, form: str) -> None:
    """They lie in memory that no process may touch."""
    layer = Layer(tmp_path, form, torch.float32, inner=256)
    names = [name for name in layer.weights if "experts" in name]
    fenced = {name: Fenced(layer.weights[name]) for name in names}
    layer.weights |= {name: fence.values for name, fence in fenced.items()}
    layer.moe = Moe(layer.config, "layers.0.", layer.weights, layer.operations)
    logits = torch.zeros(5, 8).index_fill_(1, torch.tensor([3, 4]), 9.0)
    layer.operations.attentions[0].is_decoding = True
    expected = layer.sums(slice(5), logits)
    forbidden = [fence.forbid_others(3 * len(fence.values) // 8, 2 * len(fence.values) // 8) for fence in fenced.values()]
    assert sum(forbidden) > sum(values.nbytes for name, values in layer.weights.items() if name in names) / 2
    assert torch.equal(layer.sums(slice(5), logits), expected)


@pytest.mark.parametrize("num_tokens", [1, 5, 90])
def test_all_experts_under_a_mask_give_the_same(tmp_path: Path, num_tokens: int) -> None:
    """What a CUDA graph has."""
    layer = Layer(tmp_path, "float32", torch.float32)
    silu_mul, experts, x = layer.operations.silu_mul, layer.moe._experts, layer.x[:num_tokens]
    routes = route(x @ layer.weights["layers.0.router"].T, layer.config)
    expected = sum_by_expert(x, routes, experts, silu_mul)
    torch.testing.assert_close(sum_by_mask(x, routes, experts, silu_mul), expected, rtol=1e-5, atol=1e-6)
    unused = [number for number in range(8) if number not in routes.numbers[:1]]
    layer.weights["layers.0.experts_down"].view(8, HIDDEN, -1)[unused] = torch.inf
    first = type(routes)(*(part[:1] for part in routes))
    torch.testing.assert_close(sum_by_mask(x[:1], first, experts, silu_mul), expected[:1], rtol=1e-5, atol=1e-6)


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._now, self._users = 0, 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {part.untyped_storage().data_ptr() for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        found = func(*args, **(kwargs or {}))
        for part in tree_leaves(found):
            storage = part.untyped_storage().data_ptr()
            if storage in self._users or storage not in before:
                self._now += part.untyped_storage().nbytes() if storage not in self._users else 0
                self._users[storage] = self._users.get(storage, 0) + 1
                weakref.finalize(part, self._drop, storage, part.untyped_storage().nbytes())
        self.most = max(self.most, self._now)
        return found

    def _drop(self, storage: int, num_bytes: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._now -= num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_steps_experts_is_estimated(tmp_path: Path, dtype: torch.dtype) -> None:
    """As they are multiplied on a GPU. An estimate may be a quarter too much, and half where the processor multiplies bfloat16."""
    layer = Layer(tmp_path, "float32" if dtype == torch.float32 else "bfloat16", dtype, num_experts=24)
    config = load_model_config(tmp_path, "float32" if dtype == torch.float32 else "bfloat16")
    estimated = msgspec.structs.replace(config, language=layer.language).step_bytes()
    routes = route(torch.randn(300, 24).to(dtype), layer.config)
    with torch.no_grad(), Peak() as peak:
        sum_by_mask(layer.x[:300], routes, layer.moe._experts, layer.operations.silu_mul)
    assert estimated == 64 * 24 * (dtype.itemsize * (3 * 96 + HIDDEN) + 8 * HIDDEN)
    taken = peak.most - 300 * (4 * HIDDEN + 8 * 24)  # of all tokens: their sums, and what their experts count
    assert (0.8 if dtype == torch.float32 else 0.66) * estimated < taken <= estimated, (taken, estimated)
    save(tmp_path, "qwen3")
    assert load_model_config(tmp_path).step_bytes() == 0


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_shared_expert(tmp_path: Path, form: str) -> None:
    """As Qwen2-MoE and Qwen3.5 have it."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    layer = Layer(tmp_path, form, torch.float32, shared=32)
    sizes: dict[str, Any] = {
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    block = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(hidden_size=HIDDEN, norm_topk_prob=False, **sizes)).eval()
    exact = layer.exact
    block.gate.weight.copy_(exact["router"])
    block.experts.gate_up_proj.copy_(exact["experts_gate_up"].view(8, 192, HIDDEN))
    block.experts.down_proj.copy_(exact["experts_down"].view(8, HIDDEN, 96))
    block.shared_expert.gate_proj.weight.copy_(exact["shared_gate_up"][:32])
    block.shared_expert.up_proj.weight.copy_(exact["shared_gate_up"][32:])
    block.shared_expert.down_proj.weight.copy_(exact["shared_down"])
    block.shared_expert_gate.weight.copy_(exact["shared_router"])
    expected = block(layer.x[None])[0]
    error = (layer.moe(layer.x) - expected).abs().max() / expected.abs().max()
    assert error < {"float32": 1e-5, "float16": 1e-3, "bfloat16": 0.01, "int8": 0.03, "int8g": 0.03, "int4": 0.25}[form]


LIMITS: dict[WeightFormat, float] = {"bfloat16": 0.03, "float16": 0.002, "int8": 0.1, "int8g": 0.1, "int4": 0.6}


@pytest.mark.parametrize("form", LIMITS)
@torch.inference_mode()
def test_whole_models_in_narrow_formats(tmp_path: Path, form: WeightFormat) -> None:
    """Of logits whose deviation is 1. Experts that lie near to each other may be exchanged."""
    reference = save(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    config = load_model_config(tmp_path, weights=form)
    weights = read_weights(tmp_path, config)
    stored = {"int8": torch.int8, "int8g": torch.int8, "int4": torch.uint8}.get(form) or getattr(torch, form)
    assert weights["layers.0.experts_down"].dtype == stored and weights["layers.0.router"].dtype == torch.float32
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids, use_cache=False).logits[:, 19:39]
    error = (our_logits(tmp_path, config, ids, 20) - expected).abs() / expected.std()
    assert error.mean() < LIMITS[form], float(error.mean())
