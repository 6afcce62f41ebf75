"""A drafter network that drafts from its target's hidden states (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.chain import draft_chain
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.features import TargetFeatures
from hf_specdec.networks import DraftNetwork
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Budget, Context, Draft


__all__ = ["HeadDrafter"]


@final
class HeadDrafter(DrafterBase):
    """Drafts a chain with a network that reads its target's features.

    The network keeps a cache of its own. Before each draft it is brought up to date with the target's *true* features of all
    tokens committed since it last drafted; what it computed from its own states is thrown away (ours: EAGLE's code keeps
    the entries of accepted drafts as they are).

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        network ([`DraftNetwork`]): The network, attached to its target.
        features ([`TargetFeatures`]): The target's features in this run.
    """

    def __init__(self, settings: DraftSettings, network: DraftNetwork, features: TargetFeatures) -> None:
        super().__init__(settings)
        self.network = network
        self.features = features
        self.embedding_rows = network.num_embeddings
        self.lm: PrefixLM | None = None
        self._num_true = torch.zeros(0, dtype=torch.long)
        self._own_states: Tensor | None = None
        self._states: Tensor = torch.zeros(0)

    def propose(self, context: Context, budget: Budget) -> Draft:
        # Column t holds token t + 1 and feature t, so the newest token, whose feature nobody knows yet, is in the last one.
        lengths = context.lengths - 1 - self.features.start
        open_rows = context.unfinished & (budget.max_tokens > 0) & (lengths > 0)
        if not bool(open_rows.any()):
            return Draft.empty(context.batch_size)
        started, is_new = time.perf_counter(), self.lm is None
        logits = self._first_logits(context, lengths, open_rows)
        return draft_chain(
            self.settings,
            context,
            budget,
            open_rows,
            logits,
            self._extend,
            name=f"the drafter {type(self.network).__name__}",
            prefill_seconds=time.perf_counter() - started if is_new else 0.0,
        )

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Not possible: transformers' own assisted decoding does not show its drafter the target's hidden states.

        Raises:
            [`UnsupportedModelError`]: Always.
        """
        raise UnsupportedModelError(
            f"{type(self.network).__name__} reads its target's hidden states, which transformers' own assisted decoding does "
            "not show: decode with speculative_config=..."
        )

    def _first_logits(self, context: Context, lengths: Tensor, open_rows: Tensor) -> Tensor:
        lm = self._lm(context)
        lm.forget(self._num_true)
        self._own_states = None
        tokens = context.tokens[:, self.features.start + 1 :].clamp(max=self.embedding_rows - 1)
        logits = lm.score(tokens, lengths, open_rows.long())[:, 0]
        self._num_true = lengths.clone()
        # One column more than the next draft needs, for a draft that is asked for twice.
        self.features.store.drop_before(self.features.start + max(0, int(lengths.min()) - 1))
        last = ((lm.fed_columns >= 0).sum(-1) - 1).clamp(min=0).to(self._states.device)
        self._own_states = self._states[torch.arange(len(last), device=last.device), last][:, None]
        return self._fit(logits)

    def _extend(self, token: Tensor) -> Tensor:
        assert self.lm is not None
        logits = self._fit(self.lm.extend(token.clamp(max=self.embedding_rows - 1)))
        self._own_states = self._states
        return logits

    def _forward(self, *, input_ids: Tensor, return_dict: bool, **inputs: Any) -> Any:
        """The network on whatever columns its cache lacks: with the target's features, or with its own states."""
        states = self._own_states
        if states is None:
            assert self.lm is not None
            columns = self.lm.fed_columns
            features = self.features.store.take(torch.where(columns >= 0, columns + self.features.start, -1))
            states = self.network.combine(features)
        outputs = self.network(input_ids, states, **inputs)
        self._states = outputs.last_hidden_state
        return outputs

    def _lm(self, context: Context) -> PrefixLM:
        if self.lm is None:
            mask = context.prompt_mask
            if mask is not None:
                mask = mask[:, self.features.start : mask.shape[1] - 1]
            self.lm = PrefixLM(
                self.network,
                pad_token_id=min(self.settings.pad_token_id, self.embedding_rows - 1),
                prompt_mask=None if mask is None or mask.shape[1] == 0 else mask,
                forward=self._forward,
            )
        return self.lm

    def _fit(self, logits: Tensor) -> Tensor:
        """Draft logits in fp32 on the target's vocabulary."""
        return fit_vocabulary(self.network.to_target_vocabulary(logits.float()), self.settings.vocab_size)
