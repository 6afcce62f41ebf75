"""`specdec bench`: several ways of decoding the same prompts, side by side."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import Models, load_models, quiet
from hf_specdec.cli.output import note, print_json, progress_bar
from hf_specdec.cli.texts import encode_prompt, read_texts


if TYPE_CHECKING:
    from hf_specdec.bench import Arm, Costs, Row


__all__ = ["bench"]

_ARMS = "plain,stock-assistant-5,stock-lookup-5,default,model-5,easd"
_FIELDS = ("prompt", "question", "problem", "instruction", "text")


@reports_errors
def bench(
    target: opt.Target,
    data: Annotated[list[Path], typer.Option("--data", "-d", help="Prompts: .txt or .jsonl; may be repeated.")],
    assistant: opt.Assistant = None,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="Comma-separated: plain, stock-assistant[-N], stock-lookup-N, stock-early-exit-N, economize-model-N, "
            "economize-lookup-N (where that package is installed), default, model[-N], ngram[-N], hybrid[-N], "
            "default-reduced, model-reduced[-N], hybrid-reduced[-N], easd[-THRESHOLD], easd-plain.",
        ),
    ] = _ARMS,
    draft_vocabulary: Annotated[
        Path | None,
        typer.Option("--draft-vocabulary", help="For the -reduced arms; see `specdec calibrate vocabulary`."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option("--field", help="Field of a .jsonl file; by default prompt, question, problem or text."),
    ] = None,
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    batch_size: opt.BatchSize = 1,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sample at this temperature; 0 decodes greedily.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="When sampling, each prompt's dice start from it.")] = 0,
    dtype: opt.DType = opt.DTypeName.float32,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    packed: Annotated[bool, typer.Option("--packed/--no-packed", help="Pack float32 linears on the CPU.")] = True,
    out: Annotated[Path, typer.Option("--out", "-o", help="Writes OUT.json, OUT.md and OUT.png.")] = Path("results"),
    keep_rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="Keep the tokens and rounds of every call in OUT.json.")
    ] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")
    ] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Decode each prompt with every arm, in alternating order, and compare speeds and texts.

    Speeds are those of the decode phase; the prompts' forward passes are not in them. Costs of isolated forward passes are
    measured in the same run and give the predicted speed-up. Ctrl-C keeps what is done; --resume goes on.
    """
    from hf_specdec.bench import parse_arm, summarize, write_report

    chosen = [parse_arm(name.strip(), draft_vocabulary) for name in arms.split(",")]
    models = load_models(
        target,
        assistant,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        packed=packed and "auto",
        networks=True,
    )
    settings = {
        "target": Path(target).name,
        "assistant": None if assistant is None else Path(assistant).name,
        "arms": arms,
        "data": [path.name for path in data],
        "field": field,
        "limit": limit,
        "chat": chat,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "dtype": str(dtype),
        "packed": packed,
        "draft_vocabulary": None if draft_vocabulary is None else draft_vocabulary.name,
    }
    with quiet():
        costs = _costs(models, draft_vocabulary if any(arm.reduced for arm in chosen) else None, batch_size)
        rows = {_name_of(path): _decode(models, chosen, path, out, settings, resume) for path in data}
    summary = {name: summarize(each, costs, sampled=temperature > 0) for name, each in rows.items()}
    environment = _environment(models, costs, settings)
    paths = write_report(out, summary, rows if keep_rows else {}, environment)
    if as_json:
        print_json({"summary": summary, "environment": environment})
    else:
        _print(summary)
        note("Written: " + ", ".join(str(path) for path in paths))


def _costs(models: Models, vocabulary: Path | None, batch_size: int) -> Costs:
    """Isolated costs, those of the draft model with a smaller head among them where an arm has one."""
    from hf_specdec.bench import measure_costs
    from hf_specdec.drafters import DraftVocabulary
    from hf_specdec.reduced_head import reduce_head

    reduced = None if vocabulary is None else reduce_head(models.assistant, DraftVocabulary.load(vocabulary).token_ids)
    return measure_costs(models.target, models.assistant, reduced_draft=reduced, batch_size=batch_size)


def _decode(
    models: Models, arms: list[Arm], path: Path, out: Path, settings: dict[str, Any], resume: bool
) -> list[Row]:
    """The rows of one data set, those of an interrupted run among them."""
    from hf_specdec.bench import Benchmark

    checkpoint = out.with_name(f"{out.name}.{_name_of(path)}.rows.jsonl")
    _check_resumable(checkpoint, settings, resume)
    texts = read_texts(path, settings["field"] or _guess_field(path), settings["limit"])
    benchmark = Benchmark(
        models.target,
        models.assistant,
        models.tokenizer,
        [encode_prompt(models.tokenizer, text, settings["chat"]) for text in texts],
        arms,
        settings["max_new_tokens"],
        checkpoint,
        temperature=settings["temperature"] or None,
        seed=settings["seed"],
        batch_size=settings["batch_size"],
    )
    with progress_bar(_name_of(path)) as show:
        return _run(benchmark, show)


def _run(benchmark: Any, show: Any) -> list[Row]:
    total = len(benchmark.batches) * len(benchmark.arms)
    done = [len(benchmark.finished())]

    def progress(row: Row) -> None:
        done[0] += 1
        show(done[0], total)

    show(done[0], total)
    return benchmark.run(progress)


def _name_of(path: Path) -> str:
    """The data set's name: that of the file, or of its folder where the file is named after its split."""
    named_after_split = path.stem.lower() in ("train", "test", "validation", "dev") and path.absolute().parent.name
    return (path.absolute().parent.name if named_after_split else path.stem).lower()


def _check_resumable(checkpoint: Path, settings: dict[str, Any], resume: bool) -> None:
    """An old checkpoint is continued only on request, and only by the same command."""
    kept = checkpoint.with_suffix(".settings.json")
    if resume and kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if other := [name for name, value in settings.items() if before.get(name) != value]:
            raise CommandError(
                f"{checkpoint.name} belongs to a run with other {', '.join(other)}: run without --resume"
            )
    if not resume:
        checkpoint.unlink(missing_ok=True)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(settings), encoding="utf-8")


def _guess_field(path: Path) -> str:
    if path.suffix != ".jsonl":
        return _FIELDS[0]
    with path.open(encoding="utf-8") as file:
        keys = json.loads(file.readline())
    return next((name for name in _FIELDS if name in keys), _FIELDS[0])


def _law(settings: dict[str, Any]) -> str:
    if not settings["temperature"]:
        return "greedy"
    return f"sampled at temperature {settings['temperature']:g}, seed {settings['seed']}"


def _environment(models: Models, costs: Costs, settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    from hf_specdec.bench.report import versions
    from hf_specdec.placement import device_of

    return {
        "target": settings["target"],
        "assistant": settings["assistant"],
        "dtype": settings["dtype"],
        "device": str(device_of(models.target)),
        "threads": torch.get_num_threads(),
        "baseline": "eager, packed linears" if settings["packed"] else "eager",
        "decoding": f"{_law(settings)}, {settings['max_new_tokens']} new tokens at most, EOS on",
        "prompts": settings["limit"] or "all",
        "batch_size": settings["batch_size"],
        "date": date.today().isoformat(),
        "versions": versions(),
        "costs": costs.to_dict(),
    }


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from hf_specdec.bench.report import table

    for name, arms in summary.items():
        Console().print(Markdown(f"**{name}**\n\n{table(arms)}"))
