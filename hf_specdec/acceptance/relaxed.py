"""What relaxed rules have in common: three ways of turning an idea into an acceptance and a correction.

All of them are **ours** in one respect: where a rule's own condition does not hold, the exact coin and the exact residual
decide. So each rule has a setting at which it is the exact rule, bit for bit, and under greedy decoding the texts are those
of the published rules, which emit the target's argmax there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.gates import allowed
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import EntropyKind, one_hot, residual
from hf_specdec.readback import sent
from hf_specdec.records import Evidence, Judged, Outcome


__all__ = [
    "CoinRule",
    "LawRule",
    "MaskRule",
    "RelaxedRule",
    "SetRule",
    "check_entropy",
    "check_range",
    "count_relaxed",
    "proposal",
    "tossed",
    "whole_draft",
]


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

    @abstractmethod
    def kept(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        """`(batch, width, vocab)`, the probability of each token to be drafted from `q` and kept."""

    @final
    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted."""
        return tossed(evidence, self.kept(evidence, evidence.p, proposal(evidence)))

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

    def every_member(self, evidence: Evidence) -> Tensor | None:
        """`(batch, width, vocab)`, all tokens of the set; None where it depends on more than the laws and the prefix."""
        return None

    @final
    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted; NaN where the set is not known as a whole."""
        members = self.every_member(evidence)
        if members is None:
            return torch.full_like(evidence.scores, float("nan"))
        q = proposal(evidence)
        return tossed(evidence, q.where(members & evidence.scores.isfinite(), torch.minimum(evidence.p, q)))

    @final
    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence).where(~(self.members(evidence) & allowed(evidence)), 1.0)

    @final
    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    @final
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        return count_relaxed(judged, self.acceptance(judged.evidence))


class MaskRule(SetRule):
    """A set that is cheap to write down as a mask over the vocabulary."""

    @abstractmethod
    def mask(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the set."""

    @final
    def members(self, evidence: Evidence) -> Tensor:
        return self.mask(evidence).gather(-1, evidence.tokens[..., None])[..., 0]

    @final
    def every_member(self, evidence: Evidence) -> Tensor:
        return self.mask(evidence)


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
        p, q = evidence.p, proposal(evidence)
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
        return residual(self.emitted(evidence)[:, 0], proposal(evidence)[:, 0])

    @final
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        return count_relaxed(judged, self.acceptance(judged.evidence))


def count_relaxed(judged: Judged, acceptance: Tensor) -> dict[str, Tensor]:
    """`relaxed_accepted`: kept drafts that the exact rule would have accepted less surely (under greedy decoding, not)."""
    relaxed = sent(judged.accepted, acceptance.device) & (acceptance > exact_acceptance(judged.evidence))
    return {"relaxed_accepted": relaxed.sum(-1)}


def tossed(evidence: Evidence, kept: Tensor) -> Tensor:
    """`(batch, width, vocab)`, the law of a coin that keeps these masses and corrects from the exact residual."""
    rejected = (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0.0)
    return kept + rejected * residual(evidence.p, proposal(evidence))


def whole_draft(evidence: Evidence) -> tuple[Evidence, slice]:
    """The evidence on the whole draft, and where in it these positions are: for rules that look at the neighbours."""
    columns = slice(evidence.first, evidence.first + evidence.tokens.shape[1])
    return (evidence, columns) if evidence.whole is None else (evidence.whole, columns)


def check_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raises unless `low <= value <= high` (`low < value` with `above`)."""
    if not low <= value <= high or (above and value == low):
        raise InvalidConfigError(f"{name} must lie in {'(' if above else '['}{low}, {high}], got {value}")


def check_entropy(kind: EntropyKind, top_k: int, base: float = math.e) -> None:
    """Raises unless these say which entropy is meant, see [`hf_specdec.laws.entropy`]."""
    if kind not in ("full", "topk", "normalized"):
        raise InvalidConfigError(f'entropy_kind must be "full", "topk" or "normalized", got {kind!r}')
    if top_k < 1:
        raise InvalidConfigError(f"entropy_top_k must be at least 1, got {top_k}")
    if not base > 1.0:
        raise InvalidConfigError(f"entropy_base must be above 1 (e for nats, 2 for bits), got {base}")


def proposal(evidence: Evidence) -> Tensor:
    """`(batch, width, vocab)`, the law the drafts were drawn from."""
    if evidence.q is None:
        return one_hot(evidence.tokens, evidence.scores.shape[-1], evidence.scores.dtype)
    return evidence.q
