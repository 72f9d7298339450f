"""The description of a model as plain numbers: dimensions and token ids, beside those of media (``media_config``).

``families`` makes it from a checkpoint's JSON files; every actor reads it. No torch; msgspec can encode it all.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from ..schema.media import MediaKind
from ..schema.quantization import Quantization
from .item_text import TileTokens, TimeTokens
from .media_config import AudioConfig, AudioRules, VisionConfig, VisionRules
from .text.transcripts import SpeechRules

DType = Literal["float32", "bfloat16"]
WeightFormat = Literal["auto", "float32", "bfloat16", "float16", "int8", "int8g", "int4"]
"""Of the decoder's matrices; auto is the model's dtype."""
KvDType = Literal["auto", "int8", "fp8"]  # of the KV cache; auto is the model's, fp8 is float8_e4m3fn
TransferDType = Literal["auto", "int8", "int4"]  # of KV pages on their way to another pool; auto: as they are

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
KV_ALIGNMENT = 32  # bytes, of a layer's part of a quantized page: see kv_pages
GROUP_ALIGNMENT = 64  # bytes, of a group's part of a page that has several
MASKED_TOKENS = 64  # of a step on a GPU that all experts of a layer multiply at once
LEAST_WINDOW_CHUNK = 512  # tokens: shorter chunks of a prompt take noticeably longer
MOST_PICTURE = 1120  # tokens of a picture that sees itself, as Gemma 4 has it: a chunk holds all of it
PACKED_GROUP = 32  # values with one scale and zero in an int4 page that is packed, or a head if that has no such groups


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A rotary position embedding: pair j of a head turns by position[axes[j]] x theta ** (-j / pairs) / stretch[j]. The leading 2 x
    pairs values of a head turn."""

    theta: float
    axes: tuple[int, ...] = ()  # of each pair: 0 t, 1 h, 2 w; empty: all of a head turns by t
    stretch: tuple[float, ...] = ()  # by which each pair turns more slowly, for a longer context; empty: none does
    factor: float = 1.0  # of cosines and sines
    has_neighbours: bool = False  # values 2 j and 2 j + 1 are pair j in the checkpoint; loading gives them the places of other ropes


def interleaved_axes(section: Sequence[int], pairs: int) -> tuple[int, ...]:
    """``RopeConfig.axes`` where t, h and w take turns while h and w have some of their ``section`` left (M-RoPE, interleaved)."""
    return tuple(pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(pairs))


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """A mixer: attention to earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int = 0  # index into ``LanguageConfig.ropes``
    owner: int = -1  # an earlier layer, whose K and V are attended to; -1: the layer has its own
    bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False
    is_fused: bool = False  # the checkpoint has one matrix for queries, keys and values
    k_is_v: bool = False  # values are what keys are before their norm and rotation: the checkpoint has no matrix for them
    qk_norm: bool = False
    has_joint_norms: bool = False  # an RMSNorm of all query heads together, and one of all key heads
    v_norm: bool = False  # an RMSNorm without weights of each value head
    window: int = 0  # tokens that are attended to, the newest included; 0: all
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    sees_pictures: bool = False  # a picture's tokens are attended to by all of its tokens, within the window
    gated: bool = False  # each value of the output is multiplied by a gate of its token


class DeltaConfig(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """A mixer: gated DeltaNet (Yang et al., 2024). What it keeps of all earlier tokens has a fixed size."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads
    key_dim: int
    value_dim: int
    conv_size: int = 4  # tokens that the convolution sees

    @property
    def mixed_size(self) -> int:
        """Queries, keys and values of a token: what the convolution mixes."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class MlpConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """A feed-forward: an activation of one projection times another projection, projected back."""

    intermediate_size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    is_fused: bool = False  # the checkpoint has one matrix for gate and up

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the activations between its matrices."""
        return (self.intermediate_size,)


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A feed-forward: the weighted sum of the ``top_k`` experts that a router chooses for each token, of ``num_experts``, each as an
    MLP."""

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0  # of an expert that every token has besides, times the sigmoid of a gate; 0: none
    renormalise: bool = True  # the weights of a token's experts are made to sum up to 1
    activation: Literal["silu", "gelu_tanh"] = "silu"

    @property
    def widths(self) -> tuple[int, ...]:
        """As ``MlpConfig.widths``."""
        return (self.expert_size, self.shared_size) if self.shared_size else (self.expert_size,)


class MlpAndExpertsConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlp_and_experts"):
    """A feed-forward: an MLP, and experts beside it, each normed before they are added. Router and experts see the residual stream,
    each by a norm of its own; an expert's weight is multiplied by a number of the expert's (Gemma 4)."""

    mlp: MlpConfig
    experts: MoeConfig

    @property
    def widths(self) -> tuple[int, ...]:
        """As ``MlpConfig.widths``."""
        return (*self.mlp.widths, *self.experts.widths)


FeedForwardConfig = MlpConfig | MoeConfig | MlpAndExpertsConfig


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: its mixer, then its feed-forward, each after an RMSNorm and added to the residual stream. ``has_output_norms``: what is
    added goes through an RMSNorm, too; ``has_input_norms``: whether the stream does before. ``output_scale``: by which what is added is
    multiplied. ``has_scalar``: in the end the stream is multiplied by a number."""

    mixer: AttentionConfig | DeltaConfig
    feed_forward: FeedForwardConfig
    has_output_norms: bool = False
    has_input_norms: bool = True
    output_scale: float = 1.0
    has_scalar: bool = False


class PerLayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs that a layer has of a token by its id, in a table; ``placeholders`` of media count as ``pad_id``."""

    size: int
    vocab_size: int
    pad_id: int = 0
    placeholders: tuple[int, ...] = ()


class KvGroup(NamedTuple):
    """Layers that attend alike, as ``heads`` says: their K and V lie side by side in a page."""

    heads: AttentionConfig
    layers: tuple[int, ...]


class KvPlace(NamedTuple):
    """Where K and V of a layer lie: its group, and its number in that."""

    group: int
    layer: int


class LanguageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: embeddings, layers, a norm and a head."""

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # by which tokens' rows are multiplied, rounded to the model's dtype; not those of media
    logits_divisor: float = 1.0
    final_softcap: float = 0.0  # c, where logits x are tanh(x / c) c; 0: as they are
    per_layer: PerLayerConfig | None = None
    norm_offset: float = 0.0  # added to the weights of all norms but a DeltaNet's own; where it is not 0 they are kept in float32

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """Those of all layers that have K and V of their own; KV pages hold them in this order."""
        groups: dict[tuple[float, ...], KvGroup] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(heads := layer.mixer, AttentionConfig) and heads.owner < 0:
                key = heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.window, heads.scale, heads.sees_pictures
                groups[key] = KvGroup(heads, (*groups[key].layers, index) if key in groups else (index,))
        return tuple(groups.values())

    @property
    def window(self) -> int:
        """Tokens that layers attend to that have a window, the most of all; 0: none has one."""
        return max((group.heads.window for group in self.kv_groups), default=0)

    @property
    def window_chunk(self) -> int:
        """The most tokens of a prompt's chunk where layers with a window have pages of their own."""
        return max(self.window, LEAST_WINDOW_CHUNK, MOST_PICTURE if self.sees_pictures else 0) if self.window else 0

    @property
    def has_windows_apart(self) -> bool:
        """True if pages of layers with a window can lie in a pool of their own: there are such layers."""
        return self.window > 0

    def kv_place(self, index: int) -> KvPlace:
        """Of a layer that attends."""
        mixer = self.layers[index].mixer
        assert isinstance(mixer, AttentionConfig)
        owner = index if mixer.owner < 0 else mixer.owner
        return next(KvPlace(group, its.layers.index(owner)) for group, its in enumerate(self.kv_groups) if owner in its.layers)

    @property
    def sees_pictures(self) -> bool:
        """As in ``AttentionConfig``, of some layer."""
        return any(isinstance(layer.mixer, AttentionConfig) and layer.mixer.sees_pictures for layer in self.layers)

    @property
    def num_kv_layers(self) -> int:
        """Layers with K and V of their own, which KV pages hold."""
        return sum(len(group.layers) for group in self.kv_groups)

    @property
    def last_owner(self) -> int:
        """The last layer that keeps something of a token for later ones: prompts whose logits nobody wants end there."""
        return max(i for i, layer in enumerate(self.layers) if isinstance(layer.mixer, DeltaConfig) or layer.mixer.owner < 0)

    @property
    def heads(self) -> AttentionConfig:
        """How the first layer attends that does: others may have windows, and in some families other heads."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    def turned_size(self, rope: int) -> int:
        """The size of heads that this rotary embedding turns."""
        mixers = (layer.mixer for layer in self.layers)
        return next((it.head_dim for it in mixers if isinstance(it, AttentionConfig) and it.rope == rope), self.heads.head_dim)

    @property
    def delta(self) -> DeltaConfig | None:
        """The DeltaNet of the layers that have one, the same in all; None if there is none."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaConfig)), None)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of all feed-forwards, each once."""
        return tuple(dict.fromkeys(width for layer in self.layers for width in layer.feed_forward.widths))

    @property
    def experts(self) -> tuple[MoeConfig, ...]:
        """Of all feed-forwards that have some, each once."""
        found = (layer.feed_forward for layer in self.layers)
        experts = (each.experts if isinstance(each, MlpAndExpertsConfig) else each for each in found)
        return tuple(dict.fromkeys(each for each in experts if isinstance(each, MoeConfig)))

    @property
    def intermediate_size(self) -> int:
        """Width of the widest feed-forward."""
        return max(self.widths)


class NullConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of the null model, in milliseconds."""

    step_ms: float = 0.0
    prefill_token_ms: float = 0.0


MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for a request's unset sampling fields; fields as in ``messages.Sampling``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about the model that a run needs."""

    family: str
    language: LanguageConfig
    dtype: DType
    weights: WeightFormat = "auto"
    quantization: Quantization | None = None  # of the checkpoint
    kv_dtype: KvDType = "auto"
    max_context: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()
    vision: VisionConfig | None = None  # the towers, for the family alone
    audio: AudioConfig | None = None
    vision_rules: VisionRules | None = None
    audio_rules: AudioRules | None = None
    speech: SpeechRules | None = None  # None: the model is told in words what to do with sounds
    image_token_id: int = -1
    video_token_id: int = -1
    video_is_pictures: bool = False  # its tokens have the id of a picture's: its own stands in no expanded prompt
    audio_token_id: int = -1
    audio_start_token_id: int = -1  # start and end enclose the tokens of a video with its sound track
    audio_end_token_id: int = -1
    vision_start_token_id: int = -1  # start and end enclose a picture, or each frame of a video whose prompt has the frames' times
    vision_end_token_id: int = -1
    times: TimeTokens | None = None
    tiles: TileTokens | None = None
    prompt_texts: tuple[tuple[str, str], ...] = ()  # pieces of a rendered template, and what each is before it becomes tokens
    behind_ids: tuple[int, ...] = ()  # of text that has positions of the medium behind which it stands
    item_text_ids: tuple[int, ...] = ()  # that the text in and around the tokens of media is made of, besides times
    positions_per_second: float = 1.0  # of video, on the temporal axis of M-RoPE
    seconds_per_chunk: float = 2.0  # of a video and its sound track, which take turns
    null: NullConfig | None = None

    @property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """Kinds of media that the model takes."""
        kinds: list[MediaKind] = []
        if self.vision_rules is not None:
            kinds += ["image", "video"] if self.vision_rules.max_frames else ["image"]
        if self.audio_rules is not None:
            kinds.append("audio")
        return tuple(kinds)

    def placeholder_id(self, kind: MediaKind) -> int:
        """The token that stands for media of this kind in a prompt; -1 if the model does not take it."""
        ids = {"image": self.image_token_id, "video": self.video_token_id, "audio": self.audio_token_id}
        return ids[kind]

    @property
    def control_ids(self) -> set[int]:
        """Ids that stand for media or around them: in users' text none of them is a token, whatever the tokenizer says."""
        around = self.vision_start_token_id, self.vision_end_token_id, self.audio_start_token_id, self.audio_end_token_id
        return {*map(self.placeholder_id, self.media_kinds), *self.item_text_ids, *around} - {-1}

    def kv_page_bytes(self, page_tokens: int) -> int:
        """Bytes of one KV page: all layers' K and V of ``page_tokens`` tokens."""
        return sum(kv_part_bytes(self.language, page_tokens, DTYPE_BYTES[self.dtype], self.kv_dtype))

    def window_page_bytes(self, page_tokens: int) -> int:
        """Bytes of it that layers with a window have, where they can have pages of their own; else 0."""
        if not self.language.has_windows_apart:
            return 0
        sizes = kv_part_bytes(self.language, page_tokens, DTYPE_BYTES[self.dtype], self.kv_dtype)
        return sum(size for size, group in zip(sizes, self.language.kv_groups, strict=True) if group.heads.window)

    def packed_page_bytes(self, page_tokens: int, packed: TransferDType) -> int:
        """Bytes of one KV page that is packed for its way to another pool; 0 where none are. See ``lm.kv_packing``."""
        return sum(packed_part_bytes(group, page_tokens, packed) for group in self.language.kv_groups)

    def prefill_token_bytes(self) -> int:
        """Bytes of activations per prompt token that a layer of prefill has at once: residual, norm, projections, and three of the
        feed-forward's width; with experts the rows of those that have all tokens, and their sum in float32; and an embedding row of
        several parts. Encoding a token's four patch rows takes about as much."""
        lm, size = self.language, DTYPE_BYTES[self.dtype]
        heads = max((its.num_heads + 2 * its.num_kv_heads) * its.head_dim for its, _ in lm.kv_groups)
        experts = (2 * size + 8) * lm.hidden_size if lm.experts else 0
        deep = self.embedding_row_bytes() if self.num_deep else 0
        per_layer = 3 * size * lm.num_layers * lm.per_layer.size if lm.per_layer is not None else 0
        return size * (3 * lm.hidden_size + 2 * heads + 3 * lm.intermediate_size) + experts + deep + per_layer

    def step_bytes(self) -> int:
        """Bytes that the experts of a layer take in a step on a GPU, where all of them multiply ``MASKED_TOKENS`` tokens: three times
        their width, what they give, and that in float32 twice. 0 without experts."""
        lm, size = self.language, DTYPE_BYTES[self.dtype]
        of_token = (moe.num_experts * (size * (3 * moe.expert_size + lm.hidden_size) + 8 * lm.hidden_size) for moe in lm.experts)
        return MASKED_TOKENS * max(of_token, default=0)

    def logits_bytes(self) -> int:
        """Bytes of one row's logits in a step: as the product gives them, and in float32."""
        return (DTYPE_BYTES[self.dtype] + 4) * self.language.vocab_size

    def patch_row_bytes(self) -> int:
        """Bytes of the longest row that goes to patch pages; without media, of a usual one."""
        rules = [rules.row_bytes for rules in (self.vision_rules, self.audio_rules) if rules is not None]
        return max(rules, default=VisionRules().row_bytes)

    def rows_per_token(self) -> int:
        """Patch rows that the vision tower merges into one embedding token; without one, of a usual one."""
        return (self.vision_rules or VisionRules()).merge_size ** 2

    @property
    def num_deep(self) -> int:
        """Parts of a medium's embedding row besides the embedding: each is added to the residual stream, one after the decoder's first
        layer, one after its second and so on."""
        return len(self.vision.deepstack_blocks) if self.vision is not None else 0

    def embedding_row_bytes(self) -> int:
        """Bytes of one token's embedding row."""
        return (1 + self.num_deep) * self.language.hidden_size * DTYPE_BYTES[self.dtype]

    def stream_token_bytes(self) -> int:
        """Bytes of one token between two stages of prefill's pipeline: the residual stream and its norm."""
        return 2 * self.language.hidden_size * DTYPE_BYTES[self.dtype]


def kv_layer_bytes(heads: AttentionConfig, page_tokens: int, value_bytes: int, kv_dtype: KvDType) -> int:
    """Bytes of a layer's part of a KV page, whose values are as large as the model's unless ``kv_dtype`` says others."""
    num_heads = page_tokens * 2 * heads.num_kv_heads
    in_integers = -(-num_heads * (heads.head_dim + 4) // KV_ALIGNMENT) * KV_ALIGNMENT
    return num_heads * heads.head_dim * value_bytes if kv_dtype == "auto" else in_integers


def kv_part_bytes(language: LanguageConfig, page_tokens: int, value_bytes: int, kv_dtype: KvDType) -> list[int]:
    """Bytes of each group's part of a KV page, as ``kv_layer_bytes``."""
    sizes = [len(layers) * kv_layer_bytes(heads, page_tokens, value_bytes, kv_dtype) for heads, layers in language.kv_groups]
    return sizes if len(sizes) == 1 else [-(-size // GROUP_ALIGNMENT) * GROUP_ALIGNMENT for size in sizes]


class KvPart(NamedTuple):
    """Where a layer's K and V lie in a page, in bytes; ``in_window``: in a page of the pool of layers with a window."""

    layer: int
    place: slice
    in_window: bool = False


def kv_layer_parts(config: ModelConfig, page_tokens: int, has_windows: bool = False) -> list[KvPart]:
    """Return the parts of the layers that have K and V of their own, in order. ``has_windows``: those with a window have pages of their
    own."""
    parts, value_bytes, starts = list[KvPart](), DTYPE_BYTES[config.dtype], [0, 0]
    sizes = kv_part_bytes(config.language, page_tokens, value_bytes, config.kv_dtype)
    for (heads, layers), size in zip(config.language.kv_groups, sizes, strict=True):
        num_bytes, is_apart = kv_layer_bytes(heads, page_tokens, value_bytes, config.kv_dtype), has_windows and heads.window > 0
        begins = [starts[is_apart] + at * num_bytes for at in range(len(layers))]
        parts += [KvPart(layer, slice(at, at + num_bytes), is_apart) for layer, at in zip(layers, begins, strict=True)]
        starts[is_apart] += size
    return sorted(parts, key=lambda part: part.layer)


def packed_part_bytes(group: KvGroup, page_tokens: int, packed: TransferDType) -> int:
    """Bytes of a group's part of a packed page; 0 where none are."""
    head_dim, num_heads = group.heads.head_dim, len(group.layers) * page_tokens * 2 * group.heads.num_kv_heads
    in_int4 = num_heads * head_dim // 2 + 4 * num_heads * (head_dim // packed_group(head_dim))
    return {"auto": 0, "int8": num_heads * (head_dim + 4), "int4": in_int4}[packed]


def packed_group(head_dim: int) -> int:
    """Return how many values of a head share a scale and a zero in int4."""
    return head_dim if head_dim % PACKED_GROUP else PACKED_GROUP
