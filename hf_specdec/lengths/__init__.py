"""Length controllers: how far to draft. Each is immutable; what it learns during a run lives in its schedule."""

from types import MappingProxyType

from hf_specdec.lengths.additive import AdditiveLength
from hf_specdec.lengths.confidence import ConfidenceLength
from hf_specdec.lengths.constant import ConstantLength
from hf_specdec.lengths.costs import CostTable
from hf_specdec.lengths.goodput import GoodputLength
from hf_specdec.lengths.noted import NotedLength
from hf_specdec.lengths.tree import GoodputTree, TreeLength


__all__ = [
    "LENGTHS",
    "AdditiveLength",
    "ConfidenceLength",
    "ConstantLength",
    "CostTable",
    "GoodputLength",
    "GoodputTree",
    "NotedLength",
    "TreeLength",
]

LENGTHS = MappingProxyType(
    {
        "additive": AdditiveLength,
        "confidence": ConfidenceLength,
        "constant": ConstantLength,
        "goodput": GoodputLength,
        "goodput_tree": GoodputTree,
        "tree": TreeLength,
    }
)
