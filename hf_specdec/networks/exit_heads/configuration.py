"""Configuration of exit heads."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig

from hf_specdec.errors import InvalidConfigError


__all__ = ["KINDS", "ExitAdapterConfig", "ExitHeadsConfig"]

KINDS = ("raw", "linear", "adapter")


@strict
class ExitAdapterConfig(LlamaConfig):
    r"""
    Configuration of an [`ExitAdapter`]: one layer with the shape of its target's.

    Args:
        qk_norm (`bool`, defaults to `False`): Whether queries and keys are normalised per head, as in Qwen3.
        kwargs: As in `LlamaConfig`; `attention_bias` is about queries, keys and values only.
    """

    model_type = "hf_specdec_exit_adapter"

    num_hidden_layers: int = 1
    qk_norm: bool = False


class ExitHeadsConfig(PreTrainedConfig):
    """Where the heads sit, what they are, and whose they are.

    Args:
        kind (`str`): `"raw"`: nothing, the logit lens. `"linear"`: a matrix per layer, which is AdaDecode's published form.
            `"adapter"`: a transformer layer with keys and values of its own, and a matrix (the layer is Kangaroo's published
            form, arXiv 2404.18911, though without an MLP there; the matrix is ours).
        exit_layers (`list[int]`): Numbers of layers, from the bottom, after which a head sits.
        hidden_size (`int`): Width of the target's hidden states.
        adapter (`dict`, *optional*): Options of [`ExitAdapterConfig`] for adapters; a small layer by default.
        target_name, target_tokenizer, target_weights (`str`, *optional*): The target they were fitted to.
        figures (`dict`, *optional*): What fitting measured, which the card shows.
        draft_vocabulary (`dict`, *optional*): Of heads that were fitted to a draft vocabulary: its `size`, and `vocab_size` and
            `fingerprint` of the tokenizer it was counted with. The ids stand beside the weights.
    """

    model_type = "hf_specdec_exit_heads"

    def __init__(
        self,
        kind: str = "raw",
        exit_layers: list[int] | tuple[int, ...] = (),
        hidden_size: int = 0,
        adapter: dict[str, Any] | None = None,
        target_name: str | None = None,
        target_tokenizer: str | None = None,
        target_weights: str | None = None,
        figures: dict[str, Any] | None = None,
        draft_vocabulary: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kind not in KINDS:
            raise InvalidConfigError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if list(exit_layers) != sorted({int(layer) for layer in exit_layers}) or any(each < 1 for each in exit_layers):
            raise InvalidConfigError(f"exit_layers must be different layers of at least 1 by depth, got {exit_layers}")
        if kind != "raw" and hidden_size < 1:
            raise InvalidConfigError(f"{kind} heads need the target's hidden_size, got {hidden_size}")
        self.kind = kind
        self.exit_layers = list(exit_layers)
        self.hidden_size = hidden_size
        self.adapter = adapter
        self.target_name, self.target_tokenizer, self.target_weights = target_name, target_tokenizer, target_weights
        self.figures = figures
        self.draft_vocabulary = draft_vocabulary
        super().__init__(**kwargs)

    def adapter_config(self) -> ExitAdapterConfig:
        """The shape of an adapter's layer."""
        heads = max(1, self.hidden_size // 64)
        small = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 2 * self.hidden_size}
        return ExitAdapterConfig(**{"hidden_size": self.hidden_size, **(self.adapter or small)})
