"""Drafter networks: small models that read their target's hidden states."""

from types import MappingProxyType

from hf_specdec.networks.auto import AutoDrafter
from hf_specdec.networks.base import DraftNetwork, DraftOutput
from hf_specdec.networks.eagle import EagleConfig, EagleDrafter
from hf_specdec.networks.eagle3 import Eagle3Config, Eagle3Drafter


__all__ = [
    "FAMILIES",
    "AutoDrafter",
    "DraftNetwork",
    "DraftOutput",
    "Eagle3Config",
    "Eagle3Drafter",
    "EagleConfig",
    "EagleDrafter",
]

FAMILIES: MappingProxyType[str, type[DraftNetwork]] = MappingProxyType({"eagle": EagleDrafter, "eagle3": Eagle3Drafter})
