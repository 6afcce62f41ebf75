"""Rows of a KV cache: moved to the right where some gave up more entries than others, and taken out."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.readback import is_host, sent


__all__ = ["DROPPED", "can_realign", "realign", "select_rows"]

DROPPED = "entries were asked for that a sliding window has already dropped"


def can_realign(cache: Cache) -> bool:
    """Whether rows of this cache can give up different numbers of entries: dynamic full and sliding layers can, and layers
    that read another layer's entries and never hold their own."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(
        type(layer) in plain or (getattr(layer, "is_initialized", False) and layer.keys is None)
        for layer in cache.layers
    )


def realign(cache: Cache, shift: Tensor, width: int, new_width: int, needed_columns: Tensor) -> None:
    """Moves each row to the right and cuts what then lies beyond the new end.

    Args:
        cache (`Cache`): A cache that can be realigned; changed in place.
        shift (`torch.LongTensor` of shape `(batch,)`): Columns by which each row moves.
        width, new_width (`int`): Columns before and after.
        needed_columns (`torch.LongTensor` of shape `(batch,)`): Last columns of each row that must be there afterwards.

    Raises:
        [`UnsupportedModelError`]: If the cache cannot be realigned.
        `RuntimeError`: If a sliding layer has dropped a column that is needed.
    """
    if not can_realign(cache):
        raise UnsupportedModelError("this cache cannot give up different numbers of entries per row")
    moves: dict[tuple[int, int, torch.device], _Move] = {}  # layers that hold as much share what says how rows move
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None or layer.keys.numel() == 0:
            continue
        stored = layer.keys.shape[-2]
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        new_stored = min(new_width, layer.sliding_window - 1) if sliding else new_width
        first = (new_width - new_stored) - shift - (width - stored)
        columns = torch.arange(new_width - new_stored, new_width)
        needed = columns >= new_width - needed_columns[:, None]
        if bool((first[:, None] + torch.arange(new_stored) < 0)[needed].any()):
            raise RuntimeError(DROPPED)
        place = (stored, new_stored, layer.keys.device)
        if place not in moves:
            moves[place] = _Move(first, stored, new_stored, layer.keys.device)
        layer.keys, layer.values = moves[place].of(layer.keys), moves[place].of(layer.values)
        if sliding:
            layer.cumulative_length = new_width


def select_rows(cache: Cache, rows: Tensor, width: int) -> None:
    """Keeps only `rows` (`(kept,)`) of the cache, in place, and of them the last `width` columns: none holds more.

    All rows of a cache that cannot be realigned hold equally many.
    """
    cache.batch_select_indices(rows)
    if not can_realign(cache):
        return
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None or layer.keys.numel() == 0:
            continue
        first = max(0, layer.keys.shape[-2] - width)
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = width


class _Move:
    """`count` columns of each row from column `first[b]` on; what would lie before column 0 repeats it, and is masked."""

    def __init__(self, first: Tensor, stored: int, count: int, device: torch.device) -> None:
        self._first, self._count = first, count
        self._source: Tensor | None = None
        if not is_host(device):
            source = (first[:, None] + torch.arange(count)).clamp(0, stored - 1)
            self._source = sent(source[:, None, :, None], device)

    def of(self, states: Tensor) -> Tensor:
        """The columns of `states` (`(batch, heads, stored, size)`)."""
        if self._source is not None:
            return states.gather(2, self._source.expand(-1, states.shape[1], -1, states.shape[3]))
        # On a CPU, one copy for each row takes a tenth of the time of a gather.
        moved = states.new_empty(*states.shape[:2], self._count, states.shape[3])
        for row, start in enumerate(self._first.tolist()):
            missing = min(max(0, -start), self._count)
            moved[row, :, missing:] = states[row, :, start + missing : start + self._count]
            if missing:
                moved[row, :, :missing] = states[row, :, :1]
        return moved
