"""Drafting a chain token by token, whatever gives the logits.

On a GPU, nothing of a draft is waited for unless the budget asks how sure the drafter is: the tokens go from one step to the
next on the device, and where each row's draft ended is found out there (ours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftSettings
from hf_specdec.errors import DrafterError
from hf_specdec.readback import is_host, read_together, sent
from hf_specdec.records import Budget, Context, Draft, Unread
from hf_specdec.verify import draw, tokens_of
from hf_specdec.warping import needs_prefix, warp


__all__ = ["draft_chain"]


def draft_chain(
    settings: DraftSettings,
    context: Context,
    budget: Budget,
    open_rows: Tensor,
    logits: Tensor,
    extend: Callable[[Tensor], Tensor],
    *,
    name: str,
    prefill_seconds: float,
    num_read: int = 0,
    when_read: Callable[[Tensor], None] = lambda tokens: None,
) -> Draft:
    """Draws tokens one after another, each from the processed law that the draft reports for it.

    Args:
        settings ([`DraftSettings`]): What the drafter must know about the run.
        context ([`Context`]): The committed tokens.
        budget ([`Budget`]): How far each row may go.
        open_rows (`torch.BoolTensor` of shape `(batch,)`): Rows that draft at all.
        logits (`torch.FloatTensor` of shape `(batch, vocab)`): Draft logits after the committed tokens, on the target's
            vocabulary.
        extend (`Callable`): Given the tokens just drafted (`(batch,)`), the draft logits after them.
        name (`str`): What drafts, for error messages.
        prefill_seconds (`float`): Time spent on the prompt.
        num_read (`int`): Tokens of each row that were read for `logits`.
        when_read (`Callable`): Told the tokens once they have been read, if `extend` was given them on a device.

    Raises:
        [`DrafterError`]: If the logits contain NaN; of an `unread` draft, when it is read.
    """
    if not is_host(logits.device) and budget.min_confidence <= 0 and budget.min_survival <= 0:
        return _draft_unread(
            settings, context, budget, open_rows, logits, extend, name=name, prefill_seconds=prefill_seconds,
            num_read=num_read, when_read=when_read,
        )  # fmt: skip
    lengths = torch.zeros_like(budget.max_tokens)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    raw: list[Tensor] = []
    peaks: list[Tensor] = []
    survival = torch.ones(context.batch_size)
    for step in range(budget.width):
        scores = warp(settings.warpers, _append(context, tokens), context.lengths + lengths, logits[:, None])[:, 0]
        law = _law(scores) if settings.do_sample else None
        seen = _look(settings, scores, law, budget)
        peaks.append(seen.peaks)
        open_rows = open_rows & seen.may_draft(budget.min_confidence)
        if not bool(open_rows.any()):
            break
        token = seen.best
        if law is not None:
            _refuse_nan(seen.peaks, name)
            laws.append(law)
            token = _drawn(settings, law, open_rows, seen)
        tokens.append(token)
        lengths = lengths + open_rows.long()
        if settings.keep_logits:
            raw.append(logits)
        open_rows = open_rows & (budget.max_tokens > step + 1) & ~_is_eos(settings, token)
        if step + 1 == budget.width or not bool(open_rows.any()):
            break
        if budget.min_survival > 0:
            survival = survival * seen.confidences
            if not _worth_a_step(survival, open_rows, context.unfinished, budget):
                break
        logits = extend(token)
    _refuse_nan(torch.stack(peaks), name)
    if not tokens:
        return Draft.empty(context.batch_size)
    return Draft(
        torch.stack(tokens, -1),
        lengths,
        q=torch.stack(laws, 1) if laws else None,
        logits=torch.stack(raw, 1) if raw else None,
        source="model",
        prefill_seconds=prefill_seconds,
        num_read=num_read,
        is_vouched_for=not is_host(logits.device),
    )


def _draft_unread(
    settings: DraftSettings,
    context: Context,
    budget: Budget,
    open_rows: Tensor,
    logits: Tensor,
    extend: Callable[[Tensor], Tensor],
    *,
    name: str,
    prefill_seconds: float,
    num_read: int,
    when_read: Callable[[Tensor], None],
) -> Draft:
    """The same without waiting for the device. Every row goes as far as its budget; where a token ended its draft before that
    is found out from all steps at once."""
    most = torch.where(open_rows, budget.max_tokens, 0)
    width, device = int(most.max()), logits.device
    if width == 0:
        return Draft.empty(context.batch_size)
    numbers = sent(_numbers_ahead(settings, context.batch_size, width), device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    raw: list[Tensor] = []
    peaks: list[Tensor] = []
    sound = torch.ones(context.batch_size, width, dtype=torch.bool, device=device)
    for step in range(width):
        text = _append(context, tokens, device) if needs_prefix(settings.warpers) else context.tokens
        scores = warp(settings.warpers, text, context.lengths + step, logits[:, None])[:, 0]
        peak, token = scores.max(-1)
        if settings.do_sample:
            laws.append(_law(scores))
            token, sound[:, step] = tokens_of(laws[-1], numbers[:, step])
        tokens.append(token)
        peaks.append(peak)
        if settings.keep_logits:
            raw.append(logits)
        if step + 1 < width:
            logits = extend(token)
    drafted, best = torch.stack(tokens, -1), torch.stack(peaks, -1)
    ends = torch.isin(drafted, sent(torch.tensor(settings.eos_token_ids, dtype=drafted.dtype), device))
    goes_on = torch.nn.functional.pad(~ends, (1, -1), value=True)
    within = torch.arange(width, device=device) < sent(most, device)[:, None]
    is_open = (within & goes_on & (best != -torch.inf)).long().cumprod(-1).bool()
    is_sound = (~is_open | (sound & ~best.isnan())).all()
    return Draft(
        drafted,
        torch.where(is_sound, is_open.sum(-1), 0),
        q=torch.stack(laws, 1) if laws else None,
        logits=torch.stack(raw, 1) if raw else None,
        source="model",
        prefill_seconds=prefill_seconds,
        num_read=num_read,
        unread=Unread(most, is_sound, f"the logits of {name} contain NaN", when_read),
    )


def _numbers_ahead(settings: DraftSettings, batch_size: int, width: int) -> Tensor:
    """`(batch, width)`, the numbers that the rows' next drafts are drawn with."""
    if not settings.do_sample:
        return torch.zeros(batch_size, 0)
    if settings.streams is None:
        return torch.rand(batch_size, width, dtype=torch.float64)
    return settings.streams.ahead(width)


class _Seen(NamedTuple):
    """What is decided from one step's scores, on the CPU: one transfer for all of it.

    Args:
        peaks (`torch.FloatTensor` of shape `(batch,)`): Largest scores.
        confidences (`torch.FloatTensor` of shape `(batch,)`): Largest probabilities; the peaks where nobody asks for them.
        best (`torch.LongTensor` of shape `(batch,)`): The tokens that have them.
        drawn (`tuple[torch.LongTensor, torch.BoolTensor]`, *optional*): Tokens that would be drawn next, and whether they come
            of a law, `(batch,)` each: on a GPU, where asking again would be to wait again. The decision does not look at them.
    """

    peaks: Tensor
    confidences: Tensor
    best: Tensor
    drawn: tuple[Tensor, Tensor] | None

    def may_draft(self, min_confidence: float) -> Tensor:
        """`(batch,)`, whether some token is allowed and the law is as sure as it must be; it never looks at the token drawn."""
        possible = self.peaks != -torch.inf
        return possible & (self.confidences >= min_confidence) if min_confidence > 0 else possible


def _law(scores: Tensor) -> Tensor:
    """`(batch, vocab)`. A row whose every token is banned has no law; it is closed, and what stands in for it is never read."""
    return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores).softmax(-1)


def _look(settings: DraftSettings, scores: Tensor, law: Tensor | None, budget: Budget) -> _Seen:
    peaks, best = scores.max(-1)
    asked = budget.min_confidence > 0 or budget.min_survival > 0
    confidences = (peaks - scores.logsumexp(-1)).exp() if asked else peaks
    drawn: tuple[Tensor, ...] = ()
    if law is not None and settings.streams is not None and not is_host(law.device):
        drawn = tokens_of(law, settings.streams.ahead(1)[:, 0])
    peaks, confidences, best, *told = read_together([peaks, confidences, best, *drawn])
    return _Seen(peaks, confidences, best, (told[0], told[1]) if told else None)


def _worth_a_step(survival: Tensor, open_rows: Tensor, unfinished: Tensor, budget: Budget) -> bool:
    """Whether drafts with these chances (`(batch,)`) of being accepted so far deserve another step; see [`Budget`]."""
    chances = torch.where(open_rows, survival, 0.0)
    if budget.weights is not None:
        chances = chances * budget.weights
    return float(chances[unfinished].mean()) >= budget.min_survival


def _refuse_nan(peaks: Tensor, name: str) -> None:
    """Raises where a largest score is NaN, which it is where any is."""
    if bool(peaks.isnan().any()):
        raise DrafterError(f"the logits of {name} contain NaN")


def _drawn(settings: DraftSettings, law: Tensor, rows: Tensor, seen: _Seen) -> Tensor:
    streams = settings.streams
    if seen.drawn is not None and streams is not None:
        tokens, sound = seen.drawn
        streams.uniforms(rows)  # uses up the numbers that they were drawn with
        if not bool(sound[rows].all()):
            raise DrafterError("a law to draft from contains inf or NaN")
        return tokens
    numbers = torch.rand(len(rows), dtype=torch.float64) if streams is None else streams.uniforms(rows)
    return draw(law, numbers).cpu()


def _is_eos(settings: DraftSettings, token: Tensor) -> Tensor:
    return torch.isin(token, torch.tensor(settings.eos_token_ids, dtype=token.dtype))


def _append(context: Context, drafted: list[Tensor], device: torch.device | None = None) -> Tensor:
    """The context's tokens with each row's drafts written after its committed ones, on the `device` of the drafts."""
    room = int(context.lengths.max()) + len(drafted) - context.tokens.shape[1]
    tokens = torch.nn.functional.pad(context.tokens, (0, max(0, room)))
    columns = context.lengths[:, None] + torch.arange(len(drafted))
    if device is not None:
        tokens, columns = sent(tokens, device), sent(columns, device)
    return tokens.scatter(1, columns, torch.stack(drafted, -1)) if drafted else tokens
