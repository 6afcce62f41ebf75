"""Drafting a chain token by token, whatever gives the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftSettings
from hf_specdec.errors import DrafterError
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.verify import draw
from hf_specdec.warping import warp


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

    Raises:
        [`DrafterError`]: If the logits contain NaN.
    """
    lengths = torch.zeros_like(budget.max_tokens)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    raw: list[Tensor] = []
    peaks: list[Tensor] = []
    survival = torch.ones(context.batch_size)
    for step in range(budget.width):
        scores = warp(settings.warpers, _append(context, tokens), context.lengths + lengths, logits[:, None])[:, 0]
        seen = _look(scores, budget)
        peaks.append(seen.peaks)
        open_rows = open_rows & seen.may_draft(budget.min_confidence)
        if not bool(open_rows.any()):
            break
        if settings.do_sample:
            _refuse_nan(seen.peaks, name)
            # A row whose every token is banned has no law; it is closed, and what stands in for its law is never read.
            laws.append(torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores).softmax(-1))
        token = _drawn(settings, laws[-1], open_rows) if settings.do_sample else seen.best
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
    )


class _Seen(NamedTuple):
    """What is decided from one step's scores, on the CPU: one transfer for all of it.

    Args:
        peaks (`torch.FloatTensor` of shape `(batch,)`): Largest scores.
        confidences (`torch.FloatTensor` of shape `(batch,)`): Largest probabilities; the peaks where nobody asks for them.
        best (`torch.LongTensor` of shape `(batch,)`): The tokens that have them.
    """

    peaks: Tensor
    confidences: Tensor
    best: Tensor

    def may_draft(self, min_confidence: float) -> Tensor:
        """`(batch,)`, whether some token is allowed and the law is as sure as it must be; it never looks at the token drawn."""
        possible = self.peaks != -torch.inf
        return possible & (self.confidences >= min_confidence) if min_confidence > 0 else possible


def _look(scores: Tensor, budget: Budget) -> _Seen:
    peaks, best = scores.max(-1)
    asked = budget.min_confidence > 0 or budget.min_survival > 0
    confidences = (peaks - scores.logsumexp(-1)).exp() if asked else peaks
    together = torch.stack([peaks, confidences, best.to(peaks.dtype)]).cpu()  # fp32 holds ids up to 2**24
    return _Seen(together[0], together[1], together[2].long())


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


def _drawn(settings: DraftSettings, law: Tensor, rows: Tensor) -> Tensor:
    streams = settings.streams
    numbers = torch.rand(len(rows), dtype=torch.float64) if streams is None else streams.uniforms(rows)
    return draw(law, numbers).cpu()


def _is_eos(settings: DraftSettings, token: Tensor) -> Tensor:
    return torch.isin(token, torch.tensor(settings.eos_token_ids, dtype=token.dtype))


def _append(context: Context, drafted: list[Tensor]) -> Tensor:
    """The context's tokens with each row's drafts written after its committed ones."""
    if not drafted:
        return context.tokens
    room = int(context.lengths.max()) + len(drafted) - context.tokens.shape[1]
    tokens = torch.nn.functional.pad(context.tokens, (0, max(0, room)))
    columns = context.lengths[:, None] + torch.arange(len(drafted))
    return tokens.scatter(1, columns, torch.stack(drafted, -1))
