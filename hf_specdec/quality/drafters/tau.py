"""Tokens per round of several drafters on the same prompts, relative to one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_specdec.bench.report import versions
from hf_specdec.files import write_at_once
from hf_specdec.networks import DraftNetwork
from hf_specdec.quality.drafters.comparison import compare_drafters, relative_to
from hf_specdec.quality.statistics import seeds_difference


__all__ = ["compare_tau", "gain_cell", "tau_cell", "write_tables"]


def compare_tau(
    target: Any,
    drafters: Mapping[str, Sequence[DraftNetwork]],
    prompts: Sequence[Sequence[int]],
    *,
    baseline: str,
    steps: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """Decodes every prompt with every drafter.

    Args:
        target (`PreTrainedModel`): The target.
        drafters (`Mapping[str, Sequence[DraftNetwork]]`): By name, the drafters of all seeds.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        baseline (`str`): The drafter that the others are compared with.
        steps (`int`): Drafts per round.
        max_new_tokens (`int`): Length of the answers.
        temperature (`float`): 0 decodes greedily.
        progress (`Callable[[int, int], None]`, *optional*): Called with the number of drafters so far and of all.

    Returns:
        `dict`: By name: `tau` with its 95 % `interval` over seeds and prompts, the `gain` over the baseline in percent, and
        the paired `difference` from it in tokens per round. Prompts whose answer ends before the first round are left out;
        they are the same for all drafters.
    """
    arms = compare_drafters(
        target, drafters, prompts, steps=(steps,), max_new_tokens=max_new_tokens, batch_size=32, temperature=temperature,
        progress=progress,
    )  # fmt: skip
    lengths = {arm.name: arm.taus(steps) for arm in arms}
    reference = lengths[baseline]
    return {
        name: relative_to(reference, each) | {"difference": asdict(seeds_difference(each, reference))}
        for name, each in lengths.items()
    }


def tau_cell(row: Mapping[str, Any]) -> str:
    """Tau and its interval."""
    return f"{row['tau']:.3f} [{row['interval']['low']:.3f}, {row['interval']['high']:.3f}]"


def gain_cell(row: Mapping[str, Any]) -> str:
    """The gain, and the paired difference with its interval."""
    difference = row["difference"]
    return f"{row['gain']:+.1f} % ({difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}])"


def write_tables(path: Path, found: Mapping[str, Mapping[str, Any]], plan: Any, lines: Sequence[str]) -> None:
    """Writes `path` with the endings `.json` and `.md`.

    Args:
        path (`Path`): Where to, without an ending.
        found (`Mapping`): What [`compare_tau`] gave, by what was measured.
        plan (`Any`): The dataclass that says how much of everything; its `seeds` stand apart in the JSON file.
        lines (`Sequence[str]`): Those of the Markdown file.
    """
    content = {
        "summary": {"demo": {key: {name: row["tau"] for name, row in rows.items()} for key, rows in found.items()}},
        "seeds": list(plan.seeds),
        "plan": asdict(plan),
        "found": found,
        "versions": versions(),
    }
    write_at_once(path.with_name(path.name + ".json"), (json.dumps(content, indent=1) + "\n").encode())
    write_at_once(path.with_name(path.name + ".md"), ("\n".join(lines) + "\n").encode())
