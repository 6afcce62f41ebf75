"""What drafters that run a network on their target's hidden states share."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.head_states import HeadStates
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.features import TargetFeatures
from hf_specdec.networks import DraftNetwork


__all__ = ["NetworkDrafter"]


class NetworkDrafter(DrafterBase, ABC):
    """Drafts from [`HeadStates`].

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        network ([`DraftNetwork`]): The network, attached to its target.
        features ([`TargetFeatures`]): The target's features in this run.
    """

    def __init__(self, settings: DraftSettings, network: DraftNetwork, features: TargetFeatures) -> None:
        super().__init__(settings)
        self.states = HeadStates(settings, network, features)

    @property
    def device(self) -> torch.device:
        """That of the network."""
        return self.states.network.device

    @property
    def can_drop_rows(self) -> bool:
        return True

    def keep_rows(self, kept: Tensor) -> None:
        self.states.keep_rows(kept)

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Not possible: transformers' own assisted decoding does not show its drafter the target's hidden states.

        Raises:
            [`UnsupportedModelError`]: Always.
        """
        raise UnsupportedModelError(
            f"{type(self.states.network).__name__} reads its target's hidden states, which transformers' own assisted decoding "
            "does not show: decode with speculative_config=..."
        )
