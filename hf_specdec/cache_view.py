"""A cache as the model must see it while its layers hold different numbers of entries."""

from __future__ import annotations

from typing import Any, final

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import UnsupportedModelError


__all__ = ["CacheView", "check_layers", "cut_layer"]


@final
class CacheView(Cache):
    """Reports the committed length for every layer and stores into the layers of the real cache.

    A model builds masks and positions from the length of one layer. While a draft is under way the lower layers hold
    entries that the upper ones lack, so the length of any one layer would silently give wrong masks; the committed length
    is right for all: a pass over the whole window sees `columns` entries before it.

    Args:
        cache (`Cache`): The real cache.
        columns (`int`): Entries that every layer holds.
    """

    def __init__(self, cache: Cache, columns: int) -> None:
        super().__init__(layers=cache.layers)
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, DynamicSlidingWindowLayer):
            return self.columns + query_length, 0
        before = layer.sliding_window - 1
        return min(self.columns, before) + query_length, max(self.columns - before, 0)


def check_layers(cache: Cache, num_layers: int, model: Any) -> None:
    """Raises an [`UnsupportedModelError`] that names the model if its layers do not each keep plain keys and values."""
    name = type(undecorated_model(model)).__name__
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedModelError(
            f"self-drafting needs the ordinary DynamicCache, got {type(cache).__name__}"
            f"{' with offloading' if cache.offloading else ''}. Drop `cache_implementation`, or draft with another model."
        )
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in plain})
    if others or len(cache.layers) != num_layers:
        found = ", ".join(others) or f"{len(cache.layers)} cache layers for {num_layers} decoder layers"
        raise UnsupportedModelError(
            f"{name} cannot draft for itself: its layers share keys and values, or keep another kind of state ({found}), so "
            'they cannot run at different times. Pass assistant_model=..., or use drafting="ngram".'
        )


def cut_layer(layer: Any, columns: int) -> None:
    """Drops a layer's entries after the first `columns`, and nothing else.

    `crop` would also shrink a sliding layer to its window, and a rejection later in the same round asks for more.
    """
    excess = int(layer.get_seq_length()) - columns
    if excess <= 0:
        return
    layer.keys, layer.values = layer.keys[:, :, :-excess], layer.values[:, :, :-excess]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= excess
