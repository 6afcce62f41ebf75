"""When each step of plain or stock decoding ended."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria

from hf_specdec.timing import wait_for


__all__ = ["Clock"]


class Clock(StoppingCriteria):
    """Notes when each step of plain or stock decoding ended, with the number of columns then; never stops anything.

    On a GPU a step has ended when its token is there. To wait for that costs such decoding nothing: it asks the device itself
    whether to go on, right after its criteria.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        wait_for(input_ids.device)
        self.steps.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
