"""The only dice: random streams, drawing from a law, and the verdict on a draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.readback import is_host, read_together, sent
from hf_specdec.records import AcceptanceRule, Draft, Evidence, Outcome, Place, Verdict


__all__ = ["RandomStreams", "choose", "draw", "evidence_of", "throw", "tokens_of", "verify"]

_BELOW_ONE = 1.0 - 2.0**-50
_UNSOUND = "cannot sample: a probability law contains inf or NaN, or has no mass"


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
        self._looked_at: list[deque[float]] = [deque() for _ in self._rows]  # numbers that `ahead` has told

    def uniforms(self, rows: Tensor) -> Tensor:
        """`(batch,)` numbers in [0, 1) in double precision; only `rows` (`(batch,)`, bool) advance their stream."""
        self._seed()
        numbers = torch.full((len(self._rows),), 0.5, dtype=torch.float64)
        for row in rows.nonzero()[:, 0].tolist():
            looked_at = self._looked_at[row]
            numbers[row] = looked_at.popleft() if looked_at else self._throw(row)
        return numbers

    def ahead(self, count: int) -> Tensor:
        """`(batch, count)`, the numbers that the next calls will give each row. No stream advances: where a device decides how
        many are used up, it gets more than it may need, and `uniforms` uses them up once that is known."""
        self._seed()
        for row, looked_at in enumerate(self._looked_at):
            while len(looked_at) < count:
                looked_at.append(self._throw(row))
        numbers = [[looked_at[i] for i in range(count)] for looked_at in self._looked_at]
        return torch.tensor(numbers, dtype=torch.float64).view(len(self._rows), count)

    def _seed(self) -> None:
        if not self._generators:
            seed = int(torch.randint(2**62, (1,)))
            self._generators = [torch.Generator().manual_seed(seed + row) for row in self._rows]

    def _throw(self, row: int) -> float:
        number = torch.rand((), dtype=torch.float64, generator=self._generators[row])
        return min(float(number), _BELOW_ONE)

    def keep_rows(self, kept: Tensor) -> None:
        """From now on there are only the rows at the places `kept` (`(kept,)`), each with the stream that it had."""
        self._rows = [self._rows[place] for place in kept.tolist()]
        self._looked_at = [self._looked_at[place] for place in kept.tolist()]
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
    tokens, sound = tokens_of(law, uniforms)
    if not bool(sound.all()):
        raise RuntimeError(_UNSOUND)
    return tokens


def tokens_of(law: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of [`draw`], and for each whether its law is one, `(batch,)`; nothing is waited for."""
    distribution = law.double().cumsum(-1)
    total = distribution[:, -1:]
    sound = torch.isfinite(total) & (total > 0)
    uniforms = sent(uniforms, law.device)
    threshold = (uniforms[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    # What no law gives must still be a token.
    tokens = torch.searchsorted(distribution, threshold, right=True)[:, 0].clamp(max=law.shape[-1] - 1)
    return tokens, sound[:, 0]


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
        return None if values is None else sent(values[:, columns], device)

    return Evidence(
        tokens=sent(draft.tokens[:, columns], device),
        valid=sent(draft.valid[:, columns], device),
        scores=scores[:, :width],
        target_logits=logits[:, :width],
        do_sample=do_sample,
        q=laid(draft.q),
        draft_logits=laid(draft.logits),
        place=place and replace(place, columns=place.columns[:, columns]),
        whole=whole,
        first=first,
        draft=draft,
    )


def verify(
    rule: AcceptanceRule,
    evidence: Evidence,
    bonus_scores: Tensor,
    streams: RandomStreams | None,
    rows: Tensor,
) -> Verdict:
    """Accepts a leading part of each row's draft and draws the token after it. The host waits for a device once.

    Args:
        rule (`AcceptanceRule`): The rule.
        evidence (`Evidence`): Evidence on the drafted positions, of any width, zero included. Its draft, if that is not read
            yet, is read with the verdict.
        bonus_scores (`torch.FloatTensor` of shape `(batch, vocab)`): Processed target logits after each row's whole draft.
        streams (`RandomStreams`, *optional*): Dice; None where every law is one-hot and every acceptance 0 or 1.
        rows (`torch.BoolTensor` of shape `(batch,)`): Rows that take part; the others throw no dice.

    Returns:
        The verdict, on the CPU. Rows that do not take part get a meaningless one.
    """
    width, lengths = evidence.tokens.shape[1], evidence.valid.sum(-1)
    draft, unread = evidence.draft, evidence.draft is not None and evidence.draft.unread is not None
    if draft is not None and unread:
        thrown, numbers = None, _ahead(streams, draft, lengths)
    else:
        thrown = _thrown(streams, rows, evidence.valid.cpu() if draft is None else _shown(draft, evidence))
        numbers = sent(thrown, bonus_scores.device)
    uniforms, last = numbers[:, :width], numbers[:, width]
    events: Mapping[str, Tensor] = {}
    if width == 0:
        num_accepted = lengths
        next_tokens, sound = _chosen(bonus_scores, evidence.do_sample, last)
    else:
        accepted = (uniforms < rule.acceptance(evidence)) & evidence.valid
        num_accepted = accepted.long().cumprod(-1).sum(-1)
        rejected, place = num_accepted < lengths, num_accepted.clamp(max=width - 1)
        ended = evidence.at(place)
        next_tokens, sound = _next_tokens(rule, evidence, ended, place, bonus_scores, rejected, last)
        events = rule.count(ended, Outcome(rejected, uniforms.gather(-1, place[:, None])[:, 0], next_tokens))
    of_draft = [draft.tokens, draft.lengths, draft.unread.sound] if draft is not None and draft.unread else []
    seen = read_together([num_accepted, next_tokens, sound, *events.values(), *of_draft])
    if not bool(seen[2].all()):
        raise RuntimeError(_UNSOUND)
    is_sound = True
    if draft is not None and unread:
        tokens, counts, drafts_sound = seen[-3:]
        draft, is_sound = draft.as_read(tokens, counts), bool(drafts_sound)
        if draft.q is not None:
            for each in draft.valid.unbind(-1):
                throw(streams, rows & each, len(rows))
        thrown = _thrown(streams, rows, draft.valid)
    assert thrown is not None
    named = dict(zip(events, seen[3:], strict=False))
    return Verdict(seen[0], seen[1], named, thrown[:, :width] if width else None, draft, is_sound)


def _shown(draft: Draft, evidence: Evidence) -> Tensor:
    """`(batch, width)` on the CPU, where the draft has the positions that the evidence is about."""
    return draft.valid[:, evidence.first : evidence.first + evidence.tokens.shape[1]]


def _thrown(streams: RandomStreams | None, rows: Tensor, valid: Tensor) -> Tensor:
    """`(batch, width + 1)`, a number for each valid position of each of the `rows`, and one for the token after them."""
    numbers = [throw(streams, rows & each, len(rows)) for each in valid.unbind(-1)]
    return torch.stack([*numbers, throw(streams, rows, len(rows))], -1)


def _ahead(streams: RandomStreams | None, draft: Draft, lengths: Tensor) -> Tensor:
    """The same numbers for a draft whose `lengths` (`(batch,)`) only its device knows, on that device. They stand after those
    that its tokens were drawn with, if they were drawn."""
    width, device = draft.width, lengths.device
    if streams is None:
        return torch.full((len(lengths), width + 1), 0.5, dtype=torch.float64, device=device)
    is_drawn = draft.q is not None
    told = sent(streams.ahead((1 + is_drawn) * width + 1), device)
    first = lengths if is_drawn else torch.zeros_like(lengths)
    places = first[:, None] + torch.arange(width, device=device)
    return told.gather(1, torch.cat([places, (first + lengths)[:, None]], 1))


def _next_tokens(
    rule: AcceptanceRule,
    evidence: Evidence,
    ended: Evidence,
    place: Tensor,
    bonus_scores: Tensor,
    rejected: Tensor,
    last: Tensor,
) -> tuple[Tensor, Tensor]:
    """`(batch,)` tokens, the correction in rows that `rejected` the draft at `place` and the bonus in others, and whether they
    come of a law."""
    sound = torch.ones_like(rejected)
    if rule.lossless and not evidence.do_sample:  # whatever was drafted, what is emitted is the target's own token
        corrections = evidence.target_tokens.gather(-1, place[:, None])[:, 0]
        return torch.where(rejected, corrections, bonus_scores.argmax(-1)), sound
    if not is_host(rejected.device):  # to ask which rows need what would be to wait
        corrections, corrected = tokens_of(rule.replacement(ended), last)
        bonus, whole = _chosen(bonus_scores, evidence.do_sample, last)
        # A law that nobody draws from may be anything, NaN included.
        return torch.where(rejected, corrections, bonus), torch.where(rejected, corrected, whole)
    tokens = torch.zeros_like(place)
    if len(rows := rejected.nonzero()[:, 0]):
        tokens[rows], sound[rows] = tokens_of(rule.replacement(ended)[rows], last[rows])
    if len(rows := (~rejected).nonzero()[:, 0]):
        tokens[rows], sound[rows] = _chosen(bonus_scores[rows], evidence.do_sample, last[rows])
    return tokens, sound


def _chosen(scores: Tensor, do_sample: bool, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own next tokens, and whether they come of a law, `(batch,)` each."""
    if do_sample:
        return tokens_of(scores.softmax(-1), uniforms)
    best = scores.argmax(-1)
    return best, torch.ones_like(best, dtype=torch.bool)


def choose(scores: Tensor, do_sample: bool, uniforms: Tensor) -> Tensor:
    """`(batch,)`, the target's own next tokens."""
    return draw(scores.softmax(-1), uniforms) if do_sample else scores.argmax(-1)


def throw(streams: RandomStreams | None, rows: Tensor, batch_size: int) -> Tensor:
    """`(batch,)` numbers in [0, 1) for `rows`; 0.5 for all where there are no dice."""
    return torch.full((batch_size,), 0.5, dtype=torch.float64) if streams is None else streams.uniforms(rows)
