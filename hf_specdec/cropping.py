"""What can be taken back from a cache: which caches allow it, and what is kept for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache, StaticCache

from hf_specdec._compat import (
    CACHE_KEY,
    cache_argument,
    empty_cache,
    empty_layer,
    uncroppable_layers,
    undecorated_model,
)
from hf_specdec.errors import UnsupportedModelError


__all__ = [
    "check_croppable",
    "check_filled",
    "crop_layers",
    "read_prompt",
    "start_recording",
    "stop_recording",
]


def check_croppable(cache: Cache, model: Any) -> None:
    """Raises an `UnsupportedModelError` that names the model if rejected drafts could not be taken out of its cache."""
    if stuck := uncroppable_layers(cache):
        kinds = sorted({type(layer).__name__ for layer in stuck})
        other = ", or with the default cache" if isinstance(cache, StaticCache | QuantizedCache) else ""
        raise UnsupportedModelError(
            f"{type(undecorated_model(model)).__name__} keeps a {type(cache).__name__} that cannot be cropped "
            f"({', '.join(kinds)}), so rejected drafts would stay in its state. Decode it without `speculative_config`{other}."
        )


def check_filled(cache: Cache, model: Any) -> None:
    """Raises an `UnsupportedModelError` if a forward pass left nothing in the cache; some old models take none."""
    if int(cache.get_seq_length()) == 0:
        raise UnsupportedModelError(
            f"{type(undecorated_model(model)).__name__} keeps no keys and values between forward passes, so each pass would "
            "see its own tokens only. Decode it without `speculative_config`."
        )


def read_prompt(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The prompt's forward pass. A cache that cannot be cropped is refused, and what was given is left as it was."""
    cache = cache_argument(model_kwargs)
    in_use = int(cache.get_seq_length()) > 0
    if in_use or type(cache) is not DynamicCache:
        check_croppable(cache, model)
    columns = [_columns(layer) for layer in cache.layers]
    try:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        filled = outputs.get(CACHE_KEY, cache)
        check_croppable(filled, model)  # recurrent layers know it only once they hold something
        check_filled(filled, model)
        # A view of the last column would keep all of those that a model without `logits_to_keep` computes.
        outputs["logits"] = outputs.logits[:, -1:].clone()
    except BaseException:
        try:
            crop_layers(cache, columns)
        except RuntimeError:
            empty_cache(cache)
        raise
    return outputs


def _columns(layer: Any) -> int:
    """Columns that a layer holds; recurrent states and layers that read another's entries have none to count."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def crop_layers(cache: Cache, columns: list[int]) -> None:
    """Cuts each layer to its number of columns and empties the layers beyond; a `RuntimeError` says that one cannot do it."""
    if any(cache.is_linear):
        raise RuntimeError("a recurrent state does not know its length")
    for layer, wanted in zip(cache.layers, [*columns, *[0] * len(cache.layers)], strict=False):
        excess = _columns(layer) - wanted
        if excess > 0 and wanted == 0:
            empty_layer(layer)
        elif excess > 0:
            layer.crop(-excess)


def start_recording(cache: Cache) -> list[bool]:
    """Lets sliding layers keep what a rejection may bring back; returns which of them did so before."""
    recorded = [bool(getattr(layer, "record_past", False)) for layer in cache.layers]
    cache.activate_past_recording()
    return recorded


def stop_recording(cache: Cache, recorded: list[bool]) -> None:
    """Shrinks sliding layers to their window and leaves the cache as plain decoding leaves it."""
    cache.crop(0)
    for layer, before in zip(cache.layers, recorded, strict=True):
        if hasattr(layer, "record_past"):
            layer.record_past = before
