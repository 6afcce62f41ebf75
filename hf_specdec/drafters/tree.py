"""A drafter network that drafts dynamic trees (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftSettings
from hf_specdec.drafters.network_drafter import NetworkDrafter
from hf_specdec.features import TargetFeatures
from hf_specdec.networks import DraftNetwork
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.timing import wait_for
from hf_specdec.trees import TreeShape, grow_tree


__all__ = ["TreeDrafter"]


@final
class TreeDrafter(NetworkDrafter):
    """Drafts a dynamic tree with a network that reads its target's features; see [`HeadStates`] and [`grow_tree`].

    It throws no dice: a tree is a function of the text. Its values are the network's own law, whatever processors the target
    has (published), since they decide only what is worth verifying.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        network ([`DraftNetwork`]): The network, attached to its target.
        features ([`TargetFeatures`]): The target's features in this run.
        shape ([`TreeShape`]): Size of the trees; a budget may ask for fewer layers and nodes.
    """

    def __init__(
        self, settings: DraftSettings, network: DraftNetwork, features: TargetFeatures, shape: TreeShape
    ) -> None:
        super().__init__(settings, network, features)
        self.shape = shape

    def propose(self, context: Context, budget: Budget) -> Draft:
        open_rows = self.states.open_rows(context, budget)
        if not bool(open_rows.any()):
            return Draft.empty(context.batch_size)
        started, is_new = time.perf_counter(), self.states.lm is None
        log_probs = self.states.first_logits(context, open_rows).log_softmax(-1)
        if is_new:
            wait_for(log_probs.device)  # once in a run
        prefill_seconds = time.perf_counter() - started if is_new else 0.0
        layer = 0

        def expand(tokens: Tensor, places: Tensor) -> Tensor:
            nonlocal layer
            layer += 1
            return self.states.expand(tokens, places, layer).log_softmax(-1)

        room = torch.where(open_rows, budget.max_tokens, 0)
        draft = grow_tree(self._shape(budget), log_probs, expand, room, self.settings.eos_token_ids)
        return replace(draft, prefill_seconds=prefill_seconds)

    def _shape(self, budget: Budget) -> TreeShape:
        depth = min(self.shape.depth, budget.width)
        nodes = self.shape.total_nodes if budget.max_nodes is None else min(budget.max_nodes, self.shape.total_nodes)
        return TreeShape(min(depth, nodes), self.shape.top_k, nodes)
