"""What an adapter saves: safetensors and JSON, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.rcsd import Recording, read_shards
from hf_specdec.training.rcsd.shards import ShardWriter


__all__ = ["OnlineState", "read_state", "write_state"]

_NETWORK, _REFERENCE = "network.safetensors", "reference.safetensors"
_COUNTS, _ROUNDS = "online.json", "rounds"


@dataclass(frozen=True)
class OnlineState:
    """Where an adapter stands.

    Args:
        network (`dict[str, torch.Tensor]`): The drafter's weights.
        reference (`dict[str, torch.Tensor]`): Those it began with.
        recordings (`tuple[Recording, ...]`): What it recorded, the oldest first.
        counts (`dict[str, int]`): Updates so far, and calls since the last one.
    """

    network: dict[str, Tensor]
    reference: dict[str, Tensor]
    recordings: tuple[Recording, ...]
    counts: dict[str, int]


def write_state(folder: Path, state: OnlineState) -> None:
    """Writes `folder`, in the place of an earlier state.

    Raises:
        [`InvalidConfigError`]: If `folder` holds something else.
    """
    if folder.exists() and not (folder / _COUNTS).exists():
        raise InvalidConfigError(f"{folder} exists and holds no state of an adapter: pass another folder")
    unfinished, old = (folder.with_name(f"{folder.name}.{end}") for end in ("unfinished", "old"))
    for stale in (unfinished, old):
        if stale.exists():
            shutil.rmtree(stale)
    unfinished.mkdir(parents=True)
    for name, weights in ((_NETWORK, state.network), (_REFERENCE, state.reference)):
        save_file({key: value.contiguous() for key, value in weights.items()}, unfinished / name)
    writer = ShardWriter(unfinished / _ROUNDS, texts_per_shard=256, max_shards=max(len(state.recordings), 1))
    for recording in state.recordings:
        writer.add(recording)
    writer.flush()
    (unfinished / _COUNTS).write_text(json.dumps(state.counts))
    if folder.exists():
        os.replace(folder, old)
    os.replace(unfinished, folder)
    if old.exists():
        shutil.rmtree(old)


def read_state(folder: Path, network: nn.Module) -> OnlineState:
    """Reads what [`write_state`] wrote for a network of this shape.

    Raises:
        [`InvalidConfigError`]: If there is no state, or it is that of another network.
    """
    if not (folder / _COUNTS).exists():
        raise InvalidConfigError(f"{folder} holds no state of an adapter: pass a folder that save() wrote")
    weights, reference = load_file(folder / _NETWORK), load_file(folder / _REFERENCE)
    own = {name: value.shape for name, value in network.state_dict().items()}
    if {name: value.shape for name, value in weights.items()} != own:
        raise InvalidConfigError(
            f"{folder} is the state of another network: restore it for the drafter that it was saved for"
        )
    counts = json.loads((folder / _COUNTS).read_text())
    recordings = read_shards(folder / _ROUNDS) if any((folder / _ROUNDS).iterdir()) else ()
    return OnlineState(weights, reference, tuple(recordings), counts)
