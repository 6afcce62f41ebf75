"""What `specdec train` and `specdec train rcsd` share: options that are checked, and the run that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.output import note, print_json


if TYPE_CHECKING:
    from hf_specdec.cli.training_run import LiveUse
    from hf_specdec.training.options import TrainingOptions
    from hf_specdec.training.rcsd import RCSDTraining
    from hf_specdec.training.recipes import Recipe


__all__ = ["is_given", "run_training"]

_CONTINUAL = ("replay_share", "reference_weight")


def run_training(context: typer.Context, asked: Mapping[str, Any], recipe: str) -> None:
    """Trains, and prints what came of it.

    Args:
        context (`typer.Context`): Knows which options were given.
        asked (`Mapping`): The options by name.
        recipe (`str`): Name of the recipe.
    """
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.cli.texts import read_texts
    from hf_specdec.cli.training_run import TrainingRun, check_trackers, own_device
    from hf_specdec.training.recipes import stages_of

    out, continual, resume = asked["out"], asked["continual"], asked["resume"]
    options, stages = _options(asked), stages_of(recipe, _rcsd(context, asked))
    _check_start(context, asked, recipe, stages)
    _check_answers(context, asked, recipe, stages)
    live = None if continual is None else _live(asked)
    prompts = read_texts(asked["data"], asked["field"], asked["limit"])
    if not resume and out.exists() and (any(out.glob("checkpoint-*")) or any(out.glob("stage-*"))):
        raise CommandError(f"{out} holds checkpoints: pass --resume to go on, or another folder")
    names = [name.strip() for name in (asked["trackers"] or "").split(",") if name.strip()]
    check_trackers(names)
    models = load_models(asked["target"], None, dtype=asked["dtype"], packed=False, device_map=own_device())
    trained, evaluating = _sides(prompts, asked["held_out"], models.tokenizer, asked["chat"], asked["system"])
    out.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(
        models.target,
        models.tokenizer,
        trained,
        evaluating,
        recipe,
        stages,
        options,
        out,
        asked["max_new_tokens"],
        asked["steps"],
        resume,
        asked["start"],
        asked.get("draft_vocab_size"),
        asked["max_tokens"],
        live,
        names,
        asked["answer_batch_size"],
        asked["features"],
        asked["fsdp"],
        asked.get("answer_temperature", 0.0),
        asked.get("answer_seed", 0),
    )
    with quiet():
        result = run()
    if result is None:  # one process prints
        return
    if asked["as_json"]:
        print_json({"target": asked["target"], "recipe": recipe, "out": str(out), **result})
        return
    recorded = "" if live is None else f" (tau {result['tau_recorded']:.3f} on rounds of live use)"
    note(
        f"wrote {out}: tau {result['tau']:.3f} with {asked['steps']} drafts per round, over {len(evaluating)} held-out "
        f"prompts{recorded}"
    )


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _options(asked: Mapping[str, Any]) -> TrainingOptions:
    from hf_specdec.training.options import TrainingOptions

    names = ("max_steps", "batch_size", "micro_batch_size", "learning_rate", "eval_every", "save_every", "seed")
    precision: Literal["no", "bf16"] = "bf16" if asked["dtype"] is opt.DTypeName.bfloat16 else "no"
    return TrainingOptions(mixed_precision=precision, **{name: asked[name] for name in names})


def _rcsd(context: typer.Context, asked: Mapping[str, Any]) -> RCSDTraining:
    from hf_specdec.training.rcsd import RCSDTraining

    once = asked["continual"] is not None and not is_given(context, "refreshes")  # live use is recorded already
    return RCSDTraining(
        masked=asked["masked"],
        pairs=asked["pairs"].value,
        rejected=asked["rejected"].value,
        beta=asked["beta"],
        refreshes=1 if once else asked["refreshes"],
        recorded_texts=asked["recorded_texts"],
        group=asked["group"].value,
        group_size=asked["group_size"],
        credit=asked["credit"].value,
        draft_temperature=asked["draft_temperature"],
        kl_weight=asked["kl_weight"],
        anchor_weight=asked["anchor_weight"],
    )


def _check_start(context: typer.Context, asked: Mapping[str, Any], name: str, stages: list[Recipe]) -> None:
    start = asked["start"]
    if start is None and stages[0].reference:
        raise CommandError(f"--recipe {name} goes on from a trained drafter: pass --start FOLDER")
    if start is not None and asked.get("draft_vocab_size") is not None:
        raise CommandError(
            "--draft-vocab-size is for new drafters, the one of --start has its own: pass one of the two"
        )
    if asked["continual"] is None:
        if given := [each for each in _CONTINUAL if is_given(context, each)]:
            raise CommandError(f"--{given[0].replace('_', '-')} is for rounds of live use: pass --continual FOLDER too")
        return
    if start is None:
        raise CommandError("--continual goes on from the drafter of the live use: pass --start FOLDER")
    if len(stages) > 1:
        raise CommandError(f"--continual takes one stage, --recipe {name} has {len(stages)} here: pass another recipe")


def _check_answers(context: typer.Context, asked: Mapping[str, Any], name: str, stages: list[Recipe]) -> None:
    """RCSD is about greedy verification: its rounds and windows are judged by what the target writes greedily."""
    if asked.get("answer_temperature") and any(stage.reference for stage in stages):
        raise CommandError(f"--recipe {name} learns from greedy answers: leave --answer-temperature away")
    if not asked.get("answer_temperature") and is_given(context, "answer_seed"):
        raise CommandError("--answer-seed is for sampled answers: pass --answer-temperature above 0 too")


def _live(asked: Mapping[str, Any]) -> LiveUse:
    from hf_specdec.cli.training_run import live_use
    from hf_specdec.training.continual import ContinualTraining
    from hf_specdec.training.rcsd import read_shards

    keeping = ContinualTraining(replay_share=asked["replay_share"], reference_weight=asked["reference_weight"])
    return live_use(list(read_shards(asked["continual"])), asked["held_out"], asked["max_tokens"], keeping)


def _sides(
    prompts: list[str], share: float, tokenizer: Any, chat: bool | None, system: str | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts to train on, and of those to evaluate with."""
    from hf_specdec.cli.texts import encode_prompt
    from hf_specdec.training.answers import is_held_out

    sides: dict[bool, list[list[int]]] = {True: [], False: []}
    for prompt in prompts:
        sides[is_held_out(prompt, share)].append(encode_prompt(tokenizer, prompt, chat, system))
    if not sides[False] or not sides[True]:
        raise CommandError(
            f"of {len(prompts)} prompts, {len(sides[True])} are held out: pass more prompts or another --held-out"
        )
    return sides[False], sides[True]
