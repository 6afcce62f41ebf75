"""A prefix LM that can be asked for the logits of its lower layers, and never runs a token through a layer twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specdec._compat import CACHE_KEY, only_visible_entries, undecorated_model
from hf_specdec.layer_gate import LayerGate, Transform, Window
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.prepared_layers import PreparedLayers
from hf_specdec.readback import sent
from hf_specdec.readout import ModelEnds, find_ends, has_fixed_positions, is_called_unseen


__all__ = ["LayeredLM"]

_WIDTH = 64  # columns that are prepared at once, which serve some rounds


@dataclass(frozen=True)
class _Standing:
    """What was prepared, and the columns of each row before its first one."""

    prepared: PreparedLayers
    kept: Tensor
    cache: Cache

    def offset(self, kept: Tensor, cache: Cache, ahead: int) -> int | None:
        """Where rows that keep `kept` columns stand in it; None where it does not serve them and `ahead` new columns."""
        gone = kept - self.kept
        first = int(gone[0])
        in_step = cache is self.cache and bool((gone == first).all())
        return first if in_step and 0 <= first <= self.prepared.width - ahead else None


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
        self._ends: ModelEnds | None = None  # of the model that climbs go through
        self._standing: _Standing | None = None
        # Whether the rows advance together, so that what is prepared serves the next round as well.
        self._rows_in_step = True
        # The ends of the model itself, if they explain all it says to the bit; None until that is known.
        self._own_ends: ModelEnds | bool | None = None
        # Called when all layers have run, while the window still holds the hidden states between them.
        self.on_pass: Callable[[], None] | None = None
        self._ungated_call = self._forward_call
        self._climber: Any = model
        self._climb_call = self._forward_call
        self.climb_ids: Tensor | None = None  # what climbs score; the whole vocabulary where it is None
        self._forward_call = self._call_with_view

    def climb_with(self, model: Any, forward: Callable[..., Any], token_ids: Tensor) -> None:
        """Lets climbs end in the head of a twin of the model, which scores `token_ids` alone (FR-Spec, arXiv 2502.14856).

        Args:
            model (`PreTrainedModel`): The twin; it has the model's own layers.
            forward (`Callable`): Its forward pass, as for [`PrefixLM`].
            token_ids (`torch.LongTensor` of shape `(kept,)`): The ids, in the order of its logits.
        """
        self._climber, self._climb_call, self.climb_ids = model, forward, token_ids.to(self.device)

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
            `(batch, kept)`: a score of each of `climb_ids`, or of the whole vocabulary.
        """
        window = self._begin(tokens, lengths, ahead) if self.gate.window is None else self.gate.window
        ids, columns = self._new_columns(tokens, lengths, self._num_held)
        window.tokens = ids.masked_fill(columns >= lengths[:, None], -1)
        self.fed_columns = columns.masked_fill(columns >= lengths[:, None], -1)
        try:
            if self._ends is not None and self._are_prepared(window, ids):
                newest = self._rise(window, self._ends, ids, depth)[:, -1:]
                logits = self._ends.logits(newest if transform is None else transform(newest))[:, -1]
            elif window.prepared is None and (wide := self._width(ids, ahead)):
                logits = self._climb_ahead(window, ids, depth, transform, wide)
            else:
                with self.gate.passing(depth, transform):
                    logits = self._climb(ids, columns.minimum(lengths[:, None] - 1))
        except BaseException:
            window.cut(0)
            self.gate.close()
            raise
        return logits

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """What a climb said, `(batch, kept)`, as scores `(batch, vocab)`; ids that it did not score have none."""
        if self.climb_ids is None:
            return logits
        width = undecorated_model(self.model).get_output_embeddings().out_features
        whole = logits.new_full((len(logits), width), float("-inf"))
        return whole.index_copy_(1, self.climb_ids, logits)

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

    def _rise(self, window: Window, ends: ModelEnds, ids: Tensor, depth: int) -> Tensor:
        """The hidden states after `depth` layers, with what an earlier climb has prepared."""
        assert window.prepared is not None
        switched = nullcontext() if self.device.type == "cpu" else self.model._optimize_model_for_decode()
        with only_visible_entries(self._cache), switched:
            return self.gate.rise(ends.embedding(sent(ids, self.device)), depth, window.prepared)

    def _are_prepared(self, window: Window, ids: Tensor) -> bool:
        return window.prepared is not None and window.offset + ids.shape[1] <= window.prepared.width

    def _width(self, ids: Tensor, ahead: int) -> int:
        """Columns to prepare: some rounds' worth, one round's, or none, as rows have positions left for."""
        positions = getattr(
            undecorated_model(self.model).config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        held = self.hidden_columns + int(self._num_held.max())
        for width in (_WIDTH, ahead + 1, ahead) if self._rows_in_step else (ahead + 1, ahead):
            if self._may_prepare and width > ids.shape[1] and (positions is None or held + width <= positions):
                return width
        return 0

    def _climb_ahead(self, window: Window, ids: Tensor, depth: int, transform: Transform | None, width: int) -> Tensor:
        """A climb by the model itself, called with columns that come later as well."""
        prepared, kept = PreparedLayers(width), self._num_held
        wide = torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=self.pad_token_id)
        with self.gate.passing(depth, transform, prepared, ids.shape[1]):
            logits = self._climb(wide, kept[:, None] + torch.arange(width))
        if self._ends is None:
            self._ends = self._find_ends(window, prepared, wide, logits)
            self._may_prepare = self._ends is not None
        if self._may_prepare:
            window.prepared = prepared
            self._standing = _Standing(prepared, kept.clone(), self._cache) if prepared.outlasts_rounds else None
        return logits

    def _find_ends(self, window: Window, prepared: PreparedLayers, ids: Tensor, logits: Tensor) -> ModelEnds | None:
        if not prepared.serves(len(self.gate.layers)) or prepared.embedded is None or window.read_out is None:
            return None
        return find_ends(self._climber, ids.to(self.device), prepared.embedded, window.read_out, logits)

    def _forward(self, ids: Tensor, columns: Tensor, kept: Tensor, logits_to_keep: int) -> Any:
        """As in a [`PrefixLM`]. A round is completed without the model's own preparation where nobody could tell."""
        window = self.gate.window
        if window is None or self.gate.current is not None:
            return super()._forward(ids, columns, kept, logits_to_keep)
        if isinstance(self._own_ends, ModelEnds) and self._are_prepared(window, ids):
            self.num_forwards += 1
            hidden = self._rise(window, self._own_ends, ids, len(self.gate.layers))
            return CausalLMOutputWithPast(logits=self._own_ends.logits(hidden[:, -logits_to_keep:]))
        with self.gate.passing():
            outputs = super()._forward(ids, columns, kept, logits_to_keep)
        if self._own_ends is None and self._ends is not None:
            self._own_ends = self._explain(outputs, window.hidden[-1], self._ends)
        return outputs

    def _explain(self, outputs: Any, hidden: Tensor | None, ends: ModelEnds) -> ModelEnds | bool:
        """The model's ends, if they give all that a pass of it gave; False otherwise."""
        bare = undecorated_model(self.model)
        if hidden is None or set(outputs) - {"logits", CACHE_KEY} or not is_called_unseen(self.model):
            return False
        own = ModelEnds(ends.embedding, ends.norm, bare.get_output_embeddings())
        return own if torch.equal(own.logits(hidden[:, -outputs.logits.shape[1] :]), outputs.logits) else False

    def run(self, tokens: Tensor, lengths: Tensor, last: Tensor, unread: Tensor | None = None) -> Any:
        """As [`PrefixLM.run`]; completes the round that [`~LayeredLM.climb`] began."""
        window, kept = self.gate.window, self._num_held
        if window is not None and bool((kept > lengths - last).any()):
            self._give_up(window)
            window = None
        if window is not None:
            self._keep_what_fits(window, tokens, lengths, kept)
        elif self.on_pass is None:
            return super().run(tokens, lengths, last, unread)
        else:
            kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - last)
            self._keep(kept)
            self._open(kept)
        outputs = self._feed(tokens, lengths, kept, last, unread, last - 1)
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

    def _begin(self, tokens: Tensor, lengths: Tensor, ahead: int) -> Window:
        kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - 1)
        if bool((lengths - kept != 1).any()):
            # Rows that lack more than their newest token would not stand side by side in one window.
            self.run(tokens, lengths - 1, torch.ones_like(lengths))
            kept = lengths - 1
        self._keep(kept)
        window = self._open(kept)
        if self._standing is not None:
            offset = self._standing.offset(kept, self._cache, ahead + 1)
            if offset is not None:
                window.prepared, window.offset = self._standing.prepared, offset
            else:
                gone = kept - self._standing.kept
                self._rows_in_step = self._rows_in_step and bool((gone == gone[0]).all())
                self._standing = None
        return window

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
