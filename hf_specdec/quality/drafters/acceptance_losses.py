"""Acceptance-aware losses: `python -m hf_specdec.quality.drafters.acceptance_losses --docs docs.jsonl --out FOLDER`.

A trained HASS drafter of the bundled demo target goes on with each loss, for the same number of tokens and with each seed: once
on texts that the target wrote greedily, once on texts that it sampled at temperature 1. Those of the first kind are measured
greedily, those of the second at temperature 1, on prompts of held-out documents. A killed run continues when started again with
the same arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import Pair, load_pair
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import AutoDrafter
from hf_specdec.quality.drafters.bundle import BUNDLED
from hf_specdec.quality.drafters.reproduction import Plan
from hf_specdec.quality.drafters.tau import compare_tau, gain_cell, tau_cell, write_tables
from hf_specdec.quality.drafters.workshop import (
    Show,
    Workshop,
    add_plan,
    bars,
    keep_plan,
    plan_from,
    target_texts,
    trained_by,
    weights_digest,
    windows,
)
from hf_specdec.training.recipes import Recipe, stages_of


__all__ = ["MODES", "LossPlan", "compare_losses"]

BASELINE = "kl"
# How texts are written and drafters are measured, and the losses that are for such texts: GRPO's windows are judged by greedy
# verification against greedy texts.
MODES = {
    "greedy": (0.0, (BASELINE, "eal", "wtv", "vat", "eal+grpo", "wtv+grpo")),
    "sampled": (1.0, (BASELINE, "eal", "wtv", "vat")),
}
_MEASURED_ONLY = ("held_out", "measured_tokens", "draft_length", "seeds")
_SEEN = Plan().texts  # windows that the bundled HASS drafter was trained on


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """How much of everything.

    Args:
        texts (`int`): Texts to train on in each mode, of `prompt_tokens` of the corpus and `new_tokens` of the target; they lie
            half way between those that the bundled HASS drafter was trained on, of which there are 2048.
        steps (`int`): Optimiser steps of each drafter.
        rate (`float`): Highest learning rate.
        held_out (`int`): Prompts that are measured, each continued by `measured_tokens`.
        draft_length (`int`): Drafts per round that are measured.
        seeds (`tuple[int, ...]`): Seeds of the training.
    """

    texts: int = _SEEN - 1
    prompt_tokens: int = 32
    new_tokens: int = 160
    steps: int = 200
    rate: float = 3e-4
    batch_size: int = 8
    held_out: int = 96
    measured_tokens: int = 128
    draft_length: int = 5
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not 0 < self.texts < _SEEN:
            raise InvalidConfigError(f"texts must be between 1 and {_SEEN - 1}, got {self.texts}")


def compare_losses(
    pair: Pair,
    docs: Path,
    start: Path,
    out: Path,
    report: Path,
    plan: LossPlan,
    *,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> dict[str, Any]:
    """Trains what is not trained yet, measures everything, and writes the report.

    Args:
        pair ([`Pair`]): The demo pair; its target is used.
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`.
        start (`Path`): The drafter that all go on from, of the EAGLE-1 family.
        out (`Path`): Folder of texts, checkpoints and drafters.
        report (`Path`): The report's path without an ending.
        plan ([`LossPlan`]): How much of everything.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        progress (`Callable[[str, int, int], None]`, *optional*): Called with the name of a part, what is done of it, and all
            there is of it.

    Raises:
        [`InvalidConfigError`]: If `out` holds what was trained by another plan, or from another drafter.

    Returns:
        `dict`: By mode, what [`compare_tau`] says of each loss and of `start`, relative to `kl`.
    """
    out.mkdir(parents=True, exist_ok=True)
    keep_plan(out / "plan.json", trained_by(plan, _MEASURED_ONLY) | {"start": weights_digest(start)})
    training, held_out = (tokenizer.encode_all(pair.tokenizer, side) for side in corpus.load(docs, library))
    prompts = windows(held_out, plan.held_out, plan.prompt_tokens)
    between = windows(training, 2 * _SEEN - 1, plan.prompt_tokens)[1::2]
    asked = [between[round(place)] for place in np.linspace(0, len(between) - 1, plan.texts)]
    first = AutoDrafter.from_pretrained(start, target=pair.target, dtype=torch.float32)
    found: dict[str, Any] = {}
    for mode, (temperature, losses) in MODES.items():
        texts = target_texts(
            pair.target, asked, out / f"{mode}.jsonl", new_tokens=plan.new_tokens, temperature=temperature,
            progress=partial(progress, f"{mode} texts"),
        )  # fmt: skip
        workshop = Workshop(target=pair.target, batch_size=plan.batch_size, progress=progress)
        drafters = {"start": [first]} | {
            loss: [
                workshop.drafter(
                    out / f"{mode}-{loss}-{seed}",
                    start,
                    texts,
                    _on_eagle(loss),
                    steps=plan.steps,
                    rate=plan.rate,
                    seed=seed,
                )
                for seed in plan.seeds
            ]
            for loss in losses
        }
        found[mode] = compare_tau(
            pair.target, drafters, prompts, baseline=BASELINE, steps=plan.draft_length, temperature=temperature,
            max_new_tokens=plan.measured_tokens, progress=partial(progress, f"{mode} measuring"),
        )  # fmt: skip
    _write(report, found, plan)
    return found


def _on_eagle(loss: str) -> list[Recipe]:
    """The recipe's stages on a network of the EAGLE-1 family, with as many drafts in each."""
    return [replace(each, family="eagle", num_steps=5) for each in stages_of(loss)]


def _write(path: Path, found: Mapping[str, Any], plan: LossPlan) -> None:
    lines = [
        "# Acceptance-aware losses",
        "",
        f"demo, pydocs, {plan.draft_length} drafts per round, {plan.held_out} prompts, seeds {list(plan.seeds)}. "
        f"Tokens per round after {plan.steps} steps of {plan.batch_size} texts from a HASS drafter (`start`), 95 % "
        f"intervals over seeds and prompts; in brackets the paired difference from `{BASELINE}`.",
    ]
    for mode, rows in found.items():
        lines += ["", f"## {mode}", "", "| loss | tau | gain |", "|---|---:|---:|"]
        lines += [f"| {name} | {tau_cell(row)} | {gain_cell(row)} |" for name, row in rows.items()]
    write_tables(path, found, plan, lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument(
        "--start", type=Path, default=BUNDLED / "hass", help="a trained HASS drafter; the bundled one by default"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, checkpoints and drafters")
    parser.add_argument("--report", type=Path, default=Path("docs/results/acceptance_losses"), help="without an ending")
    parser.add_argument("--threads", type=int, default=1)
    add_plan(parser, LossPlan())
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    shown, show = bars()
    with shown:
        compare_losses(
            load_pair(),
            given["docs"],
            given["start"],
            given["out"],
            given["report"],
            plan_from(given, LossPlan()),
            progress=show,
        )


if __name__ == "__main__":
    _main()
