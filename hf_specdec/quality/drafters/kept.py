"""What drafters were measured to do, kept in files: a run that was killed measures nothing twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch

from hf_specdec.files import write_at_once
from hf_specdec.networks import DraftNetwork
from hf_specdec.networks.target import weights_fingerprint
from hf_specdec.training.acceptance import Measured, measure


__all__ = ["KeptMeasures"]


@final
class KeptMeasures:
    """Stands in for [`measure`], and measures what is not in its folder.

    Args:
        target (`PreTrainedModel`): The target.
        folder (`Path`, *optional*): Receives a file for each drafter, prompts and options; None keeps nothing.
    """

    def __init__(self, target: Any, folder: Path | None) -> None:
        self.target, self.folder = target, folder
        self._target_weights = None if folder is None else weights_fingerprint(target)

    def __call__(self, network: DraftNetwork, prompts: Sequence[Sequence[int]], **options: Any) -> list[Measured]:
        """What [`measure`] gives of a drafter.

        Args:
            network ([`DraftNetwork`]): The drafter.
            prompts (`Sequence[Sequence[int]]`): Token ids.
            options: Those of [`measure`].
        """
        if self.folder is None:
            return measure(self.target, network, prompts, **options)
        about = [self._target_weights, _digest(network), [list(prompt) for prompt in prompts], options]
        file = self.folder / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"
        if file.exists():
            return [Measured(row["tau"], tuple(row["text"])) for row in json.loads(file.read_text())]
        found = measure(self.target, network, prompts, **options)
        write_at_once(file, json.dumps([asdict(each) for each in found]).encode())
        return found


def _digest(network: DraftNetwork) -> str:
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
