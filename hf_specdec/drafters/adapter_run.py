"""An adapter head in one run: the hidden states that it reads, and its own keys and values in step with the text."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftSettings
from hf_specdec.features import TargetFeatures
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.networks.exit_heads import ExitAdapter
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Context


__all__ = ["AdapterRun"]


@final
class AdapterRun:
    """Runs an adapter on the columns that it has not read yet.

    A column's hidden state depends on the tokens up to it alone, so the adapter is addressed by prefix like any model: what
    it holds of a rejected draft goes when the prefix differs, and everything else is kept.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        target ([`LayeredLM`]): The target, whose layers give the hidden states.
        adapter ([`ExitAdapter`]): The head.
        depth (`int`): The layers below it.
        states ([`TargetFeatures`]): The target's hidden states after them, along the prompt.
    """

    def __init__(
        self, settings: DraftSettings, target: LayeredLM, adapter: ExitAdapter, depth: int, states: TargetFeatures
    ) -> None:
        self.settings, self.target, self.adapter, self.depth = settings, target, adapter, depth
        self.store, self.start = states.store, states.start
        self.lm: PrefixLM | None = None

    @property
    def num_read(self) -> int:
        """Columns that the latest read was fed."""
        return 0 if self.lm is None else self.lm.fed_columns.shape[1]

    def keep(self) -> None:
        """Keeps the hidden states of the window's columns, from whatever pass they are."""
        window = self.target.gate.window
        hidden = None if window is None else window.hidden[self.depth - 1]
        if hidden is not None:
            self.store.put(self.target.fed_columns[:, : hidden.shape[1]], hidden)

    def read(self, context: Context, tokens: Tensor, lengths: Tensor, going: Tensor) -> Tensor:
        """`(batch, 1, hidden_size)`: what the final norm should see of the newest token of each row that is `going`.

        Args:
            context ([`Context`]): The text that the round began with.
            tokens (`torch.LongTensor` of shape `(batch, columns)`): It, and what was drafted since.
            lengths (`torch.LongTensor` of shape `(batch,)`): Their lengths.
            going (`torch.BoolTensor` of shape `(batch,)`): Rows whose result is wanted.
        """
        self.keep()
        mapped = self._lm(context).score(tokens[:, self.start :], (lengths - self.start).clamp(min=1), going.long())
        # One column more than the next draft needs, for a draft that is asked for twice.
        self.store.drop_before(max(self.start, int(context.lengths.min()) - 2))
        return mapped

    def _lm(self, context: Context) -> PrefixLM:
        if self.lm is None:
            mask = context.prompt_mask
            mask = None if mask is None else mask[:, self.start :]
            self.lm = PrefixLM(
                self.adapter,
                pad_token_id=self.settings.pad_token_id,
                prompt_mask=None if mask is None or mask.shape[1] == 0 else mask,
                forward=self._forward,
            )
        return self.lm

    def _forward(self, *, input_ids: Tensor, return_dict: bool, **inputs: Any) -> Any:
        """The adapter on the hidden states of the columns that its cache lacks, in place of their tokens."""
        assert self.lm is not None
        columns = self.lm.fed_columns
        hidden = self.store.take(torch.where(columns >= 0, columns + self.start, -1))
        return self.adapter(hidden.to(self.adapter.device, self.adapter.dtype), **inputs)
