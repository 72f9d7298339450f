"""Decides whether prefill interrupts a long plan between two layers for short ones (pure)."""

from ...models.architecture import AttentionConfig, ModelConfig
from ...models.state_layout import state_layout
from ...runtime.config.runtime_config import RuntimeConfig
from ...runtime.stage_table import stage_of


def has_breaks(config: RuntimeConfig, model: ModelConfig) -> bool:
    """Return whether its plans have breaks: where it is alone in its process, on the one CPU of a run without turns, with a model that
    keeps nothing of prompts between two layers but their residual streams."""
    is_apart = all(len(together) == 1 for together in config.processes.values() if "prefill" in map(stage_of, together))
    on_one_cpu = not config.model.on_cuda and config.num_kv_pools == 1 and config.actors.turns == "off"
    if not (is_apart and on_one_cpu and config.prefill_ranks == 1) or model.null is not None or state_layout(model) is not None:
        return False
    mixers = [layer.mixer for layer in model.language.layers]
    return all(isinstance(mixer, AttentionConfig) and mixer.owner < 0 for mixer in mixers)
