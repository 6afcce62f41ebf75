"""Length controllers: how far to draft. Each is immutable; what it learns during a run lives in its schedule."""

from hf_specdec.lengths.additive import AdditiveLength
from hf_specdec.lengths.confidence import ConfidenceLength
from hf_specdec.lengths.constant import ConstantLength


__all__ = ["LENGTHS", "AdditiveLength", "ConfidenceLength", "ConstantLength"]

LENGTHS = {"additive": AdditiveLength, "confidence": ConfidenceLength, "constant": ConstantLength}
