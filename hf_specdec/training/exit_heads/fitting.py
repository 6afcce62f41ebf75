"""Exit heads from texts: which texts go into which step, and what follows what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hf_specdec.drafters import DraftVocabulary
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.networks.target import weights_fingerprint
from hf_specdec.training.checkpoints import latest_checkpoint
from hf_specdec.training.curve import CURVE, add_to_curve
from hf_specdec.training.exit_heads.agreement import agreement_along
from hf_specdec.training.exit_heads.distilling import distil
from hf_specdec.training.exit_heads.held_out import HeldOut
from hf_specdec.training.exit_heads.observing import Observer, num_positions
from hf_specdec.training.exit_heads.options import FitLog, FitOptions
from hf_specdec.training.exit_heads.ridge import fit_maps
from hf_specdec.training.identity import check_identity, write_identity
from hf_specdec.training.texts import Text, digest_of


__all__ = ["fit_exit_heads"]

_IDENTITY = "fit.json"


def fit_exit_heads(
    target: Any,
    texts: Sequence[Text],
    exits: Sequence[int],
    options: FitOptions,
    *,
    held_out: Sequence[Text] = (),
    tokenizer: Any = None,
    vocabulary: DraftVocabulary | None = None,
    start: ExitHeads | None = None,
    out: Path | None = None,
    resume: bool = False,
    on_ridge: Callable[[int], None] | None = None,
    on_step: Callable[[FitLog], None] | None = None,
) -> ExitHeads:
    """Fits exit heads to a frozen target.

    Published: the kinds `linear` by AdaDecode's shape and `adapter` by Kangaroo's, and KL against the final law for both.
    Ours: the ridge regression, from which all of them start, and everything that has a number.

    Args:
        target (`PreTrainedModel`): The target, in evaluation mode; its weights are read only.
        texts (`Sequence[Text]`): What is fitted to.
        exits (`Sequence[int]`): Numbers of layers after which a head sits, by depth.
        options ([`FitOptions`]): Kind, length and pace.
        held_out (`Sequence[Text]`): Texts that evaluate. What the target shows of them is kept in memory, up to 1 GiB:
            `(exits + 1) * hidden_size` numbers of its dtype a token.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, whose hash the heads then carry.
        vocabulary ([`DraftVocabulary`], *optional*): Ids on which the laws are compared, for drafts from these alone.
        start ([`ExitHeads`], *optional*): Fitted heads to go on from, on further texts say, instead of the regression; their
            draft vocabulary is kept, and they stay as they are.
        out (`Path`, *optional*): Where the heads are saved, at each checkpoint too, with what is needed to go on.
        resume (`bool`): Whether to go on from what is in `out`.
        on_ridge (`Callable[[int], None]`, *optional*): Called with the tokens of the regression so far.
        on_step (`Callable[[FitLog], None]`, *optional*): Sees each optimiser step.

    Raises:
        [`InvalidConfigError`]: If there are no texts, an exit is no inner layer of the target, `start` are heads of another
            kind, other exits or another vocabulary, or `out` holds a fit to other texts, another vocabulary or another target,
            or with another start.
        [`IncompatibleDraftError`]: If `start` belongs to another target.
    """
    if not texts:
        raise InvalidConfigError("there are no texts to fit to")
    kind = "adapter" if options.kind == "adapter" else "linear"
    if start is not None:
        _check_start(start, kind, exits, options, vocabulary)
        start.check_target(target, tokenizer)
        vocabulary = DraftVocabulary.of_heads(start)
    heads = ExitHeads.for_target(target, kind, exits, tokenizer, vocabulary)
    before = 0
    if start is not None:
        heads.load_state_dict(start.state_dict())
        before = int((start.config.figures or {}).get("num_tokens", 0))
    observer = Observer(target, exits, None if vocabulary is None else vocabulary.token_ids)
    evaluates = HeldOut(observer, held_out)
    if out is not None:
        # Weights in float16, and quantised ones, have no fingerprint.
        identity = {
            "texts": digest_of(texts),
            "vocabulary": digest_of([], None if vocabulary is None else vocabulary.token_ids),
            "target": heads.config.target_weights or heads.config.target_name,
            "start": None if start is None else weights_fingerprint(start),
        }
        if resume:
            check_identity(out / _IDENTITY, identity, "a fit")
        else:
            (out / CURVE).unlink(missing_ok=True)
        write_identity(out / _IDENTITY, identity)

    def keep(num_tokens: int, stage: str = "kl") -> dict[str, Any]:
        heads.config.figures = _figures(evaluates, heads, before + num_tokens)
        if out is not None:
            heads.save_pretrained(out)
            add_to_curve(out / CURVE, {"stage": stage, **heads.config.figures}, _place)
        return dict(heads.config.figures)

    begins = not (resume and out is not None and latest_checkpoint(out) is not None)
    if begins and start is not None:
        figures = keep(0, "start")
        if on_step is not None:
            on_step(FitLog(0, 0, {}, figures))
    elif begins:
        wanted = min(options.ridge_tokens, options.max_tokens) if options.distils else options.max_tokens
        chosen = _until(_order(texts, options.seed, epochs=1), wanted)
        num_tokens = fit_maps(observer, heads, chosen, options.ridge, folder=out, resume=resume, on_text=on_ridge)
        figures = keep(num_tokens, "ridge")
        if on_step is not None:
            on_step(FitLog(0, num_tokens, {}, figures))
    if options.distils:
        plan = _plan(texts, options)
        distil(observer, heads, plan, options, folder=out, resume=resume, evaluate=keep, on_step=on_step)
    return heads.eval()


def _check_start(
    start: ExitHeads, kind: str, exits: Sequence[int], options: FitOptions, vocabulary: DraftVocabulary | None
) -> None:
    if not options.distils:
        raise InvalidConfigError("linear heads are found in one pass, from nothing: leave start away, or fit linear+kl")
    if (start.config.kind, start.config.exit_layers) != (kind, list(exits)):
        raise InvalidConfigError(
            f"a fit of {kind} heads after the layers {list(exits)} cannot start from {start.config.kind} heads after "
            f"{start.config.exit_layers}: pass heads of the same kind and exits"
        )
    if vocabulary is not None and vocabulary != DraftVocabulary.of_heads(start):
        raise InvalidConfigError(
            "the heads to start from have another draft vocabulary: leave vocabulary away to keep theirs"
        )


def _place(figures: Mapping[str, Any]) -> tuple[int, int]:
    """Where figures stand in a fit: by its stage, and within it by the tokens so far."""
    return {"start": 0, "ridge": 0, "kl": 1}[figures["stage"]], figures["num_tokens"]


def _order(texts: Sequence[Text], seed: int, epochs: int | None = None) -> Iterator[Text]:
    """The texts in an order that depends on nothing but the seed, another one each time they are read."""
    for epoch in count() if epochs is None else range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for index in torch.randperm(len(texts), generator=generator).tolist():
            yield texts[index]


def _until(texts: Iterable[Text], num_tokens: int) -> list[Text]:
    """The first texts that have `num_tokens` positions together; all if they have fewer."""
    chosen, total = [], 0
    for text in texts:
        chosen.append(text)
        total += num_positions(text)
        if total >= num_tokens:
            break
    return chosen


def _plan(texts: Sequence[Text], options: FitOptions) -> list[list[Text]]:
    """The texts of each optimiser step."""
    order = _order(texts, options.seed)
    plan, total = [], 0
    while total < options.max_tokens:
        step = _until(order, options.tokens_per_step)
        plan.append(step)
        total += sum(map(num_positions, step))
    return plan


def _figures(held_out: HeldOut, heads: ExitHeads, num_tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_tokens": num_tokens}
    if held_out.texts:
        found = agreement_along(held_out, heads)
        figures["num_held_out_tokens"] = next(iter(found.values())).num_tokens
        figures["agreement"] = {str(depth): each.to_dict() for depth, each in found.items()}
    return figures
