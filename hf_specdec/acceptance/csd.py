"""CSD: calibrated speculative decoding (arXiv 2604.13634)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from hf_specdec.acceptance.correction_memory import CorrectionMemory
from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.gates import allowed, mismatched
from hf_specdec.acceptance.relaxed import RelaxedRule, count_relaxed, proposal, tossed
from hf_specdec.errors import InvalidConfigError
from hf_specdec.readback import read_together, sent
from hf_specdec.records import Evidence, Judged


__all__ = ["CSD"]


@final
@dataclass(frozen=True)
class CSD(RelaxedRule):
    """Rescues a draft that the exact rule rejects if the mismatch is familiar and the target finds it plausible.

    Published (arXiv 2604.13634, as its abstract and a summary describe it): a mismatch is rescued when its pair of draft and
    target token was met more than `lambda = 6` times (online correction memory) *and* the target's raw logits satisfy
    `z(draft) - z(target) >= log tau`, `tau = 0.01` (semantic consistency gate); greedy decoding only. Ours: counts are those
    before the round and grow after its commit, by every reached mismatch, rescued or not, and by nothing that was discarded;
    under sampling the target token is the argmax, rescued drafts form a set as in [`SetRule`] and a reached draft counts
    wherever it differs from that argmax; a draft is never rescued from or into an end of text.

    To calibrate without changing any text, decode with `frequency_threshold=math.inf`.

    Args:
        frequency_threshold (`float`): A pair is familiar once it was met more often than this; inf is the exact rule.
        score_ratio (`float`): Least ratio of the untempered probabilities of draft and target token; above 0.
        mode (`str`): `"both"`, or an ablation: `"ocm"` asks the memory only, `"scg"` the gate only.
        learn (`bool`): Whether the memory grows while decoding.
        protected_tokens (`tuple[int, ...]`): Tokens that are never rescued nor replaced by a rescue, beside ends of text.
        memory ([`CorrectionMemory`]): The counts; the rule itself never changes.
    """

    frequency_threshold: float = 6
    score_ratio: float = 0.01
    mode: Literal["both", "ocm", "scg"] = "both"
    learn: bool = True
    protected_tokens: tuple[int, ...] = ()
    memory: CorrectionMemory = field(default_factory=CorrectionMemory, hash=False)

    def __post_init__(self) -> None:
        if not self.frequency_threshold >= 0:
            raise InvalidConfigError(f"frequency_threshold must be at least 0, got {self.frequency_threshold}")
        if not self.score_ratio > 0:
            raise InvalidConfigError(f"score_ratio must be above 0, got {self.score_ratio}")
        if self.mode not in ("both", "ocm", "scg"):
            raise InvalidConfigError(f'mode must be "both", "ocm" or "scg", got {self.mode!r}')
        if not isinstance(self.memory, CorrectionMemory):
            raise InvalidConfigError(f"memory must be a CorrectionMemory, got {type(self.memory).__name__}")
        object.__setattr__(self, "protected_tokens", tuple(self.protected_tokens))  # a saved config holds a list

    def acceptance(self, evidence: Evidence) -> Tensor:
        return exact_acceptance(evidence).where(~self.rescues(evidence), 1.0)

    def replacement(self, evidence: Evidence) -> Tensor:
        return exact_replacement(evidence)

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted, with the memory as it is."""
        q = proposal(evidence)
        rescued = self._every_rescue(evidence) & evidence.scores.isfinite()
        return tossed(evidence, q.where(rescued, torch.minimum(evidence.p, q)))

    def rescues(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, mismatches that are familiar and plausible."""
        candidates = mismatched(evidence) & allowed(evidence) & evidence.valid & ~self._protected(evidence)
        if self.mode != "ocm":
            candidates = candidates & self._is_plausible(evidence)
        if self.mode != "scg":
            candidates = candidates & self._is_familiar(evidence, candidates)
        return candidates

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Counts reached mismatches in the memory; reports `relaxed_accepted`."""
        evidence = judged.evidence
        counts = count_relaxed(judged, self.acceptance(evidence))
        if self.learn:
            met = sent(judged.reached, evidence.tokens.device) & mismatched(evidence)
            self.memory.add(_pairs(evidence, met))
        return counts

    def _every_rescue(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the tokens that would be rescued had they been drafted."""
        logits, wanted = evidence.target_logits, evidence.target_tokens
        others = torch.arange(logits.shape[-1], device=logits.device) != wanted[..., None]
        rescued = others & evidence.valid[..., None]
        if self.mode != "ocm":
            rescued = rescued & (logits - logits.gather(-1, wanted[..., None]) >= math.log(self.score_ratio))
        if self.mode != "scg":
            familiar = self.memory.familiar(set(wanted.flatten().tolist()), self.frequency_threshold)
            met = torch.zeros_like(rescued)
            for place in evidence.valid.nonzero().tolist():
                met[tuple(place)][familiar[int(wanted[tuple(place)])]] = True
            rescued = rescued & met
        protected = self._protected_tokens(evidence)
        rescued[..., protected] = False
        return rescued & ~torch.isin(wanted, protected)[..., None]

    def _is_plausible(self, evidence: Evidence) -> Tensor:
        logits, wanted = evidence.target_logits, evidence.target_tokens
        drafted = logits.gather(-1, evidence.tokens[..., None]) - logits.gather(-1, wanted[..., None])
        return drafted[..., 0] >= math.log(self.score_ratio)

    def _is_familiar(self, evidence: Evidence, candidates: Tensor) -> Tensor:
        counts = [self.memory.count(*pair) for pair in _pairs(evidence, candidates)]
        familiar = torch.tensor([count > self.frequency_threshold for count in counts], dtype=torch.bool)
        return torch.zeros_like(candidates).masked_scatter(candidates, sent(familiar, candidates.device))

    def _protected(self, evidence: Evidence) -> Tensor:
        tokens = self._protected_tokens(evidence)
        return torch.isin(evidence.tokens, tokens) | torch.isin(evidence.target_tokens, tokens)

    def _protected_tokens(self, evidence: Evidence) -> Tensor:
        ends = () if evidence.place is None else evidence.place.eos_token_ids
        tokens = torch.tensor([*self.protected_tokens, *ends], dtype=torch.long)
        return sent(tokens, evidence.tokens.device)


def _pairs(evidence: Evidence, where: Tensor) -> list[tuple[int, int]]:
    drafted, wanted, where = read_together([evidence.tokens, evidence.target_tokens, where])
    return list(zip(drafted[where].tolist(), wanted[where].tolist(), strict=True))
