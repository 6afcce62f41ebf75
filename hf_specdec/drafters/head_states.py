"""A drafter network kept up to date with its target: logits after the committed tokens, and after drafted ones."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from hf_specdec.compatibility import fit_vocabulary
from hf_specdec.drafters.base import DraftSettings
from hf_specdec.features import TargetFeatures
from hf_specdec.networks import DraftNetwork
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.readback import sent
from hf_specdec.records import Budget, Context
from hf_specdec.tree_lm import TreeLM


__all__ = ["HeadStates"]


@final
class HeadStates:
    """A network that reads its target's features, and its own states where none are known.

    The network keeps a cache of its own. Before each draft it is brought up to date with the target's *true* features of all
    tokens committed since it last drafted; what it computed from its own states is thrown away (ours: EAGLE's code keeps
    the entries of accepted drafts as they are).

    Args:
        settings ([`DraftSettings`]): What a drafter must know about the run.
        network ([`DraftNetwork`]): The network, attached to its target.
        features ([`TargetFeatures`]): The target's features in this run.
    """

    def __init__(self, settings: DraftSettings, network: DraftNetwork, features: TargetFeatures) -> None:
        self.settings = settings
        self.network = network
        self.features = features
        self.embedding_rows = network.num_embeddings
        self.lm: TreeLM | None = None
        self._num_true = torch.zeros(0, dtype=torch.long)
        self._own_states: Tensor | None = None
        self._states: Tensor = torch.zeros(0)

    def open_rows(self, context: Context, budget: Budget) -> Tensor:
        """`(batch,)`, rows that may draft and have a feature to draft from."""
        return context.unfinished & (budget.max_tokens > 0) & (self._lengths(context) > 0)

    def first_logits(self, context: Context, open_rows: Tensor) -> Tensor:
        """`(batch, vocab)`, the draft logits after the committed tokens of `open_rows`, on the target's vocabulary."""
        lm, lengths = self._lm(context), self._lengths(context)
        lm.forget(self._num_true)
        self._own_states = None
        tokens = context.tokens[:, self.features.start + 1 :].clamp(max=self.embedding_rows - 1)
        logits = lm.score(tokens, lengths, open_rows.long())[:, 0]
        self._num_true = lengths.clone()
        # One column more than the next draft needs, for a draft that is asked for twice.
        self.features.store.drop_before(self.features.start + max(0, int(lengths.min()) - 1))
        last = ((lm.fed_columns >= 0).sum(-1) - 1).clamp(min=0)
        last = sent(last, self._states.device)
        self._own_states = self._states[torch.arange(len(last), device=last.device), last][:, None]
        return self._fit(logits)

    def extend(self, token: Tensor) -> Tensor:
        """`(batch, vocab)`, the draft logits after one more drafted token of each row."""
        assert self.lm is not None
        logits = self._fit(self.lm.extend(token.clamp(max=self.embedding_rows - 1)))
        self._own_states = self._states
        return logits

    def tell(self, tokens: Tensor) -> None:
        """Says what the drafted tokens were, `(batch, width)` on the CPU, that were fed without being waited for."""
        assert self.lm is not None
        self.lm.tell(tokens.clamp(max=self.embedding_rows - 1))

    def expand(self, tokens: Tensor, places: Tensor, layer: int) -> Tensor:
        """`(batch, nodes, vocab)`, the draft logits after each node of a layer; see [`TreeLM.expand`]."""
        assert self.lm is not None
        assert self._own_states is not None
        above = sent(places, self._own_states.device)[..., None].expand(-1, -1, self._own_states.shape[-1])
        self._own_states = self._own_states.gather(1, above)
        logits = self._fit(self.lm.expand(tokens.clamp(max=self.embedding_rows - 1), places, layer))
        self._own_states = self._states
        return logits

    def keep_rows(self, kept: Tensor) -> None:
        """From now on the batch has only the rows at the places `kept` (`(kept,)`)."""
        self.features.store.keep_rows(kept)
        if self.lm is not None:
            self.lm.keep_rows(kept)
            self._num_true = self._num_true[kept]

    def _lengths(self, context: Context) -> Tensor:
        # Column t holds token t + 1 and feature t, so the newest token, whose feature nobody knows yet, is in the last one.
        return context.lengths - 1 - self.features.start

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
            self.lm = TreeLM(
                self.network,
                pad_token_id=min(self.settings.pad_token_id, self.embedding_rows - 1),
                prompt_mask=None if mask is None or mask.shape[1] == 0 else mask,
                forward=self._forward,
            )
        return self.lm

    def _fit(self, logits: Tensor) -> Tensor:
        """Draft logits in fp32 on the target's vocabulary."""
        return fit_vocabulary(self.network.to_target_vocabulary(logits.float()), self.settings.vocab_size)
