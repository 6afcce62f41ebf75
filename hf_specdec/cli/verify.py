"""`specdec verify`: plain against speculative greedy decoding, prompt by prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.models import load_models, quiet
from hf_specdec.cli.output import print_json, progress_bar
from hf_specdec.cli.settings import build_config
from hf_specdec.cli.texts import encode_prompt, read_prompts


if TYPE_CHECKING:
    from hf_specdec.losslessness import LosslessReport


__all__ = ["verify"]

PROMPTS = (
    "Write a Python function that reverses a string.",
    "The three laws of motion are",
    "def fibonacci(n):",
    "List the months of the year, one per line.",
    "Once upon a time there was a",
    "Explain in two sentences why the sky is blue.",
)


@reports_errors
def verify(
    target: opt.Target,
    assistant: opt.Assistant = None,
    prompt: opt.Prompts = None,
    file: opt.TextFile = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    config: opt.ConfigName = "exact",
    drafting: opt.Drafting = None,
    length: opt.DraftLength = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    batch_size: opt.BatchSize = 1,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Logit distance that counts as rounding. By default by dtype."),
    ] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Check that speculative greedy text is the plain greedy text, and tell rounding from faults.

    Prompts come from --prompt or --file; without either, six short ones are used. Exits with 0 if there is no fault and
    with 1 if there is one. A relaxed config such as easd changes texts on purpose; its differences are shown and are no
    faults.
    """
    from hf_specdec.losslessness import verify_lossless

    method = build_config(config, drafting=drafting, length=length)
    prompts = read_prompts(prompt, file, field, limit, default=PROMPTS)
    models = load_models(
        target, assistant, dtype=dtype, device_map=device_map, quantization=quantization, networks=True
    )
    with quiet(), progress_bar("Comparing") as progress:
        report = verify_lossless(
            models.target,
            [encode_prompt(models.tokenizer, text, chat) for text in prompts],
            method,
            assistant_model=models.assistant,
            tokenizer=models.tokenizer,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            tolerance=tolerance,
            progress=progress,
        )
    if as_json:
        print_json({"target": target, "assistant": assistant, "config": method.to_dict(), **report.to_dict()})
    else:
        _print_table(report, prompts)
    raise typer.Exit(0 if report.passed else 1)


def _print_table(report: LosslessReport, prompts: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", "prompt", "tokens", "accepted", "result", "parts at", "top-2 gap")
    styles = {"equal": "green", "rounding": "yellow", "fault": "bold red", "relaxed": "yellow"}
    for each, prompt in zip(report.comparisons, prompts, strict=True):
        table.add_row(
            str(each.index),
            Text(" ".join(prompt.split()), overflow="ellipsis", no_wrap=True),
            str(len(each.plain_tokens)),
            f"{each.num_accepted_tokens}/{each.num_draft_tokens}",
            Text(each.kind, style=styles[each.kind]),
            "" if each.position is None else str(each.position),
            "" if each.gap is None else f"{each.gap:.3g}",
        )
    console = Console()
    console.print(table)
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
