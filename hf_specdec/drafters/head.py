"""A drafter network that drafts from its target's hidden states (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

import time
from typing import final

from hf_specdec.drafters.chain import draft_chain
from hf_specdec.drafters.network_drafter import NetworkDrafter
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.timing import wait_for


__all__ = ["HeadDrafter"]


@final
class HeadDrafter(NetworkDrafter):
    """Drafts a chain with a network that reads its target's features; see [`HeadStates`].

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        network ([`DraftNetwork`]): The network, attached to its target.
        features ([`TargetFeatures`]): The target's features in this run.
    """

    def propose(self, context: Context, budget: Budget) -> Draft:
        open_rows = self.states.open_rows(context, budget)
        if not bool(open_rows.any()):
            return Draft.empty(context.batch_size)
        started, is_new = time.perf_counter(), self.states.lm is None
        logits = self.states.first_logits(context, open_rows)
        if is_new:
            wait_for(logits.device)  # once in a run
        return draft_chain(
            self.settings,
            context,
            budget,
            open_rows,
            logits,
            self.states.extend,
            name=f"the drafter {type(self.states.network).__name__}",
            prefill_seconds=time.perf_counter() - started if is_new else 0.0,
            when_read=self.states.tell,
        )
