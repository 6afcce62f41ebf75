"""Losses of drafter training."""

from hf_specdec.training.losses.base import DraftedRounds, LossValue, PairLoss, TrainingLoss, Unrolled
from hf_specdec.training.losses.dpo import DPOLoss
from hf_specdec.training.losses.eagle3 import Eagle3Loss
from hf_specdec.training.losses.eal import EALLoss
from hf_specdec.training.losses.grpo import GRPOLoss
from hf_specdec.training.losses.hass import HassLoss
from hf_specdec.training.losses.kl import KLLoss
from hf_specdec.training.losses.lk import LKLoss
from hf_specdec.training.losses.reference import NearReferenceLoss
from hf_specdec.training.losses.topk import TopKLoss
from hf_specdec.training.losses.vat import VATLoss
from hf_specdec.training.losses.wtv import WTVLoss


__all__ = [
    "DPOLoss",
    "DraftedRounds",
    "EALLoss",
    "Eagle3Loss",
    "GRPOLoss",
    "HassLoss",
    "KLLoss",
    "LKLoss",
    "LossValue",
    "NearReferenceLoss",
    "PairLoss",
    "TopKLoss",
    "TrainingLoss",
    "Unrolled",
    "VATLoss",
    "WTVLoss",
]
