"""Drafts along texts of the target, at every place at once: divergence, and acceptance by the entropy of the target's law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_specdec.networks import DraftNetwork
from hf_specdec.training.texts import Text, observe
from hf_specdec.training.trainer import Observe
from hf_specdec.training.unroll import unroll


__all__ = ["Along", "acceptance_by_entropy", "drafts_along"]

_BINS = 10


@dataclass(frozen=True)
class Along:
    """What greedy verification would say of a round that began at any column of the answers.

    Args:
        kl (`float`): Mean of `KL(p || q)` in nats over all first drafts.
        first_entropies (`numpy.ndarray` of shape `(columns,)`): Entropy of the target's law in nats where first drafts stand,
            the same for every drafter.
        entropies (`numpy.ndarray` of shape `(drafts,)`): The same of all drafts that are verified: those after drafts that are
            all the target's choice.
        accepted (`numpy.ndarray` of shape `(drafts,)`): Which of these are the target's choice, too.
    """

    kl: float
    first_entropies: NDArray[np.float64]
    entropies: NDArray[np.float64]
    accepted: NDArray[np.bool_]

    @property
    def rate(self) -> float:
        """Share of verified drafts that are accepted."""
        return float(self.accepted.mean())


@torch.no_grad()
def drafts_along(
    target: Any,
    network: DraftNetwork,
    texts: Sequence[Text],
    *,
    steps: int,
    batch_size: int = 4,
    observer: Observe = observe,
) -> Along:
    """Drafts from every column of some texts, in one pass for each step of a batch.

    On texts that the target wrote greedily, a chain reads what it would have drafted for as long as all its drafts are
    accepted, so what is counted is what decoding would do from there.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): A drafter with the target's whole vocabulary.
        texts (`Sequence[Text]`): Texts that the target wrote greedily.
        steps (`int`): Drafts per round.
        batch_size (`int`): Texts that are read at once.
        observer (`Callable`): What gives the target's features of some texts.
    """
    divergences: list[Tensor] = []
    firsts: list[Tensor] = []
    entropies: list[Tensor] = []
    accepted: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        unrolled = unroll(network, observer(target, network, texts[start : start + batch_size]), steps)
        reached = unrolled.masks[0]
        for step, mask in enumerate(unrolled.masks):
            reached = reached & mask
            log_q = unrolled.student_logits[step][reached].float().log_softmax(-1)
            log_p = unrolled.target_logits[step][reached].float().log_softmax(-1)
            p, agreed = log_p.exp(), log_q.argmax(-1) == log_p.argmax(-1)
            entropy = -(p * log_p).sum(-1)
            if step == 0:
                firsts.append(entropy)
                divergences.append((p * (log_p - log_q)).sum(-1))
            entropies.append(entropy)
            accepted.append(agreed)
            reached = reached.masked_scatter(reached, agreed)
    first, every, taken = (torch.cat(each).cpu().numpy() for each in (firsts, entropies, accepted))
    return Along(float(torch.cat(divergences).mean()), first.astype(np.float64), every.astype(np.float64), taken)


def acceptance_by_entropy(arms: Mapping[str, Sequence[Along]]) -> dict[str, Any]:
    """Share of verified drafts that are accepted, by decile of the entropy of the target's law.

    Args:
        arms (`Mapping[str, Sequence[Along]]`): By arm, what each seed's drafter does along the same texts.

    Returns:
        `dict`: `edges` (nats): those of the deciles of all columns, the same for every arm; `arms`: by arm, `acceptance` (null
        where nothing was verified) and `drafts`, the number of verified ones, for each decile.
    """
    columns = next(iter(arms.values()))[0].first_entropies
    edges = np.quantile(columns, np.linspace(0, 1, _BINS + 1))
    found = {}
    for name, seeds in arms.items():
        places = np.concatenate([np.searchsorted(edges[1:-1], each.entropies, side="right") for each in seeds])
        accepted = np.bincount(places, np.concatenate([each.accepted for each in seeds]), minlength=_BINS)
        drafts = np.bincount(places, minlength=_BINS)
        rates = [float(part / whole) if whole else None for part, whole in zip(accepted, drafts, strict=True)]
        found[name] = {"acceptance": rates, "drafts": drafts.tolist()}
    return {"edges": edges.tolist(), "arms": found}
