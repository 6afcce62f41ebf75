"""Checkpoints of a training run: whole folders or none, safetensors and JSON only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from hf_specdec.errors import InvalidConfigError


__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_PREFIX, _UNFINISHED = "checkpoint-", ".unfinished-"
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


def save_checkpoint(
    folder: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int = 2
) -> Path:
    """Writes `folder/checkpoint-STEP`, which appears only once all of it is on the disk.

    Args:
        folder (`Path`): Folder of the run.
        step (`int`): Optimiser steps so far.
        network (`nn.Module`): Its parameters and buffers are saved, tied ones once.
        optimizer (`torch.optim.Optimizer`): Its moments are saved, for the parameters that have some.
        state (`dict`): Anything that JSON can hold.
        keep (`int`): How many checkpoints are left; older ones are deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(stale)
    final, unfinished = folder / f"{_PREFIX}{step:08d}", folder / f"{_UNFINISHED}{step:08d}"
    unfinished.mkdir()
    save_model(network, str(unfinished / _WEIGHTS))
    save_file(_moments(optimizer), unfinished / _OPTIMIZER)
    (unfinished / _STATE).write_text(json.dumps({"step": step} | state))
    for file in unfinished.iterdir():
        _flush(file)
    _flush(unfinished)
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    _flush(folder)
    for old in _checkpoints(folder)[:-keep]:
        # Out of sight first, so that a folder of that name is never half deleted.
        shutil.rmtree(old.rename(folder / f"{_UNFINISHED}old-{old.name}"))
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the most steps, if there is one."""
    return next(reversed(_checkpoints(folder)), None)


def load_checkpoint(
    checkpoint: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, Any]:
    """Fills a network and an optimiser, and returns the saved state, with the number of steps as `step`.

    Args:
        checkpoint (`Path`): Its folder.
        network (`nn.Module`): Receives the weights.
        optimizer (`torch.optim.Optimizer`): Receives the moments.
        check (`Callable`): Called with the saved state before anything is filled; it may refuse by raising.

    Raises:
        [`InvalidConfigError`]: If the checkpoint is that of another network.
    """
    state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    check(state)
    try:
        load_model(network, checkpoint / _WEIGHTS)
    except RuntimeError as error:
        raise InvalidConfigError(
            f"{checkpoint} is the checkpoint of another network; resume with the recipe and target that it was started with, "
            f"or write to another folder: {error}"
        ) from error
    moments = load_file(checkpoint / _OPTIMIZER)
    for index, parameter in enumerate(_parameters(optimizer)):
        names = [name for name in moments if name.startswith(f"{index}.")]
        if names:
            optimizer.state[parameter] = {
                name.partition(".")[2]: moments[name].to(parameter.device if moments[name].ndim else "cpu")
                for name in names
            }
    return state


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*"))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.contiguous()
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
