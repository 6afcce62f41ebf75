"""What each nucleus mass would accept, and how far it would leave the target's law, along given texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.compatibility import check_tokenizers
from hf_specdec.configs import NucleusConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import nucleus_floor
from hf_specdec.teacher_forcing import Text, logits_along


__all__ = ["MASSES", "NucleusCalibration", "NucleusPoint", "calibrate_nucleus"]

MASSES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)  # ours


@dataclass(frozen=True)
class NucleusPoint:
    """What a nucleus mass does at the positions of the texts.

    Args:
        nucleus_p (`float`): The mass.
        acceptance (`float`): Mean probability of accepting a sampled draft, `sum min(p, q) + sum_N (q - p)+`.
        mean_tv, max_tv (`float`): Total variation of the emitted law to the target's, `sum_N (q - p)+`.
        greedy_acceptance (`float`): Share of positions whose greedy draft is the target's argmax or in the nucleus.
        greedy_tv (`float`): Share of positions whose greedy draft is kept and not the target's argmax.
    """

    nucleus_p: float
    acceptance: float
    mean_tv: float
    max_tv: float
    greedy_acceptance: float
    greedy_tv: float


@dataclass(frozen=True)
class NucleusCalibration:
    """What [`calibrate_nucleus`] measured and chose.

    Args:
        num_texts, num_positions (`int`): What was read.
        temperature (`float`): Temperature of both laws; the nucleus is that of the untempered law in any case.
        greedy (`bool`): Whether the bound is about greedy decoding.
        tv_bound (`float`): Largest mean total variation of a step.
        chosen ([`NucleusPoint`]): The largest mass of the grid within the bound.
        grid (`tuple[NucleusPoint, ...]`): All masses.
        config ([`NucleusConfig`]): The config with the chosen mass.
    """

    num_texts: int
    num_positions: int
    temperature: float
    greedy: bool
    tv_bound: float
    chosen: NucleusPoint
    grid: tuple[NucleusPoint, ...]
    config: NucleusConfig

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        return asdict(replace(self, config=NucleusConfig())) | {"config": self.config.to_dict()}

    def summary(self) -> str:
        """A few lines to print."""
        decoding = "greedy decoding" if self.greedy else f"sampling at temperature {self.temperature:g}"
        distance = self.chosen.greedy_tv if self.greedy else self.chosen.mean_tv
        accepted = self.chosen.greedy_acceptance if self.greedy else self.chosen.acceptance
        return (
            f"{self.num_positions} positions of {self.num_texts} texts: for a mean total variation of at most "
            f"{self.tv_bound:g} per step in {decoding}, nucleus_p={self.chosen.nucleus_p:g} (mean {distance:.4f}); it accepts "
            f"{accepted:.1%} of the drafts"
        )


@torch.no_grad()
def calibrate_nucleus(
    target: Any,
    draft: Any,
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    tv_bound: float = 0.05,
    temperature: float = 1.0,
    greedy: bool = False,
    masses: Sequence[float] = MASSES,
    max_tokens: int = 512,
    config: NucleusConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NucleusCalibration:
    """Measures NSD's acceptance and error along the texts, teacher-forced, and picks the largest mass within a bound.

    Published (arXiv 2610.07822): the error of a step is the draft's excess probability inside the nucleus. Ours: choosing the
    mass by its mean along texts, and the grid. The mean over given texts bounds nothing on a single text: for that there
    is `tv_budget`.

    Args:
        target, draft, texts, tokenizer, max_tokens, progress: See [`hf_specdec.teacher_forcing.logits_along`].
        tv_bound (`float`): Largest mean total variation of a step, in [0, 1].
        temperature (`float`): Sampling temperature, above 0.
        greedy (`bool`): Whether to bound greedy decoding, where the distance of a step is 0 or 1.
        masses (sequence of `float`): The grid, in [0, 1]; 0, the exact rule, is always in it.
        config ([`NucleusConfig`], *optional*): The other options.

    Raises:
        [`InvalidConfigError`]: If an argument is out of range or the texts hold no position.
        [`IncompatibleDraftError`]: If the models use different tokenizers.
    """
    config = NucleusConfig() if config is None else config
    _check(tv_bound, temperature, masses, config)
    check_tokenizers(target, draft, tokenizer, None)
    grid = sorted({0.0, *masses})
    along = logits_along(target, draft, texts, tokenizer=tokenizer, max_tokens=max_tokens, progress=progress)
    found = torch.cat([_statistics(*logits, grid, temperature, config.score_temperature) for logits in along], 1)
    if bool(found.isnan().any()):
        raise InvalidConfigError("a model's logits contain NaN along these texts, so there is nothing to calibrate on")
    points = tuple(_point(mass, values) for mass, values in zip(grid, found.double(), strict=True))
    fits = [each for each in points if (each.greedy_tv if greedy else each.mean_tv) <= tv_bound]
    chosen = fits[-1]
    return NucleusCalibration(
        num_texts=len(texts),
        num_positions=found.shape[1],
        temperature=temperature,
        greedy=greedy,
        tv_bound=tv_bound,
        chosen=chosen,
        grid=points,
        config=replace(config, nucleus_p=chosen.nucleus_p),
    )


def _check(tv_bound: float, temperature: float, masses: Sequence[float], config: NucleusConfig) -> None:
    if not 0.0 <= tv_bound <= 1.0:
        raise InvalidConfigError(f"tv_bound must lie in [0, 1], got {tv_bound}")
    if not temperature > 0.0:
        raise InvalidConfigError(f"temperature must be above 0, got {temperature}; greedy=True is greedy decoding")
    for mass in masses:
        replace(config, nucleus_p=mass)  # which refuses what is out of range


def _statistics(
    target_logits: Tensor, draft_logits: Tensor, masses: Sequence[float], temperature: float, score_temperature: float
) -> Tensor:
    """`(masses, positions, 4)`: acceptance and distance of a sampled draft, whether a greedy one is kept, and is foreign."""
    p, q = (target_logits / temperature).softmax(-1), (draft_logits / temperature).softmax(-1)
    gate = (target_logits / score_temperature).softmax(-1)
    ordered = gate.sort(-1, descending=True).values
    excess, common = (q - p).clamp(min=0.0), torch.minimum(p, q).sum(-1)
    drafted = draft_logits.argmax(-1, keepdim=True)
    aligned = drafted[:, 0] == target_logits.argmax(-1)
    rows = []
    for mass in masses:
        floor = nucleus_floor(ordered, mass) if 0.0 < mass < 1.0 else torch.full_like(p[:, :1], 2.0 * (mass == 0.0))
        distance = excess.where(gate >= floor, 0.0).sum(-1)
        foreign = (gate >= floor).gather(-1, drafted)[:, 0] & ~aligned
        rows.append(
            torch.stack([common + distance, distance, (aligned | foreign).to(p.dtype), foreign.to(p.dtype)], -1)
        )
    return torch.stack(rows).cpu()


def _point(mass: float, values: Tensor) -> NucleusPoint:
    acceptance, mean_tv, greedy_acceptance, greedy_tv = values.mean(0).tolist()
    return NucleusPoint(mass, acceptance, mean_tv, float(values[:, 1].max()), greedy_acceptance, greedy_tv)
