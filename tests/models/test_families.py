"""The interface of families, and what a new one costs: a module of its own and a line of the registry."""

import importlib.util
import inspect
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mmrt.actors.host.media_rules import for_run
from mmrt.actors.video.items import open_item
from mmrt.cli.main import run
from mmrt.media.decoding import DecodingPool
from mmrt.media.limits import UNLIMITED, MediaLimits
from mmrt.media.preprocess import patch_rows, resize
from mmrt.models.config import load_model_config
from mmrt.models.families import registry
from mmrt.models.families.family import Family
from mmrt.models.families.item_check import fault_of
from mmrt.models.families.registry import FAMILIES, family_named, family_of
from mmrt.models.lm.decoder import Chunk
from mmrt.models.lm.language_model import LanguageModel, build_language_model
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.text.tokenizer import Tokenizer
from mmrt.models.towers.dispatch import Towers
from mmrt.models.towers.interface import TowerInput
from mmrt.runtime.bus.messages import Generation, MediaItem, RequestSpec
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.config.sections import MediaSection
from mmrt.runtime.controller.rows.expansion import check_placeholders, expand
from mmrt.runtime.controller.scheduling.budgets import encode_budget
from mmrt.runtime.controller.scheduling.types import Limits
from mmrt.runtime.process.memory_layout import plan_layout
from mmrt.schema.media import MediaSpan
from mmrt.schema.model_facts import ModelFacts

MEMBERS = {name for name in vars(Family) if not name.startswith("_")}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_members_of_the_interface(name: str) -> None:
    family = family_named(name)
    for member in MEMBERS:
        ours = inspect.signature(getattr(family, member)).parameters
        assert list(ours) == list(inspect.signature(getattr(Family, member)).parameters)[1:], member


def home_of(name: str) -> str:
    """The module or package of a family; those of a line of models, as those of text alone, share one."""
    family: Any = family_named(name)
    return str(family.__name__ if isinstance(family, ModuleType) else getattr(family, "home", type(family).__module__))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_s_family_is_imported_and_no_other(name: str, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "model", name)
    assert load_model_config(tmp_path / "model").family == name
    code = "import sys; from mmrt.models.config import load_model_config; load_model_config(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    own = home_of(name)
    assert {home for home in map(home_of, FAMILIES) if home in loaded and not own.startswith(f"{home}.")} == {own}
    assert not loaded & {"torch", "transformers", "tokenizers"}


def test_making_what_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no family 'gpt2'; there are {', '.join(FAMILIES)}$"):
        make_checkpoint("tiny", tmp_path / "model", "gpt2")
    with pytest.raises(ValueError, match="no shape 'huge' of null; there are tiny, small, 3b, 7b$"):
        make_checkpoint("huge", tmp_path / "model", "null")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the toy family, made by the command line. The family is a module of its own, and one line here."""
    module = tmp_path / "modules" / "a_toy_family.py"
    module.parent.mkdir()
    module.write_text((Path(__file__).parent / "toy_family.py").read_text())
    monkeypatch.syspath_prepend(str(module.parent))
    monkeypatch.setitem(registry.FAMILIES, "toy", registry.Entry(lambda: importlib.import_module("a_toy_family"), ("toy",)))
    monkeypatch.delitem(sys.modules, "a_toy_family", raising=False)
    assert run(["model", "make", "toy-toy", str(tmp_path / "toy")]) == 0
    return tmp_path / "toy"


def test_a_new_family_s_prompts(toy: Path) -> None:
    """Its media rules, its expansion and its positions, through what the gateway, video and the controller call."""
    config = load_model_config(toy)
    family = family_of(config)
    assert config.media_kinds == ("image",) and for_run(config, MediaSection()).media_kinds == ("image",)
    tile = config.placeholder_id("image")
    ids = [*Tokenizer.load(toy).encode("<|im_start|>see"), tile, 5, 6]
    item = family.image_item(config, 100, 50)
    assert item.num_tokens == 7 and item.segments[0].num_rows == 54 and fault_of(config, "image", item) == ""
    limits = Limits(
        num_rows=1, max_context=512, kv_page_tokens=16, num_kv_pages=8, media_page_bytes=4096, num_media_pages=8,
        patch_page_bytes=256 * 768, num_patch_pages=8, embedding_page_tokens=32, num_embedding_pages=8, placeholder_ids={"image": tile},
    )  # fmt: skip
    spec = RequestSpec(Generation("r"), ids, [MediaItem("image", 9)], 4)
    check_placeholders(spec, limits)
    prompt, (start,) = expand(spec, [item], limits)
    assert prompt == [*ids[:-3], *[tile] * 3, *config.item_text_ids, *[tile] * 3, 5, 6]
    places, delta = family.positions(config, len(prompt), [MediaSpan(start, item)])
    assert places[0].tolist() == [*range(start), *[start] * 7, start + 1, start + 2] and delta == -6


def test_a_new_family_s_picture_on_its_way_to_the_encoder(toy: Path, load: Callable[..., Any]) -> None:
    """Its views are cut, and each of its tokens has a row: those of its text are the decoder's."""
    config, weights = load(toy)
    pixels = np.random.default_rng(1).integers(0, 256, (40, 96, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    with DecodingPool() as pool:
        item = open_item("image", file, config, MediaLimits(), UNLIMITED, pool)
        rows = np.concatenate(list(item.rows(0)))
    (segment,) = item.item.segments
    resized = resize(pixels, 48, 96)
    rules = config.vision_rules
    expected = np.concatenate([patch_rows(np.ascontiguousarray(resized[None, :, :, x : x + 48]), rules) for x in (0, 48)])
    np.testing.assert_array_equal(rows, expected)
    towers = Towers(config, weights)
    (found,) = towers.encode([TowerInput("image", rows, segment.grid, ids=segment.ids)])
    left, right = torch.from_numpy(rows.reshape(2, 9, 768).mean(1)).float() @ weights["vision.project"].T
    torch.testing.assert_close(found, torch.stack([left, weights["embed"][config.item_text_ids[0]], right]))


def test_a_new_family_s_tensors_and_towers(toy: Path, load: Callable[..., Any]) -> None:
    config, weights = load(toy)
    rows = np.random.default_rng(0).integers(0, 256, (18, 768), dtype=np.uint8)
    towers = Towers(config, weights)
    (output,) = towers.encode([TowerInput("image", rows, (1, 3, 6))])
    expected = torch.from_numpy(rows.reshape(2, 9, 768).mean(1)).float() @ weights["vision.project"].T
    torch.testing.assert_close(output, expected)
    with pytest.raises(ValueError, match="no tower for audio"):
        towers.encode([TowerInput("audio", rows, (18, 0, 0))])
    lm = build_language_model(config, weights, torch.zeros(4, config.kv_page_bytes(16), dtype=torch.uint8), 16)
    lm.prefill([Chunk(output, torch.arange(2).expand(3, -1), 0, torch.arange(4))])
    logits = lm.decode(torch.tensor([5]), torch.full((3, 1), 2), torch.tensor([3]), torch.arange(4)[None])
    assert logits.shape == (1, 320) and logits.isfinite().all()


def expected_logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of each of a prompt's tokens (shape [tokens, 320]), by dense attention with a mask and the parts of transformers' Llama."""
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    weights = {name.removeprefix("toy/"): value.float() for name, value in load_file(checkpoint / "model.safetensors").items()}
    turns = llama.LlamaRotaryEmbedding(llama.LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_theta=10000.0))
    cos, sin = turns(torch.zeros(1), torch.arange(len(ids))[None])
    behind = torch.arange(len(ids))[:, None] - torch.arange(len(ids))

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"language.{name}.weight"].T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        rms = llama.LlamaRMSNorm(32, 1e-6)
        rms.weight = torch.nn.Parameter(weights[f"language.{name}.weight"])
        return rms(x)  # type: ignore[no-any-return]

    stream, kept = weights["language.embed_tokens.weight"][ids], []
    for layer in range(4):
        place = f"layers.{layer}"
        x = norm(stream, f"{place}.input_layernorm")
        q = project(x, f"{place}.self_attn.q_proj").view(-1, 2, 16).transpose(0, 1)[None]
        if layer < 2:
            kept.append([project(x, f"{place}.self_attn.{it}_proj").view(-1, 1, 16).transpose(0, 1)[None] for it in "kv"])
            q, kept[layer][0] = llama.apply_rotary_pos_emb(q, kept[layer][0], cos, sin)
        else:
            q, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
        k, v = kept[layer % 2]
        seen = (behind >= 0) & (behind < (24 if layer % 2 == 0 else len(ids)))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), seen)
        stream = stream + project(mixed[0].transpose(0, 1).flatten(1), f"{place}.self_attn.o_proj")
        x = norm(stream, f"{place}.post_attention_layernorm")
        gate = torch.nn.functional.silu(project(x, f"{place}.mlp.gate_proj"))
        stream = stream + project(gate * project(x, f"{place}.mlp.up_proj"), f"{place}.mlp.down_proj")
    return project(norm(stream, "norm"), "embed_tokens")


@torch.inference_mode()
def test_a_new_family_s_windows_and_shared_keys(toy: Path, load: Callable[..., Any]) -> None:
    """Pages of layers with a window lie in a pool of their own; layers whose keys are another's have none."""
    config, weights = load(toy)
    whole, apart = config.kv_page_bytes(16), config.window_page_bytes(16)
    assert (config.language.num_kv_layers, config.language.last_owner, 2 * apart) == (2, 1, whole)
    ids = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(1))
    expected, places, table = expected_logits(toy, ids), torch.arange(90).expand(3, -1), torch.arange(6)
    pools = [torch.zeros(6, num_bytes, dtype=torch.uint8) for num_bytes in (whole - apart, apart)]
    lm = LanguageModel(config, weights, pools[0], 16, windows=pools[1])
    for start, end in ((0, 7), (7, 50), (50, 80)):
        chunk = Chunk(lm.embed(ids[start:end]), places[:, start:end], start, table, ids=ids[start:end], window_table=table.clone())
        hidden = lm.prefill(
            [chunk], [0] if start != 7 else []
        )  # a prompt whose logits nobody wants ends behind the last layer with keys
        for found in hidden:
            torch.testing.assert_close(lm.logits(found), expected[start:end], rtol=1e-4, atol=5e-5)
    for at in range(80, 90):
        table_of_windows = table[None].clone()
        table_of_windows[:, : (at - 23) // 16] = 5 - at % 2  # no token of these pages is in a window
        logits = lm.decode(
            ids[at : at + 1], places[:, at : at + 1], torch.tensor([at + 1]), table[None], window_tables=table_of_windows
        )
        torch.testing.assert_close(logits[0], expected[at], rtol=1e-4, atol=5e-5)


def test_the_runtime_takes_sizes_from_a_new_family(toy: Path) -> None:
    config = load_model_config(toy)
    facts = ModelFacts(config.kv_page_bytes(16), config.embedding_row_bytes(), config.max_context, config.patch_row_bytes())
    assert plan_layout(RuntimeConfig(), facts, config.dtype).pools["patch"].page_bytes == 256 * 768
    assert encode_budget(0, config.rows_per_token()).low == 256 * 9
