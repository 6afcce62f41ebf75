"""The losses of the demo pair: LayerSkip's for the target, distillation for the draft.

Published (LayerSkip, arXiv 2404.16710): layer dropout that grows exponentially with depth and with
training time; cross-entropy at intermediate layers through the shared final norm and head; only a
few exits per step, in rotation.

[ours]: a dropped layer is dropped for the whole batch (the paper drops it per sample), which saves
its computation; the exits rotate over seven depths, one a step, with one flat weight (the paper's
weights grow with depth); the draft is distilled in the same loop from the detached final logits.
"""

import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor


EXIT_WEIGHT = 0.4
EXITS_PER_STEP = 1
MAX_LAYER_DROPOUT = 0.1
DRAFT_HARD_WEIGHT = 0.1


def exit_depths(num_layers: int) -> list[int]:
    """The seven (or fewer) inner depths that are trained as exits, an eighth of the model apart."""
    return sorted({round(num_layers * k / 8) for k in range(1, 8)} - {0, num_layers})


def exits_at(step: int, num_layers: int) -> list[int]:
    """The depths whose exit loss is computed at `step`."""
    depths = exit_depths(num_layers)
    count = min(EXITS_PER_STEP, len(depths))
    return [depths[(step + i * max(1, len(depths) // 2)) % len(depths)] for i in range(count)]


def dropped_layers(rng: random.Random, num_layers: int, progress: float) -> frozenset[int]:
    """Layers to skip at a step; `progress` runs from 0 to 1 over the training.

    The rate is `p_max * S(t) * D(l)`, both factors `exp(x ln 2) - 1`, which runs from 0 to 1.
    """
    time_factor = math.exp(progress * math.log(2)) - 1
    rates = [math.exp(i * math.log(2) / max(1, num_layers - 1)) - 1 for i in range(num_layers)]
    limits = [MAX_LAYER_DROPOUT * time_factor * rate for rate in rates]
    return frozenset(i for i, limit in enumerate(limits) if rng.random() < limit)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` `(batch, length, vocab)` against the next of `ids` `(batch, length)`."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def with_exits(losses: dict[int, Tensor], num_layers: int) -> Tensor:
    """The target's loss, from the `next_token_loss` at the final layer and at some exits, by depth."""
    final = losses[num_layers]
    inner = [loss for depth, loss in losses.items() if depth != num_layers]
    return (final + EXIT_WEIGHT * sum(inner)) / (1 + EXIT_WEIGHT * len(inner))


def draft_loss(draft_logits: Tensor, target_logits: Tensor, ids: Tensor) -> Tensor:
    """KL from the target's distribution (detached) to the draft's, and a little cross-entropy."""
    teacher = torch.log_softmax(target_logits.detach().float(), dim=-1).flatten(0, 1)
    student = torch.log_softmax(draft_logits.float(), dim=-1).flatten(0, 1)
    distance = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return distance + DRAFT_HARD_WEIGHT * next_token_loss(draft_logits, ids)
