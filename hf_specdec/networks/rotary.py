"""Rotary tables of the networks, which stay in single precision whatever the weights are cast to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_specdec.errors import InvalidConfigError


__all__ = ["DraftRotaryEmbedding", "rotary_like"]

_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
_FIELDS = frozenset(
    "rope_type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
    "truncate low_freq_factor high_freq_factor short_factor long_factor".split()
)


@final
class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, whose frequencies move between devices and are never cast.

    In half precision a frequency is off by up to 0.4 %, and a phase is off by that times its position: a network would be
    right on short prompts only. transformers' `from_pretrained(dtype=...)` leaves the frequencies alone too, but `to(dtype)`
    does not, and casting back does not restore them.

    Args:
        config (`LlamaConfig`): `rope_parameters` of any type that transformers computes in `ROPE_INIT_FUNCTIONS`.

    Raises:
        [`InvalidConfigError`]: For another type, or one whose factors are not as many as half a head.
    """

    def __init__(self, config: Any) -> None:
        _check(config.rope_parameters, config.head_dim or config.hidden_size // config.num_attention_heads)
        super().__init__(config)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        tables = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, table in tables.items():
            moved = self.get_buffer(name)
            if moved.dtype != table.dtype:
                setattr(self, name, table.to(moved.device))
        return self


def rotary_like(parameters: Any) -> dict[str, Any]:
    """Rotary parameters for a layer like its target's; the default ones where the target has none.

    Where kinds of layers differ they are those of the full-attention layers. The layer rotates whole heads, also where its
    target rotates a part of them (ours); what belongs to images or to the target's queries is left out.

    Args:
        parameters (`dict`, *optional*): `rope_parameters` of the target's config.
    """
    if parameters and "rope_type" not in parameters:
        kinds = [each for each in (parameters.get("full_attention"), *parameters.values()) if each]
        parameters = kinds[0] if kinds else None
    if not parameters:
        return {"rope_type": "default", "rope_theta": 10000.0}
    own = {name: value for name, value in parameters.items() if name in _FIELDS}
    if parameters["rope_type"] == "proportional" and "partial_rotary_factor" in parameters:
        own["partial_rotary_factor"] = parameters["partial_rotary_factor"]  # the other frequencies are zeros
    return own


def _check(parameters: Mapping[str, Any], head_dim: int) -> None:
    kind, wanted = parameters["rope_type"], head_dim // 2
    problem = None if kind in _ROPE_TYPES else f"of the type {kind!r}"
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(parameters[name]) != wanted:
            problem = f"with {len(parameters[name])} numbers in {name} for heads of {head_dim}"
    if problem:
        raise InvalidConfigError(
            f"a drafter network cannot compute rotary parameters {problem}, its config's or those of its target: "
            f"expected one of the types {', '.join(sorted(_ROPE_TYPES))}, and for longrope {wanted} numbers; load a drafter "
            "that was published for the target, or draft with a draft model, n-grams or linear exit heads"
        )
