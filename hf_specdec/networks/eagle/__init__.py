"""EAGLE-1 and HASS."""

from hf_specdec.networks.eagle.configuration import EagleConfig
from hf_specdec.networks.eagle.modeling import EagleDrafter


__all__ = ["EagleConfig", "EagleDrafter"]
