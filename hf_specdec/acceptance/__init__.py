"""Acceptance rules: one final, frozen class per file. `ACCEPTANCE` is the table of their names."""

from types import MappingProxyType

from hf_specdec.acceptance.easd import EASD
from hf_specdec.acceptance.exact import Exact


__all__ = ["ACCEPTANCE", "EASD", "Exact"]

ACCEPTANCE = MappingProxyType({"easd": EASD, "exact": Exact})
