"""`specdec train exit-heads`: heads that let a model draft with its own lower layers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.output import note, print_json, progress_bar


if TYPE_CHECKING:
    from hf_specdec.drafters import DraftVocabulary
    from hf_specdec.networks.exit_heads import ExitHeads
    from hf_specdec.training.exit_heads import FitLog, FitOptions
    from hf_specdec.training.texts import Text


__all__ = ["exit_heads", "read_training_texts"]


class HeadKind(StrEnum):
    """The kinds of heads that can be fitted."""

    linear = "linear"
    linear_kl = "linear+kl"
    adapter = "adapter"


TextData = Annotated[
    list[Path],
    typer.Option("--data", "-d", help="Texts: .txt with one a line, or .jsonl; may be repeated.", show_default=False),
]
TextField = Annotated[str, typer.Option("--field", help="Field of a .jsonl file that holds the text.")]
PromptField = Annotated[
    str | None, typer.Option("--prompt-field", help="Field with the prompt that the text answers; it is not fitted to.")
]
MaxLength = Annotated[int, typer.Option("--max-length", min=8, help="Longest part of a text that is read, in tokens.")]
Vocabulary = Annotated[
    Path | None,
    typer.Option("--vocabulary", help="Draft vocabulary; laws are compared on its ids only, which is faster."),
]


@reports_errors
def exit_heads(
    target: opt.Target,
    data: TextData,
    kind: Annotated[HeadKind, typer.Option("--kind", help="What a head is.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", show_default=False)],
    exits: Annotated[
        str | None,
        typer.Option(
            "--exits",
            help="Layers after which heads sit: 6,12. By default those of --start, or a quarter and half of the depth.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to fit to.")] = 100_000,
    field: TextField = "text",
    prompt_field: PromptField = None,
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_length: MaxLength = 512,
    vocabulary: Vocabulary = None,
    start: Annotated[
        str | None,
        typer.Option("--start", help="Fitted heads to go on from: a folder or Hub id; their vocabulary is kept."),
    ] = None,
    ridge: Annotated[float, typer.Option("--ridge", help="Penalty of the regression.")] = 0.01,
    ridge_tokens: Annotated[int, typer.Option("--ridge-tokens", help="Tokens of the regression before KL.")] = 20_000,
    tokens_per_step: Annotated[int, typer.Option("--tokens-per-step", help="Tokens per optimiser step.")] = 1024,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The highest one.")] = 3e-4,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints and evaluations.")] = 20,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the texts that evaluate.")] = 0.02,
    seed: Annotated[int, typer.Option("--seed", help="Decides the order of the texts.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is in the folder.")] = False,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit exit heads to a frozen model on your texts, for self-drafting.

    Heads are saved with every checkpoint, so that a run that is stopped leaves heads that work.
    """
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.drafters import DraftVocabulary
    from hf_specdec.networks.exit_heads import ExitHeads
    from hf_specdec.training.exit_heads import FitOptions

    options = FitOptions(
        kind=kind.value,
        max_tokens=max_tokens,
        ridge_tokens=ridge_tokens,
        ridge=ridge,
        tokens_per_step=tokens_per_step,
        learning_rate=learning_rate,
        save_every=save_every,
        seed=seed,
    )
    if not resume and out.exists() and any((*out.glob("checkpoint-*"), *out.glob("ridge.safetensors"))):
        raise CommandError(f"{out} holds an earlier fit: pass --resume to go on, or another folder")
    if start is not None and not options.distils:
        raise CommandError("--kind linear fits in one pass, from nothing: leave --start away, or pass --kind linear+kl")
    rows = _rows(data, field, prompt_field, limit)
    kept = None if vocabulary is None else DraftVocabulary.load(vocabulary)
    with quiet():
        begun = None if start is None else ExitHeads.from_pretrained(start, dtype="float32")
    models = load_models(target, None, dtype=dtype, packed=False)
    with quiet():
        sides = read_training_texts(models.tokenizer, rows, held_out, chat, system, max_length)
        layers = begun.config.exit_layers if begun is not None and exits is None else _layers(exits, models.target)
        result = _run(models, sides, layers, options, kept, begun, out, resume)
    if as_json:
        print_json({"target": target, "kind": kind.value, "out": str(out), **result})
        return
    _print_agreement(result)
    note(f'wrote {out}: use it with SelfDraftConfig(exit_heads="{out}")')


def read_training_texts(
    tokenizer: Any,
    rows: list[tuple[str | None, str]],
    held_out: float,
    chat: bool | None,
    system: str | None,
    max_length: int,
) -> dict[bool, list[Text]]:
    """Token ids of prompts and texts; by whether a hash of the text holds them out."""
    from hf_specdec.cli.texts import encode_prompt
    from hf_specdec.training.answers import is_held_out
    from hf_specdec.training.texts import Text

    sides: dict[bool, list[Text]] = {True: [], False: []}
    for prompt, text in rows:
        before = [] if prompt is None else encode_prompt(tokenizer, prompt, chat, system)
        own = tokenizer(text, add_special_tokens=prompt is None)["input_ids"]
        if prompt is not None and tokenizer.eos_token_id is not None:
            own = [*own, tokenizer.eos_token_id]
        tokens = [*before, *own][:max_length]
        if len(tokens) >= 3 and len(before) < len(tokens):
            sides[is_held_out(text, held_out)].append(Text(tuple(tokens), len(before)))
    if not sides[False]:
        raise CommandError(f"none of {len(rows)} texts is left to fit to: pass more texts or another --held-out")
    return sides


def _rows(data: list[Path], field: str, prompt_field: str | None, limit: int | None) -> list[tuple[str | None, str]]:
    from hf_specdec.cli.texts import read_pairs, read_texts

    if prompt_field is not None:
        return [row for path in data for row in read_pairs(path, prompt_field, field, limit)]
    return [(None, text) for path in data for text in read_texts(path, field, limit)]


def _layers(exits: str | None, target: Any) -> list[int]:
    from hf_specdec.layer_gate import find_layers

    if exits is None:
        depth = len(find_layers(target))
        return sorted({max(1, round(depth / 4)), max(1, round(depth / 2))})
    try:
        return sorted(int(each) for each in exits.split(","))
    except ValueError:
        raise CommandError(f"--exits must be numbers of layers such as 6,12, got {exits!r}") from None


def _run(
    models: Any,
    sides: dict[bool, list[Text]],
    exits: list[int],
    options: FitOptions,
    kept: DraftVocabulary | None,
    start: ExitHeads | None,
    out: Path,
    resume: bool,
) -> dict[str, Any]:
    from hf_specdec.training.exit_heads import fit_exit_heads

    if kept is not None:
        kept.check_tokenizer(models.tokenizer)
    before = options.ridge_tokens if options.distils and start is None else 0
    with progress_bar("Tokens") as show:

        def on_step(log: FitLog) -> None:
            if log.step:
                show(before + log.num_tokens, before + options.max_tokens)
            if log.step and log.evaluation:
                note(f"{log.num_tokens} tokens: KL {_losses(log)}; held out {_top1(log.evaluation)}")

        heads = fit_exit_heads(
            models.target,
            sides[False],
            exits,
            options,
            held_out=sides[True],
            tokenizer=models.tokenizer,
            vocabulary=kept,
            start=start,
            out=out,
            resume=resume,
            on_ridge=lambda done: show(done, before + options.max_tokens),
            on_step=on_step,
        )
    return {"exits": exits, "num_texts": len(sides[False]), **(heads.config.figures or {})}


def _losses(log: FitLog) -> str:
    return ", ".join(f"{loss:.3f} after {depth} layers" for depth, loss in log.losses.items())


def _top1(figures: dict[str, Any]) -> str:
    found = figures.get("agreement", {})
    return ", ".join(f"top-1 {each['top1']:.3f} after {depth} layers" for depth, each in found.items()) or "nothing"


def _print_agreement(result: dict[str, Any]) -> None:
    for depth, each in result.get("agreement", {}).items():
        sure = ", ".join(
            f"above {threshold}: {point['coverage']:.0%} of tokens, {point['precision']:.0%} right"
            for threshold, point in each["at"].items()
        )
        typer.echo(f"after {depth} layers: top-1 {each['top1']:.3f}, KL {each['kl']:.3f}; {sure}")
