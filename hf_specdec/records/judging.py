"""What an acceptance rule may look at, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_specdec.readback import sent
from hf_specdec.records.drafting import Draft


__all__ = [
    "AcceptanceRule",
    "Evidence",
    "Explainer",
    "Judged",
    "KnownLaw",
    "Observer",
    "Outcome",
    "Place",
    "Verdict",
    "choice_law",
]


@dataclass(frozen=True)
class Place:
    """Where drafted positions stand in the texts, for rules that look at the prefix.

    Args:
        text (`torch.LongTensor` of shape `(batch, columns)`): Committed tokens with the drafts after them, on the CPU; see
            `text_on`.
        columns (`torch.LongTensor` of shape `(batch, width)`): The column of each draft; its prefix stands left of it.
        prompt_columns (`int`): Columns of the prompts, padding included.
        eos_token_ids (`tuple[int, ...]`): Tokens that end a text.
        drafted (`tuple[torch.LongTensor, torch.LongTensor]`, *optional*): Columns (on the CPU) and tokens (on the device) of a
            draft that nobody has read yet; `text` has -1 in their place.
    """

    text: Tensor
    columns: Tensor
    prompt_columns: int
    eos_token_ids: tuple[int, ...] = ()
    drafted: tuple[Tensor, Tensor] | None = None

    def text_on(self, device: torch.device) -> Tensor:
        """`(batch, columns)`, the text on a device, drafts included."""
        text = sent(self.text, device)
        if self.drafted is None:
            return text
        columns, tokens = (sent(each, device) for each in self.drafted)
        return text.scatter(1, columns, tokens)

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
        index (`torch.LongTensor` of shape `(batch,)`, *optional*): The same by row, where each row shows another position.
        draft ([`Draft`], *optional*): The whole draft as the loop has it: what the CPU knows of it need not be asked of the
            device. It is for [`verify`]; rules have no use for it.
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
    index: Tensor | None = None
    draft: Draft | None = None

    @cached_property
    def p(self) -> Tensor:
        """`(batch, width, vocab)`, the law the target would draw from."""
        return choice_law(self.scores, self.do_sample)

    @cached_property
    def target_tokens(self) -> Tensor:
        """`(batch, width)`, the target's argmax among what the processors left. A pass over the vocabulary, made once."""
        return self.scores.argmax(-1)

    @cached_property
    def p_token(self) -> Tensor:
        """`(batch, width)`, the target's probability of each drafted token."""
        if self.do_sample:
            return self.p.gather(-1, self.tokens[..., None])[..., 0]
        return (self.target_tokens == self.tokens).to(self.scores.dtype)

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

        place = self.place
        if place is not None:
            columns = sent(place.columns, position.device).gather(1, position[:, None])
            place = replace(place, columns=columns)
        return Evidence(
            tokens=self.tokens[rows, position][:, None],
            valid=self.valid[rows, position][:, None],
            scores=self.scores[rows, position][:, None],
            target_logits=self.target_logits[rows, position][:, None],
            do_sample=self.do_sample,
            q=pick(self.q),
            draft_logits=pick(self.draft_logits),
            place=place,
            whole=self if self.whole is None else self.whole,
            index=position + self.first,
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
        uniforms (`torch.FloatTensor` of shape `(batch, width)`, *optional*): The numbers in [0, 1) thrown at the drafts.
        next_tokens (`torch.LongTensor` of shape `(batch,)`, *optional*): What was emitted in place of the first rejected
            draft, in rows that rejected one.
    """

    evidence: Evidence
    reached: Tensor
    accepted: Tensor
    uniforms: Tensor | None = None
    next_tokens: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification decided.

    Args:
        num_accepted (`torch.LongTensor` of shape `(batch,)`): Leading drafts accepted.
        next_tokens (`torch.LongTensor` of shape `(batch,)`): The correction, or the bonus after a fully accepted draft.
        events (`dict[str, torch.LongTensor]`): Counts of shape `(batch,)` the rule reports for this round.
        uniforms (`torch.FloatTensor` of shape `(batch, width)`, *optional*): The numbers in [0, 1) thrown at the drafts.
        draft ([`Draft`], *optional*): The draft that was judged, with what the verdict's reading brought of it.
        sound (`bool`): Whether that draft's logits were sound; nothing of it was accepted otherwise.
    """

    num_accepted: Tensor
    next_tokens: Tensor
    events: Mapping[str, Tensor] = field(default_factory=dict)
    uniforms: Tensor | None = None
    draft: Draft | None = None
    sound: bool = True


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


@runtime_checkable
class KnownLaw(Protocol):
    """A rule whose emitted law is known in closed form."""

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law of the token at each position that is reached; NaN where it is not known."""
        ...


@runtime_checkable
class Explainer(Protocol):
    """A rule that says of every position how it was decided."""

    def explain(self, judged: Judged) -> Mapping[str, Tensor]:
        """Called before `observe` with the same round; values of shape `(batch, width)` for [`Round.marks`]."""
        ...
