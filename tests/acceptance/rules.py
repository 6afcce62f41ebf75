"""Every relaxed rule once switched on, in a way that acts on random tables of six tokens, and once switched off."""

import math

import torch

from hf_specdec.acceptance import (
    ASD,
    CSD,
    EARS,
    EASD,
    FSD,
    MARS,
    BiLD,
    CascadeChow,
    CascadeDiff,
    CascadeOpt,
    CascadeToken,
    CorrectionMemory,
    CoSpec,
    Ensemble,
    FLy,
    Judge,
    Lenience,
    LossyEps,
    Mentored,
    Nucleus,
    RelaxedThinking,
    TopK,
    Typical,
)


__all__ = ["OFF", "ON", "familiar_memory"]


def familiar_memory(vocab_size=6, times=3):
    """A memory that has met every pair of tokens."""
    memory = CorrectionMemory()
    pairs = [(x, t) for x in range(vocab_size) for t in range(vocab_size) if x != t]
    for _ in range(times):
        memory.add(pairs)
    return memory


def half(features):
    return torch.full(features.shape[:2], 0.7)


def even_tokens(evidence):
    return (evidence.tokens % 2 == 0).double()


def never(evidence):
    return torch.zeros(evidence.tokens.shape)


ON = {
    "asd": ASD(budget=2.0, max_exceptions=2),
    "bild": BiLD(2.5),
    "cascade_chow": CascadeChow(0.6),
    "cascade_diff": CascadeDiff(0.2),
    "cascade_opt": CascadeOpt(0.9),
    "cascade_token": CascadeToken(0.75),
    "cospec": CoSpec(half),
    "csd": CSD(frequency_threshold=2, score_ratio=0.2, memory=familiar_memory(), learn=False),
    "ears": EARS(0.5),
    "easd": EASD(0.5, 0.5, 0.0),
    "ensemble": Ensemble(0.6),
    "fly": FLy(window=2, entropy_threshold=0.1),
    "fsd": FSD(0.4),
    "judge": Judge(even_tokens),
    "lenience": Lenience(0.5),
    "lossy_eps": LossyEps(0.3),
    "mars": MARS(0.2),
    "mentored": Mentored(0.1),
    "nucleus": Nucleus(0.8),
    "relaxed_thinking": RelaxedThinking(end_token_id=5, min_ratio=0.1),
    "topk": TopK(3),
    "typical": Typical(),
}
OFF = {
    "asd": ASD(budget=0.0),
    "bild": BiLD(0.0),
    "cascade_chow": CascadeChow(-math.inf),
    "cascade_diff": CascadeDiff(-math.inf),
    "cascade_opt": CascadeOpt(-math.inf),
    "cascade_token": CascadeToken(-math.inf),
    "cospec": CoSpec(half, threshold=1.0),
    "csd": CSD(frequency_threshold=math.inf, memory=familiar_memory(64), learn=False),
    "ears": EARS(0.0),
    "easd": EASD(math.inf, math.inf),
    "ensemble": Ensemble(1.0),
    "fly": FLy(entropy_threshold=math.inf),
    "fsd": FSD(0.0),
    "judge": Judge(never),
    "lenience": Lenience(1.0),
    "lossy_eps": LossyEps(0.0),
    "mars": MARS(1.0),
    "mentored": Mentored(0.0),
    "nucleus": Nucleus(0.0),
    "relaxed_thinking": RelaxedThinking(end_token_id=5, top_k=0),
    "topk": TopK(0),
    "typical": Typical(1.0, math.inf),
}
