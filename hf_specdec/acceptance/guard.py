"""SecureSD's guard: a relaxed rule that is exact at first (arXiv 2610.08678)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from torch import Tensor

from hf_specdec.acceptance.emission import emitted_law
from hf_specdec.acceptance.exact import Exact, exact_acceptance, exact_replacement
from hf_specdec.acceptance.relaxed import check_range
from hf_specdec.acceptance.tv_budget import TVBudget
from hf_specdec.acceptance.wrapping import WrappingRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.readback import sent
from hf_specdec.records import AcceptanceRule, Evidence, Judged, Outcome


__all__ = ["EarlyExactGuard"]


@final
@dataclass(frozen=True)
class EarlyExactGuard(WrappingRule):
    """Any rule, but exact for the first tokens of the answer, where relaxed acceptance lets attacks through.

    Published (arXiv 2610.08678 and its code): `alpha(t) = alpha_exact(t) + eta(t) (alpha_rule(t) - alpha_exact(t))`,
    corrections from the rule with probability `eta(t)` and from the exact residual else; the schedules and their defaults
    (step, 0, 1, `L = 2`). Ours: `t` counts generated tokens from 0, from each call of `generate`, so that exactly the first
    `length` tokens are judged exactly; a rule's memory sees every position.

    Args:
        inner ([`AcceptanceRule`]): The rule. Left out where a config has the rule and is told its guard, as in
            `NucleusConfig(guard=EarlyExactGuard(length=2))`.
        length (`int`): `L`: generated tokens before the schedule ends; 0 leaves the rule as it is.
        schedule (`str`): `"step"`: `start` before `L`, `end` from there on; `"linear"`: from one to the other; `"power"`: the
            same with the fraction `t / L` raised to `gamma`.
        start, end (`float`): `eta` at both ends, in [0, 1]; 0 is the exact rule, 1 the inner one.
        gamma (`float`): Exponent of `"power"`.
    """

    inner: AcceptanceRule = field(default_factory=Exact)
    length: int = 2
    schedule: Literal["step", "linear", "power"] = "step"
    start: float = 0.0
    end: float = 1.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.inner, EarlyExactGuard):
            raise InvalidConfigError("the rule is guarded already: set the length of that guard")
        if isinstance(self.inner, TVBudget):  # its ledger would outlive the run
            raise InvalidConfigError(
                "a TVBudget serves one run: guard its rule, and pass max_step_tv=... and tv_budget=... to the config"
            )
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise InvalidConfigError(f"length must be an integer of at least 0 (in tokens), got {self.length!r}")
        if self.schedule not in ("step", "linear", "power"):
            raise InvalidConfigError(f'schedule must be "step", "linear" or "power", got {self.schedule!r}')
        check_range("start", self.start, 0.0, 1.0)
        check_range("end", self.end, 0.0, 1.0)
        check_range("gamma", self.gamma, 0.0, float("inf"), above=True)

    @property
    def throws_dice(self) -> bool:
        """Whether some acceptance is fractional under greedy decoding: the inner rule's, or the schedule's own."""
        sharp = self.schedule == "step" and {self.start, self.end} <= {0.0, 1.0}
        return not sharp or self.inner.throws_dice

    def acceptance(self, evidence: Evidence) -> Tensor:
        exact = exact_acceptance(evidence)
        return self._blend(self.weight(evidence), exact, self.inner.acceptance(evidence))

    def replacement(self, evidence: Evidence) -> Tensor:
        exact = exact_replacement(evidence)
        return self._blend(self.weight(evidence), exact, self.inner.replacement(evidence))

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted: the target's or the inner rule's; NaN where both are blended."""
        weight = self.weight(evidence)[..., None]
        law = torch.where(weight == 1, emitted_law(self.inner, evidence), float("nan"))
        return torch.where(weight == 0, evidence.p, law)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        """The inner rule's counts, where the inner rule decided."""
        decided = self.weight(evidence)[:, 0] > 0
        return {name: values.where(decided, 0) for name, values in self.inner.count(evidence, outcome).items()}

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Shows the inner rule what was committed; its counts are about drafts which it decided."""
        decided = self.weight(judged.evidence) > 0
        return self.observed_by_inner(replace(judged, accepted=sent(judged.accepted, decided.device) & decided))

    def weight(self, evidence: Evidence) -> Tensor:
        """`eta` of each position, of shape `(batch, width)`."""
        if evidence.place is None:
            raise InvalidConfigError("the guard must know how many tokens were generated: pass Evidence(place=...)")
        steps = sent(evidence.place.steps, evidence.scores.device)
        if self.schedule == "step" or self.length == 0:
            fraction = (steps >= self.length).to(evidence.scores.dtype)
        else:
            fraction = (steps / self.length).clamp(0.0, 1.0).to(evidence.scores.dtype)
            fraction = fraction if self.schedule == "linear" else fraction**self.gamma
        return self.start + (self.end - self.start) * fraction

    def _blend(self, weight: Tensor, exact: Tensor, inner: Tensor) -> Tensor:
        mixed = exact + weight * (inner - exact)
        return torch.where(weight == 0, exact, torch.where(weight == 1, inner, mixed))
