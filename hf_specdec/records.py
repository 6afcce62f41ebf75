"""The glossary: the only things that cross a seam between the loop, the drafters, the rules and the controllers.

All are batched: `batch` rows, of which each may draft, accept and finish on its own. `p` is the target's law, `q` the
draft's. A *draft* token is proposed by a drafter, an *accepted* one passed the rule, the *correction* replaces the first
rejected one and the *bonus* follows a draft that was accepted whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_specdec.errors import DrafterError


__all__ = [
    "AcceptanceRule",
    "Budget",
    "Context",
    "Draft",
    "Drafter",
    "Evidence",
    "Forecast",
    "Judged",
    "LengthController",
    "LengthSchedule",
    "Observer",
    "Outcome",
    "Place",
    "Plan",
    "Round",
    "Verdict",
    "choice_law",
]


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
            probabilities so far, as the mean over the unfinished rows (0 for those that draft no more), is below this.
        ceiling (`torch.LongTensor` of shape `(batch,)`, *optional*): Most tokens for a drafter that asks the `forecast`;
            `max_tokens` is the advice for the others.
        forecast ([`Forecast`], *optional*): Helps drafters that have a choice of drafts.
    """

    max_tokens: Tensor
    min_confidence: float = 0.0
    min_survival: float = 0.0
    ceiling: Tensor | None = None
    forecast: Forecast | None = None

    @property
    def width(self) -> int:
        return int(self.max_tokens.max()) if self.max_tokens.numel() else 0

    @property
    def limit(self) -> Tensor:
        """`(batch,)`, tokens that no draft may exceed."""
        return self.max_tokens if self.ceiling is None else self.ceiling

    def capped(self, most: Tensor) -> Budget:
        """The same with at most `most` (`(batch,)`) tokens per row."""
        ceiling = None if self.ceiling is None else torch.minimum(self.ceiling, most)
        return replace(self, max_tokens=torch.minimum(self.max_tokens, most), ceiling=ceiling)


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

    def plan(self, offers: Sequence[tuple[str, int] | None], *, with_model: bool) -> Plan:
        """The best drafts for rows that are each offered a match, `(kind, tokens)`, or None, and perhaps a model."""
        ...

    def extension(self, kind: str, offered: int, drafted: int) -> int:
        """How many of the `offered` tokens of a match should follow `drafted` tokens of the model."""
        ...


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the laws they were drawn from.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, width)`): Drafted tokens, on the CPU; row `b` uses the first
            `lengths[b]`.
        lengths (`torch.LongTensor` of shape `(batch,)`): Number of tokens each row drafted.
        q (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): The law each token was really drawn from.
            None says that every token is a point mass (greedy or n-gram drafts).
        logits (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): The drafter's logits before any
            processor, for rules that measure its uncertainty.
        parents (`torch.LongTensor` of shape `(batch, width)`, *optional*): Parent of each node when the draft is a tree;
            None for a chain.
        source (`str`): What drafted, for the statistics.
        stretches (`Sequence[Sequence[tuple[str, int]]]`, *optional*): For each row, what kind of draft its tokens are,
            `(kind, tokens)` from left to right. None says that all are of the kind `source`.
        prefill_seconds (`float`): Time spent on the prompt, the first time a drafter sees it.
        num_attempted (`torch.LongTensor` of shape `(batch,)`, *optional*): Positions at which the drafter looked for a
            token, the one included at which it found none worth proposing; `lengths` where it is None.
        exit_depths (`torch.LongTensor` of shape `(batch, width)`, *optional*): Layers after which each token was drafted.
        shared_seconds (`float`): Time spent on layers that verification goes on from, without a draft having come of it.
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

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def kinds(self) -> Sequence[Sequence[tuple[str, int]]]:
        """The stretches of every row, written out."""
        if self.stretches is not None:
            return self.stretches
        return [[(self.source, length)] if length else [] for length in self.lengths.tolist()]

    @property
    def valid(self) -> Tensor:
        """`(batch, width)`, True where a row really drafted."""
        return torch.arange(self.width) < self.lengths[:, None]

    def first(self, most: Tensor) -> Draft:
        """The first `most[b]` tokens of each row."""
        if bool((self.lengths <= most).all()):
            return self
        lengths = torch.minimum(self.lengths, most)
        width = int(lengths.max())
        return replace(
            self,
            tokens=self.tokens[:, :width],
            lengths=lengths,
            q=None if self.q is None else self.q[:, :width],
            logits=None if self.logits is None else self.logits[:, :width],
            stretches=[_cut(row, int(length)) for row, length in zip(self.kinds, lengths, strict=True)],
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
        if bool((self.lengths > budget.limit).any()) or bool((self.lengths > self.width).any()):
            raise DrafterError(
                f"a draft is longer than its budget: {self.lengths.tolist()} tokens in {self.width} columns, "
                f"allowed {budget.limit.tolist()}"
            )
        drafted = self.tokens[self.valid]
        if drafted.numel() and (int(drafted.min()) < 0 or int(drafted.max()) >= vocab_size):
            raise DrafterError(f"drafted token ids must lie in [0, {vocab_size}), got {drafted.tolist()}")
        if self.q is not None:
            drawn = self.q.gather(-1, self.tokens.to(self.q.device)[..., None])[..., 0][self.valid.to(self.q.device)]
            if not bool(((drawn > 0) & drawn.isfinite()).all()):
                raise DrafterError("a drafted token has no probability, or NaN, under the law it was drawn from")
        if self.logits is not None and bool(self.logits[self.valid.to(self.logits.device)].isnan().any()):
            raise DrafterError("the drafter's logits contain NaN")
        return self


def _cut(stretches: Sequence[tuple[str, int]], length: int) -> list[tuple[str, int]]:
    kept = []
    for kind, number in stretches:
        if length > 0:
            kept.append((kind, min(number, length)))
        length -= number
    return kept


@dataclass(frozen=True)
class Place:
    """Where drafted positions stand in the texts, for rules that look at the prefix.

    Args:
        text (`torch.LongTensor` of shape `(batch, columns)`): Committed tokens with the drafts after them, on the CPU.
        columns (`torch.LongTensor` of shape `(batch, width)`): The column of each draft; its prefix stands left of it.
        prompt_columns (`int`): Columns of the prompts, padding included.
        eos_token_ids (`tuple[int, ...]`): Tokens that end a text.
    """

    text: Tensor
    columns: Tensor
    prompt_columns: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def steps(self) -> Tensor:
        """`(batch, width)`, the index of each draft among the generated tokens: 0 for the first after the prompt."""
        return self.columns - self.prompt_columns


@dataclass(frozen=True)
class Evidence:
    """All that an acceptance rule may look at, for `width` drafted positions of each row.

    Greedy decoding arrives here as the one-hot law `p`, a greedy or n-gram draft as the point mass `q`, so that rules
    need no branch for either. Rules that gate on uncertainty read the untempered logits.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, width)`): Drafted tokens.
        valid (`torch.BoolTensor` of shape `(batch, width)`): Positions that were really drafted.
        scores (`torch.FloatTensor` of shape `(batch, width, vocab)`): Target logits after all processors, `-inf` where banned.
        target_logits (`torch.FloatTensor` of shape `(batch, width, vocab)`): Target logits before any processor.
        do_sample (`bool`): Whether `p` is the softmax of `scores` or the one-hot law of their argmax.
        q (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): Law they were drawn from; None for point masses.
        draft_logits (`torch.FloatTensor` of shape `(batch, width, vocab)`, *optional*): Draft logits before any processor.
        place ([`Place`], *optional*): Where the positions stand in the texts.
        whole ([`Evidence`], *optional*): The evidence on the whole draft where this is only part of it. Scores of later
            positions are then the raw logits, since no processor may see a prefix that is not committed.
        first (`int`): Index of the first position in the whole draft.
    """

    tokens: Tensor
    valid: Tensor
    scores: Tensor
    target_logits: Tensor
    do_sample: bool
    q: Tensor | None = None
    draft_logits: Tensor | None = None
    place: Place | None = None
    whole: Evidence | None = None
    first: int = 0

    @cached_property
    def p(self) -> Tensor:
        """`(batch, width, vocab)`, the law the target would draw from."""
        return choice_law(self.scores, self.do_sample)

    @cached_property
    def p_token(self) -> Tensor:
        """`(batch, width)`, the target's probability of each drafted token."""
        if self.do_sample:
            return self.p.gather(-1, self.tokens[..., None])[..., 0]
        return (self.scores.argmax(-1) == self.tokens).to(self.scores.dtype)

    @cached_property
    def q_token(self) -> Tensor:
        """`(batch, width)`, the probability each drafted token had when it was drawn."""
        if self.q is None:
            return torch.ones_like(self.tokens, dtype=self.scores.dtype)
        return self.q.gather(-1, self.tokens[..., None])[..., 0]

    def at(self, position: Tensor) -> Evidence:
        """The evidence of one position per row (`position`: `(batch,)`), with width 1."""
        rows = torch.arange(self.tokens.shape[0], device=self.tokens.device)

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows, position][:, None]

        return Evidence(
            tokens=self.tokens[rows, position][:, None],
            valid=self.valid[rows, position][:, None],
            scores=self.scores[rows, position][:, None],
            target_logits=self.target_logits[rows, position][:, None],
            do_sample=self.do_sample,
            q=pick(self.q),
            draft_logits=pick(self.draft_logits),
            place=self.place and replace(self.place, columns=self.place.columns.gather(1, position.cpu()[:, None])),
        )


def choice_law(scores: Tensor, do_sample: bool) -> Tensor:
    """The law a next token is drawn from: the softmax of `scores` (`(..., vocab)`), or its one-hot argmax when greedy."""
    if do_sample:
        return scores.softmax(-1)
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class Outcome:
    """How the first position that was not accepted ended, for rules that count what they did.

    Args:
        rejected (`torch.BoolTensor` of shape `(batch,)`): Rows that rejected a draft in this round.
        uniforms (`torch.FloatTensor` of shape `(batch,)`): The number in [0, 1) thrown at that draft.
        next_tokens (`torch.LongTensor` of shape `(batch,)`): The token emitted instead.
    """

    rejected: Tensor
    uniforms: Tensor
    next_tokens: Tensor


@dataclass(frozen=True)
class Judged:
    """What became of drafted positions once their round was committed. What was discarded is in neither mask.

    Args:
        evidence ([`Evidence`]): What the rule was shown.
        reached (`torch.BoolTensor` of shape `(batch, width)`): Positions judged and committed: the accepted drafts and the
            first rejected one.
        accepted (`torch.BoolTensor` of shape `(batch, width)`): Drafts that were kept.
    """

    evidence: Evidence
    reached: Tensor
    accepted: Tensor


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Args:
        num_accepted (`torch.LongTensor` of shape `(batch,)`): Leading drafts accepted.
        next_tokens (`torch.LongTensor` of shape `(batch,)`): The correction, or the bonus after a fully accepted draft.
        events (`dict[str, torch.LongTensor]`): Counts of shape `(batch,)` the rule reports for this round.
    """

    num_accepted: Tensor
    next_tokens: Tensor
    events: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """One target forward pass of the decode phase and what came of it. The first record of a run is the prefill.

    Args:
        emitted (`list[list[int]]`): New tokens of each row, cut where the row stopped.
        num_drafted (`torch.LongTensor` of shape `(batch,)`): Drafts that were put before the target.
        num_verified (`torch.LongTensor` of shape `(batch,)`): Drafts judged: the accepted ones and the first rejected one.
        num_accepted (`torch.LongTensor` of shape `(batch,)`): Drafts accepted *and* kept after stopping criteria.
        unfinished (`torch.BoolTensor` of shape `(batch,)`): Rows that go on after this round.
        draft_seconds (`float`): Time spent drafting.
        prefill_seconds (`float`): Time spent on the prompt: by the target in the record of the prefill, by the drafter in
            the round in which it first sees the prompt.
        verify_seconds (`float`): Time of the target's forward pass, the verdict and the commit.
        source (`str`): What drafted.
        stretches (`Sequence[Sequence[tuple[str, int]]]`): See [`Draft`].
        is_prefill (`bool`): True for the record of the prompt's forward pass, which is not a round.
        events (`dict[str, torch.LongTensor]`): Counts of shape `(batch,)`; of shape `(batch, n)` for histograms, whose
            column `i` counts the value `i`.
        problem (`str`, *optional*): What went wrong with the drafter in this round.
        num_attempted (`torch.LongTensor` of shape `(batch,)`, *optional*): As in [`Draft`].
    """

    emitted: Sequence[Sequence[int]]
    num_drafted: Tensor
    num_verified: Tensor
    num_accepted: Tensor
    unfinished: Tensor
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    source: str = "none"
    stretches: Sequence[Sequence[tuple[str, int]]] = ()
    is_prefill: bool = False
    events: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    num_attempted: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Drafts at most `budget.max_tokens[b]` tokens after row `b` of the context."""
        ...


class AcceptanceRule(Protocol):
    """Judges drafts. A rule is two pure laws; the dice are thrown in `hf_specdec.verify` and nowhere else."""

    @property
    def lossless(self) -> bool:
        """Whether the emitted law is exactly the target's."""
        ...

    @property
    def needs_draft_logits(self) -> bool:
        """Whether `Evidence.draft_logits` must be there, so that n-gram drafts are of no use to the rule."""
        ...

    @property
    def throws_dice(self) -> bool:
        """Whether the rule needs random numbers when decoding is greedy: its laws are then not all 0, 1 or one-hot."""
        ...

    def acceptance(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, the probability of accepting each draft, given that it was reached."""
        ...

    def replacement(self, evidence: Evidence) -> Tensor:
        """`(batch, vocab)`, the law of the correction after a rejection; `evidence` has width 1."""
        ...

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        """Counts of shape `(batch,)` to report; `evidence` has width 1, the position where the draft ended."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A rule that looks at what was committed: to count it, or to learn from it in a memory of its own."""

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Called by the loop after a round's commit; returns counts of shape `(batch,)` to report."""
        ...


class LengthSchedule(Protocol):
    """The running state of a length controller during one `generate` call."""

    def next_budget(self) -> Budget:
        """The next round's length of each row, before the loop caps it by what the run has left."""
        ...

    def observe(self, round_: Round) -> None:
        """Learns from a finished round."""
        ...


class LengthController(Protocol):
    """Says how far to draft. The controller itself is immutable; what it learns lives in the schedule it starts."""

    def start(self, batch_size: int) -> LengthSchedule: ...
