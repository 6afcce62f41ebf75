"""What an RCSD stage can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import DPOLoss, GRPOLoss


__all__ = ["RCSDTraining"]


@final
@dataclass(frozen=True, kw_only=True)
class RCSDTraining:
    """Options of the DPO and GRPO stages; those of the other stage are without effect.

    Args:
        masked (`bool`): Whether tokens that are the target's own choice are never penalised (published).
        pairs (`"literal"` or `"continuation"`): DPO: what is preferred to the rejected tokens, see [`DPOLoss`].
        rejected (`"first"` or `"all"`): DPO: whether only the first rejected draft counts, see [`DPOLoss`].
        beta (`float`): DPO: how sharply preferences count.
        refreshes (`int`): DPO: how often rounds are recorded with the drafter as it is then; the steps are shared evenly.
        recorded_texts (`int`, *optional*): DPO: most texts that are recorded each time; as many as the steps read where None.
        group (`"window"` or `"response"`): GRPO: what is compared with what, see [`GRPOLoss`].
        group_size (`int`): GRPO: windows or responses in a group.
        credit (`"position"` or `"window"`): GRPO: whether each draft has an advantage of its own, see [`GRPOLoss`].
        draft_temperature (`float`): GRPO: temperature at which windows are sampled.
        kl_weight (`float`): GRPO: weight of the distance to the frozen reference.
        anchor_weight (`float`, *optional*): Weight of the divergence from the target, which keeps supervision alive; that of
            the loss unless given.

    Raises:
        [`InvalidConfigError`]: If an option is out of range.
    """

    masked: bool = True
    pairs: Literal["literal", "continuation"] = "continuation"
    rejected: Literal["first", "all"] = "all"
    beta: float = 0.1
    refreshes: int = 2
    recorded_texts: int | None = None
    group: Literal["window", "response"] = "window"
    group_size: int = 8
    credit: Literal["position", "window"] = "position"
    draft_temperature: float = 0.3
    kl_weight: float = 0.02
    anchor_weight: float | None = None

    def __post_init__(self) -> None:
        if self.refreshes < 1 or self.kl_weight < 0 or (self.anchor_weight or 0.0) < 0:
            raise InvalidConfigError(
                "refreshes must be at least 1, kl_weight and anchor_weight at least 0, got "
                f"{self.refreshes}, {self.kl_weight} and {self.anchor_weight}"
            )
        if self.recorded_texts is not None and self.recorded_texts < 1:
            raise InvalidConfigError(f"recorded_texts must be at least 1, got {self.recorded_texts}")
        # Building the losses validates what is theirs.
        self.dpo, self.grpo  # noqa: B018

    @property
    def dpo(self) -> DPOLoss:
        """The loss of the DPO stage."""
        return DPOLoss(
            pairs=self.pairs,
            rejected=self.rejected,
            masked=self.masked,
            beta=self.beta,
            **self._anchor,
        )

    @property
    def grpo(self) -> GRPOLoss:
        """The loss of the GRPO stage."""
        return GRPOLoss(
            group_size=self.group_size,
            group=self.group,
            credit=self.credit,
            temperature=self.draft_temperature,
            masked=self.masked,
            kl_weight=self.kl_weight,
            **self._anchor,
        )

    @property
    def _anchor(self) -> dict[str, float]:
        return {} if self.anchor_weight is None else {"anchor_weight": self.anchor_weight}
