"""RCSD's claim on the bundled demo target: `python -m hf_specdec.quality.drafters.reproduction --docs docs.jsonl --out FOLDER`.

HASS is trained on text that the target writes greedily, or with `--hass-on corpus` on as much of the corpus itself. Then DPO,
GRPO and a control of the same number of tokens each go on from it on the target's text, with each seed. All are measured on
prompts of held-out documents. A killed run continues when started again with the same arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import Pair, load_pair
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.quality.drafters.comparison import compare, compare_drafters
from hf_specdec.quality.drafters.report import write_report
from hf_specdec.quality.drafters.workshop import (
    Show,
    Workshop,
    add_plan,
    bars,
    history,
    keep_plan,
    plan_from,
    target_texts,
    trained_by,
    windows,
)
from hf_specdec.training.losses import KLLoss
from hf_specdec.training.rcsd import RCSDTraining
from hf_specdec.training.recipes import RECIPES, Recipe, stages_of
from hf_specdec.training.texts import Text


__all__ = ["Plan", "reproduce"]

_MEASURED_ONLY = ("held_out", "measured_tokens", "steps", "seeds", "evaluate_every")  # drafters do not depend on them
_BEFORE = {
    "hass_on": "target",
    "credit": "window",
    "draft_temperature": 1.0,
    "rejected": "all",
}  # runs that were not told


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything.

    Args:
        texts (`int`): Texts to train on, of `prompt_tokens` of the corpus and `new_tokens` of the target.
        hass_on (`str`): What HASS is trained on, `"target"`, the same texts as what goes on from it, or `"corpus"`, as much of
            the corpus itself: a fixed data set that the target did not write.
        hass_steps, stage_steps (`int`): Optimiser steps of HASS, and of what goes on from it.
        hass_rate, stage_rate (`float`): Highest learning rates.
        held_out (`int`): Prompts that are measured, each continued by `measured_tokens`.
        steps (`tuple[int, ...]`): Drafts per round that are measured.
        seeds (`tuple[int, ...]`): Seeds of the stages after HASS.
    """

    texts: int = 2048
    prompt_tokens: int = 32
    new_tokens: int = 160
    hass_on: str = "target"
    hass_steps: int = 3000
    hass_rate: float = 3e-3
    stage_steps: int = 500
    stage_rate: float = 3e-4
    batch_size: int = 8
    held_out: int = 96
    measured_tokens: int = 128
    steps: tuple[int, ...] = (3, 4, 5, 6)
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluate_every: int = 250

    def __post_init__(self) -> None:
        if self.hass_on not in ("target", "corpus"):
            raise InvalidConfigError(f"hass_on must be 'target' or 'corpus', got {self.hass_on!r}")


def reproduce(
    pair: Pair,
    docs: Path,
    out: Path,
    report: Path,
    plan: Plan,
    *,
    options: RCSDTraining | None = None,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> dict[str, Any]:
    """Trains what is not trained yet, measures everything, and writes the report.

    Args:
        pair ([`Pair`]): The demo pair; its target is used.
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`.
        out (`Path`): Folder of texts, checkpoints and drafters.
        report (`Path`): The report's path without an ending.
        plan ([`Plan`]): How much of everything.
        options ([`RCSDTraining`], *optional*): How the RCSD stages are to be done.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        progress (`Callable[[str, int, int], None]`, *optional*): Called with the name of a part, what is done of it, and all
            there is of it.

    Raises:
        [`InvalidConfigError`]: If `out` holds what was trained by another plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    options = options or RCSDTraining()
    asked = trained_by(plan, _MEASURED_ONLY) | asdict(options)
    keep_plan(out / "plan.json", asked, later=_BEFORE)
    training, held_out = (tokenizer.encode_all(pair.tokenizer, side) for side in corpus.load(docs, library))
    prompts = windows(held_out, plan.held_out, plan.prompt_tokens)
    texts = target_texts(
        pair.target, windows(training, plan.texts, plan.prompt_tokens), out / "texts.jsonl", new_tokens=plan.new_tokens,
        progress=partial(progress, "texts"),
    )  # fmt: skip
    workshop = Workshop(
        target=pair.target, prompts=prompts[::3], measured_tokens=plan.measured_tokens,
        evaluate_every=plan.evaluate_every, batch_size=plan.batch_size, progress=progress,
    )  # fmt: skip
    drafters = _drafters(workshop, texts, _hass_texts(plan, training, texts), out, plan, options)
    arms = compare_drafters(
        pair.target, drafters, prompts, steps=plan.steps, max_new_tokens=plan.measured_tokens, batch_size=32,
        progress=partial(progress, "measuring"),
    )  # fmt: skip
    found = compare(arms, baseline="hass", control="control")
    about = {"seeds": list(plan.seeds), "hass_on": plan.hass_on, "plan": asdict(plan), "rcsd": asdict(options)}
    write_report(report, found, model="demo", dataset="pydocs", about={**about, "hass_history": history(out / "hass")})
    return found


def _drafters(
    workshop: Workshop, texts: list[Text], hass_texts: list[Text], out: Path, plan: Plan, options: RCSDTraining
) -> dict[str, list[DraftNetwork]]:
    """HASS, and by name what goes on from it with each seed."""
    start = workshop.drafter(
        out / "hass", None, hass_texts, [RECIPES["hass"]], steps=plan.hass_steps, rate=plan.hass_rate, seed=0
    )
    stages = {name: stages_of(name, options) for name in ("rcsd-dpo", "rcsd-grpo")}
    stages["control"] = [Recipe("eagle", KLLoss(), num_steps=6, detach=False)]
    pace: dict[str, Any] = {"steps": plan.stage_steps, "rate": plan.stage_rate}
    return {"hass": [start]} | {
        name: [
            workshop.drafter(out / f"{name}-{seed}", out / "hass", texts, recipes, seed=seed, **pace)
            for seed in plan.seeds
        ]
        for name, recipes in stages.items()
    }


def _hass_texts(plan: Plan, corpus_ids: torch.Tensor, written: list[Text]) -> list[Text]:
    if plan.hass_on == "target":
        return written
    pieces = windows(corpus_ids, plan.texts, plan.prompt_tokens + plan.new_tokens)
    return [Text(tuple(piece), plan.prompt_tokens) for piece in pieces]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, checkpoints and drafters")
    parser.add_argument("--report", type=Path, default=Path("docs/results/rcsd"), help="the report, without an ending")
    parser.add_argument("--threads", type=int, default=1)
    add_plan(parser, Plan())
    parser.add_argument("--recorded-texts", type=int, help="texts that DPO records each time")
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    shown, show = bars()
    with shown:
        reproduce(
            load_pair(),
            given["docs"],
            given["out"],
            given["report"],
            plan_from(given, Plan()),
            options=RCSDTraining(recorded_texts=given["recorded_texts"]),
            progress=show,
        )


if __name__ == "__main__":
    _main()
