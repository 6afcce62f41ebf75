"""CoSpec: at a mismatch a policy decides whom to follow (arXiv 2605.24793)."""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.arbitration import ArbitrationPolicy, arbitration_features
from hf_specdec.acceptance.gates import mismatched
from hf_specdec.acceptance.relaxed import SetRule, check_range
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["CoSpec", "is_plausible"]

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class CoSpec(SetRule):
    """Where the draft is not the target's argmax, a policy says which of the two tokens to take.

    Published (arXiv 2605.24793, abstract): an arbitration policy, trained by reinforcement learning on correct final answers,
    decides at each mismatch of exact-match speculation. Ours: everything else, since the policy's inputs, architecture and
    threshold are not public: the features ([`arbitration_features`]), the threshold, the safety gate, and the exact coin for
    other positions when sampling. Without a policy the rule is exact, and says so once.

    Args:
        policy ([`ArbitrationPolicy`], *optional*): From features to the probability of taking the draft.
        threshold (`float`): The draft is taken above it, in [0, 1]; 1 is the exact rule.
        floor_ratio (`float`): Least ratio of the untempered target probabilities of draft and argmax; 0 is no gate.
    """

    needs_draft_logits: ClassVar[bool] = True

    policy: ArbitrationPolicy | None = None
    threshold: float = 0.5
    floor_ratio: float = 1e-3

    def __post_init__(self) -> None:
        if self.policy is None:
            _warn_without_policy()
        elif not callable(self.policy):
            raise InvalidConfigError(
                f"policy must be a function from features to probabilities, got {type(self.policy).__name__}"
            )
        check_range("threshold", self.threshold, 0.0, 1.0)
        check_range("floor_ratio", self.floor_ratio, 0.0, 1.0)

    def members(self, evidence: Evidence) -> Tensor:
        candidates = mismatched(evidence) & evidence.valid & is_plausible(evidence, self.floor_ratio)
        if self.policy is None or self.threshold == 1.0 or not bool(candidates.any()):
            return torch.zeros_like(candidates)
        trusted = self.policy(arbitration_features(evidence))
        if trusted.shape != candidates.shape:
            raise InvalidConfigError(
                f"a policy must return probabilities of shape {tuple(candidates.shape)}, got {tuple(trusted.shape)}"
            )
        return candidates & (trusted > self.threshold)


def is_plausible(evidence: Evidence, floor_ratio: float) -> Tensor:
    """`(batch, width)`, drafts whose untempered probability is at least this share of that of the target's argmax."""
    logits = evidence.target_logits
    drafted, wanted = (
        logits.gather(-1, tokens[..., None])[..., 0] for tokens in (evidence.tokens, evidence.target_tokens)
    )
    return drafted - wanted >= (math.log(floor_ratio) if floor_ratio > 0 else -math.inf)


@cache
def _warn_without_policy() -> None:
    logger.warning("CoSpec has no policy and decodes exactly. Pass policy=... to let it arbitrate.")
