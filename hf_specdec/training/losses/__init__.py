"""Losses of drafter training."""

from hf_specdec.training.losses.base import LossValue, TrainingLoss, Unrolled
from hf_specdec.training.losses.eagle3 import Eagle3Loss
from hf_specdec.training.losses.hass import HassLoss


__all__ = ["Eagle3Loss", "HassLoss", "LossValue", "TrainingLoss", "Unrolled"]
