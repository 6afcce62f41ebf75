"""Drafting a chain token by token, whatever gives the logits."""

from __future__ import annotations

from collections.abc import Callable

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
        peaks.append(scores.max(-1).values)
        open_rows = open_rows & _may_draft(scores, peaks[-1], budget.min_confidence)
        if not bool(open_rows.any()):
            break
        if settings.do_sample:
            _refuse_nan(peaks[-1], name)
            # A row whose every token is banned has no law; it is closed, and what stands in for its law is never read.
            laws.append(torch.where(peaks[-1][:, None] == -torch.inf, 0.0, scores).softmax(-1))
        token = _choose(settings, scores, laws, open_rows)
        tokens.append(token)
        lengths = lengths + open_rows.long()
        if settings.keep_logits:
            raw.append(logits)
        open_rows = open_rows & (budget.max_tokens > step + 1) & ~_is_eos(settings, token)
        if step + 1 == budget.width or not bool(open_rows.any()):
            break
        if budget.min_survival > 0:
            survival = survival * scores.softmax(-1).max(-1).values.cpu()
            if not _worth_a_step(survival, open_rows, context.unfinished, budget):
                break
        logits = extend(token)
    _refuse_nan(torch.stack(peaks), name)
    return _drafted(tokens, lengths, laws, raw, prefill_seconds) if tokens else Draft.empty(context.batch_size)


def _drafted(
    tokens: list[Tensor], lengths: Tensor, laws: list[Tensor], raw: list[Tensor], prefill_seconds: float
) -> Draft:
    return Draft(
        torch.stack(tokens, -1),
        lengths,
        q=torch.stack(laws, 1) if laws else None,
        logits=torch.stack(raw, 1) if raw else None,
        source="model",
        prefill_seconds=prefill_seconds,
    )


def _may_draft(scores: Tensor, peaks: Tensor, min_confidence: float) -> Tensor:
    """`(batch,)`, whether some token is allowed and the law is as sure as it must be; it never looks at the token drawn."""
    possible = peaks != -torch.inf
    if min_confidence > 0:
        possible = possible & (scores.softmax(-1).max(-1).values >= min_confidence)
    return possible.cpu()


def _worth_a_step(survival: Tensor, open_rows: Tensor, unfinished: Tensor, budget: Budget) -> bool:
    """Whether drafts with these chances (`(batch,)`) of being accepted so far deserve another step; see [`Budget`]."""
    chances = torch.where(open_rows, survival, 0.0)
    if budget.weights is not None:
        chances = chances * budget.weights
    return float(chances[unfinished].mean()) >= budget.min_survival


def _refuse_nan(peaks: Tensor, name: str) -> None:
    """Raises where a largest score is NaN, which it is where any is. It waits for the device, as drawing does."""
    if bool(peaks.isnan().any()):
        raise DrafterError(f"the logits of {name} contain NaN")


def _choose(settings: DraftSettings, scores: Tensor, laws: list[Tensor], rows: Tensor) -> Tensor:
    if not settings.do_sample:
        return scores.argmax(-1).cpu()
    streams = settings.streams
    numbers = torch.rand(len(rows), dtype=torch.float64) if streams is None else streams.uniforms(rows)
    return draw(laws[-1], numbers).cpu()


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
