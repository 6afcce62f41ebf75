"""`specdec generate`: streams what a pair of models writes, with accepted drafts in colour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.cli import options as opt
from hf_specdec.cli.decoding import Answer, Decoding, sampling_options
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import load_models, quiet
from hf_specdec.cli.output import note, print_json, wants_color
from hf_specdec.cli.screen import Screen
from hf_specdec.cli.settings import build_config, refuse_method
from hf_specdec.cli.texts import encode_prompt, read_prompts
from hf_specdec.trace import DecodingTrace, html_page


if TYPE_CHECKING:
    from hf_specdec.configs import BaseConfig

__all__ = ["generate"]


@reports_errors
def generate(
    target: opt.Target,
    assistant: opt.Assistant = None,
    prompt: opt.Prompts = None,
    file: opt.TextFile = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    config: opt.ConfigName = "exact",
    drafting: opt.Drafting = None,
    length: opt.DraftLength = None,
    entropy_threshold: opt.EntropyThreshold = None,
    overlap_threshold: opt.OverlapThreshold = None,
    top_n: opt.TopN = None,
    plain: opt.Plain = False,
    sample: opt.Sample = False,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    seed: opt.Seed = None,
    dtype: opt.DType = opt.DTypeName.auto,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    stats: opt.Stats = False,
    color: opt.Color = None,
    trace: opt.Trace = False,
    trace_html: opt.TraceHtml = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write the continuation of each prompt as it is decoded. Accepted drafts are coloured on a terminal.

    The prompt comes from --prompt, --file or standard input. Decoding is greedy unless --sample is given. Text goes to
    standard output, everything else to standard error.
    """
    changes: dict[str, Any] = {
        "drafting": drafting,
        "length": length,
        "entropy_threshold": entropy_threshold,
        "overlap_threshold": overlap_threshold,
        "top_n": top_n,
    }
    if plain:
        refuse_method(config, changes)
    method = None if plain else build_config(config, **changes)
    if trace or trace_html is not None:
        method = _with_diagnostics(method)
    options = sampling_options(sample, {"temperature": temperature, "top_p": top_p, "top_k": top_k})
    options["max_new_tokens"] = max_new_tokens
    prompts = read_prompts(prompt, file, field, limit)
    assistant = None if plain else assistant
    models = load_models(
        target, assistant, dtype=dtype, device_map=device_map, quantization=quantization, networks=True
    )
    encoded = [(text, encode_prompt(models.tokenizer, text, chat, system)) for text in prompts]
    decoding = Decoding(models, method, options, seed)
    with quiet():
        if trace or trace_html is not None:
            traced = [_traced(decoding, text, tokens) for text, tokens in encoded]
            _show_traces(traced, trace_html, wants_color(color), stats, as_json)
            if as_json:
                print_json(_as_dict(target, assistant, decoding, [answer for answer, _ in traced], traced))
            return
        if as_json:
            answers = [decoding.run(text, tokens) for text, tokens in encoded]
            print_json(_as_dict(target, assistant, decoding, answers))
            return
        screen = Screen(wants_color(color) and not plain, stats)
        for index, (text, tokens) in enumerate(encoded):
            screen.start(index, prompts)
            screen.finish(decoding.run(text, tokens, show=screen.write))


def _with_diagnostics(method: BaseConfig | None) -> BaseConfig:
    if method is None:
        raise CommandError("--plain decides every token by the target alone: drop --trace and --trace-html")
    return replace(method, diagnostics=True)


def _traced(decoding: Decoding, text: str, tokens: list[int]) -> tuple[Answer, DecodingTrace]:
    trace = DecodingTrace(decoding.models.tokenizer, tokens)
    return decoding.run(text, tokens, on_round=trace.add), trace


def _show_traces(
    traced: list[tuple[Answer, DecodingTrace]], file: Path | None, colored: bool, stats: bool, as_json: bool
) -> None:
    from rich.console import Console

    if file is not None:
        file.write_text(html_page((answer.prompt, trace) for answer, trace in traced), encoding="utf-8")
        note(f"wrote {file}")
    if as_json:
        return
    out, beside = Console(force_terminal=colored, no_color=not colored), Console(stderr=True)
    for answer, trace in traced:
        out.print(trace.to_rich(), soft_wrap=True)
        beside.print(trace.legend(), soft_wrap=True)
        if stats:
            note(answer.summary)


def _as_dict(
    target: str,
    assistant: str | None,
    decoding: Decoding,
    answers: list[Answer],
    traced: Iterable[tuple[Answer, DecodingTrace]] = (),
) -> dict[str, Any]:
    traces = [{"trace": trace.to_dict()} for _, trace in traced] or [{} for _ in answers]
    return {
        "target": target,
        "assistant": assistant,
        "config": None if decoding.config is None else decoding.config.to_dict(),
        "options": decoding.options,
        "seed": decoding.seed,
        "outputs": [answer.to_dict() | more for answer, more in zip(answers, traces, strict=True)],
    }
