"""Which target a drafter belongs to: its tokenizer and its base weights, as short hashes in the drafter's config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.compatibility import saved_tokenizer
from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.placement import is_sharded


__all__ = ["TargetIdentity", "tokenizer_hash", "weights_fingerprint"]

_SAMPLES = 64


@dataclass(frozen=True)
class TargetIdentity:
    """What a checkpoint says about its target. Ours; no published checkpoint carries it, and a missing hash is not compared.

    Args:
        name (`str`, *optional*): Folder or Hub id.
        tokenizer (`str`, *optional*): [`tokenizer_hash`] of its tokenizer.
        weights (`str`, *optional*): [`weights_fingerprint`] of its weights.
    """

    name: str | None = None
    tokenizer: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, target: Any, tokenizer: Any = None) -> TargetIdentity:
        """The identity of a loaded target; its tokenizer is looked for in the local cache if it is not given."""
        name = target.config.name_or_path or None
        tokenizer = saved_tokenizer(name) if tokenizer is None and name else tokenizer
        return cls(name, None if tokenizer is None else tokenizer_hash(tokenizer), weights_fingerprint(target))

    @classmethod
    def of_config(cls, config: Any) -> TargetIdentity:
        """What a drafter's config says."""
        return cls(config.target_name, config.target_tokenizer, config.target_weights)

    def check(self, target: Any, tokenizer: Any = None) -> None:
        """Raises an [`IncompatibleDraftError`] if a hash is known on both sides and differs."""
        if self.tokenizer is None and self.weights is None:
            return
        found = TargetIdentity.of(target, tokenizer)
        for what, ours, theirs in (
            ("tokenizer", self.tokenizer, found.tokenizer),
            ("base weights", self.weights, found.weights),
        ):
            if None not in (ours, theirs) and ours != theirs:
                raise IncompatibleDraftError(
                    f"the drafter was made for {self.name or 'a target'} whose {what} have the hash {ours}, but those of "
                    f"{found.name or type(target).__name__} have {theirs}: load the target that the drafter was trained for"
                )


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary: every token with its id."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def weights_fingerprint(target: nn.Module) -> str | None:
    """SHA-256 of 64 evenly spaced values of each parameter, rounded to bfloat16, so that it is one in float32 and in bfloat16.

    None where the stored values are not the weights (quantised, adapted or sharded models), or float16 has rounded them before.
    """
    quantized = getattr(target, "hf_quantizer", None) is not None or getattr(target, "is_quantized", False)
    if quantized or is_sharded(target):
        return None
    samples: dict[str, bytes] = {}
    for name, values in _weights(target):
        if "lora_" in name or values.device.type == "meta" or values.dtype == torch.float16:
            return None
        if values.is_floating_point():
            samples[name] = f"{name}{tuple(values.shape)}".encode() + _sample(values)
    return hashlib.sha256(b"".join(samples[name] for name in sorted(samples))).hexdigest() if samples else None


def _weights(target: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dictionary, module by module: packed layers unpack their weight for it, and one copy at a time is enough."""
    for prefix, module in target.named_modules():
        own: dict[str, Tensor] = {}
        module._save_to_state_dict(own, f"{prefix}." if prefix else "", keep_vars=False)
        yield from own.items()


def _sample(values: Tensor) -> bytes:
    flat = values.detach().reshape(-1)
    count = min(_SAMPLES, len(flat))
    places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return bytes(flat[places].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
