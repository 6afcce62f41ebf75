"""What comparing plain with speculative decoding found, text by text and in total."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal


__all__ = ["Comparison", "Kind", "LosslessReport"]

Kind = Literal["equal", "rounding", "fault", "relaxed"]


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded plainly and speculatively.

    Args:
        index (`int`): Which prompt.
        num_prompt_tokens (`int`): Its length.
        plain_tokens, speculative_tokens (`tuple[int, ...]`): The new tokens of both runs.
        kind (`str`): `"equal"`; `"rounding"`: they part where both tokens are as good as the best one; `"fault"`; or
            `"relaxed"`: they part, and the config asks for that.
        position (`int`, *optional*): The first new token at which they part.
        gap (`float`, *optional*): Distance of the target's two largest scores there. None where they do not part, or where
            the plain text had ended already.
        shortfall (`float`, *optional*): How far the worse of the two chosen tokens lies below the largest score there.
        tolerance (`float`, *optional*): The largest shortfall that counts as rounding.
        num_draft_tokens, num_accepted_tokens (`int`): What the speculative run drafted and accepted for this prompt.
    """

    index: int
    num_prompt_tokens: int
    plain_tokens: tuple[int, ...]
    speculative_tokens: tuple[int, ...]
    kind: Kind
    position: int | None = None
    gap: float | None = None
    shortfall: float | None = None
    tolerance: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def equal(self) -> bool:
        """Whether both texts are the same, token for token."""
        return self.kind == "equal"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        values = asdict(self)
        for name in ("plain_tokens", "speculative_tokens"):
            values[name] = list(values[name])
        return values


@dataclass(frozen=True)
class LosslessReport:
    """What [`verify_lossless`] found.

    Args:
        comparisons (`tuple[Comparison, ...]`): One for each prompt, in order.
        lossless (`bool`): Whether the config promises the target's own text. Differences under a relaxed one are no faults.
        plain_seconds, speculative_seconds (`float`): Time of all plain and of all speculative runs.
    """

    comparisons: tuple[Comparison, ...]
    lossless: bool
    plain_seconds: float
    speculative_seconds: float

    @property
    def equal(self) -> bool:
        """Whether every text is the same, token for token."""
        return self.num_equal == len(self.comparisons)

    @property
    def passed(self) -> bool:
        """Whether there is no fault. Texts that part by rounding pass, and so do all texts of a relaxed config."""
        return self.num_faults == 0

    @property
    def num_equal(self) -> int:
        """Texts that are the same."""
        return self._count("equal")

    @property
    def num_rounding(self) -> int:
        """Texts that part where the target's best tokens are nearly tied."""
        return self._count("rounding")

    @property
    def num_faults(self) -> int:
        """Texts that part although the target clearly prefers another token."""
        return self._count("fault")

    @property
    def num_relaxed(self) -> int:
        """Texts that part because the config is a relaxed one."""
        return self._count("relaxed")

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts of all prompts; without any, equality says little."""
        return sum(each.num_accepted_tokens for each in self.comparisons)

    def _count(self, kind: Kind) -> int:
        return Counter(each.kind for each in self.comparisons)[kind]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        names = "passed equal lossless num_equal num_rounding num_faults num_relaxed num_accepted_tokens"
        return {
            "num_prompts": len(self.comparisons),
            **{name: getattr(self, name) for name in names.split()},
            "plain_seconds": self.plain_seconds,
            "speculative_seconds": self.speculative_seconds,
            "comparisons": [each.to_dict() for each in self.comparisons],
        }

    def summary(self) -> str:
        """A few lines to print."""
        lines = [f"{self.num_equal} of {len(self.comparisons)} texts are equal, token for token"]
        for each in self.comparisons:
            if not each.equal:
                lines.append(f"text {each.index} parts at new token {each.position}: {_reason(each)}")
        if self.num_accepted_tokens == 0:
            lines.append("no draft was accepted, so only the rejection of drafts was checked")
        if not self.lossless:
            lines.append("no verdict: the acceptance rule is relaxed, so differences are expected")
        else:
            lines.append("passed" if self.passed else f"FAILED: {self.num_faults} of the texts show a fault")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def _reason(each: Comparison) -> str:
    if each.kind == "relaxed":
        return "as a relaxed rule may"
    if each.gap is None:
        return f"{each.kind}, one text ends where the other goes on"
    return (
        f"{each.kind}, the target's top-2 gap is {each.gap:.3g} and the worse token lies {each.shortfall:.3g} below "
        f"the best (tolerance {each.tolerance:.3g})"
    )
