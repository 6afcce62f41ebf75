"""A causal LM addressed by prefix. This is the only file that knows KV caches, masks, positions and ragged batches.

The prefix is the truth: callers say which tokens each row has, and the model finds out what its cache can keep, removes
what it cannot, and feeds the rest. Rows may keep different amounts. Entries are held right-aligned: a row that keeps less
is shifted to the right and the columns it leaves are masked. Masking rejected columns in place would be wrong with
sliding windows, whose width counts columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_specdec._compat import (
    CACHE_KEY,
    empty_cache,
    forward_parameters,
    only_visible_entries,
    undecorated_model,
)
from hf_specdec.cache_rows import DROPPED, can_realign, realign, select_rows
from hf_specdec.cropping import check_croppable, check_filled, crop_layers, start_recording, stop_recording
from hf_specdec.placement import device_of
from hf_specdec.readback import is_host, read_together, sent


__all__ = ["PrefixLM"]


class PrefixLM:
    """Logits of prefixes; the cache is an optimisation and never part of the contract.

    Args:
        model (`PreTrainedModel`): A causal LM, possibly wrapped by PEFT.
        pad_token_id (`int`): Filler fed where a row has fewer new tokens than another.
        prompt_mask (`torch.LongTensor` of shape `(batch, prompt_columns)`, *optional*): 0 where the prompt is padding.
        cache (`Cache`, *optional*): A cache that already holds `held` columns of every row; a new one otherwise. It
            records its past until [`~PrefixLM.settle`] or [`~PrefixLM.abandon`].
        held (`torch.LongTensor` of shape `(batch, columns)`, *optional*): The token ids in that cache.
        hidden_columns (`int`): Cache columns before those of `held`, whose tokens nobody knows (continued caches, embedded
            prompts). They count in `prompt_mask`.
        next_position (`torch.LongTensor` of shape `(..., batch or 1, 1)`, *optional*): Position of the first column after
            the prompt.
        forward (`Callable`, *optional*): Called with the fed ids and the other inputs instead of the model; the target
            goes through its own `prepare_inputs_for_generation` here.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_token_id: int = 0,
        prompt_mask: Tensor | None = None,
        cache: Cache | None = None,
        held: Tensor | None = None,
        hidden_columns: int = 0,
        next_position: Tensor | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.device = device_of(undecorated_model(model))
        self.pad_token_id = pad_token_id
        prompt_mask = None if prompt_mask is None else prompt_mask.cpu()
        self.prompt_mask = None if prompt_mask is None or bool(prompt_mask.all()) else prompt_mask
        self.cache = cache
        self.hidden_columns = hidden_columns
        self.num_forwards = 0
        # `(batch, width)`, the columns of the latest pass; -1 where it fed filler.
        self.fed_columns = torch.zeros(0, 0, dtype=torch.long)
        self._forward_call = model if forward is None else forward
        self._parameters = forward_parameters(model)
        self._next_position = None if next_position is None else next_position.cpu()
        self._held = torch.zeros(0, 0, dtype=torch.long) if held is None else held.cpu()
        self._prompt_columns = hidden_columns + self._held.shape[1]
        self._num_held = torch.full((self._held.shape[0],), self._held.shape[1])
        self._num_known = self._num_held.clone()
        # Columns `(batch, width)` that hold -1, and their tokens on a device, which nobody has read yet.
        self._unread: list[tuple[Tensor, Tensor]] = []
        self._recorded = [] if cache is None else start_recording(cache)

    def score(self, tokens: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
        """The logits of [`~PrefixLM.run`]."""
        return self.run(tokens, lengths, last).logits

    def run(self, tokens: Tensor, lengths: Tensor, last: Tensor, unread: Tensor | None = None) -> Any:
        """Runs the model so that the logits of each row's `last` final positions are known.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, columns)`): Prefixes, on the CPU; row `b` ends at `lengths[b]`.
            lengths (`torch.LongTensor` of shape `(batch,)`): Their lengths.
            last (`torch.LongTensor` of shape `(batch,)`): Final positions wanted of each row; 0 where nobody reads it.
            unread (`torch.LongTensor` of shape `(batch, width)`, *optional*): Tokens that only a device knows: the first
                `last[b] - 1` stand in the final columns of row `b`, where `tokens` holds anything. Who reads them says so by
                [`~PrefixLM.tell`].

        Returns:
            The model's output. Its `logits` have the shape `(batch, last.max(), vocab)`: row `b` has its own in columns
            `0..last[b] - 1`, in the model's dtype.
        """
        kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - last)
        self._ensure_cache(len(lengths))
        if not can_realign(self._cache):
            kept = kept.min().expand_as(kept)
        self._keep(kept)
        return self._feed(tokens, lengths, kept, last, unread, last - 1)

    def tell(self, tokens: Tensor) -> None:
        """Says what the tokens are, `(batch, width)` on the CPU, that a device gave since this was last said."""
        for columns, unread in self._unread:
            self._write(columns, tokens[:, : unread.shape[1]])
            tokens = tokens[:, unread.shape[1] :]
        self._unread = []

    def lacks(self, tokens: Tensor, lengths: Tensor) -> bool:
        """Whether [`~PrefixLM.settle`] needs a forward pass."""
        return bool((self._common_prefix(tokens, lengths) < lengths).any())

    def settle(self, tokens: Tensor, lengths: Tensor) -> None:
        """Makes the cache hold exactly these prefixes, as plain decoding would leave it."""
        missing = self._common_prefix(tokens, lengths) < lengths
        if bool(missing.any()):
            self.run(tokens, lengths, missing.long())
        self._keep(lengths)
        stop_recording(self._cache, self._recorded)

    def extend(self, new_tokens: Tensor) -> Tensor:
        """Appends one token to every row's known prefix and returns the next logits, `(batch, vocab)`.

        Tokens on a device are not waited for; see [`~PrefixLM.tell`].
        """
        trailing = bool((self._num_known < self._num_held).any())
        realigns = can_realign(self._cache)
        if trailing and not realigns:  # all rows give up as much, and some are fed again
            self._read()
            new_tokens = new_tokens.cpu()
        unread = None if is_host(new_tokens.device) else new_tokens[:, None]
        if trailing and realigns:
            self._keep(self._num_known)
        # Otherwise nothing is cropped, not even by nothing: sliding layers would forget what a rejection may bring back.
        rows = torch.arange(len(new_tokens))
        if int(self._num_known.max()) >= self._held.shape[1]:
            self._held = torch.cat([self._held, torch.full_like(self._held[:, :1], -1)], 1)
        tokens = self._held.clone() if bool((self._num_known < self._num_held).any()) else self._held
        tokens[rows, self._num_known] = new_tokens if unread is None else -1
        one = torch.ones_like(self._num_known)
        if trailing and not realigns:
            return self.score(tokens, self._num_known + 1, one)[:, 0]
        return self._feed(tokens, self._num_known + 1, self._num_known, one, unread, one).logits[:, 0]

    def forget(self, lengths: Tensor) -> None:
        """Distrusts the entries after each row's first `lengths`: they are fed again even where their tokens are the same."""
        if len(self._num_known) == len(lengths):
            self._num_known = torch.minimum(self._num_known, lengths)

    def keep_rows(self, rows: Tensor) -> None:
        """From now on only `rows` (`(kept,)`) of the batch are asked for; the entries of the others are thrown away."""
        if self.prompt_mask is not None:
            self.prompt_mask = self.prompt_mask[rows]
        if self._next_position is not None and self._next_position.shape[-2] > 1:
            self._next_position = self._next_position[..., rows, :]
        self._read()
        self._held, self._num_held, self._num_known = self._held[rows], self._num_held[rows], self._num_known[rows]
        if self.cache is not None:
            select_rows(self.cache, rows, self.hidden_columns + int(self._num_held.max()))

    def abandon(self, lengths: Tensor) -> None:
        """Leaves in the cache what every row has committed, without a forward pass: for a run that ends by an exception.

        Where that is no longer to be had (a sliding window has dropped it, a recurrent state cannot tell), the cache is
        emptied, so that nobody continues from a wrong one.
        """
        kept = torch.minimum(lengths, self._num_known).min().expand_as(lengths)
        ragged = bool((self._num_held != self._num_held.max()).any())
        columns = self.hidden_columns + int(self._num_held.max() if ragged else kept.max())
        try:
            crop_layers(self._cache, [columns] * len(self._cache.layers))  # a pass may have reached some layers only
            if ragged:
                self._keep(kept)
            stop_recording(self._cache, self._recorded)
        except RuntimeError:
            empty_cache(self._cache)

    def idle(self) -> None:
        """A forward pass whose result nobody reads, for processes that wait for others."""
        pad = torch.full((1, 1), self.pad_token_id, device=self.device)
        self.model(input_ids=pad, use_cache=False)
        self.num_forwards += 1

    @property
    def visible_prompt_mask(self) -> Tensor | None:
        """The prompt mask on the columns whose tokens are known, which is what a drafter sees; None without padding."""
        return None if self.prompt_mask is None else self.prompt_mask[:, self.hidden_columns :]

    def _common_prefix(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """`(batch,)`, leading columns that the cache and the prefixes share."""
        if self.cache is None or self._held.shape[0] != tokens.shape[0]:
            return torch.zeros_like(lengths)
        self._read()
        width = min(self._held.shape[1], tokens.shape[1])
        same = (self._held[:, :width] == tokens[:, :width]).long().cumprod(-1).sum(-1)
        # Fillers were fed with the position of the token before them: they are never kept, even where their id fits.
        return torch.minimum(torch.minimum(same, self._num_known), lengths)

    def _read(self) -> None:
        """Asks the device for the tokens that nobody has told."""
        if self._unread:
            self.tell(torch.cat(read_together([tokens for _, tokens in self._unread]), 1))

    def _write(self, columns: Tensor, tokens: Tensor) -> None:
        rows, places = (columns >= 0).nonzero(as_tuple=True)
        self._held[rows, columns[rows, places]] = tokens[rows, places]

    def _feed(
        self,
        tokens: Tensor,
        lengths: Tensor,
        kept: Tensor,
        last: Tensor,
        unread: Tensor | None = None,
        num_unread: Tensor | None = None,
    ) -> Any:
        width = int((lengths - kept).max())
        columns = kept[:, None] + torch.arange(width)
        padded = torch.nn.functional.pad(tokens, (0, max(0, int(columns.max()) + 1 - tokens.shape[1])))
        ids = padded.gather(1, columns).masked_fill(columns >= lengths[:, None], self.pad_token_id)
        first_wanted = (lengths - kept) - last
        unneeded = int(first_wanted.min())
        self.fed_columns = columns.masked_fill(columns >= lengths[:, None], -1)
        fed = ids
        if unread is not None and num_unread is not None:
            fed = self._filled(ids, unread, lengths - num_unread - kept, num_unread)
        outputs = self._forward(fed, columns.minimum(lengths[:, None] - 1), kept, width - unneeded)
        self._remember(tokens, columns, ids, lengths, kept + width)
        if unread is not None and num_unread is not None:
            steps = torch.arange(unread.shape[1])
            places = (lengths - num_unread)[:, None] + steps
            self._unread.append((places.masked_fill(steps >= num_unread[:, None], -1), unread))
        # A model without `logits_to_keep` returns logits for every column it was fed.
        offset = first_wanted - unneeded + (outputs.logits.shape[1] - (width - unneeded))
        outputs["logits"] = _take_columns(outputs.logits, offset, int(last.max()))
        return outputs

    def _filled(self, ids: Tensor, unread: Tensor, first: Tensor, count: Tensor) -> Tensor:
        """The ids on the device, with the first `count[b]` tokens of `unread` from place `first[b]` on."""
        unread, start = sent(unread, self.device), int(first[0])
        if start + unread.shape[1] == ids.shape[1] and bool(((first == start) & (count == unread.shape[1])).all()):
            return torch.cat([sent(ids[:, :start], self.device), unread], 1) if start else unread
        steps = torch.arange(ids.shape[1]) - first[:, None]
        chosen = (steps >= 0) & (steps < count[:, None])
        ids, steps, chosen = (sent(each, self.device) for each in (ids, steps.clamp(0, unread.shape[1] - 1), chosen))
        return torch.where(chosen, unread.gather(1, steps), ids)

    def _forward(self, ids: Tensor, columns: Tensor, kept: Tensor, logits_to_keep: int) -> Any:
        mask, positions = self._mask(kept, ids.shape[1]), self._positions(columns)
        inputs: dict[str, Any] = {CACHE_KEY: self.cache, "use_cache": True}
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = logits_to_keep
        if mask is not None and "attention_mask" in self._parameters:
            inputs["attention_mask"] = sent(mask, self.device)
        if "position_ids" in self._parameters:
            inputs["position_ids"] = sent(positions, self.device)
        first = self.num_forwards == 0 and not self._started()
        with only_visible_entries(self.cache):
            outputs = self._forward_call(input_ids=sent(ids, self.device), return_dict=True, **inputs)
        self.num_forwards += 1
        if first:
            check_croppable(self._cache, self.model)
            check_filled(self._cache, self.model)
            self._recorded = start_recording(self._cache)
        return outputs

    @property
    def _cache(self) -> Cache:
        if self.cache is None:
            raise RuntimeError("the cache is made by the first forward pass")
        return self.cache

    def _started(self) -> bool:
        return bool(self._num_held.any()) or self.hidden_columns > 0

    def _ensure_cache(self, batch_size: int) -> None:
        if self.cache is None or len(self._num_held) != batch_size:
            self.cache = DynamicCache(config=undecorated_model(self.model).config.get_text_config(decoder=True))
            self._num_held = torch.zeros(batch_size, dtype=torch.long)
            self._num_known = torch.zeros(batch_size, dtype=torch.long)
            self._unread = []
            self.num_forwards = 0

    def _mask(self, kept: Tensor, width: int) -> Tensor | None:
        """`(batch, cache columns + width)`; None where every row is whole and unpadded."""
        shift = kept.max() - kept
        if self.prompt_mask is None and not bool(shift.any()):
            return None
        total = self.hidden_columns + int(kept.max()) + width
        source = torch.arange(total) - shift[:, None]
        mask = (source >= 0).long()
        if self.prompt_mask is not None:
            inside = (source >= 0) & (source < self.prompt_mask.shape[1])
            prompt = self.prompt_mask.gather(1, source.clamp(0, self.prompt_mask.shape[1] - 1))
            mask = torch.where(inside, prompt.to(mask), mask)
        return mask

    def _positions(self, columns: Tensor) -> Tensor:
        """Position of each fed column: it counts the row's real tokens and does not depend on the cache's layout."""
        if self._next_position is None:
            padding = 0 if self.prompt_mask is None else (self.prompt_mask == 0).sum(-1, keepdim=True)
            return (columns + self.hidden_columns - padding).clamp(min=0)
        since_prompt = columns + self.hidden_columns - self._prompt_columns
        return self._next_position + since_prompt

    def _remember(self, tokens: Tensor, columns: Tensor, ids: Tensor, lengths: Tensor, num_held: Tensor) -> None:
        needed = int(num_held.max())
        held = torch.nn.functional.pad(tokens, (0, max(0, needed - tokens.shape[1])), value=-1)
        self._held = held.scatter(1, columns, ids)
        self._num_held, self._num_known = num_held, lengths.clone()

    def _keep(self, kept: Tensor) -> None:
        """Takes the entries after each row's first `kept` out of the cache and aligns the rows to the right again.

        Sliding layers then drop what lies before their window. Until then they can give up all that was fed.
        """
        removed = self._num_held - kept
        width, new_width = int(self._num_held.max()), int(kept.max())
        if width == 0 and self.hidden_columns == 0:
            return
        shift = removed - (width - new_width)
        if bool(shift.any()):
            hidden = self.hidden_columns
            realign(self._cache, shift, hidden + width, hidden + new_width, hidden + kept)
        else:
            self._check_windows(width - new_width)
            self._cache.crop(-(width - new_width))
        self._num_held, self._num_known = kept.clone(), torch.minimum(self._num_known, kept)

    def _check_windows(self, num_removed: int) -> None:
        """Sliding layers hold what was fed since they were last trimmed; to ask for more would go unnoticed."""
        for layer in self._cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
                needed = min(layer.sliding_window - 1, layer.cumulative_length - num_removed)
                if layer.keys.shape[-2] - num_removed < needed:
                    raise RuntimeError(DROPPED)


def _take_columns(logits: Tensor, offset: Tensor, width: int) -> Tensor:
    """`width` columns of each row from `offset[b]` on; columns beyond the end repeat the last one."""
    first = int(offset[0])
    if not bool((offset != first).any()) and first + width == logits.shape[1]:
        return logits[:, first:]
    columns = (offset[:, None] + torch.arange(width)).clamp(max=logits.shape[1] - 1)
    columns = sent(columns, logits.device)
    return logits.gather(1, columns[..., None].expand(-1, -1, logits.shape[-1]))
