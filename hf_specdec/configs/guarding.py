"""The guard that configs put around relaxed rules."""

from __future__ import annotations

from hf_specdec.acceptance import ACCEPTANCE, EarlyExactGuard, RelaxedRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule


__all__ = ["DEFAULT_GUARD", "guarded", "rule_of"]

DEFAULT_GUARD = 2  # tokens, as published (arXiv 2610.08678)


def guarded(rule: AcceptanceRule, guard: int | str | None) -> AcceptanceRule:
    """The rule, made exact for the first `guard` generated tokens; None leaves it as it is.

    Raises:
        [`InvalidConfigError`]: If `guard` is no number of tokens.
    """
    if guard is None:
        return rule
    if isinstance(guard, bool) or not isinstance(guard, int) or guard < 0:
        raise InvalidConfigError(f"guard must be a number of tokens (an integer of at least 0) or None, got {guard!r}")
    return rule if rule.lossless else EarlyExactGuard(rule, guard)


def rule_of(acceptance: AcceptanceRule | str, guard: int | str | None) -> AcceptanceRule:
    """A rule, or the one of that name, behind its guard; see [`hf_specdec.SpeculativeConfig`]."""
    if isinstance(acceptance, str) and acceptance not in ACCEPTANCE:
        raise InvalidConfigError(f"unknown acceptance {acceptance!r}; known: {', '.join(sorted(ACCEPTANCE))}")
    rule: AcceptanceRule = ACCEPTANCE[acceptance]() if isinstance(acceptance, str) else acceptance
    if guard == "auto":
        return guarded(rule, DEFAULT_GUARD) if isinstance(rule, RelaxedRule) else rule
    return guarded(rule, guard)
