"""Measures several drafters on the same prompts and compares them question by question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_specdec.networks import DraftNetwork
from hf_specdec.quality.drafters.kept import KeptMeasures
from hf_specdec.quality.statistics import bootstrap_seeds, seeds_difference
from hf_specdec.training.acceptance import Measured


__all__ = ["Arm", "compare", "compare_drafters", "relative_to"]


@dataclass(frozen=True)
class Arm:
    """One way of training, with the drafters that its seeds gave.

    Args:
        name (`str`): Such as `"rcsd-grpo"`.
        runs (`Sequence[Mapping[int, Sequence[Measured]]]`): For each seed and number of drafts, what became of each prompt.
    """

    name: str
    runs: Sequence[Mapping[int, Sequence[Measured]]]

    def taus(self, steps: int) -> NDArray[np.float64]:
        """`(seeds, prompts)`, tau. Prompts whose answer ends before the first round are left out; they are the same for all
        drafters."""
        return np.array([[each.tau for each in run[steps] if each.tau] for run in self.runs])

    def lengths(self, steps: int) -> NDArray[np.float64]:
        """`(prompts,)`, the mean over seeds of tau."""
        found: NDArray[np.float64] = self.taus(steps).mean(0)
        return found

    def wrote(self, texts: Sequence[tuple[int, ...]], steps: int) -> float:
        """The share of answers, of all seeds, that are these."""
        same = [each.text == text for run in self.runs for each, text in zip(run[steps], texts, strict=True)]
        return float(np.mean(same))


def compare_drafters(
    target: Any,
    drafters: Mapping[str, Sequence[DraftNetwork]],
    prompts: Sequence[Sequence[int]],
    *,
    steps: Sequence[int] = (3, 4, 5, 6),
    max_new_tokens: int,
    batch_size: int = 1,
    temperature: float = 0.0,
    kept: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Arm]:
    """Decodes every prompt with every drafter and every number of drafts.

    Args:
        target (`PreTrainedModel`): The target.
        drafters (`Mapping[str, Sequence[DraftNetwork]]`): By arm, the drafters of its seeds.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        steps (`Sequence[int]`): Numbers of drafts per round.
        max_new_tokens (`int`): Length of the answers.
        batch_size (`int`): Prompts of one length that are decoded at once.
        temperature (`float`): 0 decodes greedily.
        kept (`Path`, *optional*): Folder of what was measured before, which is read, and of what is measured now.
        progress (`Callable`, *optional*): Called with the number of passes over the prompts so far and of all.
    """
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "batch_size": batch_size, "temperature": temperature,
    }  # fmt: skip
    measure = KeptMeasures(target, kept)
    arms = {name: [dict[int, list[Measured]]() for _ in networks] for name, networks in drafters.items()}
    tasks = [(name, seed, k) for name, runs in arms.items() for seed in range(len(runs)) for k in steps]
    for done, (name, seed, k) in enumerate(tasks, start=1):
        arms[name][seed][k] = measure(drafters[name][seed], prompts, steps=k, **options)
        if progress is not None:
            progress(done, len(tasks))
    return [Arm(name, runs) for name, runs in arms.items()]


def relative_to(reference: NDArray[np.float64], tau: NDArray[np.float64]) -> dict[str, Any]:
    """Figures of a drafter beside those of another.

    Args:
        reference, tau (`numpy.ndarray` of shapes `(seeds, prompts)`): Tokens per round of the other and of the drafter.

    Returns:
        `dict`: `tau`, its 95 % bootstrap `interval` over seeds and prompts, and the `gain` in percent.
    """
    interval = asdict(bootstrap_seeds(tau))
    gain = 100.0 * (float(tau.mean()) / float(reference.mean()) - 1.0)
    return {"interval": interval, "tau": interval["mean"], "gain": gain}


def compare(
    arms: Sequence[Arm],
    *,
    baseline: str,
    control: str | None = None,
    plain: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Figures of all arms, with 95 % bootstrap intervals over seeds and prompts.

    Args:
        arms (`Sequence[Arm]`): The arms.
        baseline (`str`): The arm that gains are relative to.
        control (`str`, *optional*): The arm that the others must beat.
        plain (`Sequence[Sequence[int]]`, *optional*): What the target writes without a drafter; the first arm's answers unless
            given.

    Returns:
        `dict`: `arms`: by arm and number of drafts, `tau`, its `interval`, the `gain` over the baseline in percent and the
        paired `difference_from_control`; `resampled`, what the intervals are over; `by_seed`: by arm and number of drafts,
        the tau of each seed; `text_equal`: by arm, the share of answers, of all seeds and numbers of drafts, that are the
        plain ones; `same_text`, whether all are; and `num_prompts`.
    """
    by_name = {arm.name: arm for arm in arms}
    counts = list(arms[0].runs[0])
    figures: dict[str, dict[str, Any]] = {}
    for arm in arms:
        figures[arm.name] = {}
        for k in counts:
            tau, reference = arm.taus(k), by_name[baseline].taus(k)
            row = relative_to(reference, tau)
            if control is not None and arm.name != control:
                row["difference_from_control"] = asdict(seeds_difference(tau, by_name[control].taus(k)))
            figures[arm.name][str(k)] = row
    texts = [each.text for each in arms[0].runs[0][counts[0]]] if plain is None else [tuple(each) for each in plain]
    equal = {arm.name: float(np.mean([arm.wrote(texts, k) for k in counts])) for arm in arms}
    return {
        "arms": figures,
        "resampled": "seeds and prompts",
        "by_seed": {arm.name: {str(k): arm.taus(k).mean(1).tolist() for k in counts} for arm in arms},
        "text_equal": equal,
        "same_text": all(share == 1 for share in equal.values()),
        "num_prompts": len(arms[0].lengths(counts[0])),
    }
