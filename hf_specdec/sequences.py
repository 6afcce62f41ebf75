"""The growing texts of a batch, and whether each row goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec.readback import sent
from hf_specdec.records import Draft


__all__ = ["Sequences", "end_tokens", "pad_left", "padding_of"]


def end_tokens(given: int | Iterable[int] | None) -> list[int]:
    """The tokens that an `eos_token_id` names."""
    if given is None:
        return []
    return [given] if isinstance(given, int) else [int(each) for each in given]


def padding_of(model: Any) -> int:
    """A token to pad prompts of a model with, which its attention mask hides: its own padding token, or else 0."""
    given = model.config.get_text_config().pad_token_id
    return 0 if given is None else int(given)


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int, device: Any) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of prompts that are padded on the left to a common length."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor(
            [[pad_token_id] * (width - len(each)) + list(each) for each in prompts], device=device
        ),
        "attention_mask": torch.tensor(
            [[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=device
        ),
    }


class Sequences:
    """Committed tokens of every row, appended one by one and put before the stopping criteria one by one.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, prompt_columns)`): The prompts, padded on the left.
        criteria (`StoppingCriteriaList`): When to stop.
        pad_token_id (`int`): What a finished row is continued with.
        pads_finished_rows (`bool`): Whether finished rows are padded (plain decoding does so iff there is an EOS criterion).
    """

    def __init__(
        self, input_ids: Tensor, criteria: StoppingCriteriaList, pad_token_id: int, pads_finished_rows: bool
    ) -> None:
        self.device = input_ids.device
        self.criteria = criteria
        self.pad_token_id = pad_token_id
        self.pads_finished_rows = pads_finished_rows
        self.prompt_columns = input_ids.shape[1]
        self.tokens = input_ids.cpu().clone()
        self.lengths = torch.full((input_ids.shape[0],), input_ids.shape[1])
        self.unfinished = torch.ones(input_ids.shape[0], dtype=torch.bool)
        self.rows = torch.arange(input_ids.shape[0])
        self._done: dict[int, Tensor] = {}

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    def keep_rows(self, kept: Tensor) -> None:
        """Goes on with the rows at the places `kept` only; the texts of the others, which have finished, are put aside.

        `rows` says which rows of the batch are left.
        """
        gone = torch.ones(self.batch_size, dtype=torch.bool)
        gone[kept] = False
        for place in gone.nonzero()[:, 0].tolist():
            self._done[int(self.rows[place])] = self.tokens[place, : int(self.lengths[place])].clone()
        self.rows, self.tokens, self.lengths = self.rows[kept], self.tokens[kept], self.lengths[kept]
        self.unfinished = self.unfinished[kept]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text by a criterion of their own."""
        ends = [each.eos_token_id for each in self.criteria if isinstance(each, EosTokenCriteria)]
        return tuple(token for each in ends for token in each.flatten().tolist())

    @property
    def rows_stop_alone(self) -> bool:
        """Whether a finished row's text is settled at once. Without padding it goes on until all rows have stopped, unless
        nothing but the common length stops them."""
        return self.pads_finished_rows or all(isinstance(each, MaxLengthCriteria) for each in self.criteria)

    @property
    def active(self) -> Tensor:
        """`(batch,)`, rows that still emit tokens of their own: without an EOS criterion plain decoding never pads."""
        if self.pads_finished_rows or not bool(self.unfinished.any()):
            return self.unfinished
        return torch.ones_like(self.unfinished)

    @property
    def prefix(self) -> Tensor:
        """`(batch, length)` on the user's device, for rows of equal length: what plain decoding calls `input_ids`."""
        return sent(self.tokens[:, : int(self.lengths[0])].contiguous(), self.device)

    def with_draft(self, draft: Draft) -> Tensor:
        """`(batch, columns)`, the tokens with each row's draft written after its committed ones; a copy.

        A draft that nobody has read stands there as -1.
        """
        self._reserve(int(self.lengths.max()) + draft.width)
        columns = self.lengths[:, None] + torch.arange(draft.width)
        tokens = self.tokens.clone()
        current = tokens.gather(1, columns)
        if draft.unread is not None:
            return tokens.scatter_(
                1, columns, current.masked_fill(columns < (self.lengths + draft.limits)[:, None], -1)
            )
        return tokens.scatter_(1, columns, torch.where(draft.valid, draft.tokens, current))

    def append_step(self, tokens: Tensor, scores: tuple[Tensor, ...] | None) -> list[list[int]]:
        """Commits one token of every row at once, as plain decoding does.

        Args:
            tokens (`torch.LongTensor` of shape `(batch,)`): The chosen tokens.
            scores (`tuple[torch.FloatTensor]`, *optional*): Recorded scores of all steps, for criteria that look at them.

        Returns:
            The token that each row really emitted: none for a row that had finished.
        """
        emits = self.active.tolist()
        tokens = torch.where(self.active, tokens, self.pad_token_id)
        self._reserve(int(self.lengths.max()) + 1)
        self.tokens.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        self.unfinished = self.unfinished & ~self.criteria(self.prefix, scores).cpu()
        return [[token] if emits[row] else [] for row, token in enumerate(tokens.tolist())]

    def append_rows(self, proposed: list[list[int]]) -> list[list[int]]:
        """Commits each row's tokens one by one until a criterion stops the row; rows advance by different numbers."""
        self._reserve(int(self.lengths.max()) + max(map(len, proposed), default=0))
        lengths, unfinished = self.lengths.clone(), self.unfinished.clone()
        emitted: list[list[int]] = []
        for row, tokens in enumerate(proposed):
            emitted.append([])
            for token in tokens:
                end = int(lengths[row]) + 1
                self.tokens[row, end - 1] = token
                lengths[row] = end
                emitted[row].append(token)
                # On the CPU, where the tokens are: criteria that judge rows alone do not mind, and no device is waited for.
                if bool(self.criteria(self.tokens[row : row + 1, :end], None)[0]):
                    unfinished[row] = False
                    break
        self.lengths, self.unfinished = lengths, unfinished
        return emitted

    def with_padded_rows(self, draft: Draft) -> Draft:
        """The draft in which rows that emit nothing of their own propose the padding they will be continued with."""
        if draft.width == 0 or draft.parents is not None or bool(self.active.all()):
            return draft
        idle = ~self.active
        tokens = torch.where(idle[:, None], self.pad_token_id, draft.tokens)
        return replace(draft, tokens=tokens, lengths=torch.where(idle, draft.width, draft.lengths))

    def pad_finished(self, most: int) -> None:
        """Lets finished rows follow the others with padding, by at most `most` columns, as plain decoding feeds them."""
        target = int(self.lengths.max())
        self._reserve(target)
        for row in (~self.unfinished).nonzero()[:, 0].tolist():
            start = int(self.lengths[row])
            end = min(start + most, target)
            self.tokens[row, start:end] = self.pad_token_id
            self.lengths[row] = end

    def finish(self) -> Tensor:
        """`(batch, length)`, the final texts, finished rows padded to the longest."""
        self.pad_finished(int(self.lengths.max()))
        left = {int(row): self.tokens[place, : int(self.lengths[place])] for place, row in enumerate(self.rows)}
        texts = [text for _, text in sorted((left | self._done).items())]
        width = max(map(len, texts))
        pad = torch.nn.functional.pad
        return torch.stack([pad(text, (0, width - len(text)), value=self.pad_token_id) for text in texts]).to(
            self.device
        )

    def _reserve(self, columns: int) -> None:
        missing = columns - self.tokens.shape[1]
        if missing > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, max(missing, 64)))
