"""Options that several commands share: one spelling and one help text each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


__all__ = [
    "Assistant",
    "BatchSize",
    "Chat",
    "Color",
    "ConfigName",
    "DType",
    "DTypeName",
    "Debug",
    "DeviceMap",
    "Draft",
    "DraftLength",
    "Drafting",
    "DraftingName",
    "EntropyThreshold",
    "Field",
    "Json",
    "Limit",
    "MaxNewTokens",
    "MaxTokens",
    "OverlapThreshold",
    "Plain",
    "PromptField",
    "PromptFile",
    "Prompts",
    "Quantization",
    "QuantizationName",
    "Sample",
    "Seed",
    "Stats",
    "System",
    "Target",
    "Temperature",
    "TextFile",
    "Texts",
    "TopK",
    "TopN",
    "TopP",
    "Trace",
    "TraceHtml",
]


class DTypeName(StrEnum):
    """Data types of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class QuantizationName(StrEnum):
    """Quantised loading through bitsandbytes."""

    four = "4bit"
    eight = "8bit"


class DraftingName(StrEnum):
    """What drafts."""

    auto = "auto"
    model = "model"
    ngram = "ngram"
    hybrid = "hybrid"


_LOADING, _METHOD, _TEXT, _SAMPLING = "Models", "Method", "Prompts", "Sampling"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--model",
        "-t",
        help="Folder or Hub id of the target.",
        rich_help_panel=_LOADING,
        show_default=False,
    ),
]
Assistant = Annotated[
    str | None,
    typer.Option(
        "--assistant",
        "--draft",
        "-a",
        help="Folder or Hub id of the draft model; without one, n-grams of the text draft.",
        rich_help_panel=_LOADING,
    ),
]
DType = Annotated[
    DTypeName,
    typer.Option("--dtype", help="Data type of the weights; auto is the checkpoint's own.", rich_help_panel=_LOADING),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="Where the weights go, as in from_pretrained (cpu, cuda, auto). By default auto where there is a GPU.",
        rich_help_panel=_LOADING,
    ),
]
Quantization = Annotated[
    QuantizationName | None,
    typer.Option("--quantization", help="Load both models quantised (bitsandbytes).", rich_help_panel=_LOADING),
]
ConfigName = Annotated[
    str,
    typer.Option(
        "--config", "-c", help="exact, easd, or the path or Hub id of a saved config.", rich_help_panel=_METHOD
    ),
]
Drafting = Annotated[
    DraftingName | None,
    typer.Option("--drafting", help="What drafts, in place of the config's choice.", rich_help_panel=_METHOD),
]
DraftLength = Annotated[
    str | None,
    typer.Option("--length", help="Tokens to draft per round, or auto.", rich_help_panel=_METHOD, show_default=False),
]
EntropyThreshold = Annotated[
    float | None,
    typer.Option("--entropy-threshold", help="EASD: threshold of both entropies.", rich_help_panel=_METHOD),
]
OverlapThreshold = Annotated[
    float | None,
    typer.Option("--overlap-threshold", help="EASD: least overlap of the top-n sets.", rich_help_panel=_METHOD),
]
TopN = Annotated[int | None, typer.Option("--top-n", help="EASD: size of the two top-n sets.", rich_help_panel=_METHOD)]
Field = Annotated[
    str, typer.Option("--field", help="Field of a .jsonl file that holds the text.", rich_help_panel=_TEXT)
]
PromptFile = Annotated[
    Path, typer.Option("--data", help="Prompts: lines of text, or a .jsonl file.", show_default=False)
]
Limit = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, help="Use the first texts only.", rich_help_panel=_TEXT)
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put prompts through the chat template. By default where the tokenizer has one.",
        rich_help_panel=_TEXT,
    ),
]
System = Annotated[
    str | None, typer.Option("--system", help="System message of the chat template.", rich_help_panel=_TEXT)
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts that are decoded together.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

TextFile = Annotated[
    Path | None,
    typer.Option("--file", "--prompts", "-f", help="Prompts: .txt with one a line, or .jsonl.", rich_help_panel=_TEXT),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="A prompt; may be repeated.", rich_help_panel=_TEXT),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="New tokens per prompt.")]
Plain = Annotated[bool, typer.Option("--plain", help="Decode without speculation.", rich_help_panel=_METHOD)]
Sample = Annotated[
    bool, typer.Option("--sample", help="Sample instead of decoding greedily.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="By default the checkpoint's own.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="The same.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="The same.", rich_help_panel=_SAMPLING)]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Each prompt's dice start from it.", rich_help_panel=_SAMPLING)
]
Stats = Annotated[bool, typer.Option("--stats", help="Show statistics after each text.")]
Color = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colour accepted drafts. By default on a terminal.")
]

Trace = Annotated[
    bool, typer.Option("--trace", help="Show when a text is done how each token was decided, in colour on a terminal.")
]
TraceHtml = Annotated[Path | None, typer.Option("--trace-html", help="Write the same as a page.", show_default=False)]
Draft = Annotated[
    str, typer.Option("--draft", "--assistant", "-a", help="Folder or Hub id of the draft model.", show_default=False)
]
Texts = Annotated[
    Path, typer.Option("--data", "-d", help="Texts: .txt with one a line, or .jsonl.", show_default=False)
]
PromptField = Annotated[
    str | None,
    typer.Option("--prompt-field", help="Field with the prompt that the text answers; read, but not counted."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Longest part of a text that is read.")]
