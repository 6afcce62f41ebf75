"""`specdec calibrate`: the settings of methods, and the frequent part of a vocabulary, from texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_specdec.cli import calibrate_self_draft
from hf_specdec.cli import options as opt
from hf_specdec.cli.calibrate_csd import csd
from hf_specdec.cli.calibrate_nucleus import nucleus
from hf_specdec.cli.calibrating import about_pair, base_config, calibrate_pair, read_some
from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.models import load_models, load_tokenizer, quiet
from hf_specdec.cli.output import note, print_json
from hf_specdec.cli.texts import read_texts
from hf_specdec.cli.train_cospec import calibrate_cospec


if TYPE_CHECKING:
    from hf_specdec.calibration import EASDCalibration


__all__ = ["app"]

app = typer.Typer(help="Find a method's settings on your own texts.", no_args_is_help=True)
app.command("cospec")(calibrate_cospec)
app.command("csd")(csd)
app.command("nucleus")(nucleus)
app.command("self-draft")(calibrate_self_draft.self_draft)


@app.callback()
def _group() -> None:
    """Find a method's settings on your own texts."""


@app.command("easd")
@reports_errors
def easd(
    target: opt.Target,
    draft: opt.Draft,
    data: opt.Texts,
    field: opt.Field = "text",
    prompt_field: opt.PromptField = None,
    limit: opt.Limit = None,
    max_tokens: opt.MaxTokens = 512,
    percentile: Annotated[
        float, typer.Option("--percentile", min=0.0, max=100.0, help="Share of positions below the thresholds.")
    ] = 95.0,
    config: Annotated[
        str, typer.Option("--config", "-c", help="EASD config whose other options are kept: easd, or a saved one.")
    ] = "easd",
    save: Annotated[Path | None, typer.Option("--save", help="Folder to write the config and a card to.")] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Set EASD's entropy thresholds to a percentile of what both models show along your texts."""
    from hf_specdec.acceptance import pair_fingerprint
    from hf_specdec.calibration import calibrate_easd
    from hf_specdec.configs import EASDConfig
    from hf_specdec.hub.artefact import write_artefact

    base = base_config(config, EASDConfig, "an EASD")
    texts = read_some(data, prompt_field, field, limit)
    models = load_models(target, draft, dtype=dtype, device_map=device_map, quantization=quantization)
    found = calibrate_pair(
        calibrate_easd, models, texts, "Reading", percentile=percentile, max_tokens=max_tokens, config=base
    )
    about = about_pair(target, draft, data, pair_fingerprint(models.target.config, models.assistant.config))
    if save is not None:
        write_artefact(save, "Entropy thresholds of EASD", found.summary(), found.config, about, found.to_dict())
    if as_json:
        print_json({**about, "saved": None if save is None else str(save), **found.to_dict()})
        return
    _print_tables(found)
    if save is not None:
        note(f"saved {save}: use it with --config {save}")


@app.command("vocabulary")
@reports_errors
def vocabulary(
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="Folder or Hub id of the tokenizer.", show_default=False)
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data", "-d", help="Texts: .txt with one a line, or .jsonl; may be repeated.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("vocabulary.safetensors"),
    size: Annotated[int, typer.Option("--size", min=1, help="Token ids to keep, special ones included.")] = 16384,
    field: opt.Field = "text",
    limit: opt.Limit = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Keep the token ids that are most frequent in your texts, for a draft model's head (FR-Spec, arXiv 2502.14856)."""
    from hf_specdec.drafters import DraftVocabulary, count_tokens

    loaded = load_tokenizer(tokenizer)
    texts = [text for path in data for text in read_texts(path, field, limit)]
    with quiet():
        counts = count_tokens(loaded, texts)
        kept = DraftVocabulary.from_tokenizer(loaded, counts, size)
    path, total = kept.save(out), sum(counts.values())
    covered = sum(counts[token] for token in kept.token_ids) / total if total else 0.0
    if as_json:
        print_json(
            {
                "saved": str(path),
                "size": len(kept.token_ids),
                "vocab_size": kept.vocab_size,
                "fingerprint": kept.fingerprint,
                "num_texts": len(texts),
                "num_tokens": total,
                "num_distinct": len(counts),
                "covered": covered,
            }
        )
        return
    typer.echo(
        f"{len(kept.token_ids)} of {kept.vocab_size} ids make up {covered:.2%} of {total} tokens ({len(counts)} distinct)"
    )
    note(f'saved {path}: use it with SpeculativeConfig(draft_vocabulary="{path}")')


def _print_tables(found: EASDCalibration) -> None:
    from rich.console import Console
    from rich.table import Table

    quantiles = Table("entropy quantile", *(f"{each:g}" for each in found.target_quantiles))
    for name, values in (("target", found.target_quantiles), ("draft", found.draft_quantiles)):
        quantiles.add_row(name, *(f"{value:.2f}" for value in values.values()))
    fires = Table("thresholds (target, draft)", "fires on", "and the models agree on")
    for each in (*found.grid, found.chosen):
        fires.add_row(
            f"{each.target_entropy_threshold:.2f}, {each.draft_entropy_threshold:.2f}",
            f"{each.fires:.1%}",
            f"{each.fires_aligned:.1%}",
            style="bold" if each is found.chosen else None,
        )
    console = Console()
    console.print(quantiles, fires)
    console.print(found.summary(), markup=False, highlight=False, soft_wrap=True)
