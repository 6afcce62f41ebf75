"""NSD: nucleus speculative decoding (arXiv 2610.07822)."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.acceptance.gates import target_gate
from hf_specdec.acceptance.relaxed import SetRule, check_range
from hf_specdec.laws import in_nucleus, nucleus
from hf_specdec.records import Evidence


__all__ = ["Nucleus"]


@final
@dataclass(frozen=True)
class Nucleus(SetRule):
    """Accepts a draft by the exact coin, or because it lies in the target's nucleus.

    Published (arXiv 2610.07822, abstract): acceptance by the standard rule or by membership in the target's nucleus; the error
    of one step, in total variation, is the draft's excess probability inside the nucleus, `sum_N (q - p)+`. Ours: the default
    of `nucleus_p`, membership without sorting, ties in or out together, and that the nucleus is that of the *untempered* law,
    since at temperature 0 the law drawn from has a nucleus of one token. Under greedy decoding every draft in the nucleus
    is kept, so the text may leave the target's greedy text.

    Args:
        nucleus_p (`float`): Probability mass of the nucleus, in [0, 1]; 0 is the exact rule, 1 accepts every draft that
            the processors allow.
        score_temperature (`float`): Temperature of the law whose nucleus it is; the sampling temperature for the nucleus of
            the law drawn from.
    """

    nucleus_p: float = 0.9
    score_temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("nucleus_p", self.nucleus_p, 0.0, 1.0)
        check_range("score_temperature", self.score_temperature, 0.0, float("inf"), above=True)

    def members(self, evidence: Evidence) -> Tensor:
        return in_nucleus(target_gate(evidence, self.score_temperature), evidence.tokens, self.nucleus_p)

    def every_member(self, evidence: Evidence) -> Tensor:
        return nucleus(target_gate(evidence, self.score_temperature), self.nucleus_p)
