"""The shape of exit heads."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_specdec.errors import InvalidConfigError


__all__ = ["KINDS", "ExitHeadsConfig"]

KINDS = ("raw", "linear", "adapter")


class ExitHeadsConfig(PreTrainedConfig):
    """Where the heads sit and what they are.

    Args:
        kind (`str`): `"raw"`: nothing, the logit lens. `"linear"`: a matrix per layer, which is AdaDecode's published form.
            `"adapter"`: a residual bottleneck per layer (ours).
        exit_layers (`list[int]`): Numbers of layers, from the bottom, after which a head sits.
        hidden_size (`int`): Width of the target's hidden states.
        adapter_size (`int`): Width of the bottleneck of an adapter.
    """

    model_type = "hf_specdec_exit_heads"

    def __init__(
        self,
        kind: str = "raw",
        exit_layers: list[int] | tuple[int, ...] = (),
        hidden_size: int = 0,
        adapter_size: int = 64,
        **kwargs: Any,
    ) -> None:
        if kind not in KINDS:
            raise InvalidConfigError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if list(exit_layers) != sorted({int(layer) for layer in exit_layers}) or any(each < 1 for each in exit_layers):
            raise InvalidConfigError(f"exit_layers must be different layers of at least 1 by depth, got {exit_layers}")
        if kind != "raw" and (hidden_size < 1 or adapter_size < 1):
            raise InvalidConfigError(
                f"{kind} heads need hidden_size and adapter_size, got {hidden_size} and {adapter_size}"
            )
        self.kind = kind
        self.exit_layers = list(exit_layers)
        self.hidden_size = hidden_size
        self.adapter_size = adapter_size
        super().__init__(**kwargs)
