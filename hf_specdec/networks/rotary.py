"""Rotary tables of the networks, which stay in single precision whatever the weights are cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


__all__ = ["DraftRotaryEmbedding"]


@final
class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, whose frequencies move between devices and are never cast.

    In half precision a frequency is off by up to 0.4 %, and a phase is off by that times its position: a network would be
    right on short prompts only. transformers' `from_pretrained(dtype=...)` leaves the frequencies alone too, but `to(dtype)`
    does not, and casting back does not restore them.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        tables = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, table in tables.items():
            moved = self.get_buffer(name)
            if moved.dtype != table.dtype:
                setattr(self, name, table.to(moved.device))
        return self
