"""RCSD's claim on the bundled demo target: `python -m hf_specdec.quality.drafters.reproduction --docs docs.jsonl --out FOLDER`.

HASS is trained on text that the target writes greedily, or with `--hass-on corpus` on as much of the corpus itself. Then DPO
and GRPO, with the published mask and without it, DPO in both readings of a pair, and two controls of the same number of tokens
each go on from it on the target's text, with each seed. All are measured on prompts of held-out documents, and timed in turn.

Whatever is finished is kept, and a killed run continues when started again with the same arguments. `--arms` asks for some of
the arms only, `--train-only` leaves them unmeasured, so that several processes may share the work once HASS is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_specdec.bench.report import versions
from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import Pair, load_pair
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.quality.drafters.along import acceptance_by_entropy, drafts_along
from hf_specdec.quality.drafters.comparison import compare, compare_drafters
from hf_specdec.quality.drafters.pace import measure_pace
from hf_specdec.quality.drafters.report import write_report
from hf_specdec.quality.drafters.variants import CONTROL, VARIANTS, Variant, variant_of
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
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.rcsd import RCSDTraining
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text


__all__ = ["Arms", "Plan", "reproduce", "train_arms"]

HASS = "hass"
_TIMED = (HASS, "rcsd-dpo", "rcsd-grpo", CONTROL)
_MEASURED_ONLY = (  # drafters do not depend on them
    "held_out", "measured_tokens", "steps", "seeds", "evaluate_every", "timed_prompts", "timed_steps", "timed_repeats",
)  # fmt: skip
_BEFORE = {  # what runs did that were not told
    "hass_on": "target",
    "credit": "window",
    "draft_temperature": 1.0,
    "rejected": "all",
}


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
        timed_prompts (`int`): How many of these prompts are timed, `timed_repeats` times each way, with `timed_steps` drafts
            per round.
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
    timed_prompts: int = 24
    timed_steps: int = 4
    timed_repeats: int = 2
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
    variants: Mapping[str, Variant] = VARIANTS,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> dict[str, Any]:
    """Trains what is not trained yet, measures everything, and writes the report.

    Args:
        pair ([`Pair`]): The demo pair; its target is used.
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`.
        out (`Path`): Folder of texts, checkpoints, drafters and measurements.
        report (`Path`): The report's path without an ending.
        plan ([`Plan`]): How much of everything.
        options ([`RCSDTraining`], *optional*): How the RCSD stages are to be done, but for what each variant changes.
        variants (`Mapping[str, Variant]`): What goes on from HASS, by name; where `control` is among them, the others are
            compared with it.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        progress (`Callable[[str, int, int], None]`, *optional*): Called with the name of a part, what is done of it, and all
            there is of it.

    Raises:
        [`InvalidConfigError`]: If `out` holds what was trained by another plan or variant.
    """
    made = train_arms(pair, docs, out, plan, options=options, variants=variants, library=library, progress=progress)
    return _measured(pair, made, out, report, plan, options or RCSDTraining(), progress)


@dataclass(frozen=True)
class Arms:
    """What [`train_arms`] made.

    Args:
        drafters (`dict[str, list[DraftNetwork]]`): By arm, the drafters of its seeds, `hass` first.
        folders (`dict[str, list[Path]]`): Where they stand.
        held_out (`list[Text]`): The held-out prompts, with what the target writes to them without a drafter.
        variants (`Mapping[str, Variant]`): What the arms but `hass` are.
    """

    drafters: dict[str, list[DraftNetwork]]
    folders: dict[str, list[Path]]
    held_out: list[Text]
    variants: Mapping[str, Variant]


def train_arms(
    pair: Pair,
    docs: Path,
    out: Path,
    plan: Plan,
    *,
    options: RCSDTraining | None = None,
    variants: Mapping[str, Variant] = VARIANTS,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> Arms:
    """The part of [`reproduce`] that trains, with the same arguments."""
    out.mkdir(parents=True, exist_ok=True)
    options = options or RCSDTraining()
    asked = trained_by(plan, _MEASURED_ONLY) | asdict(options)
    keep_plan(out / "plan.json", asked, later=_BEFORE)
    training, held_out = (tokenizer.encode_all(pair.tokenizer, side) for side in corpus.load(docs, library))
    written = partial(target_texts, pair.target)
    prompts = windows(held_out, plan.held_out, plan.prompt_tokens)
    plain = written(
        prompts, out / f"held-out-{plan.held_out}x{plan.measured_tokens}.jsonl", new_tokens=plan.measured_tokens,
        progress=partial(progress, "held-out texts"),
    )  # fmt: skip
    texts = written(
        windows(training, plan.texts, plan.prompt_tokens), out / "texts.jsonl", new_tokens=plan.new_tokens,
        progress=partial(progress, "texts"),
    )  # fmt: skip
    workshop = Workshop(
        target=pair.target, prompts=prompts[::3], held_out=plain[::3], measured_tokens=plan.measured_tokens,
        evaluate_every=plan.evaluate_every, batch_size=plan.batch_size, progress=progress,
    )  # fmt: skip
    start = workshop.drafter(
        out / HASS, None, _hass_texts(plan, training, texts), [RECIPES["hass"]], steps=plan.hass_steps,
        rate=plan.hass_rate, seed=0,
    )  # fmt: skip
    drafters, folders = {HASS: [start]}, {HASS: [out / HASS]}
    for name, variant in variants.items():
        folders[name] = [out / f"{name}-{seed}" for seed in plan.seeds]
        drafters[name] = []
        for seed, folder in zip(plan.seeds, folders[name], strict=True):
            folder.mkdir(exist_ok=True)
            keep_plan(folder / "variant.json", variant.to_dict())
            stages, rate = variant.stages(options), variant.rate or plan.stage_rate
            drafters[name].append(
                workshop.drafter(folder, out / HASS, texts, stages, steps=plan.stage_steps, rate=rate, seed=seed)
            )
    return Arms(drafters, folders, plain, variants)


def _measured(
    pair: Pair, made: Arms, out: Path, report: Path, plan: Plan, options: RCSDTraining, progress: Show
) -> dict[str, Any]:
    prompts = [list(text.tokens[: text.num_prompt_tokens]) for text in made.held_out]
    plain = [text.tokens[text.num_prompt_tokens :] for text in made.held_out]
    arms = compare_drafters(
        pair.target, made.drafters, prompts, steps=plan.steps, max_new_tokens=plan.measured_tokens, batch_size=32,
        kept=out / "measured", progress=partial(progress, "measuring"),
    )  # fmt: skip
    control = CONTROL if CONTROL in made.drafters else None
    found = compare(arms, baseline=HASS, control=control, plain=plain)
    observer = KeptFeatures()
    along = {
        name: [
            drafts_along(pair.target, each, made.held_out, steps=max(plan.steps), observer=observer)
            for each in drafters
        ]
        for name, drafters in made.drafters.items()
    }
    found["entropy"] = acceptance_by_entropy(along)
    found["checkpoints"] = _checkpoints(made.folders)
    timed = {name: folders[0] for name, folders in made.folders.items() if name in _TIMED}
    found["pace"] = measure_pace(
        pair.target, timed, prompts[: plan.timed_prompts], out / "pace", baseline=HASS, steps=plan.timed_steps,
        max_new_tokens=plan.measured_tokens, repeats=plan.timed_repeats, progress=partial(progress, "timing"),
    )  # fmt: skip
    about = {
        "seeds": list(plan.seeds),
        "hass_on": plan.hass_on,
        "plan": asdict(plan),
        "rcsd": asdict(options),
        "variants": {name: each.to_dict() for name, each in made.variants.items()},
        "hass_history": history(out / HASS),
        "versions": versions(),
    }
    write_report(report, found, model="demo", dataset="pydocs", about=about)
    return found


def _checkpoints(folders: Mapping[str, list[Path]]) -> list[dict[str, Any]]:
    """KL, acceptance and tau of every evaluation of every arm; those of earlier versions found tau only."""
    return [
        {"arm": name, "run": folder.name, **found}
        for name, own in folders.items()
        for folder in own
        for found in history(folder)
        if "kl" in found
    ]


def _hass_texts(plan: Plan, corpus_ids: torch.Tensor, written: list[Text]) -> list[Text]:
    if plan.hass_on == "target":
        return written
    pieces = windows(corpus_ids, plan.texts, plan.prompt_tokens + plan.new_tokens)
    return [Text(tuple(piece), plan.prompt_tokens) for piece in pieces]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, checkpoints, drafters, measurements")
    parser.add_argument("--report", type=Path, default=Path("docs/results/rcsd"), help="the report, without an ending")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these of the arms that go on from HASS")
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME=ARM,OPTION=VALUE",
        help="further arms, as in rcsd-grpo-16=rcsd-grpo,group_size=16,rate=1e-4",
    )  # fmt: skip
    parser.add_argument("--train-only", action="store_true", help="train, and neither measure nor report")
    add_plan(parser, Plan())
    parser.add_argument("--recorded-texts", type=int, help="texts that DPO records each time")
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    asked: dict[str, Any] = {
        "options": RCSDTraining(recorded_texts=given["recorded_texts"]),
        "variants": _chosen(given["arms"], given["also"]),
    }
    docs, out, plan = given["docs"], given["out"], plan_from(given, Plan())
    shown, show = bars()
    with shown:
        if given["train_only"]:
            train_arms(load_pair(), docs, out, plan, progress=show, **asked)
        else:
            reproduce(load_pair(), docs, out, given["report"], plan, progress=show, **asked)


def _chosen(names: Sequence[str] | None, further: Sequence[str]) -> dict[str, Variant]:
    """The arms of these names, all of the usual ones where None, and further ones."""
    known = dict(VARIANTS) | dict(variant_of(text) for text in further)
    if unknown := [name for name in names or () if name not in known]:
        raise InvalidConfigError(f"--arms takes {', '.join(known)}; got {', '.join(unknown)}")
    return {name: each for name, each in known.items() if names is None or name in names}


if __name__ == "__main__":
    _main()
