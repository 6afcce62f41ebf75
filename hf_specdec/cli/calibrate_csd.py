"""`specdec calibrate csd`: a correction memory from the answers to your prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.calibrating import about_pair, calibrate_pair
from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.models import load_models
from hf_specdec.cli.output import note, print_json
from hf_specdec.cli.texts import encode_prompt, read_texts


__all__ = ["csd"]


@reports_errors
def csd(
    target: opt.Target,
    draft: opt.Draft,
    data: opt.PromptFile,
    save: Annotated[Path, typer.Option("--save", help="Folder to write to.", show_default=False)],
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    start: Annotated[
        Path | None, typer.Option("--start", help="A memory of the same two models to go on from.", show_default=False)
    ] = None,
    max_entries: Annotated[
        int, typer.Option("--max-entries", min=1, help="Most pairs that a new memory keeps.")
    ] = 200_000,
    max_new_tokens: opt.MaxNewTokens = 256,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens to draft per round.")] = 6,
    batch_size: opt.BatchSize = 8,
    dtype: opt.DType = opt.DTypeName.auto,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fill CSD's correction memory with the mismatches met while the target answers your prompts. No text is changed."""
    from hf_specdec.acceptance import CorrectionMemory
    from hf_specdec.acceptance.correction_memory import MEMORY_NAME
    from hf_specdec.configs import CSDConfig
    from hf_specdec.csd_calibration import calibrate_csd
    from hf_specdec.hub.artefact import write_artefact

    texts = read_texts(data, field, limit)
    memory = None if start is None else CorrectionMemory.load(start)
    models = load_models(target, draft, dtype=dtype, device_map=device_map, quantization=quantization)
    prompts = [encode_prompt(models.tokenizer, text, chat, system) for text in texts]
    found = calibrate_pair(
        calibrate_csd,
        models,
        prompts,
        "Answering",
        memory=memory,
        max_entries=max_entries,
        max_new_tokens=max_new_tokens,
        length=length,
        batch_size=batch_size,
    )
    about = about_pair(target, draft, data, found.memory.fingerprint)
    save.mkdir(parents=True, exist_ok=True)
    found.memory.save(save / MEMORY_NAME)
    special = tuple(sorted(set(models.tokenizer.all_special_ids)))
    config = CSDConfig(memory=str(save / MEMORY_NAME), length=length, protected_tokens=special)
    write_artefact(save, "Correction memory of CSD", found.summary(), config, about, found.to_dict())
    if as_json:
        print_json({**about, "saved": str(save), **found.to_dict()})
        return
    typer.echo(found.summary())
    note(f'saved {save}: use it with --config {save}, or CSDConfig(memory="{save}")')
