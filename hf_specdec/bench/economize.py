"""The package economize as a peer: the same prompts through its own decoding loop."""

from __future__ import annotations

import importlib
import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.bench.batched import eos_token_ids
from hf_specdec.errors import InvalidConfigError
from hf_specdec.linear import PackedLinear, pack_linears


__all__ = ["EconomizeArm", "EconomizeRun", "economize_problem"]


@dataclass(frozen=True)
class EconomizeArm:
    """What economize shall do.

    Args:
        technique (`str`): `"lookup"` or `"draft_model"`.
        length (`int`): Drafts per cycle at most.
    """

    technique: str
    length: int


def economize_problem() -> str | None:
    """Why economize cannot take part; None where it can."""
    if importlib.util.find_spec("economize") is None:
        return "the package economize is not installed: pip install economize, or leave these arms out"
    return None


class EconomizeRun:
    """Decodes prompts with economize. Its `decode` is used, since its `generate` fails on transformers 5.24.

    Args:
        arm ([`EconomizeArm`]): What it shall do.
        target (`PreTrainedModel`): The model; economize leaves it as it is.
        assistant (`PreTrainedModel`, *optional*): The draft model. economize loads it again from where it was loaded from; the
            copy is packed if the original is.
        temperature (`float`, *optional*): Samples at this temperature; greedy by default.
    """

    def __init__(self, arm: EconomizeArm, target: Any, assistant: Any | None, temperature: float | None = None) -> None:
        economize: Any = importlib.import_module("economize")
        self._economize, self._temperature = economize, temperature
        self._has_draft_model = arm.technique == "draft_model"
        self._eos = eos_token_ids(target)
        verifier = {} if temperature is None else {"verifier": "rejection"}
        decoding = economize.DecodeConfig(cycle_length=arm.length + 1, **verifier)
        technique: Any = importlib.import_module(f"economize.techniques.{arm.technique}")
        if not self._has_draft_model:
            self._model = economize.apply(target, technique.LookupConfig(), decoding=decoding)
            return
        name = "" if assistant is None else assistant.config.name_or_path
        if not name:
            raise InvalidConfigError(
                "economize loads the draft model itself: pass one that was loaded from a folder or the Hub"
            )
        self._model = economize.apply(target, technique.DraftModelConfig(model=name), decoding=decoding)
        if any(isinstance(module, PackedLinear) for module in assistant.modules()):  # type: ignore[union-attr]
            pack_linears(self._model.techniques["draft_model"].draft_model)

    def decode(self, input_ids: torch.Tensor, max_new_tokens: int, seed: int = 0) -> tuple[list[int], int, int, float]:
        """Decodes one prompt.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): The prompt.
            max_new_tokens (`int`): New tokens at most.
            seed (`int`): Of the sampler.

        Returns:
            The new tokens, and of the decode phase its tokens, its cycles and its seconds. With a draft model it begins after
            the first cycle, which holds the draft's prompt pass, as for transformers' own assisted decoding.
        """
        times: list[float] = []

        def stop(tokens: torch.Tensor) -> bool:
            times.append(time.perf_counter())
            return int(tokens[-1]) in self._eos

        sampled = self._temperature is not None
        selector = self._economize.TopPSampler(temperature=self._temperature, seed=seed) if sampled else None
        result = self._model.decode(input_ids, max_new_tokens, selector=selector, stop=stop)
        tokens, first = result.tokens.tolist(), 1
        cycles = sum(event.kind == "exact" for event in result.cost.events) - 1  # without the prompt's own pass
        if self._has_draft_model and cycles > 1:
            first, cycles = 2 + result.acceptance[0][1], cycles - 1
        return tokens, len(tokens) - first, cycles, times[-1] - times[min(first, len(times)) - 1]
