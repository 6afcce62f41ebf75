"""Trains the demo pair: `python -m hf_specdec.demo.build --docs docs.jsonl --out FOLDER --steps N`.

A killed run continues from its checkpoint when started again with the same arguments. With `--minutes` in
place of `--steps`, a few steps are timed first; the number that fits is kept with the checkpoint.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_specdec.training.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint

from . import corpus, tokenizer
from .export import save_pair
from .polish import Polish, greedy_agreement, polish_draft
from .shape import CHOSEN, DRAFT_LAYERS, VOCAB_SIZE, Shape
from .trainer import Recipe, Trainer, affordable_steps


COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def build(
    docs: Path,
    out: Path,
    recipe: Recipe,
    shape: Shape = CHOSEN,
    *,
    polish: Polish | None = None,
    vocab_size: int = VOCAB_SIZE,
    minutes: float | None = None,
    checkpoints: Path | None = None,
    library: Path | None = None,
    stop_at: int | None = None,
    console: Console | None = None,
) -> dict:
    """Trains a pair, or continues to, and saves it in `out`; returns the last held-out measurements.

    Args:
        docs (`Path`): JSON lines with the fields `id` and `text`.
        out (`Path`): Receives `target/` (with the tokenizer), `draft/` and `figures.json`.
        recipe (`Recipe`): How to train; its `steps` give way to `minutes`.
        polish (`Polish`, *optional*): The draft's distillation on the target's own text, afterwards.
        minutes (`float`, *optional*): Train for as many steps as take about this long.
        checkpoints (`Path`, *optional*): Where the resumable state lies; `out/checkpoint` by default.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        stop_at (`int`, *optional*): Stop with a checkpoint at this step, as a killed run would.
    """
    console, polish = console or Console(stderr=True), polish or Polish()
    checkpoints = checkpoints or out / "checkpoint"
    training, held_out = corpus.load(docs, library)
    tok = tokenizer.load_or_train(checkpoints / "tokenizer", training, vocab_size)
    train_ids, test_ids = (tokenizer.encode_all(tok, texts) for texts in (training, held_out))
    console.print(f"{len(train_ids):,} training tokens, {len(test_ids):,} held out")
    if minutes is not None:
        probe = Trainer(shape, DRAFT_LAYERS, len(tok), recipe, train_ids, test_ids)
        recipe = replace(recipe, steps=kept_steps(checkpoints, minutes, probe))
    trainer = Trainer(shape, DRAFT_LAYERS, len(tok), recipe, train_ids, test_ids)
    state: dict = {"step": 0, "history": []}
    if (latest := latest_checkpoint(checkpoints)) is not None:
        state = load_checkpoint(latest, trainer.pair, trainer.optimizer)
    state = run(trainer, state, checkpoints, min(stop_at or recipe.steps, recipe.steps), console)
    if state["step"] == recipe.steps:
        console.print("distilling the draft on the target's own text")
        polish_draft(trainer, polish)
    figures = {"step": state["step"], "training_tokens": len(train_ids)}
    figures |= trainer.evaluate() | greedy_agreement(trainer, polish)
    save_pair(trainer.target, trainer.draft, tok, out, figures)
    console.print(figures)
    return figures


def kept_steps(checkpoints: Path, minutes: float, probe: Trainer) -> int:
    """The number of steps that fits into `minutes`, measured once and kept in `schedule.json`."""
    path = checkpoints / "schedule.json"
    if not path.exists():
        path.write_text(json.dumps({"minutes": minutes, "steps": affordable_steps(probe, minutes)}) + "\n")
    return json.loads(path.read_text())["steps"]


def run(trainer: Trainer, state: dict, checkpoints: Path, stop_at: int, console: Console) -> dict:
    """Runs the steps that are left, evaluating and writing checkpoints on the way."""
    recipe = trainer.recipe
    history = list(state["history"])
    saved = time.monotonic()
    with Progress(*COLUMNS, console=console) as bar:
        task = bar.add_task("training", total=recipe.steps, completed=state["step"])
        for step in range(state["step"], stop_at):
            losses = trainer.step(step)
            done = step + 1
            shown = f"loss {losses['loss']:.3f} draft {losses['draft']:.3f}"
            bar.update(task, completed=done, description=shown)
            if done == 2 or done % recipe.evaluate_every == 0:
                history.append({"step": done, **trainer.evaluate()})
                console.print(time.strftime("%H:%M:%S"), history[-1])
            if time.monotonic() - saved > recipe.checkpoint_seconds or done == stop_at:
                save_checkpoint(checkpoints, done, trainer.pair, trainer.optimizer, {"history": history}, keep=1)
                saved = time.monotonic()
    return {"step": max(state["step"], stop_at), "history": history}


def parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--checkpoints", type=Path, help="folder for the resumable state (OUT/checkpoint)")
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--steps", type=int, default=Recipe.steps)
    duration.add_argument("--minutes", type=float, help="train for about this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile, no bf16 products")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed, fast=not arguments.no_compile)
    checkpoints, minutes = arguments.checkpoints, arguments.minutes
    build(arguments.docs, arguments.out, recipe, checkpoints=checkpoints, minutes=minutes)


if __name__ == "__main__":
    main()
