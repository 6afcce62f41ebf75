"""Held-out measurements of a pair: losses, and how often cheaper predictions match the target's."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .forward import TrainingForward
from .losses import exit_depths, next_token_loss


@torch.no_grad()
def evaluate(
    forward: TrainingForward,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    batches: list[Tensor],
    first: int = 0,
) -> dict:
    """Measures the pair on batches of shape `(batch, length)`; positions before `first` are only read.

    Returns:
        `dict`: `loss` and `draft_loss` in nats per token; `draft_agreement` and `exit_agreement`
        (per depth), the share of positions at which the greedy token is the final layer's.
    """
    depth, draft_depth = target.config.num_hidden_layers, draft.config.num_hidden_layers
    keep = {*exit_depths(depth), depth}
    loss = draft_loss = draft_hits = 0.0
    hits = dict.fromkeys(sorted(keep - {depth}), 0.0)
    for ids in batches:
        states = {at: state[:, first:] for at, state in forward(target, ids, keep).items()}
        logits = target.lm_head(states[depth])
        draft_logits = draft.lm_head(forward(draft, ids, {draft_depth})[draft_depth][:, first:])
        ids = ids[:, first:]
        greedy = logits.argmax(-1)
        loss += next_token_loss(logits, ids).item()
        draft_loss += next_token_loss(draft_logits, ids).item()
        draft_hits += (draft_logits.argmax(-1) == greedy).float().mean().item()
        for at in hits:
            hits[at] += (target.lm_head(states[at]).argmax(-1) == greedy).float().mean().item()
    count = len(batches)
    return {
        "loss": round(loss / count, 4),
        "draft_loss": round(draft_loss / count, 4),
        "draft_agreement": round(draft_hits / count, 4),
        "exit_agreement": {str(at): round(value / count, 4) for at, value in hits.items()},
    }
