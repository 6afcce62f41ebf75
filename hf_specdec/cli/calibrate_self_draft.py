"""`specdec calibrate self-draft`: exits, thresholds and widths of self-drafting, and whether it can pay at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import load_models, quiet
from hf_specdec.cli.output import note, print_json, progress_bar
from hf_specdec.cli.texts import encode_prompt, read_texts


if TYPE_CHECKING:
    from hf_specdec.training.exit_heads import ExitTrace, LayerCosts, Replayed


__all__ = ["self_draft"]

_LEAST_GAIN = 1.02  # below this a prediction is no gain


@reports_errors
def self_draft(
    target: opt.Target,
    data: opt.PromptFile,
    exit_heads: Annotated[
        str | None, typer.Option("--exit-heads", help="Folder or Hub id of fitted heads; raw exits by default.")
    ] = None,
    exits: Annotated[
        str | None,
        typer.Option(
            "--exits", help="Layers to try: 6,12. By default those of the heads, else every eighth of the depth."
        ),
    ] = None,
    vocabulary: Annotated[
        Path | None,
        typer.Option(
            "--vocabulary",
            help="Draft vocabulary: exits score its ids and the prompt's only, and the config names it. By default that "
            "of the heads.",
        ),
    ] = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = 16,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation", help="Also replay without annealing, depth bound and width bound; three exits or more."
        ),
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Folder to write speculative_config.json to.")] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Find exits, annealing, threshold, depth and width by replaying what exits say along the model's own answers."""
    from hf_specdec import DraftVocabulary, ExitHeadsConfig, SelfDraftConfig
    from hf_specdec.cli.self_draft_costs import measure_layer_costs
    from hf_specdec.loading import load_exit_heads
    from hf_specdec.training.exit_heads import FEWEST_EXITS, Observer, best_policy, trace_exits

    prompts = read_texts(data, field, limit)
    kept = None if vocabulary is None else DraftVocabulary.load(vocabulary)
    if exit_heads is not None:
        with quiet():
            ExitHeadsConfig.from_pretrained(exit_heads)  # a wrong name is said before the target is loaded
    models = load_models(target, None, dtype=dtype)
    with quiet():
        heads = None if exit_heads is None else load_exit_heads(exit_heads, models.target)
        if heads is not None:
            heads.check_target(models.target)
        kept = kept or DraftVocabulary.of_heads(heads)
        if kept is not None:
            kept.check_tokenizer(models.tokenizer)
        ids = None if kept is None else kept.token_ids
        observer = Observer(models.target, _layers(exits, heads, models.target), ids)
        if ablation and len(observer.exits) < FEWEST_EXITS:
            raise CommandError(
                f"--ablation needs {FEWEST_EXITS} exits or more, got {list(observer.exits)}: name more with --exits, or drop it"
            )
        depth, traces = len(observer.layers), []
        with progress_bar("Reading") as show:
            for index, prompt in enumerate(prompts):
                text = _answer(models.target, encode_prompt(models.tokenizer, prompt, chat, system), max_new_tokens)
                if text is not None:
                    traces.append(trace_exits(observer, heads, text, depth))
                show(index + 1, len(prompts))
        if not traces:
            raise CommandError(
                "no answer was long enough to draft in: give other prompts, or raise --max-new-tokens above "
                f"{max_new_tokens}"
            )
        costs = measure_layer_costs(models.target, observer, heads)
        best = best_policy(traces, observer.exits, depth, costs)
        parts = _ablation(traces, observer.exits, depth, costs) if ablation else None
    config = SelfDraftConfig(**vars(best.policy), exit_heads=exit_heads, draft_vocabulary=vocabulary)
    path = None if save is None else config.save_pretrained(save)
    if as_json:
        pays, where = best.speed_up >= _LEAST_GAIN, None if path is None else str(path)
        found: dict[str, Any] = {"target": target, "saved": where, "pays": pays}
        found |= {} if parts is None else {"ablation": parts}
        print_json({**found, "costs": vars(costs), "num_texts": len(traces), **best.to_dict()})
        return
    _print(best, costs)
    if parts is not None:
        _print_ablation(parts)
    if path is not None:
        note(f"saved {path}: use it with --config {save}")


def _layers(exits: str | None, heads: Any, target: Any) -> list[int]:
    from hf_specdec.drafters import ExitPolicy
    from hf_specdec.layer_gate import find_layers

    depth = len(find_layers(target))
    if exits is None:
        chosen = heads.config.exit_layers if heads is not None else [round(depth * part / 8) for part in range(1, 8)]
        layers = sorted({max(1, layer) for layer in chosen if layer < depth})
    else:
        try:
            layers = sorted(int(each) for each in exits.split(","))
        except ValueError:
            raise CommandError(f"--exits must be numbers of layers such as 6,12, got {exits!r}") from None
    policy = ExitPolicy(exit_layers=tuple(layers))
    return list(policy.exits_of(depth, None if heads is None else tuple(heads.config.exit_layers)))


def _answer(target: Any, prompt: list[int], max_new_tokens: int) -> Any:
    """The model's own answer; None where it is too short to draft in."""
    import torch

    from hf_specdec.placement import device_of
    from hf_specdec.training.texts import Text

    ids = torch.tensor([prompt], device=device_of(target))
    tokens = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )[0].tolist()
    return Text(tuple(tokens), len(prompt)) if len(tokens) > max(len(prompt) + 1, 2) else None


def _ablation(traces: list[ExitTrace], exits: tuple[int, ...], depth: int, costs: LayerCosts) -> dict[str, Any]:
    from hf_specdec.training.exit_heads import ablate, precision_at_coverage

    parts = {name: each.to_dict() for name, each in ablate(traces, exits, depth, costs).items()}
    return {"exits": list(exits), "parts": parts, "precision_at_coverage": precision_at_coverage(traces, exits)}


def _print_ablation(found: dict[str, Any]) -> None:
    typer.echo(f"\nexits {found['exits']}, each row with its own best settings:")
    typer.echo("| rule | speed-up | tokens/round | acceptance | tau | alpha | depth | width |\n|---|" + "---:|" * 7)
    for name, part in found["parts"].items():
        policy = part["policy"]
        typer.echo(
            f"| {name} | {part['speed_up']:.2f}x | {part['tokens_per_round']:.2f} | {part['acceptance']:.1%} | "
            f"{policy['confidence_threshold']} | {policy['annealing']} | {policy['max_depth']} | {policy['max_width']} |"
        )
    table = found["precision_at_coverage"]
    coverages = list(next(iter(table.values())))
    typer.echo("\nPrecision of the tokens that leave, by the share of tokens that do (tau is set for it):")
    typer.echo(
        "| alpha | " + " | ".join(f"{share:.0%}" for share in coverages) + " |\n|---|" + "---:|" * len(coverages)
    )
    for annealing, row in table.items():
        typer.echo(f"| {annealing} | " + " | ".join(f"{share:.1%}" for share in row.values()) + " |")


def _print(best: Replayed, costs: LayerCosts) -> None:
    policy = best.policy
    bound = "" if policy.max_depth is None else f", max_depth={policy.max_depth}"
    typer.echo(
        f"exit_layers={list(policy.exit_layers or ())}, confidence_threshold={policy.confidence_threshold}, "
        f"annealing={policy.annealing}, max_width={policy.max_width}{bound}"
    )
    typer.echo(
        f"predicted: {best.speed_up:.2f}x plain decoding, {best.tokens_per_round:.2f} tokens per round, "
        f"{best.acceptance:.0%} of drafts accepted"
    )
    exits = ", ".join(f"{1000 * costs.heads[depth]:.1f} ms after {depth} layers" for depth in policy.exit_layers or ())
    typer.echo(
        f"measured here: a step {1000 * costs.step:.1f} ms, a layer {1000 * costs.layer:.2f} ms, an exit {exits}, "
        f"each further token of a pass {costs.row:.0%} of a step"
    )
    if best.speed_up < _LEAST_GAIN:
        typer.echo(
            "Self-drafting cannot pay on this model with these exits: fit heads with `specdec train exit-heads`, or let "
            "another model draft."
        )
