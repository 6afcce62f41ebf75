"""The target's features of texts on the disk: computed once, in shards that appear whole, and read at each step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import InvalidConfigError
from hf_specdec.features import FeatureTap
from hf_specdec.files import write_at_once
from hf_specdec.networks import DraftNetwork
from hf_specdec.networks.target import weights_fingerprint
from hf_specdec.placement import device_of
from hf_specdec.training.texts import Text, TextBatch, check_head, digest_of, observe, padded


__all__ = ["FeatureShards", "FeatureSize"]

_SHARD, _SHARDS, _ABOUT = "features-{:04d}-{:08d}.safetensors", "features-*.safetensors", "about.json"


@dataclass(frozen=True)
class FeatureSize:
    """What is still to be written.

    Args:
        num_texts (`int`): Texts without features so far.
        num_bytes (`int`): What theirs will take.
        free_bytes (`int`): What is free where they go.
    """

    num_texts: int
    num_bytes: int
    free_bytes: int


@final
class FeatureShards:
    """Stands in for [`observe`] with features that [`~FeatureShards.write`] put on the disk; other texts are observed.

    Beside the states that the network taps, those after the target's final norm are kept, from which its head makes the
    logits. They are kept in the target's dtype: nothing is lost.

    Args:
        folder (`Path`): Where they are; made if it is not there. It serves one target and one choice of taps.
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): Says which states it reads.

    Raises:
        [`InvalidConfigError`]: If the folder holds features of another target or of other states.
    """

    def __init__(self, folder: Path, target: Any, network: DraftNetwork) -> None:
        config = undecorated_model(target).config.get_text_config(decoder=True)
        self.folder, self.taps = folder, network.taps_of(target)
        last, self._width = config.num_hidden_layers, config.hidden_size
        self._states = self.taps if last in self.taps else (*self.taps, last)
        self._last = self._states.index(last)
        self._about = {
            "hidden_states": list(self._states),
            "hidden_size": self._width,
            "dtype": str(target.dtype),
            "target": weights_fingerprint(target),
        }
        file = folder / _ABOUT
        if file.exists() and json.loads(file.read_text()) != self._about:
            raise InvalidConfigError(
                f"{folder} holds features {file.read_text()}, and this run needs {json.dumps(self._about)}: pass another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._token_bytes = len(self._states) * self._width * target.dtype.itemsize
        self._places: dict[str, Path] = {}
        self._find()

    def size_of(self, texts: Sequence[Text]) -> FeatureSize:
        """What [`~FeatureShards.write`] would write, before anything is computed."""
        missing = self._missing(texts)
        num_tokens = sum(len(text.tokens) for text in missing.values())
        return FeatureSize(len(missing), num_tokens * self._token_bytes, shutil.disk_usage(self.folder).free)

    def write(
        self,
        target: Any,
        network: DraftNetwork,
        texts: Sequence[Text],
        *,
        texts_per_shard: int = 64,
        accelerator: Accelerator | None = None,
        on_text: Callable[[int, int], None] | None = None,
    ) -> None:
        """Computes what is not there yet. Several processes share the texts, and each writes shards of its own.

        Args:
            target (`PreTrainedModel`), network ([`DraftNetwork`]): As before.
            texts (`Sequence[Text]`): The texts.
            texts_per_shard (`int`): Texts in a shard; a run that is killed loses no more.
            accelerator (`Accelerator`, *optional*): Knows the processes.
            on_text (`Callable[[int, int], None]`, *optional*): Called with the number of texts so far and of all.

        Raises:
            [`InvalidConfigError`]: If there is no room, or the target does more to its logits than its head does.
        """
        size, missing = self.size_of(texts), list(self._missing(texts).items())
        if size.num_bytes > size.free_bytes:
            raise InvalidConfigError(
                f"features of {size.num_texts} texts take {size.num_bytes} bytes and {size.free_bytes} are free in "
                f"{self.folder}: pass a folder elsewhere, fewer or shorter texts, or none to observe the target at each step"
            )
        rank, share = 0, missing
        if accelerator is not None and accelerator.num_processes > 1:
            accelerator.wait_for_everyone()  # all have looked before one writes
            rank, share = accelerator.process_index, missing[accelerator.process_index :: accelerator.num_processes]
        if rank == 0:
            write_at_once(self.folder / _ABOUT, json.dumps(self._about).encode())
        tap, waiting = FeatureTap(target, self._states), dict[str, Tensor]()
        for number, (name, text) in enumerate(share, start=1):
            waiting[name] = self._computed(target, network, tap, text, checks=number == 1)
            if len(waiting) == texts_per_shard or number == len(share):
                self._flush(rank, waiting)
                waiting = {}
            if on_text is not None:
                on_text(number, len(share))
        if accelerator is not None:
            accelerator.wait_for_everyone()
        self._find()

    def __call__(self, target: Any, network: DraftNetwork, texts: Sequence[Text]) -> TextBatch:
        """What [`observe`] gives; where all texts are there, with features of padding 0."""
        names = [digest_of([text]) for text in texts]
        if any(name not in self._places for name in names):
            return observe(target, network, texts)
        states, place = pad_sequence([self._read(name) for name in names], batch_first=True), network.device
        tokens, loss_mask = padded(texts)
        with torch.no_grad():
            logits = network.target_logits(self._last_of(states).to(place)).float()
        features = states[..., : len(self.taps) * self._width]
        return TextBatch(tokens.to(place), loss_mask.to(place), features.to(place, network.dtype), logits)

    def _computed(self, target: Any, network: DraftNetwork, tap: FeatureTap, text: Text, checks: bool) -> Tensor:
        ids = torch.tensor([text.tokens], device=device_of(target))
        with torch.no_grad(), tap.capture() as captured:
            logits = target(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        states = captured.features
        if checks:
            check_head(network, self._last_of(states).to(network.device), logits.to(network.device).float())
        return states[0].cpu().contiguous()

    def _last_of(self, states: Tensor) -> Tensor:
        return states[..., self._last * self._width : (self._last + 1) * self._width]

    def _missing(self, texts: Sequence[Text]) -> dict[str, Text]:
        named = {digest_of([text]): text for text in texts}
        return {name: text for name, text in named.items() if name not in self._places}

    def _read(self, name: str) -> Tensor:
        with safe_open(self._places[name], framework="pt") as shard:
            states: Tensor = shard.get_tensor(name)
        return states

    def _flush(self, rank: int, tensors: dict[str, Tensor]) -> None:
        number = len(list(self.folder.glob(f"features-{rank:04d}-*.safetensors")))
        file = self.folder / _SHARD.format(rank, number)
        unfinished = file.with_suffix(".unfinished")
        save_file(tensors, unfinished)
        os.replace(unfinished, file)

    def _find(self) -> None:
        for file in sorted(self.folder.glob(_SHARDS)):
            if file not in self._places.values():
                with safe_open(file, framework="pt") as shard:
                    self._places |= dict.fromkeys(shard.keys(), file)
