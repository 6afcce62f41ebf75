"""Acceptance rules: one final, frozen class per file. `ACCEPTANCE` is the table of their names."""

from types import MappingProxyType

from hf_specdec.acceptance.arbitration import FEATURES, ArbitrationPolicy, arbitration_features
from hf_specdec.acceptance.asd import ASD
from hf_specdec.acceptance.bild import BiLD
from hf_specdec.acceptance.cascade_chow import CascadeChow
from hf_specdec.acceptance.cascade_diff import CascadeDiff
from hf_specdec.acceptance.cascade_opt import CascadeOpt
from hf_specdec.acceptance.cascade_token import CascadeToken
from hf_specdec.acceptance.correction_memory import CorrectionMemory, pair_fingerprint
from hf_specdec.acceptance.cospec import CoSpec
from hf_specdec.acceptance.csd import CSD
from hf_specdec.acceptance.ears import EARS
from hf_specdec.acceptance.easd import EASD
from hf_specdec.acceptance.emission import emitted_law, step_tv
from hf_specdec.acceptance.ensemble import Ensemble
from hf_specdec.acceptance.exact import Exact
from hf_specdec.acceptance.fly import FLy
from hf_specdec.acceptance.fsd import FSD
from hf_specdec.acceptance.guard import EarlyExactGuard
from hf_specdec.acceptance.judge import Judge
from hf_specdec.acceptance.lenience import Lenience
from hf_specdec.acceptance.lossy_eps import LossyEps
from hf_specdec.acceptance.mars import MARS
from hf_specdec.acceptance.mentored import Mentored
from hf_specdec.acceptance.nucleus import Nucleus
from hf_specdec.acceptance.policy import POLICY_NAME, PolicyNetwork
from hf_specdec.acceptance.relaxed import RelaxedRule
from hf_specdec.acceptance.relaxed_thinking import RelaxedThinking
from hf_specdec.acceptance.topk import TopK
from hf_specdec.acceptance.tv_budget import TVBudget
from hf_specdec.acceptance.typical import Typical


__all__ = [
    "ACCEPTANCE",
    "ASD",
    "CSD",
    "EARS",
    "EASD",
    "FEATURES",
    "FSD",
    "MARS",
    "POLICY_NAME",
    "ArbitrationPolicy",
    "BiLD",
    "CascadeChow",
    "CascadeDiff",
    "CascadeOpt",
    "CascadeToken",
    "CoSpec",
    "CorrectionMemory",
    "EarlyExactGuard",
    "Ensemble",
    "Exact",
    "FLy",
    "Judge",
    "Lenience",
    "LossyEps",
    "Mentored",
    "Nucleus",
    "PolicyNetwork",
    "RelaxedRule",
    "RelaxedThinking",
    "TVBudget",
    "TopK",
    "Typical",
    "arbitration_features",
    "emitted_law",
    "pair_fingerprint",
    "step_tv",
]

ACCEPTANCE = MappingProxyType(
    {
        "asd": ASD,
        "bild": BiLD,
        "cascade_chow": CascadeChow,
        "cascade_diff": CascadeDiff,
        "cascade_opt": CascadeOpt,
        "cascade_token": CascadeToken,
        "cospec": CoSpec,
        "csd": CSD,
        "ears": EARS,
        "easd": EASD,
        "ensemble": Ensemble,
        "exact": Exact,
        "fly": FLy,
        "fsd": FSD,
        "judge": Judge,
        "lenience": Lenience,
        "lossy_eps": LossyEps,
        "mars": MARS,
        "mentored": Mentored,
        "nucleus": Nucleus,
        "relaxed_thinking": RelaxedThinking,
        "topk": TopK,
        "typical": Typical,
    }
)
