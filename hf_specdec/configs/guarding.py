"""The guard that configs put around relaxed rules."""

from __future__ import annotations

from dataclasses import replace

from hf_specdec.acceptance import ACCEPTANCE, EarlyExactGuard, Exact, RelaxedRule, TVBudget
from hf_specdec.acceptance.wrapping import WrappingRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule


__all__ = ["DEFAULT_GUARD", "budgeted", "guarded", "rule_of"]

DEFAULT_GUARD = 2  # tokens, as published (arXiv 2610.08678)


def guarded(rule: AcceptanceRule, guard: EarlyExactGuard | int | str | None) -> AcceptanceRule:
    """The rule, made exact for the first `guard` generated tokens, or as an [`EarlyExactGuard`] without a rule of its own says;
    None leaves it as it is.

    Raises:
        [`InvalidConfigError`]: If `guard` is neither.
    """
    if guard is None:
        return rule
    if isinstance(guard, EarlyExactGuard):
        if not isinstance(guard.inner, Exact):
            raise InvalidConfigError(
                f"guard= goes around the rule of the config, and this one is around {type(guard.inner).__name__} "
                "already: leave its rule out, as in guard=EarlyExactGuard(length=2), or pass it as acceptance=..."
            )
        return rule if rule.lossless else replace(guard, inner=rule)
    if isinstance(guard, bool) or not isinstance(guard, int) or guard < 0:
        raise InvalidConfigError(
            f"guard must be a number of tokens (an integer of at least 0), an EarlyExactGuard or None, got {guard!r}"
        )
    return rule if rule.lossless else EarlyExactGuard(rule, guard)


def budgeted(
    rule: AcceptanceRule, diagnostics: bool, max_step_tv: float | None, tv_budget: float | None
) -> AcceptanceRule:
    """The rule with the limits of a config; itself where there are none, or where it is lossless anyway.

    Raises:
        [`InvalidConfigError`]: If a limit is negative or no number.
    """
    if not isinstance(diagnostics, bool):
        raise InvalidConfigError(f"diagnostics must be True or False, got {diagnostics!r}")
    limits = {"max_step_tv": max_step_tv, "tv_budget": tv_budget}
    for name, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float | None):
            raise InvalidConfigError(f"{name} must be a number of at least 0 or None, got {limit!r}")
    given = {name: float(limit) for name, limit in limits.items() if limit is not None}
    limited = TVBudget(rule, **given)  # also where it is not used: the limits are checked
    return limited if (diagnostics or given) and not rule.lossless else rule


def rule_of(acceptance: AcceptanceRule | str, guard: EarlyExactGuard | int | str | None) -> AcceptanceRule:
    """A rule, or the one of that name, behind its guard; see [`hf_specdec.SpeculativeConfig`]."""
    if isinstance(acceptance, str) and acceptance not in ACCEPTANCE:
        raise InvalidConfigError(f"unknown acceptance {acceptance!r}; known: {', '.join(sorted(ACCEPTANCE))}")
    if isinstance(acceptance, TVBudget):  # its ledger must start anew with each call
        raise InvalidConfigError(
            "acceptance is a TVBudget, which serves one run: pass its rule, and max_step_tv=... and tv_budget=... to the config"
        )
    rule: AcceptanceRule = ACCEPTANCE[acceptance]() if isinstance(acceptance, str) else acceptance
    if guard == "auto":
        return guarded(rule, DEFAULT_GUARD) if _wants_guard(rule) else rule
    return guarded(rule, guard)


def _wants_guard(rule: AcceptanceRule) -> bool:
    """Whether a relaxed rule of this package decides without a guard, also where another rule only looks on."""
    while isinstance(rule, WrappingRule) and not isinstance(rule, EarlyExactGuard):
        rule = rule.inner
    return isinstance(rule, RelaxedRule)
