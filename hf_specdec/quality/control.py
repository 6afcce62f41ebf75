"""The control of an EASD measurement: rejection of aligned drafts at random, without a look at any entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.easd import masked_law
from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence, Outcome


__all__ = ["RandomRejection"]


@final
@dataclass(frozen=True)
class RandomRejection:
    """Rejects each draft that the exact rule would accept with a fixed probability, and draws from the masked target law.

    Ours: it does what [`EASD`] does to a token where it fires, at positions that chance chooses. At the rate at which EASD
    changes tokens it tells what the choice by entropy is worth.

    Args:
        rate (`float`): Probability of rejecting an aligned draft, in [0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise InvalidConfigError(f"rate must lie in [0, 1], got {self.rate}")

    @property
    def lossless(self) -> bool:
        """Whether nothing is ever rejected at random."""
        return self.rate == 0.0

    @property
    def needs_draft_logits(self) -> bool:
        """False: no entropy is looked at."""
        return False

    @property
    def throws_dice(self) -> bool:
        """True: chance decides under greedy decoding as well."""
        return True

    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence) * (1.0 - self._rate(evidence))

    def replacement(self, evidence: Evidence) -> Tensor:
        """The mixture of the masked law and the residual that the two ways of rejecting make.

        With `a` the exact acceptance, a draft is rejected at random with probability `a * rate` and by the exact rule with
        `1 - a`; the shares of the two laws are in that proportion.
        """
        exact, rate = exact_acceptance(evidence), self._rate(evidence)
        at_random, rejected = exact * rate, 1 - exact * (1 - rate)
        share = (at_random / rejected.where(rejected > 0, 1.0)).where(rejected > 0, 0.0)
        return share * masked_law(evidence) + (1 - share) * exact_replacement(evidence)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        """`random_changed_token`: reached positions where the same dice under the exact rule would have kept the draft and
        another token was emitted."""
        kept_if_exact = outcome.uniforms.to(evidence.scores.device) < exact_acceptance(evidence)[:, 0]
        changed = outcome.rejected & kept_if_exact & (outcome.next_tokens != evidence.tokens[:, 0])
        return {"random_changed_token": changed.long()}

    def _rate(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`; 0 where the processors left a single token, so that there is nothing to draw instead."""
        has_choice = evidence.scores.topk(2, -1).values[..., 1].isfinite()
        return self.rate * has_choice.to(evidence.scores.dtype)
