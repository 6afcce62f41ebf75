"""A causal LM that drafts for a larger one (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.errors import DrafterError
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.verify import draw
from hf_specdec.warping import warp


__all__ = ["AssistantDrafter"]


@final
class AssistantDrafter(DrafterBase):
    """Drafts token by token with a smaller model of the same tokenizer.

    The two vocabularies may be padded differently: ids that only the draft model has are never drafted, ids that only the
    target has get no draft probability.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        model (`PreTrainedModel`): The draft model; it may live on another device than the target.
        token_ids (`torch.LongTensor` of shape `(draft_vocab,)`, *optional*): The ids that the model's logits stand for,
            where its head scores a part of the vocabulary only. The others have no probability, so the law that a draft
            is drawn from, and is judged by, is the one on these ids.
    """

    def __init__(self, settings: DraftSettings, model: Any, token_ids: Tensor | None = None) -> None:
        super().__init__(settings)
        self.model = model
        self.token_ids = token_ids
        self.embedding_rows = undecorated_model(model).get_input_embeddings().weight.shape[0]
        self.lm: PrefixLM | None = None

    def propose(self, context: Context, budget: Budget) -> Draft:
        if budget.width == 0:
            return Draft.empty(context.batch_size)
        # An id that the draft model has no embedding for cannot be fed; a stand-in costs acceptance, never exactness.
        prefix = context.tokens.clamp(max=self.embedding_rows - 1)
        open_rows = context.unfinished & (budget.max_tokens > 0)
        logits, prefill_seconds = self._first_logits(prefix, context, open_rows)
        lengths = torch.zeros_like(budget.max_tokens)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        raw: list[Tensor] = []
        peaks: list[Tensor] = []
        survival = torch.ones(context.batch_size)
        for step in range(budget.width):
            sequences = _append(context, tokens)
            scores = warp(self.settings.warpers, sequences, context.lengths + lengths, logits[:, None])[:, 0]
            peaks.append(scores.max(-1).values)
            if self.token_ids is not None:  # processors may have banned all that this draft model can say
                open_rows = open_rows & (peaks[-1] != float("-inf")).cpu()
            if budget.min_confidence > 0:
                sure = scores.softmax(-1).max(-1).values >= budget.min_confidence
                open_rows = open_rows & sure.cpu()
            if not bool(open_rows.any()):
                break
            if self.settings.do_sample:
                self._refuse_nan(peaks[-1])
                laws.append(scores.softmax(-1))
            token = self._choose(scores, laws, open_rows)
            tokens.append(token)
            lengths = lengths + open_rows.long()
            if self.settings.keep_logits:
                raw.append(logits)
            open_rows = open_rows & (budget.max_tokens > step + 1) & ~self._is_eos(token)
            if step + 1 == budget.width or not bool(open_rows.any()):
                break
            if budget.min_survival > 0:
                survival = survival * scores.softmax(-1).max(-1).values.cpu()
                if not worth_a_step(survival, open_rows, context.unfinished, budget.min_survival):
                    break
            logits = self._fit(self._lm(context).extend(token.clamp(max=self.embedding_rows - 1)))
        self._refuse_nan(torch.stack(peaks))
        if not tokens:
            return Draft.empty(context.batch_size)
        return Draft(
            torch.stack(tokens, -1),
            lengths,
            q=torch.stack(laws, 1) if laws else None,
            logits=torch.stack(raw, 1) if raw else None,
            source="model",
            prefill_seconds=prefill_seconds,
        )

    def _first_logits(self, prefix: Tensor, context: Context, open_rows: Tensor) -> tuple[Tensor, float]:
        """The logits after the committed tokens, and the seconds they took if the prompt was read for them."""
        started, is_new = time.perf_counter(), self.lm is None
        last = open_rows.long()  # nobody reads a closed row, so it need not give up its newest entry to be fed again
        logits = self._fit(self._lm(context).score(prefix, context.lengths, last)[:, 0])
        return logits, time.perf_counter() - started if is_new else 0.0

    def _lm(self, context: Context) -> PrefixLM:
        if self.lm is None:
            self.lm = PrefixLM(self.model, pad_token_id=self.settings.pad_token_id, prompt_mask=context.prompt_mask)
        return self.lm

    def _refuse_nan(self, peaks: Tensor) -> None:
        """Raises where a largest score is NaN, which it is where any is. It waits for the device, as drawing does."""
        if bool(peaks.isnan().any()):
            raise DrafterError(
                f"the logits of the draft model {type(undecorated_model(self.model)).__name__} contain NaN"
            )

    def _choose(self, scores: Tensor, laws: list[Tensor], rows: Tensor) -> Tensor:
        if not self.settings.do_sample:
            return scores.argmax(-1).cpu()
        streams = self.settings.streams
        numbers = torch.rand(len(rows), dtype=torch.float64) if streams is None else streams.uniforms(rows)
        return draw(laws[-1], numbers).cpu()

    def _fit(self, logits: Tensor) -> Tensor:
        """Draft logits in fp32 on the target's vocabulary."""
        if self.token_ids is not None:
            width = max(self.settings.vocab_size, int(self.token_ids.max()) + 1)
            everything = logits.new_full((*logits.shape[:-1], width), float("-inf"))
            logits = everything.index_copy_(-1, self.token_ids.to(logits.device), logits)
        return fit_vocabulary(logits, self.settings.vocab_size).float()

    def _is_eos(self, token: Tensor) -> Tensor:
        return torch.isin(token, torch.tensor(self.settings.eos_token_ids, dtype=token.dtype))


def worth_a_step(survival: Tensor, open_rows: Tensor, unfinished: Tensor, bound: float) -> bool:
    """Whether drafts with these chances (`(batch,)`) of being accepted so far deserve another step; see [`Budget`]."""
    return float(torch.where(open_rows, survival, 0.0)[unfinished].mean()) >= bound


def _append(context: Context, drafted: list[Tensor]) -> Tensor:
    """The context's tokens with each row's drafts written after its committed ones."""
    if not drafted:
        return context.tokens
    room = int(context.lengths.max()) + len(drafted) - context.tokens.shape[1]
    tokens = torch.nn.functional.pad(context.tokens, (0, max(0, room)))
    columns = context.lengths[:, None] + torch.arange(len(drafted))
    return tokens.scatter(1, columns, torch.stack(drafted, -1))
