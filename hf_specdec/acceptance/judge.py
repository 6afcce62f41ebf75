"""Judge decoding: a trained judge may overrule the exact rule (arXiv 2501.19309)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, final

from torch import Tensor

from hf_specdec.acceptance.relaxed import SetRule, check_range
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Evidence


__all__ = ["Judge"]


@final
@dataclass(frozen=True)
class Judge(SetRule):
    """Accepts a draft by the exact rule, or because a judge finds it correct.

    Published (arXiv 2501.19309): a linear head on the target's hidden state of the draft, trained to tell contextually
    correct tokens, accepts where its probability exceeds a threshold. Ours: the interface. A judge is any function of the
    [`Evidence`]; no trained judge comes with this package, and a saved config cannot hold one.

    Args:
        judge (`Callable`): From [`Evidence`] to probabilities of shape `(batch, width)` that each draft is correct.
        threshold (`float`): In [0, 1]; 1 is the exact rule.
    """

    judge: Callable[[Evidence], Tensor] | None = None
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not callable(self.judge):
            raise InvalidConfigError(
                f"judge must be a function from Evidence to probabilities [batch, width], got {self.judge!r}. None comes with "
                "the package: pass Judge(judge=...)"
            )
        check_range("threshold", self.threshold, 0.0, 1.0)

    def members(self, evidence: Evidence) -> Tensor:
        scores = cast(Callable[[Evidence], Tensor], self.judge)(evidence)
        if scores.shape != evidence.tokens.shape:
            raise InvalidConfigError(
                f"a judge must return probabilities of shape {tuple(evidence.tokens.shape)}, got {tuple(scores.shape)}"
            )
        return scores > self.threshold
