"""Fitting exit heads to a frozen target."""

from hf_specdec.training.exit_heads.ablation import FEWEST_EXITS, ablate, precision_at_coverage
from hf_specdec.training.exit_heads.agreement import ExitAgreement, agreement_along, measure_agreement
from hf_specdec.training.exit_heads.fitting import fit_exit_heads
from hf_specdec.training.exit_heads.held_out import HeldOut
from hf_specdec.training.exit_heads.observing import Observation, Observer
from hf_specdec.training.exit_heads.options import FitLog, FitOptions
from hf_specdec.training.exit_heads.replay import ExitTrace, LayerCosts, Replayed, best_policy, replay, trace_exits
from hf_specdec.training.exit_heads.ridge import NormalEquations


__all__ = [
    "FEWEST_EXITS",
    "ExitAgreement",
    "ExitTrace",
    "FitLog",
    "FitOptions",
    "HeldOut",
    "LayerCosts",
    "NormalEquations",
    "Observation",
    "Observer",
    "Replayed",
    "ablate",
    "agreement_along",
    "best_policy",
    "fit_exit_heads",
    "measure_agreement",
    "precision_at_coverage",
    "replay",
    "trace_exits",
]
