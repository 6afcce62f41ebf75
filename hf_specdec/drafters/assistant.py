"""A causal LM that drafts for a larger one (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.chain import draft_chain
from hf_specdec.placement import device_of
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.timing import wait_for


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
        self._scored_width = 0 if token_ids is None else max(settings.vocab_size, int(token_ids.max()) + 1)
        self.embedding_rows = undecorated_model(model).get_input_embeddings().weight.shape[0]
        self.lm: PrefixLM | None = None

    def propose(self, context: Context, budget: Budget) -> Draft:
        if budget.width == 0:
            return Draft.empty(context.batch_size)
        # An id that the draft model has no embedding for cannot be fed; a stand-in costs acceptance, never exactness.
        prefix = context.tokens.clamp(max=self.embedding_rows - 1)
        open_rows = context.unfinished & (budget.max_tokens > 0)
        logits, prefill_seconds = self._first_logits(prefix, context, open_rows)
        return draft_chain(
            self.settings,
            context,
            budget,
            open_rows,
            logits,
            lambda token: self._fit(self._lm(context).extend(token.clamp(max=self.embedding_rows - 1))),
            name=f"the draft model {type(undecorated_model(self.model)).__name__}",
            prefill_seconds=prefill_seconds,
            num_read=self._lm(context).fed_columns.shape[1],
            when_read=lambda tokens: self._lm(context).tell(tokens.clamp(max=self.embedding_rows - 1)),
        )

    @property
    def device(self) -> torch.device:
        """That of the draft model."""
        return device_of(undecorated_model(self.model))

    @property
    def can_drop_rows(self) -> bool:
        return True

    def keep_rows(self, kept: Tensor) -> None:
        if self.lm is not None:
            self.lm.keep_rows(kept)

    def _first_logits(self, prefix: Tensor, context: Context, open_rows: Tensor) -> tuple[Tensor, float]:
        """The logits after the committed tokens, and the seconds they took if the prompt was read for them."""
        started, is_new = time.perf_counter(), self.lm is None
        last = open_rows.long()  # nobody reads a closed row, so it need not give up its newest entry to be fed again
        logits = self._fit(self._lm(context).score(prefix, context.lengths, last)[:, 0])
        if is_new:
            wait_for(logits.device)  # once in a run
        return logits, time.perf_counter() - started if is_new else 0.0

    def _lm(self, context: Context) -> PrefixLM:
        if self.lm is None:
            self.lm = PrefixLM(self.model, pad_token_id=self.settings.pad_token_id, prompt_mask=context.prompt_mask)
        return self.lm

    def _fit(self, logits: Tensor) -> Tensor:
        """Draft logits in fp32 on the target's vocabulary."""
        if self.token_ids is not None:
            everything = logits.new_full((*logits.shape[:-1], self._scored_width), float("-inf"))
            self.token_ids = self.token_ids.to(logits.device)
            logits = everything.index_copy_(-1, self.token_ids, logits)
        return fit_vocabulary(logits, self.settings.vocab_size).float()
