"""EAGLE-3."""

from hf_specdec.networks.eagle3.configuration import Eagle3Config
from hf_specdec.networks.eagle3.modeling import Eagle3Drafter


__all__ = ["Eagle3Config", "Eagle3Drafter"]
