"""EASD: entropy-aware token rejection (arXiv 2512.23765)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.relaxed import check_entropy
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import EntropyKind, entropy, one_hot, residual, top_overlap, without_token
from hf_specdec.readback import is_host
from hf_specdec.records import Evidence, Outcome


__all__ = ["EASD", "masked_law"]


def masked_law(evidence: Evidence, penalty: float = 0.0) -> Tensor:
    """`(batch, vocab)`, the target's law without the drafted token, normalised again, for evidence of width 1.

    Under greedy decoding the runner-up is wanted, so there the mask acts before the argmax.

    Args:
        evidence (`Evidence`): The evidence of one position per row.
        penalty (`float`): Share of the token's probability that survives the mask; 0 removes it.
    """
    p = evidence.p[:, 0]
    if not evidence.do_sample:
        scores = evidence.scores[:, 0]
        handicap = math.log(penalty) if penalty > 0 else -math.inf
        masked = scores.scatter(-1, evidence.tokens, scores.gather(-1, evidence.tokens) + handicap)
        p = torch.zeros_like(scores).scatter_(-1, masked.argmax(-1, keepdim=True), 1.0)
    return without_token(p, evidence.tokens[:, 0], penalty)


@final
@dataclass(frozen=True)
class EASD:
    """Rejects a draft where both models are unsure and yet agree in their top candidates.

    Published (arXiv 2512.23765, as its reviewers and a summary of equations 4 to 7 describe it): the rule fires where both
    entropies exceed a threshold and the two top-n sets overlap; the draft's token is then removed from the target's law,
    which is normalised again and sampled. Ours: `top_n`, the overlap threshold and its `>=`, entropies of the
    *untempered* laws (at temperature 0 the sampling law has none), full-vocabulary entropy in nats, and that only drafts
    which the exact rule would accept are rejected (`apply_to="accepted"`); a draft that the exact rule rejects is
    corrected as usual, so that at temperature 0 the rule changes a token exactly where the draft is the target's argmax,
    which gives way to the runner-up.

    Args:
        target_entropy_threshold, draft_entropy_threshold (`float`): The rule fires above both, in units of `entropy_base`.
        overlap_threshold (`float`): Least share of common tokens among the two `top_n` sets, in [0, 1].
        top_n (`int`): Size of the two sets.
        resample (`str`): `"masked"` draws from the target's law without the rejected token; `"plain"` draws from the law
            itself (an ablation: at temperature 0 it changes nothing).
        apply_to (`str`): `"accepted"`, or `"all"` to treat drafts that the exact rule rejects in the same way.
        penalty (`float`): Share of the rejected token's probability that survives the mask; 0 removes it.
        entropy_kind (`str`): See [`hf_specdec.laws.entropy`].
        entropy_top_k (`int`): Terms of the `"topk"` entropy.
        entropy_base (`float`): Base of the logarithm.
    """

    target_entropy_threshold: float = 2.0
    draft_entropy_threshold: float = 2.0
    overlap_threshold: float = 0.6
    top_n: int = 5
    resample: Literal["masked", "plain"] = "masked"
    apply_to: Literal["accepted", "all"] = "accepted"
    penalty: float = 0.0
    entropy_kind: EntropyKind = "full"
    entropy_top_k: int = 3
    entropy_base: float = math.e

    def __post_init__(self) -> None:
        for name in ("target_entropy_threshold", "draft_entropy_threshold"):
            if math.isnan(getattr(self, name)):
                raise InvalidConfigError(f"{name} must be a number, got NaN")
        if not self.overlap_threshold >= 0.0:
            raise InvalidConfigError(f"overlap_threshold must be at least 0, got {self.overlap_threshold}")
        if self.top_n < 1:
            raise InvalidConfigError(f"top_n must be at least 1, got {self.top_n}")
        if self.resample not in ("masked", "plain"):
            raise InvalidConfigError(f'resample must be "masked" or "plain", got {self.resample!r}')
        if self.apply_to not in ("accepted", "all"):
            raise InvalidConfigError(f'apply_to must be "accepted" or "all", got {self.apply_to!r}')
        if not 0.0 <= self.penalty <= 1.0:
            raise InvalidConfigError(f"penalty must lie in [0, 1], got {self.penalty}")
        check_entropy(self.entropy_kind, self.entropy_top_k, self.entropy_base)

    @property
    def lossless(self) -> bool:
        """False: where the rule fires, the emitted law is not the target's."""
        return False

    @property
    def needs_draft_logits(self) -> bool:
        """True: the rule measures the drafter's entropy."""
        return True

    @property
    def throws_dice(self) -> bool:
        """False: whether the rule fires depends on the two laws only."""
        return False

    def fires(self, target_logits: Tensor, draft_logits: Tensor, num_candidates: Tensor) -> Tensor:
        """Where the uncertain agreement holds; depends on the two laws only, never on the token.

        Args:
            target_logits, draft_logits (`torch.FloatTensor` of shape `(..., vocab)`): Untempered logits of both models.
            num_candidates (`torch.LongTensor` of shape `(...)`): Tokens that the processors left to the target. With
                fewer than two there is nothing to resample and the rule stays silent.
        """
        return (
            (self._entropy(target_logits) > self.target_entropy_threshold)
            # A point mass, such as an n-gram draft beside a model's, has no entropy and is never unsure.
            & (self._entropy(draft_logits) > max(self.draft_entropy_threshold, 0.0))
            & (top_overlap(target_logits, draft_logits, self.top_n) >= self.overlap_threshold)
            & (num_candidates > 1)
        )

    def _entropy(self, logits: Tensor) -> Tensor:
        return entropy(logits, self.entropy_kind, self.entropy_top_k, self.entropy_base)

    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence).where(~self._fires_on(evidence), 0.0)

    def replacement(self, evidence: Evidence) -> Tensor:
        """The residual where the rule is silent; where it fires, the mixture that its two ways of rejecting make."""
        ordinary = exact_replacement(evidence)
        resampled = evidence.p[:, 0] if self.resample == "plain" else masked_law(evidence, self.penalty)
        share = torch.ones_like(evidence.p_token) if self.apply_to == "all" else exact_acceptance(evidence)
        return torch.where(self._fires_on(evidence), share * resampled + (1 - share) * ordinary, ordinary)

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted; under greedy decoding only where the drafts are point masses,
        which the two laws of the rule themselves describe, and NaN else."""
        p = evidence.p
        fired = self._fires_on(evidence)[..., None]
        if not evidence.do_sample:
            return p.where(~fired, float("nan"))
        q = one_hot(evidence.tokens, p.shape[-1], p.dtype) if evidence.q is None else evidence.q
        resampled = q if self.apply_to == "all" else torch.minimum(p, q)  # drafts whose place is drawn anew
        rest = (1.0 - resampled.sum(-1, keepdim=True)).clamp(min=0.0) * residual(p, q)
        if self.resample == "plain":
            return p.where(~fired, resampled.sum(-1, keepdim=True) * p + rest)
        # Of the law without x, `p` keeps all but the share `1 - penalty` of `p(x)`: summed over x in closed form.
        left = 1.0 - (1.0 - self.penalty) * p
        weight = (resampled / left.where(left > 0, 1.0)).where(left > 0, 0.0)
        masked = p * (weight.sum(-1, keepdim=True) - (1.0 - self.penalty) * weight)
        return p.where(~fired, masked + resampled.where(left <= 0, 0.0) + rest)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        """`easd_fired`: reached positions where the rule fired; `easd_changed_token`: those where the same dice under the
        exact rule would have kept the draft and another token was emitted."""
        fired = outcome.rejected & self._fires_on(evidence)[:, 0]
        kept_if_exact = outcome.uniforms.to(fired.device) < exact_acceptance(evidence)[:, 0]
        changed = fired & kept_if_exact & (outcome.next_tokens != evidence.tokens[:, 0])
        return {"easd_fired": fired.long(), "easd_changed_token": changed.long()}

    def _fires_on(self, evidence: Evidence) -> Tensor:
        if evidence.draft_logits is None:  # n-gram drafts are point masses: their entropy is 0
            return torch.zeros_like(evidence.valid)
        if not is_host(evidence.scores.device):  # to ask which positions get far would be to wait
            num_candidates = evidence.scores.isfinite().sum(-1)
            return self.fires(evidence.target_logits, evidence.draft_logits.to(evidence.scores.dtype), num_candidates)
        fired = self._entropy(evidence.target_logits) > self.target_entropy_threshold
        # The other conditions read the whole vocabulary several times, and few positions get this far.
        logits, scores = evidence.target_logits[fired], evidence.scores[fired]
        draft_logits = evidence.draft_logits[fired].to(scores.dtype)
        return fired.masked_scatter(fired, self.fires(logits, draft_logits, scores.isfinite().sum(-1)))
