"""A prefix LM that can be asked for the logits of its lower layers, and never runs a token through a layer twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec._compat import CACHE_KEY, only_visible_entries, undecorated_model
from hf_specdec.layer_gate import LayerGate, Transform, Window
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.prepared_layers import PreparedLayers
from hf_specdec.readout import ModelEnds, find_ends, has_fixed_positions


__all__ = ["LayeredLM"]


@final
class LayeredLM(PrefixLM):
    """A [`PrefixLM`] whose layers are gated.

    [`~LayeredLM.climb`] begins a round and takes the new columns of every row through the lower layers only; the next
    [`~LayeredLM.run`] takes them, and what was drafted since, through the rest and ends the round. A round that is not
    begun runs as in a [`PrefixLM`].

    Args:
        gate ([`LayerGate`]): The gate, installed by the caller.
        model, kwargs: As for [`PrefixLM`].
    """

    def __init__(self, model: Any, gate: LayerGate, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.gate = gate
        self._may_prepare = has_fixed_positions(undecorated_model(model).config)
        self._ends: ModelEnds | None = None
        # Called when all layers have run, while the window still holds the hidden states between them.
        self.on_pass: Callable[[], None] | None = None
        self._ungated_call = self._forward_call
        self._climber: Any = model
        self._climb_call = self._forward_call
        self._token_ids: Tensor | None = None
        self._forward_call = self._call_with_view

    def climb_with(self, model: Any, forward: Callable[..., Any], token_ids: Tensor) -> None:
        """Lets climbs end in the head of a twin of the model, which scores `token_ids` alone (FR-Spec, arXiv 2502.14856).

        Args:
            model (`PreTrainedModel`): The twin; it has the model's own layers.
            forward (`Callable`): Its forward pass, as for [`PrefixLM`].
            token_ids (`torch.LongTensor` of shape `(kept,)`): The ids, in the order of its logits.
        """
        self._climber, self._climb_call, self._token_ids = model, forward, token_ids.to(self.device)

    def climb(
        self, tokens: Tensor, lengths: Tensor, depth: int, transform: Transform | None = None, ahead: int = 1
    ) -> Tensor:
        """The logits that the model's own head gives to each row's newest token after its first `depth` layers.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, columns)`): Prefixes, on the CPU; row `b` ends at `lengths[b]`.
            lengths (`torch.LongTensor` of shape `(batch,)`): Their lengths. Rows that are shorter than others by less than
                they were at the beginning of the round are filled up, and their logits mean nothing.
            depth (`int`): Layers to run, from the bottom.
            transform (`Callable`, *optional*): An exit head: maps hidden states `(batch, 1, hidden_size)` to what the
                model's final norm should see.
            ahead (`int`): Columns that may climb in this round, the first one included. Where the model allows it, those
                after the first go through its layers without its own preparation.

        Returns:
            `(batch, vocab)`.
        """
        window = self._begin(tokens, lengths) if self.gate.window is None else self.gate.window
        ids, columns = self._new_columns(tokens, lengths, self._num_held)
        window.tokens = ids.masked_fill(columns >= lengths[:, None], -1)
        self.fed_columns = columns.masked_fill(columns >= lengths[:, None], -1)
        try:
            if window.prepared is not None and ids.shape[1] <= window.prepared.width and self._ends is not None:
                logits = self._rise(window.prepared, self._ends, ids, depth, transform)
            elif window.prepared is None and ids.shape[1] < ahead and self._may_climb_ahead(ahead):
                logits = self._climb_ahead(window, ids, depth, transform, ahead)
            else:
                with self.gate.passing(depth, transform):
                    logits = self._climb(ids, columns.minimum(lengths[:, None] - 1))
        except BaseException:
            window.cut(0)
            self.gate.close()
            raise
        if self._token_ids is None:
            return logits
        width = undecorated_model(self.model).get_output_embeddings().out_features
        whole = logits.new_full((len(logits), width), float("-inf"))
        return whole.index_copy(1, self._token_ids, logits)

    def _climb(self, ids: Tensor, columns: Tensor) -> Tensor:
        """The newest column's logits from a pass of the model, which the gate ends below its last layer."""
        own, self._ungated_call = self._ungated_call, self._climb_call
        try:
            outputs = self._forward(ids, columns, self._num_held, 1)
        finally:
            self._ungated_call = own
        self.num_forwards -= 1  # part of a pass, which `run` completes
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _rise(
        self, prepared: PreparedLayers, ends: ModelEnds, ids: Tensor, depth: int, transform: Transform | None
    ) -> Tensor:
        """A climb with what the round's first one has prepared."""
        with only_visible_entries(self._cache):
            newest = self.gate.rise(ends.embedding(ids.to(self.device)), depth, prepared)
        return ends.logits(newest if transform is None else transform(newest))

    def _may_climb_ahead(self, ahead: int) -> bool:
        """Whether every row has that many positions left, be it that it will not use them."""
        positions = getattr(
            undecorated_model(self.model).config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        needed = self.hidden_columns + int(self._num_held.max()) + ahead
        return self._may_prepare and (positions is None or needed <= positions)

    def _climb_ahead(self, window: Window, ids: Tensor, depth: int, transform: Transform | None, ahead: int) -> Tensor:
        """A climb by the model itself, called with as many columns as the round may have."""
        prepared, kept = PreparedLayers(ahead), self._num_held
        wide = torch.nn.functional.pad(ids, (0, ahead - ids.shape[1]), value=self.pad_token_id)
        with self.gate.passing(depth, transform, prepared, ids.shape[1]):
            logits = self._climb(wide, kept[:, None] + torch.arange(ahead))
        if self._ends is None:
            self._ends = self._find_ends(window, prepared, wide, logits)
            self._may_prepare = self._ends is not None
        window.prepared = prepared if self._may_prepare else None
        return logits

    def _find_ends(self, window: Window, prepared: PreparedLayers, ids: Tensor, logits: Tensor) -> ModelEnds | None:
        if not prepared.serves(len(self.gate.layers)) or prepared.embedded is None or window.read_out is None:
            return None
        return find_ends(self._climber, ids.to(self.device), prepared.embedded, window.read_out, logits)

    def run(self, tokens: Tensor, lengths: Tensor, last: Tensor) -> Any:
        """As [`PrefixLM.run`]; completes the round that [`~LayeredLM.climb`] began."""
        window, kept = self.gate.window, self._num_held
        if window is not None and bool((kept > lengths - last).any()):
            self._give_up(window)
            window = None
        if window is not None:
            self._keep_what_fits(window, tokens, lengths, kept)
        elif self.on_pass is None:
            return super().run(tokens, lengths, last)
        else:
            kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - last)
            self._keep(kept)
            self._open(kept)
        with self.gate.passing():
            outputs = self._feed(tokens, lengths, kept, last)
        if self.on_pass is not None:
            self.on_pass()
        self.gate.close()
        return outputs

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Rounds that nobody completes. The gate stands only meanwhile, and what came of the round is forgotten."""
        self.gate.install(self._cache)
        try:
            yield
        finally:
            if self.gate.window is not None:
                self._give_up(self.gate.window)
            self.gate.remove()

    def _begin(self, tokens: Tensor, lengths: Tensor) -> Window:
        kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - 1)
        if bool((lengths - kept != 1).any()):
            # Rows that lack more than their newest token would not stand side by side in one window.
            self.run(tokens, lengths - 1, torch.ones_like(lengths))
            kept = lengths - 1
        self._keep(kept)
        return self._open(kept)

    def _open(self, kept: Tensor) -> Window:
        return self.gate.open(self._cache, self.hidden_columns + int(kept.max()), len(kept))

    def _give_up(self, window: Window) -> None:
        window.cut(0)
        self.gate.close()

    def _new_columns(self, tokens: Tensor, lengths: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and column numbers from each row's `kept` on."""
        columns = kept[:, None] + torch.arange(int((lengths - kept).max()))
        padded = torch.nn.functional.pad(tokens, (0, max(0, int(columns.max()) + 1 - tokens.shape[1])))
        return padded.gather(1, columns).masked_fill(columns >= lengths[:, None], self.pad_token_id), columns

    def _keep_what_fits(self, window: Window, tokens: Tensor, lengths: Tensor, kept: Tensor) -> None:
        """Forgets the columns whose tokens turned out to be others than those that were fed."""
        ids, columns = self._new_columns(tokens, lengths, kept)
        width = min(window.tokens.shape[1], ids.shape[1])
        fits = (window.tokens[:, :width] == ids[:, :width]) | (columns >= lengths[:, None])[:, :width]
        common = int(fits.all(0).long().cumprod(0).sum())
        if common < window.tokens.shape[1]:
            window.cut(common)

    def _call_with_view(self, **inputs: Any) -> Any:
        if CACHE_KEY in inputs:
            inputs[CACHE_KEY] = self.gate.view(inputs[CACHE_KEY])
        return self._ungated_call(**inputs)
