"""The glossary: the only things that cross a seam between the loop, the drafters, the rules and the controllers.

All are batched: `batch` rows, of which each may draft, accept and finish on its own. `p` is the target's law, `q` the
draft's. A *draft* token is proposed by a drafter, an *accepted* one passed the rule, the *correction* replaces the first
rejected one and the *bonus* follows a draft that was accepted whole.
"""

from hf_specdec.records.drafting import Budget, Context, Draft, Drafter, DropsRows, Forecast, Plan, Unread
from hf_specdec.records.judging import (
    AcceptanceRule,
    Evidence,
    Explainer,
    Judged,
    KnownLaw,
    Observer,
    Outcome,
    Place,
    Verdict,
    choice_law,
)
from hf_specdec.records.rounds import LengthController, LengthSchedule, Round


__all__ = [
    "AcceptanceRule",
    "Budget",
    "Context",
    "Draft",
    "Drafter",
    "DropsRows",
    "Evidence",
    "Explainer",
    "Forecast",
    "Judged",
    "KnownLaw",
    "LengthController",
    "LengthSchedule",
    "Observer",
    "Outcome",
    "Place",
    "Plan",
    "Round",
    "Unread",
    "Verdict",
    "choice_law",
]
