"""Learning a second domain without forgetting the first: `python -m hf_specdec.quality.drafters.continual --docs docs.jsonl
--second other.jsonl --field question --out FOLDER`.

A trained HASS drafter of the bundled demo target serves prompts of a second domain, and the rounds are recorded. It then learns
from them, once with old texts replayed and kept near to where it began, once without either. All are measured on held-out
prompts of both domains. A killed run continues when started again with the same arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import Pair, load_pair
from hf_specdec.networks import AutoDrafter, DraftNetwork
from hf_specdec.networks.export import export_drafter
from hf_specdec.quality.drafters.bundle import BUNDLED
from hf_specdec.quality.drafters.tau import compare_tau, gain_cell, tau_cell, write_tables
from hf_specdec.quality.drafters.workshop import (
    Show,
    add_plan,
    bars,
    keep_plan,
    plan_from,
    step_logger,
    target_texts,
    trained_by,
    weights_digest,
    windows,
)
from hf_specdec.training.answers import is_held_out
from hf_specdec.training.continual import ContinualTraining, train_continually
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import Recording, roll_out
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text


__all__ = ["MEANS", "ContinualPlan", "compare_means"]

MEANS = {
    "replay": ContinualTraining(),
    "neither": ContinualTraining(replay_share=0.0, reference_weight=0.0),
}
_MEASURED_ONLY = ("held_out", "measured_tokens", "seeds")
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ContinualPlan:
    """How much of everything.

    Args:
        texts (`int`): Recorded texts of the second domain, and old ones to replay from, of `prompt_tokens` of the data and
            `new_tokens` of the target.
        steps (`int`): Optimiser steps; with replay as many more as make the steps on new texts the same.
        rate (`float`): Highest learning rate.
        held_out (`int`): Prompts of each domain that are measured, each continued by `measured_tokens`.
        draft_length (`int`): Drafts per round, recorded and measured.
        seeds (`tuple[int, ...]`): Seeds of the training.
    """

    texts: int = 1024
    prompt_tokens: int = 32
    new_tokens: int = 160
    steps: int = 300
    rate: float = 1e-3
    batch_size: int = 8
    held_out: int = 64
    measured_tokens: int = 128
    draft_length: int = 5
    seeds: tuple[int, ...] = (0, 1, 2)


def compare_means(
    pair: Pair,
    docs: Path,
    second: Sequence[str],
    start: Path,
    out: Path,
    report: Path,
    plan: ContinualPlan,
    *,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> dict[str, Any]:
    """Records, trains what is not trained yet, measures everything, and writes the report.

    Args:
        pair ([`Pair`]): The demo pair; its target is used.
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`: the first domain.
        second (`Sequence[str]`): Documents of the second domain.
        start (`Path`): The drafter that learns, of the EAGLE-1 family.
        out (`Path`): Folder of texts, checkpoints and drafters.
        report (`Path`): The report's path without an ending.
        plan ([`ContinualPlan`]): How much of everything.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        progress (`Callable[[str, int, int], None]`, *optional*): Called with the name of a part, what is done of it, and all
            there is of it.

    Raises:
        [`InvalidConfigError`]: If `out` holds what was trained by another plan, from another drafter, or on other data.

    Returns:
        `dict`: By domain (`first`, `second`), what [`compare_tau`] says of the drafters `before`, `replay` (old texts
        replayed, and a divergence from `before` in the loss) and `neither`, relative to `before`.
    """
    out.mkdir(parents=True, exist_ok=True)
    keep_plan(out / "plan.json", trained_by(plan, _MEASURED_ONLY) | {"start": weights_digest(start)})
    sides = {"first": corpus.load(docs, library), "second": _split(second)}
    asked, prompts = {}, {}
    for domain, documents in sides.items():
        training, held_out = (tokenizer.encode_all(pair.tokenizer, side) for side in documents)
        asked[domain] = windows(training, plan.texts, plan.prompt_tokens)
        prompts[domain] = windows(held_out, plan.held_out, plan.prompt_tokens)
    texts = {
        domain: target_texts(
            pair.target, each, out / f"{domain}.jsonl", new_tokens=plan.new_tokens,
            progress=partial(progress, f"{domain} texts"),
        )
        for domain, each in asked.items()
    }  # fmt: skip
    drafters: dict[str, list[DraftNetwork]] = {"before": [_loaded(start, pair.target)]}
    served = partial(
        roll_out, pair.target, drafters["before"][0], texts["second"], steps=plan.draft_length,
        on_batch=partial(progress, "serving"),
    )  # fmt: skip
    recordings: list[Recording] = []
    for name, means in MEANS.items():
        drafters[name] = []
        for seed in plan.seeds:
            folder = out / f"{name}-{seed}"
            if not (folder / "config.json").exists():
                recordings = recordings or served()
                _learn(pair.target, start, recordings, texts["first"], means, plan, seed, folder, progress)
            drafters[name].append(_loaded(folder, pair.target))
    found = {
        domain: compare_tau(
            pair.target, drafters, each, baseline="before", steps=plan.draft_length, max_new_tokens=plan.measured_tokens,
            progress=partial(progress, f"measuring {domain}"),
        )
        for domain, each in prompts.items()
    }  # fmt: skip
    _write(report, found, plan)
    return found


def _split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    sides: tuple[list[str], list[str]] = ([], [])
    for text in documents:
        sides[is_held_out(text, _HELD_OUT_SHARE)].append(text)
    return sides


def _loaded(folder: Path, target: Any) -> DraftNetwork:
    return AutoDrafter.from_pretrained(folder, target=target, dtype=torch.float32)


def _learn(
    target: Any,
    start: Path,
    recordings: Sequence[Recording],
    old: Sequence[Text],
    means: ContinualTraining,
    plan: ContinualPlan,
    seed: int,
    folder: Path,
    progress: Show,
) -> None:
    """One drafter that goes on from `start`."""
    folder.mkdir(exist_ok=True)
    network, steps = _loaded(start, target), round(plan.steps / (1 - means.replay_share))
    options = TrainingOptions(
        max_steps=steps, batch_size=plan.batch_size, micro_batch_size=plan.batch_size, learning_rate=plan.rate,
        warmup=0.03, save_every=100, seed=seed,
    )  # fmt: skip
    train_continually(
        target, network, recordings, old, RECIPES["hass"], options, means, out=folder, resume=True,
        on_step=step_logger(folder / "log.jsonl", lambda log: progress(folder.name, log.step, steps)),
    )  # fmt: skip
    export_drafter(network, folder)


def _write(path: Path, found: dict[str, Any], plan: ContinualPlan) -> None:
    lines = [
        "# Learning a second domain",
        "",
        f"demo, {plan.draft_length} drafts per round, {plan.held_out} held-out prompts of each domain, seeds "
        f"{list(plan.seeds)}. Tokens per round with 95 % intervals over seeds and prompts; in brackets the paired difference "
        "from the drafter before it learnt.",
        "",
        "| drafter | first domain | | second domain | |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in found["first"]:
        rows = [found[domain][name] for domain in ("first", "second")]
        lines.append(f"| {name} | {' | '.join(f'{tau_cell(row)} | {gain_cell(row)}' for row in rows)} |")
    write_tables(path, found, plan, lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument("--second", type=Path, required=True, help="JSON lines of the second domain")
    parser.add_argument("--field", default="text", help="the field of --second that holds the text")
    parser.add_argument(
        "--start", type=Path, default=BUNDLED / "hass", help="a trained HASS drafter; the bundled one by default"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, checkpoints and drafters")
    parser.add_argument("--report", type=Path, default=Path("docs/results/continual"), help="without an ending")
    parser.add_argument("--threads", type=int, default=1)
    add_plan(parser, ContinualPlan())
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    second = [json.loads(line)[given["field"]] for line in given["second"].read_text(encoding="utf-8").splitlines()]
    shown, show = bars()
    with shown:
        compare_means(
            load_pair(),
            given["docs"],
            second,
            given["start"],
            given["out"],
            given["report"],
            plan_from(given, ContinualPlan()),
            progress=show,
        )


if __name__ == "__main__":
    _main()
