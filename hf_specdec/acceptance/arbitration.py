"""What a collaborative policy may look at where target and draft disagree: fourteen numbers from one verification pass."""

from typing import Protocol

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import by_model, draft_gate, mismatched, target_gate
from hf_specdec.acceptance.relaxed import whole_draft
from hf_specdec.laws import divergence, top_overlap
from hf_specdec.records import Evidence


__all__ = ["FEATURES", "ArbitrationPolicy", "arbitration_features"]

FEATURES = (
    "log_p_target",
    "log_p_draft",
    "log_q_draft",
    "log_q_target",
    "target_entropy",
    "draft_entropy",
    "target_margin",
    "draft_rank",
    "target_rank",
    "js_divergence",
    "overlap",
    "position",
    "num_mismatches",
    "has_draft_law",
)
_LEAST = 1e-9  # a probability below this is as good as none, and its logarithm stays finite


class ArbitrationPolicy(Protocol):
    """Says how far the drafter is to be trusted at a mismatch."""

    def __call__(self, features: Tensor) -> Tensor:
        """From features of shape `(batch, width, len(FEATURES))` to probabilities `(batch, width)` of taking the draft."""
        ...


def arbitration_features(evidence: Evidence) -> Tensor:
    """The features of every position, in the order of [`FEATURES`], of shape `(batch, width, len(FEATURES))`.

    Ours (arXiv 2605.24793 does not say what its policy sees). Laws are untempered, entropies in nats; `target` is the target's
    argmax, ranks are logarithms of one plus the rank in the other model, `position` is relative to the row's draft.
    """
    whole, columns = whole_draft(evidence)
    p, q, wanted = target_gate(whole), draft_gate(whole), whole.target_tokens
    drafted, number = whole.tokens, whole.valid.sum(-1, keepdim=True).clamp(min=1)
    best = p.topk(2, -1).values
    features = (
        _log(p, wanted),
        _log(p, drafted),
        _log(q, drafted),
        _log(q, wanted),
        torch.special.entr(p).sum(-1),
        torch.special.entr(q).sum(-1),
        best[..., 0] - best[..., 1],
        _rank(p, drafted),
        _rank(q, wanted),
        divergence(p, q, "js"),
        top_overlap(p, q, 5),
        torch.arange(drafted.shape[1], device=p.device) / number,
        (mismatched(whole) & whole.valid).long().cumsum(-1),
        by_model(whole),
    )
    return torch.stack([each.to(p.dtype) for each in features], -1)[:, columns]


def _log(law: Tensor, tokens: Tensor) -> Tensor:
    return law.gather(-1, tokens[..., None])[..., 0].clamp(min=_LEAST).log()


def _rank(law: Tensor, tokens: Tensor) -> Tensor:
    return (law > law.gather(-1, tokens[..., None])).sum(-1).to(law.dtype).log1p()
