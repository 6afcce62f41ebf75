"""AdamW on KL(p || q) between the target's final law and those of the exits; the target is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from hf_specdec.training.exit_heads.observing import Observation, Observer
from hf_specdec.training.exit_heads.options import FitLog, FitOptions
from hf_specdec.training.texts import Text


__all__ = ["distil", "exit_loss"]

_ROWS = 128  # positions whose logits are held at a time: a large vocabulary times a long text is much memory
_WARMUP = 0.05


def exit_loss(observer: Observer, heads: ExitHeads, seen: Observation, depth: int, share: float) -> float:
    """Backpropagates `share` times the summed KL(p || q) of one exit into its head, and returns the sum in nats.

    Args:
        observer ([`Observer`]): Whose readout gives the law of a state.
        heads ([`ExitHeads`]): The heads.
        seen ([`Observation`]): One text.
        depth (`int`): The exit.
        share (`float`): Factor of the loss; with 0 nothing is backpropagated.
    """
    states = heads(seen.states[depth].to(heads.device), layer=depth)[:, seen.first :]
    leaf = states.detach().requires_grad_(share > 0)
    total = 0.0
    for start in range(0, leaf.shape[1], _ROWS):
        law = observer.readout(leaf[:, start : start + _ROWS]).log_softmax(-1)
        target = seen.logits[:, start : start + _ROWS].log_softmax(-1)
        loss = torch.nn.functional.kl_div(law, target, reduction="sum", log_target=True)
        total += float(loss.detach())
        if share > 0:
            (loss * share).backward()
    if share > 0:
        states.backward(leaf.grad)
    return total


def distil(
    observer: Observer,
    heads: ExitHeads,
    plan: Sequence[Sequence[Text]],
    options: FitOptions,
    *,
    folder: Path | None = None,
    resume: bool = False,
    evaluate: Callable[[int], dict[str, Any]] | None = None,
    on_step: Callable[[FitLog], None] | None = None,
) -> list[FitLog]:
    """Fits heads by gradient descent, one optimiser step per entry of `plan`.

    Args:
        observer ([`Observer`]): Reads the texts.
        heads ([`ExitHeads`]): The heads, in float32; they are fitted in place.
        plan (`Sequence[Sequence[Text]]`): The texts of each step.
        options ([`FitOptions`]): Rates and pace.
        folder (`Path`, *optional*): Folder of checkpoints.
        resume (`bool`): Whether to go on from the newest one, if there is one.
        evaluate (`Callable[[int], dict]`, *optional*): Called with the number of tokens when a checkpoint is due.
        on_step (`Callable[[FitLog], None]`, *optional*): Sees each step.

    Returns:
        `list[FitLog]`: The steps of this call.
    """
    if heads.dtype != torch.float32:
        raise InvalidConfigError(f"heads are fitted in float32, got {heads.dtype}: load them with dtype=torch.float32")
    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, round(_WARMUP * len(plan)), len(plan))
    done, num_tokens = 0, 0
    if resume and folder is not None and (checkpoint := latest_checkpoint(folder)) is not None:
        done, num_tokens = _load(checkpoint, heads, optimizer, scheduler, options)
        if done == len(plan) and evaluate is not None:
            evaluate(num_tokens)
    logs = []
    with _only_heads_train(observer.target, heads):
        for step, texts in enumerate(plan[done:], start=done + 1):
            losses, count = _one_step(observer, heads, texts, optimizer, options.clip)
            scheduler.step()
            num_tokens += count
            log = FitLog(step, num_tokens, losses)
            due = step % options.save_every == 0 or step == len(plan)
            if due and folder is not None:
                state = {"scheduler": scheduler.state_dict(), "options": asdict(options), "num_tokens": num_tokens}
                save_checkpoint(folder, step, heads, optimizer, state)
            if due and evaluate is not None:
                log = replace(log, evaluation=evaluate(num_tokens))
            if on_step is not None:
                on_step(log)
            logs.append(log)
    return logs


def _one_step(
    observer: Observer, heads: ExitHeads, texts: Sequence[Text], optimizer: torch.optim.Optimizer, clip: float
) -> tuple[dict[int, float], int]:
    """The mean losses by exit, and the number of tokens."""
    seen = [observer.observe(text) for text in texts]
    count = sum(each.num_positions for each in seen)
    losses = {
        depth: sum(exit_loss(observer, heads, each, depth, 1.0 / count) for each in seen) / count
        for depth in observer.exits
    }
    for depth in observer.exits:  # each head as if it were fitted alone
        torch.nn.utils.clip_grad_norm_(_parameters(heads, depth), clip)
    optimizer.step()
    optimizer.zero_grad()
    return losses, count


def _parameters(heads: ExitHeads, depth: int) -> list[Tensor]:
    return list(heads.head(depth).parameters())


def _load(
    checkpoint: Path, heads: ExitHeads, optimizer: torch.optim.Optimizer, scheduler: Any, options: FitOptions
) -> tuple[int, int]:
    def check(saved: dict[str, Any]) -> None:
        if saved["options"] != asdict(options):
            raise InvalidConfigError(
                f"{checkpoint} was written by a fit with {saved['options']}, which cannot go on with {asdict(options)}: resume "
                "with the same options, or write to another folder"
            )

    saved = load_checkpoint(checkpoint, heads, optimizer, check)
    scheduler.load_state_dict(saved["scheduler"])
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return saved["step"], saved["num_tokens"]


@contextmanager
def _only_heads_train(target: Any, heads: ExitHeads) -> Iterator[None]:
    frozen = list(target.parameters())
    wanted = [parameter.requires_grad for parameter in frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, was in zip(frozen, wanted, strict=True):
            parameter.requires_grad_(was)
        heads.zero_grad(set_to_none=True)
