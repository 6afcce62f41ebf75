"""`specdec train`: a drafter network for a target; other things that can be trained are commands below it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli import train_cospec, train_exit_heads
from hf_specdec.cli import training_options as rl
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.output import note, print_json, progress_bar


__all__ = ["app", "train"]

app = typer.Typer(help="Train a drafter network, or what a subcommand names.")
app.command("exit-heads")(train_exit_heads.exit_heads)
app.command("cospec")(train_cospec.train_cospec)

_NEEDED = ("target", "data", "recipe", "out")


class RecipeName(StrEnum):
    """The recipes."""

    hass = "hass"
    eagle3 = "eagle3"
    kl = "kl"
    eal = "eal"
    wtv = "wtv"
    lk = "lk"
    rcsd_dpo = "rcsd-dpo"
    rcsd_grpo = "rcsd-grpo"
    eal_grpo = "eal+grpo"
    wtv_grpo = "wtv+grpo"


@app.callback(invoke_without_command=True)
@reports_errors
def train(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option("--target", "--model", "-t", help="Folder or Hub id of the target; needed.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Prompts: lines of text, or a .jsonl file; needed.")
    ] = None,
    recipe: Annotated[RecipeName | None, typer.Option("--recipe", help="Network and loss; needed.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to; needed.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start", help="A drafter to go on from, which all but hass, eagle3 and kl want."),
    ] = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    max_steps: Annotated[int, typer.Option("--max-steps", help="Optimiser steps.")] = 1000,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Texts per optimiser step.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The highest one.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="Tokens drafted per round in evaluations.")] = 5,
    eval_every: Annotated[int, typer.Option("--eval-every", help="Steps between evaluations.")] = 500,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints.")] = 500,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the prompts that evaluate.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Decides the first weights and the order.")] = 0,
    masked: rl.Masked = True,
    pairs: rl.Pairs = rl.PairsName.continuation,
    beta: rl.Beta = 0.1,
    refreshes: rl.Refreshes = 2,
    group: rl.Group = rl.GroupName.window,
    group_size: rl.GroupSize = 8,
    kl_weight: rl.KLWeight = 0.02,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", min=1, help="EAGLE-3: tokens that a new drafter knows, the answers' most frequent."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=3, help="Longest text; what follows is not trained on.")
    ] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train a drafter network on answers that the target writes to your prompts.

    The acceptance length is measured by the real decoding loop on prompts that a hash of their text holds out.
    """
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.cli.texts import encode_prompt, read_texts
    from hf_specdec.training.answers import is_held_out
    from hf_specdec.training.options import TrainingOptions
    from hf_specdec.training.rcsd import RCSDTraining
    from hf_specdec.training.recipes import stages_of

    if target is None or data is None or recipe is None or out is None:
        missing = ", ".join(f"--{name}" for name in _NEEDED if context.params[name] is None)
        raise CommandError(f"specdec train needs {missing}; see specdec train --help")
    options = TrainingOptions(
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        eval_every=eval_every,
        save_every=save_every,
        seed=seed,
        mixed_precision="bf16" if dtype is opt.DTypeName.bfloat16 else "no",
    )
    rcsd = RCSDTraining(
        masked=masked,
        pairs=pairs.value,
        beta=beta,
        refreshes=refreshes,
        group=group.value,
        group_size=group_size,
        kl_weight=kl_weight,
    )
    stages = stages_of(recipe.value, rcsd)
    if start is None and stages[0].reference:
        raise CommandError(f"--recipe {recipe.value} goes on from a trained drafter: pass --start FOLDER")
    if start is not None and draft_vocab_size is not None:
        raise CommandError(
            "--draft-vocab-size is for new drafters, the one of --start has its own: pass one of the two"
        )
    prompts = read_texts(data, field, limit)
    if not resume and out.exists() and (any(out.glob("checkpoint-*")) or any(out.glob("stage-*"))):
        raise CommandError(f"{out} holds checkpoints: pass --resume to go on, or another folder")
    models = load_models(target, None, dtype=dtype, packed=False)
    sides: dict[bool, list[list[int]]] = {True: [], False: []}
    for prompt in prompts:
        sides[is_held_out(prompt, held_out)].append(encode_prompt(models.tokenizer, prompt, chat, system))
    if not sides[False] or not sides[True]:
        raise CommandError(
            f"of {len(prompts)} prompts, {len(sides[True])} are held out: pass more prompts or another --held-out"
        )
    out.mkdir(parents=True, exist_ok=True)
    with quiet():
        result = _run(
            models, sides, stages, options, out, max_new_tokens, steps, resume, start, draft_vocab_size, max_tokens
        )
    if as_json:
        print_json({"target": target, "recipe": recipe.value, "out": str(out), **result})
        return
    note(
        f"wrote {out}: tau {result['tau']:.3f} with {steps} drafts per round, over {len(sides[True])} held-out prompts"
    )


def _refuse_own_options(context: typer.Context) -> None:
    """Options before a subcommand would go nowhere."""
    given = [name for name in context.params if _is_given(context, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise CommandError(f"{names} must stand after {context.invoked_subcommand}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run(
    models: Any,
    sides: dict[bool, list[list[int]]],
    stages: Any,
    options: Any,
    out: Path,
    max_new_tokens: int,
    steps: int,
    resume: bool,
    start: Path | None,
    draft_vocab_size: int | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    from hf_specdec.networks.export import export_drafter
    from hf_specdec.training.acceptance import acceptance_lengths
    from hf_specdec.training.answers import answer_prompts
    from hf_specdec.training.stages import train_in_stages
    from hf_specdec.training.texts import cut_texts
    from hf_specdec.training.trainer import StepLog

    with progress_bar("Answers of the target") as show:
        file = out / "answers.jsonl"
        texts = answer_prompts(models.target, sides[False], file, max_new_tokens=max_new_tokens, on_answer=show)
    texts = texts if max_tokens is None else cut_texts(texts, max_tokens)
    network = _network(models, texts, stages[0].family, options.seed, start, draft_vocab_size)

    def evaluate() -> dict[str, float]:
        found = acceptance_lengths(models.target, network, sides[True], steps=steps, max_new_tokens=max_new_tokens)
        return {"tau": sum(found) / max(len(found), 1)}

    with progress_bar("Training") as show:

        def on_step(log: StepLog) -> None:
            show(log.step, options.max_steps)
            if log.evaluation:
                first = ", ".join(f"{rate:.2f}" for rate in log.acceptance)
                note(
                    f"step {log.step}: loss {log.loss:.4f}, agreement by position {first}, "
                    f"{log.tokens_per_second:.0f} tokens/s, tau {log.evaluation['tau']:.3f}"
                )

        logs = train_in_stages(
            models.target,
            network,
            texts,
            stages,
            options,
            out=out,
            resume=resume,
            evaluate=evaluate,
            on_step=on_step,
            on_recorded=show,
        )
    export_drafter(network, out)
    loss = logs[-1].loss if logs else None
    return {
        "num_texts": len(texts),
        "steps": steps,
        "loss": loss,
        "tau": (logs[-1].evaluation if logs else evaluate())["tau"],
    }


def _network(
    models: Any, texts: list[Any], family: str, seed: int, start: Path | None, draft_vocab_size: int | None
) -> Any:
    """The drafter of `--start`, or a new one."""
    import torch

    from hf_specdec.networks import AutoDrafter

    if start is not None:
        return AutoDrafter.from_pretrained(start, target=models.target, dtype=torch.float32)
    known = None if draft_vocab_size is None else _frequent(models.target, texts, draft_vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoDrafter.from_target(
            models.target, family, draft_token_ids=known, tokenizer=models.tokenizer, dtype=torch.float32
        )


def _frequent(target: Any, texts: list[Any], size: int) -> Any:
    """The ids of the answers' most frequent tokens."""
    from collections import Counter

    import torch

    from hf_specdec.drafters import DraftVocabulary

    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt_tokens :])
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return torch.tensor(DraftVocabulary.from_counts(counts, size, vocab_size=vocab_size).token_ids)
