"""How often an exit says what the target's last layer says, and how sure it is of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.exit_heads.held_out import HeldOut
from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["ExitAgreement", "agreement_along", "measure_agreement"]

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


def measure_agreement(observer: Observer, heads: ExitHeads | None, texts: Sequence[Text]) -> dict[int, ExitAgreement]:
    """The agreement of each exit of an observer; of raw exits where there are no heads."""
    return agreement_along(HeldOut(observer, texts, most_bytes=0), heads)


@torch.no_grad()
def agreement_along(held_out: HeldOut, heads: ExitHeads | None) -> dict[int, ExitAgreement]:
    """The same along texts that are kept from one evaluation to the next.

    Args:
        held_out ([`HeldOut`]): The texts; each exit of its observer is judged.
        heads ([`ExitHeads`], *optional*): Heads; raw exits without them.
    """
    observer = held_out.observer
    found: dict[int, list[Tensor]] = {depth: [] for depth in observer.exits}
    for seen in held_out:
        wanted = observer.readout(seen.final).log_softmax(-1)
        best = seen.best.to(wanted.device)
        for depth, states in seen.states.items():
            mapped = states if heads is None else heads(states.to(heads.device, heads.dtype), layer=depth)
            law = observer.readout(mapped[:, -seen.final.shape[1] :]).log_softmax(-1)
            right = observer.ids_of(law.argmax(-1)) == best
            divergence = (wanted.exp() * (wanted - law)).sum(-1)
            found[depth].append(torch.stack([law.max(-1).values.exp(), right.float(), divergence], -1)[0])
    return {depth: _summary(torch.cat(rows)) for depth, rows in found.items()}


def _summary(rows: Tensor) -> ExitAgreement:
    confidence, right, divergence = rows.unbind(-1)
    at = {}
    for threshold in _THRESHOLDS:
        sure = confidence > threshold
        precision = float(right[sure].mean()) if bool(sure.any()) else 0.0
        at[str(threshold)] = {"coverage": float(sure.float().mean()), "precision": precision}
    return ExitAgreement(len(rows), float(right.mean()), float(divergence.mean()), at)
