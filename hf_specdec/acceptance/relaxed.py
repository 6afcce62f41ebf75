"""What relaxed rules have in common: three ways of turning an idea into an acceptance and a correction.

All of them are **ours** in one respect: where a rule's own condition does not hold, the exact coin and the exact residual
decide. So each rule has a setting at which it is the exact rule, bit for bit, and under greedy decoding the texts are those
of the published rules, which emit the target's argmax there.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.gates import allowed
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import one_hot, residual
from hf_specdec.records import Evidence, Judged, Outcome


__all__ = ["CoinRule", "LawRule", "RelaxedRule", "SetRule", "check_range", "count_relaxed", "whole_draft"]


class RelaxedRule(ABC):
    """A rule whose emitted law is not the target's; guarded unless the user says otherwise.

    `throws_dice` says whether acceptance is fractional also under greedy decoding.
    """

    lossless: ClassVar[bool] = False
    needs_draft_logits: ClassVar[bool] = False
    throws_dice: ClassVar[bool] = False

    @abstractmethod
    def acceptance(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, the probability of accepting each draft."""

    @abstractmethod
    def replacement(self, evidence: Evidence) -> Tensor:
        """`(batch, vocab)`, the law of the correction."""

    @final
    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        return {}


class CoinRule(RelaxedRule):
    """Another coin, the exact residual."""

    @final
    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    @final
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        return count_relaxed(judged, self.acceptance(judged.evidence))


class SetRule(RelaxedRule):
    """Drafts in a set are accepted outright, others by the exact coin; corrections come from the exact residual.

    For a set `S` that depends on the two laws and not on the draft, the emitted law is at total variation
    `sum_S (q - p)+` from the target's, exactly (**ours**; for the nucleus **published**, arXiv 2610.07822).
    """

    @abstractmethod
    def members(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, drafts in the set; banned ones are taken out afterwards."""

    @final
    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence).where(~(self.members(evidence) & allowed(evidence)), 1.0)

    @final
    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    @final
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        return count_relaxed(judged, self.acceptance(judged.evidence))


class LawRule(RelaxedRule):
    """The target is replaced by another law `pi`, which is then coupled with the draft exactly.

    A draft is accepted with probability `min(1, pi / q)` and corrected from `(pi - q)+`, so the emitted law is `pi`. **Ours**:
    tokens that a processor banned are taken out of `pi`, and the bonus after a wholly accepted draft comes from the target,
    since the drafter has no law there.
    """

    @abstractmethod
    def law(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        """`(batch, width, vocab)`, the law to emit, from what target and draft draw from."""

    @final
    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted."""
        p, q = evidence.p, _proposal(evidence)
        law = self.law(evidence, p, q)
        banned = ~evidence.scores.isfinite() & (law > 0)
        kept = law.where(~banned, 0.0)
        mass = kept.sum(-1, keepdim=True)
        mended = torch.where(mass > 0, kept / mass.where(mass > 0, 1.0), p)
        return torch.where(banned.any(-1, keepdim=True), mended, law)

    @final
    def acceptance(self, evidence: Evidence) -> Tensor:
        emitted = self.emitted(evidence).gather(-1, evidence.tokens[..., None])[..., 0]
        return (emitted / evidence.q_token).clamp(max=1.0).where(emitted > 0, 0.0)

    @final
    def replacement(self, evidence: Evidence) -> Tensor:
        return residual(self.emitted(evidence)[:, 0], _proposal(evidence)[:, 0])

    @final
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        return count_relaxed(judged, self.acceptance(judged.evidence))


def count_relaxed(judged: Judged, acceptance: Tensor) -> dict[str, Tensor]:
    """`relaxed_accepted`: kept drafts that the exact rule would have accepted less surely (under greedy decoding, not)."""
    relaxed = judged.accepted.to(acceptance.device) & (acceptance > exact_acceptance(judged.evidence))
    return {"relaxed_accepted": relaxed.sum(-1)}


def whole_draft(evidence: Evidence) -> tuple[Evidence, slice]:
    """The evidence on the whole draft, and where in it these positions are: for rules that look at the neighbours."""
    columns = slice(evidence.first, evidence.first + evidence.tokens.shape[1])
    return (evidence, columns) if evidence.whole is None else (evidence.whole, columns)


def check_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raises unless `low <= value <= high` (`low < value` with `above`)."""
    if not low <= value <= high or (above and value == low):
        raise InvalidConfigError(f"{name} must lie in {'(' if above else '['}{low}, {high}], got {value}")


def _proposal(evidence: Evidence) -> Tensor:
    """`(batch, width, vocab)`, the law the drafts were drawn from."""
    if evidence.q is None:
        return one_hot(evidence.tokens, evidence.scores.shape[-1], evidence.scores.dtype)
    return evidence.q
