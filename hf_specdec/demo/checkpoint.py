"""Atomic training checkpoints: safetensors for tensors, JSON for the rest."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


LATEST = "latest.json"


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Writes a checkpoint of `step`, then points `latest.json` at it, then removes the older ones.

    `state` is any JSON object. The random state needs no place here: every step draws from a
    generator seeded with `(seed, step)`, and the learning rate is a function of the step.
    """
    name = f"step-{step:07d}"
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names = {id(p): n for n, p in model.named_parameters()}
    save_file({n: p.detach() for n, p in model.named_parameters()}, partial / "model.safetensors")
    slots = ((names[id(p)], key, value) for p, slots in optimizer.state.items() for key, value in slots.items())
    save_file({f"{name}/{key}": value for name, key, value in slots}, partial / "optimizer.safetensors")
    shutil.rmtree(folder / name, ignore_errors=True)
    partial.rename(folder / name)
    pointer = folder / (LATEST + ".partial")
    pointer.write_text(json.dumps({"folder": name, "step": step, **state}, indent=1))
    os.replace(pointer, folder / LATEST)
    for old in folder.glob("step-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Restores the latest checkpoint in place and returns its state, or `None` if there is none."""
    pointer = folder / LATEST
    if not pointer.exists():
        return None
    state = json.loads(pointer.read_text())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in load_file(folder / state["folder"] / "model.safetensors").items():
            parameters[name].copy_(value)
    for name, value in load_file(folder / state["folder"] / "optimizer.safetensors").items():
        parameter, key = name.rsplit("/", 1)
        optimizer.state[parameters[parameter]][key] = value
    return state
