"""`specdec evaluate`: acceptance lengths of a drafter network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.output import note, print_json


__all__ = ["evaluate"]


@reports_errors
def evaluate(
    target: opt.Target,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Folder or Hub id of the drafter network.", show_default=False)
    ],
    data: opt.PromptFile,
    steps: Annotated[str, typer.Option("--steps", help="Tokens drafted per round, separated by commas.")] = "3,4,5,6",
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Another drafter network, measured beside it.")
    ] = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure the acceptance length tau (the bonus token counted) of a drafter network, greedy, for each draft length.

    In brackets: the 95 % bootstrap interval of the mean over prompts.
    """
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.cli.texts import encode_prompt, read_texts
    from hf_specdec.networks import AutoDrafter

    counts = _counts(steps)
    texts = read_texts(data, field, limit)
    models = load_models(target, None, dtype=dtype, packed=False)
    prompts = [encode_prompt(models.tokenizer, text, chat, system) for text in texts]
    found = {}
    with quiet():
        for role, name in (("drafter", drafter), ("baseline", baseline)):
            if name is not None:
                network = AutoDrafter.from_pretrained(name, target=models.target, tokenizer=models.tokenizer)
                found[role] = {str(k): _tau(models.target, network, prompts, k, max_new_tokens) for k in counts}
    if as_json:
        print_json({"target": target, "names": {"drafter": drafter, "baseline": baseline}, "tau": found})
        return
    for role, row in found.items():
        cells = (f"{k} drafts: {each['mean']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for k, each in row.items())
        note(f"{role}: {'; '.join(cells)}")


def _counts(steps: str) -> list[int]:
    try:
        counts = [int(each) for each in steps.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise CommandError(f"--steps needs numbers of at least 1, separated by commas, as in 3,4,5,6; got {steps!r}")
    return counts


def _tau(target: Any, network: Any, prompts: list[list[int]], steps: int, max_new_tokens: int) -> dict[str, Any]:
    from hf_specdec.quality.statistics import bootstrap_mean
    from hf_specdec.training.acceptance import acceptance_lengths

    lengths = acceptance_lengths(target, network, prompts, steps=steps, max_new_tokens=max_new_tokens)
    if not lengths:
        raise CommandError("no answer is longer than one token, so there is nothing to draft: pass other prompts")
    return {**asdict(bootstrap_mean(lengths)), "values": lengths}
