"""Checking a claim: is speculative greedy text the plain greedy text, and where it is not, is that rounding or a fault?"""

from hf_specdec.losslessness.checking import Prompt, default_tolerance, verify_lossless
from hf_specdec.losslessness.report import Comparison, LosslessReport


__all__ = ["Comparison", "LosslessReport", "Prompt", "default_tolerance", "verify_lossless"]
