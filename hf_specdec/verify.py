"""The only dice: random streams, drawing from a law, and the verdict on a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule, Draft, Evidence, Outcome, Place, Verdict


__all__ = ["RandomStreams", "choose", "draw", "evidence_of", "throw", "verify"]

_BELOW_ONE = 1.0 - 2.0**-50


class RandomStreams:
    """One stream of random numbers per row, so that a row's text does not depend on the rows beside it.

    Without `seeds` the streams are seeded from torch's global generator when the first number is asked for:
    `torch.manual_seed` makes a run repeatable, and a run that needs no dice leaves the global generator untouched.

    Args:
        batch_size (`int`): Number of rows.
        seeds (sequence of `int`, *optional*): One seed per row; a row's numbers then depend on its own seed alone, and the
            global generator is never asked.

    Raises:
        [`InvalidConfigError`]: If there is not one seed per row.
    """

    def __init__(self, batch_size: int, seeds: Sequence[int] | None = None) -> None:
        if seeds is not None and len(seeds) != batch_size:
            raise InvalidConfigError(f"row_seeds must hold one seed for each of {batch_size} rows, got {len(seeds)}")
        self._rows = list(range(batch_size))
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds or ()]

    def uniforms(self, rows: Tensor) -> Tensor:
        """`(batch,)` numbers in [0, 1) in double precision; only `rows` (`(batch,)`, bool) advance their stream."""
        if not self._generators:
            seed = int(torch.randint(2**62, (1,)))
            self._generators = [torch.Generator().manual_seed(seed + row) for row in self._rows]
        numbers = torch.full((len(self._rows),), 0.5, dtype=torch.float64)
        for row in rows.nonzero()[:, 0].tolist():
            numbers[row] = torch.rand((), dtype=torch.float64, generator=self._generators[row])
        return numbers.clamp(max=_BELOW_ONE)

    def keep_rows(self, kept: Tensor) -> None:
        """From now on there are only the rows at the places `kept` (`(kept,)`), each with the stream that it had."""
        self._rows = [self._rows[place] for place in kept.tolist()]
        if self._generators:
            self._generators = [self._generators[place] for place in kept.tolist()]


def draw(law: Tensor, uniforms: Tensor) -> Tensor:
    """One token of each law by inversion of its distribution function.

    Args:
        law (`torch.FloatTensor` of shape `(batch, vocab)`): Laws.
        uniforms (`torch.FloatTensor` of shape `(batch,)`): Numbers in [0, 1).

    Returns:
        Tokens of shape `(batch,)`; one without probability is never drawn.

    Raises:
        `RuntimeError`: If a law holds inf or NaN, as plain sampling does.
    """
    distribution = law.double().cumsum(-1)
    total = distribution[:, -1:]
    if not bool(torch.isfinite(total).all() and (total > 0).all()):
        raise RuntimeError("cannot sample: a probability law contains inf or NaN, or has no mass")
    threshold = (uniforms.to(law.device)[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(distribution, threshold, right=True)[:, 0]


def evidence_of(
    draft: Draft,
    scores: Tensor,
    logits: Tensor,
    do_sample: bool,
    first: int,
    width: int,
    place: Place | None = None,
    whole: Evidence | None = None,
) -> Evidence:
    """The evidence on `width` drafted positions from `first` on.

    Args:
        draft (`Draft`): The draft.
        scores, logits (`torch.FloatTensor` of shape `(batch, >= width, vocab)`): The target's processed and raw logits at
            those positions.
        do_sample (`bool`): Whether the target samples.
        first, width (`int`): The positions.
        place ([`Place`], *optional*): Where the whole draft stands in the texts.
        whole ([`Evidence`], *optional*): The evidence on the whole draft, where this is only part of it.
    """
    device, columns = scores.device, slice(first, first + width)

    def laid(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:, columns].to(device)

    return Evidence(
        tokens=draft.tokens[:, columns].to(device, non_blocking=True),
        valid=draft.valid[:, columns].to(device, non_blocking=True),
        scores=scores[:, :width],
        target_logits=logits[:, :width],
        do_sample=do_sample,
        q=laid(draft.q),
        draft_logits=laid(draft.logits),
        place=place and replace(place, columns=place.columns[:, columns]),
        whole=whole,
        first=first,
    )


def verify(
    rule: AcceptanceRule, evidence: Evidence, bonus_scores: Tensor, streams: RandomStreams | None, rows: Tensor
) -> Verdict:
    """Accepts a leading part of each row's draft and draws the token after it.

    Args:
        rule (`AcceptanceRule`): The rule.
        evidence (`Evidence`): Evidence on the drafted positions, of any width, zero included.
        bonus_scores (`torch.FloatTensor` of shape `(batch, vocab)`): Processed target logits after each row's whole draft.
        streams (`RandomStreams`, *optional*): Dice; None where every law is one-hot and every acceptance 0 or 1.
        rows (`torch.BoolTensor` of shape `(batch,)`): Rows that take part; the others throw no dice.

    Returns:
        The verdict, on the CPU. Rows that do not take part get a meaningless one.
    """
    batch_size, width = evidence.tokens.shape
    lengths = evidence.valid.sum(-1)
    valid = evidence.valid.cpu()
    thrown = [throw(streams, rows & valid[:, i], batch_size) for i in range(width)]
    last = throw(streams, rows, batch_size)
    if width == 0:
        return Verdict(lengths.cpu(), choose(bonus_scores, evidence.do_sample, last).cpu())

    acceptance = rule.acceptance(evidence)
    uniforms = torch.stack(thrown, -1)
    accepted = (uniforms.to(acceptance.device) < acceptance) & evidence.valid
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    rejected = num_accepted < lengths
    ended = evidence.at(num_accepted.clamp(max=width - 1))
    next_tokens = torch.zeros_like(lengths)
    # A law that nobody draws from may be anything, NaN included.
    if len(corrected := rejected.nonzero()[:, 0]):
        next_tokens[corrected] = draw(rule.replacement(ended)[corrected], last[corrected.to(last.device)])
    if len(whole := (~rejected).nonzero()[:, 0]):
        next_tokens[whole] = choose(bonus_scores[whole], evidence.do_sample, last[whole.to(last.device)])
    outcome = Outcome(
        rejected, uniforms.gather(-1, num_accepted.clamp(max=width - 1).cpu()[:, None])[:, 0], next_tokens
    )
    events = {name: values.cpu() for name, values in rule.count(ended, outcome).items()}
    return Verdict(num_accepted.cpu(), next_tokens.cpu(), events, uniforms)


def choose(scores: Tensor, do_sample: bool, uniforms: Tensor) -> Tensor:
    """`(batch,)`, the target's own next tokens."""
    return draw(scores.softmax(-1), uniforms) if do_sample else scores.argmax(-1)


def throw(streams: RandomStreams | None, rows: Tensor, batch_size: int) -> Tensor:
    """`(batch,)` numbers in [0, 1) for `rows`; 0.5 for all where there are no dice."""
    return torch.full((batch_size,), 0.5, dtype=torch.float64) if streams is None else streams.uniforms(rows)
