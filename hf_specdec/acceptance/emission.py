"""Which law a rule emits, and how far that is from the target's."""

import torch
from torch import Tensor

from hf_specdec.laws import total_variation
from hf_specdec.records import AcceptanceRule, Evidence, KnownLaw


__all__ = ["emitted_law", "step_tv"]


def emitted_law(rule: AcceptanceRule, evidence: Evidence) -> Tensor:
    """The law of the token at each position, given the prefix, for a draft that is drawn from `q` and judged by `rule`.

    Ours. A [`KnownLaw`] says it in closed form. Of a point mass (greedy drafting, an n-gram match) it follows from the rule's
    two laws: the draft with the probability of its acceptance `a`, and `(1 - a)` times the replacement.

    Returns:
        Laws of shape `(batch, width, vocab)`; NaN where neither holds.
    """
    if isinstance(rule, KnownLaw):
        law = rule.emitted(evidence)
    else:
        law = torch.full_like(evidence.scores, float("nan"))
    lacking = law.isnan().any(-1) & (evidence.q_token == 1.0) & evidence.valid
    if not bool(lacking.any()):
        return law
    acceptance, law = rule.acceptance(evidence), law.clone()
    for position in lacking.any(0).nonzero()[:, 0].tolist():
        at = torch.full((evidence.tokens.shape[0],), position, device=evidence.tokens.device)
        kept = acceptance[:, position, None]
        mixed = (1.0 - kept) * rule.replacement(evidence.at(at))
        mixed = mixed.scatter_add(-1, evidence.tokens[:, position, None], kept.to(mixed.dtype))
        law[:, position] = torch.where(lacking[:, position, None], mixed, law[:, position])
    return law


def step_tv(rule: AcceptanceRule, evidence: Evidence) -> Tensor:
    """`(batch, width)`, the total variation of the emitted law to the target's, 0 for a lossless rule; NaN where unknown."""
    if rule.lossless:
        return torch.zeros_like(evidence.p_token)
    if not evidence.do_sample and bool(((evidence.q_token == 1.0) | ~evidence.valid).all()):
        return _greedy_step_tv(rule, evidence)
    return total_variation(emitted_law(rule, evidence), evidence.p)


def _greedy_step_tv(rule: AcceptanceRule, evidence: Evidence) -> Tensor:
    """The same for point masses on both sides, without laws over the vocabulary: the probability of another token than the
    target's, 0 where nothing was drafted."""
    wanted = evidence.target_tokens
    kept = rule.acceptance(evidence)
    missed = (evidence.tokens != wanted).to(kept.dtype)
    rejects = (kept != 1.0) & evidence.valid
    cost = missed * kept
    for position in rejects.any(0).nonzero()[:, 0].tolist():
        at = torch.full((evidence.tokens.shape[0],), position, device=evidence.tokens.device)
        own = rule.replacement(evidence.at(at)).gather(-1, wanted[:, position, None])[:, 0]
        replaced = (1.0 - kept[:, position]) * (1.0 - own)
        cost[:, position] += replaced.where(rejects[:, position], 0.0)
    return cost.where(evidence.valid, 0.0)
