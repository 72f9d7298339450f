"""Sliding windows of a checkpoint: the tokens that each layer attends to, the newest included; 0 where it attends to all. Pure."""

from collections.abc import Callable

from ...checkpoint.json_fields import JsonObject

Windows = Callable[[JsonObject, int], list[int]]
"""Reads the window of each layer, so many. Raises CheckpointError."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT = 4096


def no_windows(config: JsonObject, num_layers: int) -> list[int]:
    """Of models that have none."""
    if others := set(_layer_types(config, num_layers)) - {_FULL}:
        raise config.error("layer_types", f"has {', '.join(sorted(others))}; only full_attention is supported")
    return [0] * num_layers


def windows_everywhere(config: JsonObject, num_layers: int) -> list[int]:
    """All layers have the window of ``sliding_window``, as Mistral's."""
    return [_window(config)] * num_layers


def windows_if_named(config: JsonObject, num_layers: int) -> list[int]:
    """All layers have it if the file has ``sliding_window``, as Phi-3's."""
    return windows_everywhere(config, num_layers) if "sliding_window" in config.data else [0] * num_layers


def windows_if_used(config: JsonObject, num_layers: int) -> list[int]:
    """All layers have it if ``use_sliding_window`` is true, as those of Qwen's experts."""
    return [_window(config) if config.boolean("use_sliding_window", default=False) else 0] * num_layers


def windows_by_layer(config: JsonObject, num_layers: int) -> list[int]:
    """Layers from ``max_window_layers`` on have it, or those that ``layer_types`` names, as Qwen's."""
    (window, *_) = windows_if_used(config, 1)
    if kinds := _parse_kinds(config, num_layers, window):
        return [window if kind == _SLIDING else 0 for kind in kinds]
    first = config.integer("max_window_layers", default=28, least=0) if window else num_layers
    return [window if layer >= first else 0 for layer in range(num_layers)]


def windows_by_pattern(config: JsonObject, num_layers: int, default_interval: int, default_window: int = _DEFAULT) -> list[int]:
    """All layers but each ``sliding_window_pattern``-th have it, or those that ``layer_types`` names, as Gemma's."""
    window = _window(config, default_window)
    interval = config.integer("sliding_window_pattern", default=default_interval)
    pattern = [_SLIDING if number % interval else _FULL for number in range(1, num_layers + 1)]
    kinds = _parse_kinds(config, num_layers, window) or pattern
    if _SLIDING in kinds and not window:
        raise config.error("sliding_window", f"is null, expected the window of {kinds.count(_SLIDING)} layers")
    return [window if kind == _SLIDING else 0 for kind in kinds]


def _parse_kinds(config: JsonObject, num_layers: int, window: int) -> list[str]:
    """As ``_layer_types``, of two kinds. Raises CheckpointError."""
    kinds = _layer_types(config, num_layers)
    if others := set(kinds) - {_FULL, _SLIDING}:
        raise config.error("layer_types", f"has {', '.join(sorted(others))}; only {_FULL} and {_SLIDING} are supported")
    if _SLIDING in kinds and not window:
        raise config.error("layer_types", f"has {_SLIDING}, and no window is used (use_sliding_window, sliding_window)")
    return kinds


def _window(config: JsonObject, default: int = _DEFAULT) -> int:
    is_none = "sliding_window" in config.data and config.data["sliding_window"] is None
    return 0 if is_none else config.integer("sliding_window", default=default)


def _layer_types(config: JsonObject, num_layers: int) -> list[str]:
    """The kind of each layer; empty where the file does not say."""
    kinds = config.data.get("layer_types") or []
    if not isinstance(kinds, list):
        raise config.error("layer_types", f"is {kinds!r}, expected a list of names")
    if kinds and len(kinds) != num_layers:
        raise config.error("layer_types", f"names {len(kinds)} layers, expected {num_layers}")
    return [str(kind) for kind in kinds]
