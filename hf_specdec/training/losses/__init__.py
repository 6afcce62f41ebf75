"""Losses of drafter training."""

from hf_specdec.training.losses.base import LossValue, TrainingLoss, Unrolled


__all__ = ["LossValue", "TrainingLoss", "Unrolled"]
