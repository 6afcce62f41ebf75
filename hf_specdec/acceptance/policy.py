"""A small network that arbitrates between draft and target token, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_specdec.acceptance.arbitration import FEATURES
from hf_specdec.acceptance.tagged_file import read_tagged
from hf_specdec.errors import InvalidConfigError


__all__ = ["POLICY_NAME", "PolicyNetwork"]

POLICY_NAME = "policy.safetensors"  # in a folder

_FORMAT = "hf_specdec.arbitration_policy.v1"


@final
class PolicyNetwork(nn.Module):
    """An [`ArbitrationPolicy`]: standardised features, one hidden layer, the probability of taking the draft.

    Ours (arXiv 2605.24793 does not say what its policy is): `len(FEATURES) -> hidden_size -> 1` with a tanh between.

    Args:
        hidden_size (`int`): Width of the hidden layer.
        fingerprint (`str`): Which pair of models it was trained on, see [`pair_fingerprint`]; empty for unknown.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int = 64, fingerprint: str = "") -> None:
        super().__init__()
        if hidden_size < 1:
            raise InvalidConfigError(f"hidden_size must be at least 1, got {hidden_size}")
        self.fingerprint = fingerprint
        self.register_buffer("mean", torch.zeros(len(FEATURES)))
        self.register_buffer("scale", torch.ones(len(FEATURES)))
        self.hidden = nn.Linear(len(FEATURES), hidden_size)
        self.output = nn.Linear(hidden_size, 1)

    def logits(self, features: Tensor) -> Tensor:
        """`(...)`, the logarithm of the odds, for features of shape `(..., len(FEATURES))`."""
        standard = (features.to(self.mean) - self.mean) / self.scale
        return self.output(torch.tanh(self.hidden(standard)))[..., 0]

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """`(...)`, the probability of taking the draft."""
        return self.logits(features).sigmoid().to(features)

    @torch.no_grad()
    def standardise(self, features: Tensor) -> None:
        """Takes mean and spread of the features from samples of shape `(samples, len(FEATURES))`."""
        self.mean.copy_(features.mean(0))
        self.scale.copy_(features.std(0, correction=0).clamp(min=1e-3))

    def save(self, path: str | Path) -> None:
        """Writes the policy to a `.safetensors` file."""
        about = {"format": _FORMAT, "fingerprint": self.fingerprint, "features": ",".join(FEATURES)}
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, Path(path), metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> PolicyNetwork:
        """Reads a policy from its file, or from the folder that it lies in.

        Raises:
            [`InvalidConfigError`]: If the file is missing, damaged, none of ours, or expects other features.
        """
        path = Path(path) / POLICY_NAME if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise InvalidConfigError(f"there is no policy at {path}: train one with `specdec train cospec`")
        about, tensors = read_tagged(path, _FORMAT)
        if about.get("features") != ",".join(FEATURES):
            raise InvalidConfigError(f"{path} was trained on other features: train it anew with this version")
        try:
            policy = cls(len(tensors["hidden.bias"]), about.get("fingerprint", ""))
            policy.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise InvalidConfigError(
                f"{path} lacks tensors of a policy, or holds others ({error}): train one with `specdec train cospec`"
            ) from error
        return policy.eval()
