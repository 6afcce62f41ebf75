"""Drafters side by side: acceptance lengths by number of drafts, with intervals, as RCSD's tables show them."""

from hf_specdec.quality.drafters.comparison import Arm, compare, compare_drafters
from hf_specdec.quality.drafters.report import table, write_report


__all__ = ["Arm", "compare", "compare_drafters", "table", "write_report"]
