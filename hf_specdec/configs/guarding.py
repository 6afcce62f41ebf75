"""The guard that configs put around relaxed rules."""

from __future__ import annotations

from hf_specdec.acceptance import EarlyExactGuard
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule


__all__ = ["DEFAULT_GUARD", "guarded"]

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
