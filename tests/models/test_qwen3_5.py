"""Qwen3.5's decoder against transformers, over pages that the tests give: base and log, cuts, steps done again, experts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrt.cpu_kernels import kernel
from mmrt.models.architecture import ModelConfig, MoeConfig, WeightFormat
from mmrt.models.checkpoint.weights import check_weights, read_weights
from mmrt.models.config import load_model_config
from mmrt.models.errors import CheckpointError
from mmrt.models.families.registry import family_of
from mmrt.models.lm.decoder import Chunk, StateRefs, StateRows
from mmrt.models.lm.delta_pages import StatePools
from mmrt.models.lm.language_model import LanguageModel
from mmrt.models.lm.matrices import matrix_of
from mmrt.models.make.checkpoint import make_checkpoint
from mmrt.models.state_layout import GRID, border_before, state_layout
from mmrt.models.towers.dispatch import Towers
from mmrt.tests.models.conftest import Loaded, load_checkpoint
from mmrt.tests.models.test_oracle import reference_logits, reference_positions

VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "initializer_range": 0.06,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def save(path: Path, is_text: bool = True, ids: Mapping[str, int] = MappingProxyType({}), **fields: Any) -> Any:
    """Write a random checkpoint of transformers, and return its model. Decays are spread as trained ones are."""
    import transformers

    torch.manual_seed(0)
    text, name = {**SIZES, **fields}, "qwen3_5_moe" if "num_experts" in fields else "qwen3_5"
    if is_text:
        config = transformers.AutoConfig.for_model(f"{name}_text", **text)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    else:
        config = transformers.AutoConfig.for_model(name, text_config=text, vision_config=VISION, **ids)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.1 * torch.randn_like(weight))
            elif name.endswith("A_log"):
                weight.copy_(torch.linspace(-4, 2.5, weight.numel()))
            elif name.endswith("dt_bias"):
                weight.copy_(torch.randn_like(weight) - 3)
            elif name.endswith((".gate.weight", ".shared_expert_gate.weight")):
                weight.mul_(5)
    model.save_pretrained(path)
    return model


class Rows:
    """Some rows of a model, with pages as a run has them: two bases and a log each, one block table. Pages begin as garbage."""

    def __init__(self, path: Path, num_rows: int, dtype: str = "float32", weights: WeightFormat = "auto") -> None:
        self.config: ModelConfig = load_model_config(path, dtype, weights=weights)  # type: ignore[arg-type]
        layout = state_layout(self.config)
        assert layout is not None
        generator = torch.Generator().manual_seed(5)

        def garbage(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

        pages = 40
        self.kv = torch.zeros(num_rows * pages, self.config.kv_page_bytes(GRID), dtype=torch.uint8)
        self.pools = StatePools(garbage(2 * num_rows, layout.base_bytes), garbage(num_rows, layout.log_bytes))
        self.lm = LanguageModel(self.config, read_weights(path, self.config), self.kv, GRID, states=self.pools)
        self.tables = torch.randperm(num_rows * pages, generator=generator).view(num_rows, pages)
        self.slots = [0] * num_rows
        self.lengths = [0] * num_rows

    def base(self, row: int, other: bool = False) -> int:
        return 2 * row + (self.slots[row] ^ other)

    def chunk(self, row: int, ids: torch.Tensor, start: int, end: int, is_last: bool) -> Chunk:
        refs = StateRefs(self.base(row) if start else -1, self.base(row, other=True), row if is_last else -1)
        return Chunk(self.lm.embed(ids[start:end]), torch.arange(start, end).expand(3, -1), start, self.tables[row], refs)

    def prefill(self, row: int, ids: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """Logits of a prompt in chunks that end at ``cuts``."""
        found = []
        ends = (*cuts, len(ids))
        for start, end in zip((0, *cuts), ends, strict=True):
            hidden = self.lm.prefill([self.chunk(row, ids, start, end, end == len(ids))], [0])
            self.slots[row] ^= 1
            self.lengths[row] = end
            found.append(self.lm.logits(hidden[0]))
        return torch.cat(found)

    def forward(self, ids: torch.Tensor, some: Sequence[int] = ()) -> tuple[torch.Tensor, StateRows]:
        """A step that is not counted, of all rows or of some."""
        rows = list(some or range(len(self.lengths)))
        lengths = torch.tensor(self.lengths)[rows] + 1
        states = StateRows(torch.tensor([self.base(row) for row in rows]), torch.tensor(rows))
        return self.lm.decode(ids[rows], (lengths - 1).expand(3, -1), lengths, self.tables[rows], states), states

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        logits, states = self.forward(ids)
        full = [row for row, length in enumerate(self.lengths) if (length + 1) % GRID == 0]
        if full:
            chosen = StateRows(states.bases[full], states.logs[full])
            self.lm.fold([self.lengths[row] + 1 for row in full], chosen, [self.base(row, other=True) for row in full])
        for row in full:
            self.slots[row] ^= 1
        self.lengths = [length + 1 for length in self.lengths]
        return logits


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def some_ids(num_rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def check(path: Path, reference: Any, num_steps: int = 40) -> ModelConfig:
    """Compare prompts of several lengths, in one chunk and in several, and then steps of all rows together, with transformers."""
    prompts = {1: (), 2: (), 15: (), 16: (), 17: (16,), 37: (), 64: (16, 48), 150: (64, 80, 144), 201: ()}
    rows = Rows(path, len(prompts))
    ids = some_ids(len(prompts), max(prompts) + num_steps)
    expected = reference(input_ids=ids, use_cache=False).logits
    for row, (length, cuts) in enumerate(prompts.items()):
        close(rows.prefill(row, ids[row, :length], cuts), expected[row, :length])
    everyone = torch.arange(len(prompts))
    for _ in range(num_steps):
        at = torch.tensor(rows.lengths)
        close(rows.step(ids[everyone, at]), expected[everyone, at])
    return rows.config


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_logits_equal_those_of_transformers(tmp_path: Path, tie: bool) -> None:
    config = check(tmp_path, save(tmp_path, tie_word_embeddings=tie))
    assert config.family == "qwen3_5" and config.language.tie_embeddings == tie and config.media_kinds == ()
    assert config.language.num_kv_layers == 2 and config.kv_page_bytes(16) == 2 * 16 * 2 * 2 * 32 * 4
    assert config.language.ropes[0].axes == (0, 1, 2, 0, 1, 2, 0, 0)


def test_logits_with_experts_equal_those_of_transformers(tmp_path: Path) -> None:
    config = check(tmp_path, save(tmp_path, **EXPERTS), num_steps=20)
    assert config.family == "qwen3_5_moe" and config.media_kinds == ()
    expected = MoeConfig(num_experts=6, top_k=2, expert_size=24, shared_size=40)
    assert {layer.feed_forward for layer in config.language.layers} == {expected}


def test_as_many_key_heads_as_value_heads_and_layers_in_another_order(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
    save_fields = {"linear_num_key_heads": 4, "num_hidden_layers": 5, "layer_types": kinds, "linear_conv_kernel_dim": 3}
    check(tmp_path, save(tmp_path, **save_fields))


def test_a_made_checkpoint_is_read_by_transformers(tmp_path: Path) -> None:
    import transformers

    make_checkpoint("tiny", tmp_path / "made", "qwen3_5")
    made, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check(tmp_path / "made", made.eval())


@torch.inference_mode()
@pytest.mark.parametrize(("step", "experts"), [(16, {}), (48, {}), (4096, {}), (32, EXPERTS)], ids=str)
def test_a_checkpoint_with_a_tower_that_transformers_wrote(tmp_path: Path, step: int, experts: dict[str, int]) -> None:
    """Logits behind a picture and a clip; the files have a draft head too, which is not read."""
    make_checkpoint("tiny", tmp_path / "made", "qwen3_5")
    ids = {name: id for name, id in json.loads((tmp_path / "made/config.json").read_text()).items() if name.endswith("_token_id")}
    model = save(tmp_path, is_text=False, ids=ids, vocab_size=1216, **experts)
    for file in (tmp_path / "made").glob("*.json"):
        if file.name not in ("config.json", "generation_config.json"):
            (tmp_path / file.name).write_text(file.read_text())
    extra = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    save_file(extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config, weights = load_checkpoint(tmp_path)
    family = family_of(config)
    loaded = Loaded(tmp_path, config, family, weights, Towers(config, weights), model)
    parts = [3, family.image_item(config, 75, 331), 4, family.video_item(config, 6, 60, 90, 2.0), 2]
    prompt = loaded.build_prompt(parts, seed=1)
    positions, _ = family.positions(config, len(prompt.ids), prompt.spans)
    np.testing.assert_array_equal(positions, reference_positions(loaded, prompt)[0].numpy())
    expected = reference_logits(loaded, prompt, [5])
    lm, table = loaded.language_model(), torch.arange(64)
    for chunk in loaded.prompt_chunks(lm, prompt, torch.from_numpy(positions), table, step):
        lm.prefill([chunk])
    place = torch.from_numpy(positions[:, -1:])
    logits = lm.decode(torch.tensor(prompt.ids[-1:]), place, torch.tensor([len(prompt.ids)]), table[None])
    close(logits[0], expected[len(prompt.ids) - 1])


@torch.inference_mode()
def test_rope_axes_equal_those_of_transformers(tmp_path: Path) -> None:
    """Positions of a picture: no two axes are alike."""
    reference = save(tmp_path)
    rows, ids = Rows(tmp_path, 1), some_ids(1, 48)
    places = torch.stack([torch.arange(48), torch.arange(48) * 3 % 7, torch.arange(48) * 5 % 11])
    chunk = rows.chunk(0, ids[0], 0, 48, is_last=True)
    hidden = rows.lm.prefill([Chunk(chunk.embeds, places, 0, chunk.block_table, chunk.state)], [0])
    theirs = reference(input_ids=ids, position_ids=places.unsqueeze(1), use_cache=False).logits
    close(rows.lm.logits(hidden[0]), theirs[0])


@torch.inference_mode()
def test_chunks_of_a_call_are_as_chunks_alone(tmp_path: Path) -> None:
    """Each row has the bits that it would have alone, as far as products do: int8's do."""
    save(tmp_path)
    ids = some_ids(3, 80)
    together, alone = Rows(tmp_path, 3, "bfloat16", "int8"), Rows(tmp_path, 3, "bfloat16", "int8")
    lengths = (40, 17, 64)
    together.lm.prefill([together.chunk(row, ids[row, :length], 0, length, True) for row, length in enumerate(lengths)])
    for row, length in enumerate(lengths):
        alone.lm.prefill([alone.chunk(row, ids[row, :length], 0, length, True)])
    for pools in zip(together.pools, alone.pools, strict=True):
        assert torch.equal(*pools)
    assert torch.equal(together.kv, alone.kv)


ALL_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
CUTS = ((128,), (16, 64, 144), (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192))


@torch.inference_mode()
def test_cuts_on_the_grid_change_no_bit_of_a_model(tmp_path: Path) -> None:
    """The states of the linear layers, whose input depends on cuts no more than int8 products do: not at all. Attention comes last."""
    save(tmp_path, num_hidden_layers=4, layer_types=ALL_LINEAR)
    ids = some_ids(1, 200)[0]
    whole = Rows(tmp_path, 1, "bfloat16", "int8")
    whole.prefill(0, ids)
    for cuts in CUTS:
        cut = Rows(tmp_path, 1, "bfloat16", "int8")
        cut.prefill(0, ids, cuts)
        assert torch.equal(cut.pools.bases[cut.base(0)], whole.pools.bases[whole.base(0)]), cuts
        assert torch.equal(_counted(cut), _counted(whole)), cuts


def _counted(rows: Rows) -> torch.Tensor:
    """The log's entries of the tokens behind the base, and all columns."""
    delta = rows.lm._delta
    pages = delta._pages  # type: ignore[union-attr]
    length = rows.lengths[0]
    found = [part.flatten().float() for layer in range(3) for part in pages.known(layer, 0, border_before(length), length)]
    return torch.cat([*found, *(pages.columns(layer, 0, length - 3, length).flatten().float() for layer in range(3))])


def test_a_chunk_that_starts_off_the_grid_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    rows, ids = Rows(tmp_path, 1), some_ids(1, 30)[0]
    with pytest.raises(ValueError, match="starts at token 13, expected a multiple of 16"):
        rows.lm.prefill([rows.chunk(0, ids, 13, 30, True)])


def test_a_chunk_without_tokens_or_without_the_state_before_it_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    rows, ids = Rows(tmp_path, 1), some_ids(1, 30)[0]
    with pytest.raises(ValueError, match="tokens 16 to 16, expected one at least"):
        rows.lm.prefill([rows.chunk(0, ids, 16, 16, True)])
    chunk = rows.chunk(0, ids, 16, 30, True)
    with pytest.raises(ValueError, match="starts at token 16 without the state of those before it"):
        rows.lm.prefill([Chunk(chunk.embeds, chunk.positions, 16, chunk.block_table, StateRefs(-1, 1, 0))])


@torch.inference_mode()
def test_a_prompt_of_one_token_is_not_prefilled(tmp_path: Path) -> None:
    """Its first step finds nothing, though its pages hold what others have left there."""
    reference = save(tmp_path)
    rows, ids = Rows(tmp_path, 1), some_ids(1, 40)
    expected = reference(input_ids=ids, use_cache=False).logits
    for at in range(40):
        close(rows.step(ids[:, at]), expected[:, at])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_step_that_is_done_again_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    """A step that dies before its commit has written entries that nobody counts, and perhaps a base that nobody takes."""
    save(tmp_path)
    rows, ids = Rows(tmp_path, 2, dtype), some_ids(2, 80)
    for row, length in enumerate((30, 13)):
        rows.prefill(row, ids[row, :length])
    for _ in range(20):
        step_ids = ids[torch.arange(2), torch.tensor(rows.lengths)]
        kept = rows.slots.copy(), rows.lengths.copy()
        first = rows.step(step_ids)
        rows.slots, rows.lengths = kept
        rows.forward(torch.tensor([5, 6]))  # of another token, as a draft that is not accepted
        assert torch.equal(rows.step(step_ids), first)


@torch.inference_mode()
def test_a_plan_that_is_done_again_gives_the_same_bits(tmp_path: Path) -> None:
    save(tmp_path)
    rows, ids = Rows(tmp_path, 1), some_ids(1, 60)[0]
    first = rows.prefill(0, ids, (32,))
    rows.slots[0] ^= 1  # the second chunk again
    hidden = rows.lm.prefill([rows.chunk(0, ids, 32, 60, True)], [0])
    assert torch.equal(rows.lm.logits(hidden[0]), first[32:])


@torch.inference_mode()
def test_without_wanted_chunks_the_last_layer_only_stores(tmp_path: Path) -> None:
    """Also where it is a DeltaNet."""
    save(tmp_path, num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    ids = some_ids(1, 50)[0]
    asked, told = Rows(tmp_path, 1), Rows(tmp_path, 1)
    for rows, wanted in ((asked, [0]), (told, [])):
        rows.lm.prefill([rows.chunk(0, ids, 0, 50, True)], wanted)
    assert torch.equal(asked.kv, told.kv) and torch.equal(asked.pools.bases, told.pools.bases)


def test_weights_in_float32_and_rows_in_turns(tmp_path: Path) -> None:
    """bfloat16 would lose bits of 1 + w; and a head's queries and gates lie apart."""
    save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = load_model_config(tmp_path, "bfloat16")
    weights = read_weights(tmp_path, config)
    torch.testing.assert_close(weights["norm"], 1 + stored["model.norm.weight"], rtol=0, atol=0)
    torch.testing.assert_close(weights["layers.0.A_log"], stored["model.layers.0.linear_attn.A_log"], rtol=0, atol=0)
    both = stored["model.layers.3.self_attn.q_proj.weight"].bfloat16().view(4, 2, 32, 64)
    assert torch.equal(weights["layers.3.qkv"][:128], both[:, 0].flatten(0, 1))
    assert torch.equal(weights["layers.3.gate"], both[:, 1].flatten(0, 1))
    assert weights["layers.0.ba"].dtype == torch.bfloat16


@pytest.mark.parametrize("is_text", [True, False])
def test_files_with_one_tensor_for_all_experts(tmp_path: Path, is_text: bool) -> None:
    """As published ones have it. A configuration without a tower reads the decoder of a checkpoint that has one."""
    reference, found = save(tmp_path / "apart", is_text, **EXPERTS), []
    reference.save_pretrained(tmp_path / "stacked", save_original_format=False)
    for path, num_tensors in ((tmp_path / "apart", 18), (tmp_path / "stacked", 2)):
        config_file = json.loads((path / "config.json").read_text())
        config_file.pop("vision_config", None)
        (path / "config.json").write_text(json.dumps(config_file))
        names = [name for name in load_file(path / "model.safetensors") if ".layers.0.mlp.experts." in name]
        assert len(names) == num_tensors
        config = load_model_config(path)
        assert not [name for name in check_weights(path, config).unread if "visual" not in name]
        found.append(read_weights(path, config))
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


NARROW = {"auto": 1e-5, "int8": 0.2, "int8g": 0.2, "int4": 0.6}  # mean errors, in deviations of logits; experts may be exchanged


@pytest.mark.skipif(kernel.vector_width() is None, reason="this processor has no kernels")
@pytest.mark.parametrize("form", NARROW)
@torch.inference_mode()
def test_a_step_of_a_row_has_the_same_bits_alone_and_beside_others(tmp_path: Path, form: WeightFormat) -> None:
    """Of a model that has layers of all kinds: a DeltaNet, attention, experts."""
    reference = save(tmp_path, **EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_hidden_layers": 4})
    rows, ids = Rows(tmp_path, 5, weights=form), some_ids(5, 60)
    for row in range(5):
        rows.prefill(row, ids[row, : 8 + 9 * row])
    exact, everyone = reference(input_ids=ids, use_cache=False).logits, torch.arange(5)
    for _ in range(4):
        at = torch.tensor(rows.lengths)
        alone, _ = rows.forward(ids[everyone, at], [3])
        together = rows.step(ids[everyone, at])
        assert torch.equal(together[3], alone[0])
        assert ((together - exact[everyone, at]).abs().mean() / exact.std()) < NARROW[form]


@pytest.mark.parametrize("form", ["int8", "int8g", "int4"])
def test_narrow_weights(tmp_path: Path, form: WeightFormat) -> None:
    """Each row of a matrix is what it is in float32, but for a step of its format; what is no matrix stays."""
    save(tmp_path)
    narrow, wide = (read_weights(tmp_path, load_model_config(tmp_path, weights=weights)) for weights in (form, "auto"))  # type: ignore[arg-type]
    for name in ("layers.3.qkv", "layers.3.gate", "layers.0.mixed_z", "layers.0.o"):
        values = matrix_of(narrow, name).product(torch.eye(wide[name].shape[1])).t()
        largest = float(wide[name].abs().max())
        assert 0 < float((values - wide[name]).abs().max()) < largest / (7 if form == "int4" else 100), name
    assert torch.equal(narrow["layers.0.ba"], wide["layers.0.ba"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1: layers without experts are not supported"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], expected \[\]: layers without experts"),
        ({"n_group": 4}, "n_group is 4, expected 1; other routers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_experts_that_are_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    save(tmp_path, **EXPERTS, num_hidden_layers=4)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "decoder_sparse_step": 1, "mlp_only_layers": []}
    file.write_text(json.dumps(config))
    load_model_config(tmp_path)
    file.write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, expected a multiple of linear_num_key_heads"),
        ({"layer_types": ["full_attention"] * 8}, "layer_types has full_attention, expected linear_attention and"),
        ({"layer_types": ["linear_attention"]}, "layer_types is .*expected a list of num_hidden_layers"),
        ({"rope_parameters": {"mrope_section": [11, 11, 10]}}, r"mrope_section is \[11, 11, 10\], expected .* the 4 pairs"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor is 0.3; 9 of a head's 32 values would turn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.03}}, "partial_rotary_factor is 0.03; 0 of a head's 32 values"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(tmp_path)
