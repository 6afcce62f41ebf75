"""What a drafter is told, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_specdec.errors import DrafterError
from hf_specdec.readback import read_together, sent


__all__ = ["Budget", "Context", "Draft", "Drafter", "DropsRows", "Forecast", "Plan", "Unread"]


@dataclass(frozen=True)
class Context:
    """What a drafter may know: every committed token of every row.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, columns)`): Committed tokens, on the CPU; row `b` ends at
            `lengths[b]`, what follows is filler. Prompts are padded on the left, as in plain batched `generate`.
        lengths (`torch.LongTensor` of shape `(batch,)`): Number of committed columns of each row, padding included.
        prompt_mask (`torch.LongTensor` of shape `(batch, prompt_columns)`, *optional*): 0 where the prompt is padding.
        unfinished (`torch.BoolTensor` of shape `(batch,)`): Rows that still generate.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_mask: Tensor | None
    unfinished: Tensor

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def of(cls, input_ids: Tensor, prompt_mask: Tensor | None = None) -> Context:
        """The context in which every row has exactly the tokens `input_ids`."""
        rows, columns = input_ids.shape
        everything = torch.ones(rows, dtype=torch.bool)
        return cls(input_ids.cpu(), torch.full((rows,), columns), prompt_mask, everything)


@dataclass(frozen=True)
class Budget:
    """How far a drafter may go.

    Args:
        max_tokens (`torch.LongTensor` of shape `(batch,)`): Most tokens each row may draft now; 0 for none.
        min_confidence (`float`): A row stops *before* a position whose largest draft probability is below this. The
            decision looks at the law and never at the token drawn from it, which keeps sampling exact.
        min_survival (`float`): Drafting stops *after* a position at which the product of a row's largest draft
            probabilities so far, as the weighted mean over the unfinished rows (0 for those that draft no more), is below this.
        ceiling (`torch.LongTensor` of shape `(batch,)`, *optional*): Most tokens for a drafter that asks the `forecast`;
            `max_tokens` is the advice for the others.
        forecast ([`Forecast`], *optional*): Helps drafters that have a choice of drafts.
        max_nodes (`int`, *optional*): Most nodes of a tree, whose longest path `max_tokens` limits; as many as the drafter
            likes where it is None.
        weights (`torch.FloatTensor` of shape `(batch,)`, *optional*): What a token is worth to each row, 1 on average over
            the unfinished ones; the same to all where it is None.
    """

    max_tokens: Tensor
    min_confidence: float = 0.0
    min_survival: float = 0.0
    ceiling: Tensor | None = None
    forecast: Forecast | None = None
    max_nodes: int | None = None
    weights: Tensor | None = None

    @property
    def width(self) -> int:
        return int(self.max_tokens.max()) if self.max_tokens.numel() else 0

    @property
    def limit(self) -> Tensor:
        """`(batch,)`, tokens that no draft may exceed."""
        return self.max_tokens if self.ceiling is None else self.ceiling

    def weights_of(self, rows: list[int]) -> list[float] | None:
        """The weights of some rows; None where all weigh the same."""
        return None if self.weights is None else self.weights[rows].tolist()

    def capped(self, most: Tensor) -> Budget:
        """The same with at most `most` (`(batch,)`) tokens per row."""
        ceiling = None if self.ceiling is None else torch.minimum(self.ceiling, most)
        return replace(self, max_tokens=torch.minimum(self.max_tokens, most), ceiling=ceiling)

    def of_rows(self, rows: Tensor) -> Budget:
        """That of some rows (`(kept,)`) only."""
        ceiling = None if self.ceiling is None else self.ceiling[rows]
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, max_tokens=self.max_tokens[rows], ceiling=ceiling, weights=weights)


@dataclass(frozen=True)
class Plan:
    """What each row drafts: the first tokens of its n-gram match, or tokens of the model.

    Args:
        from_match (`Sequence[int]`): Tokens of the match that each row takes.
        from_model (`Sequence[int]`): Most tokens that the model drafts for each row; 0 where the match is taken.
    """

    from_match: Sequence[int]
    from_model: Sequence[int]


class Forecast(Protocol):
    """What a length controller expects of the drafts that a drafter could make."""

    def plan(
        self, offers: Sequence[tuple[str, int] | None], *, with_model: bool, weights: Sequence[float] | None = None
    ) -> Plan:
        """The best drafts for rows that are each offered a match, `(kind, tokens)`, or None, and perhaps a model.

        `weights` are those of a [`Budget`] for these rows.
        """
        ...

    def extensions(
        self, offers: Sequence[tuple[str, int, int] | None], width: int, weights: Sequence[float] | None = None
    ) -> list[int]:
        """How many tokens of its match should follow each row's model draft; the widest of these has `width` tokens.

        A row's offer is the match's kind, its tokens, and how many the model drafted; None where there is no match.
        """
        ...


@dataclass(frozen=True)
class Unread:
    """What is known of a draft that nobody has read from the device yet.

    Args:
        most (`torch.LongTensor` of shape `(batch,)`): Most tokens that each row drafted, on the CPU.
        sound (`torch.BoolTensor` of shape `()`): False where the logits turned out to hold NaN; the draft is empty then. On
            the device.
        complaint (`str`): What to say in that case.
        when_read (`Callable`): Told the tokens, `(batch, width)` on the CPU.
    """

    most: Tensor
    sound: Tensor
    complaint: str
    when_read: Callable[[Tensor], None]

    def check(self, sound: Tensor) -> None:
        """Raises a `DrafterError` if `sound`, as it was read, is False."""
        if not bool(sound):
            raise DrafterError(self.complaint)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the laws they were drawn from.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, width)`): Drafted tokens, on the CPU unless the draft is `unread`; row `b`
            uses the first `lengths[b]`.
        lengths (`torch.LongTensor` of shape `(batch,)`): Number of tokens each row drafted.
        q (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): The law each token was really drawn from.
            None says that every token is a point mass (greedy or n-gram drafts).
        logits (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): The drafter's logits before any
            processor, for rules that measure its uncertainty.
        parents (`torch.LongTensor` of shape `(batch, width)`, *optional*): Parent of each node when the draft is a tree: an
            earlier node, or -1 for the last committed token. None for a chain. `lengths` then counts nodes.
        source (`str`): What drafted, for the statistics.
        stretches (`Sequence[Sequence[tuple[str, int]]]`, *optional*): For each row, what kind of draft its tokens are,
            `(kind, tokens)` from left to right. None says that all are of the kind `source`.
        prefill_seconds (`float`): Time spent on the prompt, the first time a drafter sees it.
        num_attempted (`torch.LongTensor` of shape `(batch,)`, *optional*): Positions at which the drafter looked for a
            token, the one included at which it found none worth proposing; `lengths` where it is None.
        exit_depths (`torch.LongTensor` of shape `(batch, width)`, *optional*): Layers after which each token was drafted.
        shared_seconds (`float`): Time spent on layers that verification goes on from, without a draft having come of it.
        num_read (`int`): Tokens of each row that the drafter was fed before its first draft: the newest two at most in a round
            after one that it drafted in, more where others drafted since.
        unread ([`Unread`], *optional*): Given where `tokens` and `lengths` are still on the drafter's device, for the loop to
            read them together with its verdict. [`~Draft.read`] fetches them.
        is_vouched_for (`bool`): Whether its drafter has seen to it that laws and logits are sound, so that `check` need not ask
            a device.
    """

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None = None
    logits: Tensor | None = None
    parents: Tensor | None = None
    source: str = "none"
    stretches: Sequence[Sequence[tuple[str, int]]] | None = None
    prefill_seconds: float = 0.0
    num_attempted: Tensor | None = None
    exit_depths: Tensor | None = None
    shared_seconds: float = 0.0
    num_read: int = 0
    unread: Unread | None = None
    is_vouched_for: bool = False

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def limits(self) -> Tensor:
        """`(batch,)`, on the CPU: columns that must be fed for each row; `lengths` once they are known there."""
        return self.lengths if self.unread is None else self.unread.most

    def read(self) -> Draft:
        """The same with tokens and lengths on the CPU; a `DrafterError` says that the drafter's logits were unsound."""
        if self.unread is None:
            return self
        tokens, lengths, sound = read_together([self.tokens, self.lengths, self.unread.sound])
        self.unread.check(sound)
        return self.as_read(tokens, lengths)

    def as_read(self, tokens: Tensor, lengths: Tensor) -> Draft:
        """The same with what was read of it elsewhere; whoever drafted is told."""
        if self.unread is not None:
            self.unread.when_read(tokens)
        return replace(self, tokens=tokens, lengths=lengths, unread=None)

    @property
    def kinds(self) -> Sequence[Sequence[tuple[str, int]]]:
        """The stretches of every row, written out."""
        if self.stretches is not None:
            return self.stretches
        return [[(self.source, length)] if length else [] for length in self.lengths.tolist()]

    @property
    def valid(self) -> Tensor:
        """`(batch, width)`, True where a row really drafted."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]

    @property
    def depths(self) -> Tensor:
        """`(batch, width)`, tokens on the path to each: `1, 2, ...` for a chain."""
        if self.parents is None:
            return torch.arange(1, self.width + 1).expand(self.tokens.shape)
        depths, above = torch.ones_like(self.tokens), self.parents
        while bool((above >= 0).any()):
            depths = depths + (above >= 0)
            above = torch.where(above >= 0, self.parents.gather(1, above.clamp(min=0)), -1)
        return depths

    @property
    def longest(self) -> Tensor:
        """`(batch,)`, tokens of each row's longest path: `lengths` for a chain."""
        if self.parents is None or self.width == 0:
            return self.lengths
        return torch.where(self.valid, self.depths, 0).max(-1).values

    def first(self, most: Tensor) -> Draft:
        """The first `most[b]` tokens of each row."""
        if bool((self.lengths <= most).all()):
            return self
        lengths = torch.minimum(self.lengths, most)
        width = int(lengths.max())
        if width == 0:
            return Draft.empty(len(lengths))
        return replace(
            self,
            tokens=self.tokens[:, :width],
            lengths=lengths,
            q=None if self.q is None else self.q[:, :width],
            logits=None if self.logits is None else self.logits[:, :width],
            parents=None if self.parents is None else self.parents[:, :width],
            stretches=[_cut(row, int(length)) for row, length in zip(self.kinds, lengths, strict=True)],
            num_attempted=None
            if self.num_attempted is None
            else torch.where(lengths < self.lengths, lengths, self.num_attempted),
            exit_depths=None if self.exit_depths is None else self.exit_depths[:, :width],
        )

    @classmethod
    def empty(cls, batch_size: int) -> Draft:
        return cls(torch.zeros(batch_size, 0, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long))

    def check(self, context: Context, budget: Budget, vocab_size: int) -> Draft:
        """Returns the draft itself, or raises a `DrafterError` that says what is malformed in it."""
        rows = context.batch_size
        if self.tokens.ndim != 2 or self.tokens.shape[0] != rows or self.lengths.shape != (rows,):
            raise DrafterError(
                f"a draft must have tokens [{rows}, width] and lengths [{rows}], got {tuple(self.tokens.shape)} and "
                f"{tuple(self.lengths.shape)}"
            )
        if self.unread is not None:
            # Its tokens are those of logits over the vocabulary, and are not waited for.
            if bool((self.unread.most > budget.limit).any()) or bool((self.unread.most > self.width).any()):
                raise DrafterError(f"a draft is longer than its budget: {self.unread.most.tolist()} tokens")
            return self
        self._check_parents()
        if bool((self.longest > budget.limit).any()) or bool((self.lengths > self.width).any()):
            raise DrafterError(
                f"a draft is longer than its budget: {self.longest.tolist()} tokens in {self.width} columns, "
                f"allowed {budget.limit.tolist()}"
            )
        drafted = self.tokens[self.valid]
        if drafted.numel() and (int(drafted.min()) < 0 or int(drafted.max()) >= vocab_size):
            raise DrafterError(f"drafted token ids must lie in [0, {vocab_size}), got {drafted.tolist()}")
        if not self.is_vouched_for:
            self._check_laws()
        return self

    def _check_laws(self) -> None:
        sound = []
        if self.q is not None:
            tokens, valid = (sent(each, self.q.device) for each in (self.tokens, self.valid))
            drawn = self.q.gather(-1, tokens[..., None])[..., 0]
            sound.append((~valid | ((drawn > 0) & drawn.isfinite())).all())
        if self.logits is not None:
            valid = sent(self.valid, self.logits.device)
            sound.append((~valid | ~self.logits.isnan().any(-1)).all())
        seen = read_together(sound)
        if self.q is not None and not bool(seen[0]):
            raise DrafterError("a drafted token has no probability, or NaN, under the law it was drawn from")
        if self.logits is not None and not bool(seen[-1]):
            raise DrafterError("the drafter's logits contain NaN")

    def _check_parents(self) -> None:
        if self.parents is None:
            return
        if self.parents.shape != self.tokens.shape:
            raise DrafterError(
                f"a tree needs one parent for each of its tokens {tuple(self.tokens.shape)}, got "
                f"{tuple(self.parents.shape)}"
            )
        if bool(((self.parents < -1) | (self.parents >= torch.arange(self.width))).any()):
            raise DrafterError(f"each node's parent must be -1 or an earlier node, got {self.parents.tolist()}")


def _cut(stretches: Sequence[tuple[str, int]], length: int) -> list[tuple[str, int]]:
    kept = []
    for kind, number in stretches:
        if length > 0:
            kept.append((kind, min(number, length)))
        length -= number
    return kept


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Drafts at most `budget.max_tokens[b]` tokens after row `b` of the context."""
        ...


@runtime_checkable
class DropsRows(Protocol):
    """A drafter that can go on without the rows of a batch that have finished."""

    @property
    def can_drop_rows(self) -> bool:
        """Whether it really can."""
        ...

    def keep_rows(self, kept: Tensor) -> None:
        """From now on the batch has only the rows at the places `kept` (`(kept,)`)."""
        ...
