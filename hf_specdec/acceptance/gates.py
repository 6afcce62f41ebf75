"""What relaxed rules look at: untempered laws, and which drafts a processor has banned."""

import torch
from torch import Tensor

from hf_specdec.laws import one_hot
from hf_specdec.records import Evidence


__all__ = ["allowed", "by_model", "draft_gate", "mismatched", "target_gate"]


def allowed(evidence: Evidence) -> Tensor:
    """`(batch, width)`, drafts that the processors left to the target; no rule may accept another one."""
    return evidence.scores.gather(-1, evidence.tokens[..., None])[..., 0].isfinite()


def mismatched(evidence: Evidence) -> Tensor:
    """`(batch, width)`, drafts that are not the target's argmax."""
    return evidence.tokens != evidence.target_tokens


def target_gate(evidence: Evidence, temperature: float = 1.0) -> Tensor:
    """`(batch, width, vocab)`, the target's law before processors: at temperature 0 the law it draws from is one-hot and
    says nothing about doubt."""
    return (evidence.target_logits / temperature).softmax(-1)


def draft_gate(evidence: Evidence) -> Tensor:
    """`(batch, width, vocab)`, the drafter's law before processors; the point mass where it has none."""
    if evidence.draft_logits is None:
        return one_hot(evidence.tokens, evidence.scores.shape[-1], evidence.scores.dtype)
    return evidence.draft_logits.to(evidence.scores.dtype).softmax(-1)


def by_model(evidence: Evidence) -> Tensor:
    """`(batch, width)`, drafts that come with a law; n-gram drafts are point masses and are judged exactly."""
    if evidence.draft_logits is None:
        return torch.zeros_like(evidence.valid)
    return evidence.draft_logits.isfinite().sum(-1) > 1
