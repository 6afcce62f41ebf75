"""Reading a drafter's files: configuration and weights, from a folder or the Hub, in one file or in shards."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError
from safetensors.torch import load_file
from torch import Tensor

from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError
from hf_specdec.networks.tensor_names import PICKLED, SAFE, tensor_names


__all__ = ["Checkpoint", "is_draft_checkpoint", "is_exit_heads", "read_checkpoint", "read_json_object"]

_MARKERS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
_TYPES = ("eagle_drafter", "eagle3_drafter")
_EXIT_HEADS = "hf_specdec_exit_heads"


@dataclass(frozen=True)
class Checkpoint:
    """What a drafter's folder holds.

    Args:
        name (`str`): Folder or Hub id, for messages.
        config (`dict[str, Any]`): `config.json`.
        tensors (`dict[str, torch.Tensor]`): The weights by the checkpoint's own names.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_checkpoint(
    id_or_path: str | os.PathLike[str], *, revision: str | None = None, allow_bin: bool = False
) -> Checkpoint:
    """Reads `config.json` and the weights.

    Args:
        id_or_path (`str` or path): Folder or Hub id.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        allow_bin (`bool`): Whether `pytorch_model.bin` may be read where there are no safetensors; with `weights_only=True`,
            which unpickles tensors and nothing else.

    Raises:
        [`InvalidConfigError`]: If a file is missing or malformed, or only a pickle is there and `allow_bin` is False.
    """
    folder = _folder(id_or_path, revision, allow_bin)
    config = read_json_object(folder / "config.json")
    if (folder / SAFE).is_file() or (folder / f"{SAFE}.index.json").is_file():
        tensors = _read_weights(folder, SAFE)
    elif not ((folder / PICKLED).is_file() or (folder / f"{PICKLED}.index.json").is_file()):
        raise InvalidConfigError(f"{id_or_path} holds no {SAFE}: expected a drafter's weights there")
    elif allow_bin:
        tensors = _read_weights(folder, PICKLED)
    else:
        raise InvalidConfigError(
            f"{id_or_path} holds {PICKLED} only, a pickle. Pass allow_bin=True to read it with weights_only=True, and save it "
            "again as safetensors"
        )
    return Checkpoint(str(id_or_path), config, tensors)


def is_draft_checkpoint(id_or_path: str | os.PathLike[str]) -> bool:
    """Whether a folder or Hub id holds a drafter network, which would otherwise load as a one-layer Llama with random parts.

    It is told by its config, and where that looks like a one-layer Llama's by its `fc.weight`, which no causal LM has.
    """
    path = _fetch(id_or_path, "config.json")
    if path is None:
        return False  # whoever loads it next says what is wrong with it
    config = read_json_object(path)
    named = any("eagle" in str(each).lower() for each in config.get("architectures") or [])
    if named or config.get("model_type") in _TYPES or any(key in config for key in _MARKERS):
        return True
    if config.get("num_hidden_layers") != 1:
        return False
    names = tensor_names(partial(_fetch, id_or_path))
    # EAGLE-1 configs of the LLaMA-3 family say whether `fc` has a bias; no other one-layer Llama config has that field.
    return "bias" in config if names is None else "fc.weight" in names


def is_exit_heads(id_or_path: str | os.PathLike[str]) -> bool:
    """Whether a folder or Hub id holds exit heads."""
    path = _fetch(id_or_path, "config.json")
    return path is not None and read_json_object(path).get("model_type") == _EXIT_HEADS


def _fetch(id_or_path: str | os.PathLike[str], name: str) -> Path | None:
    """A file of a folder or of a Hub repository, or None where there is none or it cannot be reached."""
    if Path(id_or_path).is_dir():
        path = Path(id_or_path) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(id_or_path), name))
    except (EntryNotFoundError, RepositoryNotFoundError, HFValidationError, OSError):
        return None


def _folder(id_or_path: str | os.PathLike[str], revision: str | None, allow_bin: bool) -> Path:
    if Path(id_or_path).is_dir():
        return Path(id_or_path)
    if Path(id_or_path).is_absolute() or str(id_or_path).startswith("."):
        raise InvalidConfigError(f"there is no folder {id_or_path}")
    patterns = ["config.json", "model*.safetensors", f"{SAFE}.index.json"]
    if allow_bin:
        patterns += ["pytorch_model*.bin", f"{PICKLED}.index.json"]
    return Path(snapshot_download(str(id_or_path), revision=revision, allow_patterns=patterns))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a drafter's folder.

    Raises:
        [`InvalidConfigError`]: If there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise InvalidConfigError(f"{path.parent} holds no {path.name}: expected a drafter's folder or Hub id")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"{path} must hold one JSON object, got {type(values).__name__}")
    return values


def _read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    index = folder / f"{name}.index.json"
    files = [folder / name]
    if not files[0].is_file():
        shards = read_json_object(index).get("weight_map", {})
        files = [folder / shard for shard in sorted(set(shards.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise InvalidConfigError(f"{index.name} in {folder} names files that are not there: {absent}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = load_file(file) if name == SAFE else torch.load(file, map_location="cpu", weights_only=True)
        if doubled := sorted(tensors.keys() & part.keys()):
            raise IncompatibleDraftError(f"{file.name} repeats tensors of another shard: {doubled}")
        tensors |= part
    return tensors
