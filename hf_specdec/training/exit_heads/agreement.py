"""How often an exit says what the target's last layer says, and how sure it is of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["ExitAgreement", "measure_agreement"]

_THRESHOLDS = (0.5, 0.7, 0.9)


@dataclass(frozen=True)
class ExitAgreement:
    """One exit along some texts.

    Args:
        num_tokens (`int`): Positions.
        top1 (`float`): Share of them whose argmax is the target's, over the target's whole vocabulary.
        kl (`float`): Mean KL(p || q) in nats, on the ids that the exit scores.
        at (`dict[str, dict[str, float]]`): By threshold, the share of positions whose largest probability (at temperature 1)
            is above it, and the share of these that is right; 0 where there are none.
    """

    num_tokens: int
    top1: float
    kl: float
    at: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, object]:
        """The figures as plain values."""
        return asdict(self)


@torch.no_grad()
def measure_agreement(observer: Observer, heads: ExitHeads | None, texts: Sequence[Text]) -> dict[int, ExitAgreement]:
    """The agreement of each exit of an observer; of raw exits where there are no heads."""
    found: dict[int, list[Tensor]] = {depth: [] for depth in observer.exits}
    for text in texts:
        seen = observer.observe(text, whole=True)
        best, ids = seen.logits.argmax(-1), observer.vocabulary
        final = seen.logits if ids is None else seen.logits[..., ids.to(seen.logits.device)]
        for depth in observer.exits:
            states = seen.states[depth]
            states = states if heads is None else heads(states.to(heads.device, heads.dtype), layer=depth)
            law = observer.readout(states[:, seen.first :]).log_softmax(-1)
            guess = observer.ids_of(law.argmax(-1))
            p = final.log_softmax(-1)
            divergence = (p.exp() * (p - law)).sum(-1)
            found[depth].append(torch.stack([law.max(-1).values.exp(), (guess == best).float(), divergence], -1)[0])
    return {depth: _summary(torch.cat(rows)) for depth, rows in found.items()}


def _summary(rows: Tensor) -> ExitAgreement:
    confidence, right, divergence = rows.unbind(-1)
    at = {}
    for threshold in _THRESHOLDS:
        sure = confidence > threshold
        precision = float(right[sure].mean()) if bool(sure.any()) else 0.0
        at[str(threshold)] = {"coverage": float(sure.float().mean()), "precision": precision}
    return ExitAgreement(len(rows), float(right.mean()), float(divergence.mean()), at)
