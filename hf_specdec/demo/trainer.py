"""One training step of the pair, and everything that a step needs."""

import contextlib
import math
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .evaluate import evaluate
from .forward import TrainingForward, compiled_if
from .losses import draft_loss, dropped_layers, exits_at, next_token_loss, with_exits
from .models import new_model, new_optimizer
from .shape import Shape


@dataclass(frozen=True)
class Recipe:
    """How the pair is trained; all of it [ours].

    `fast` compiles the decoder layer and multiplies matrices in bf16; weights, optimizer state and
    losses stay in fp32.
    """

    steps: int = 4300
    seed: int = 0
    batch: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 500
    evaluate_batches: int = 12
    checkpoint_seconds: float = 180.0
    fast: bool = True

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        warmup = min(self.warmup, max(1, self.steps // 10))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """The pair, its optimizer and its data. Step `n` depends only on the weights, the seed and `n`."""

    def __init__(
        self,
        shape: Shape,
        draft_layers: int,
        vocab_size: int,
        recipe: Recipe,
        train_ids: Tensor,
        test_ids: Tensor,
    ):
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        self.target = new_model(shape, shape.layers, vocab_size)
        self.draft = new_model(shape, draft_layers, vocab_size)
        self.pair = nn.ModuleDict({"target": self.target, "draft": self.draft})
        self.optimizer = new_optimizer(self.pair, recipe.weight_decay)
        self.train_ids = train_ids
        self.test_ids, self.test_batches = test_ids, windows(test_ids, recipe)
        self.forward = TrainingForward(compiled=recipe.fast)
        self.next_token_loss = compiled_if(recipe.fast, next_token_loss)
        self.draft_loss = compiled_if(recipe.fast, draft_loss)

    def precision(self) -> contextlib.AbstractContextManager:
        """Where the fast recipe multiplies matrices in bf16."""
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.recipe.fast else contextlib.nullcontext()

    def batch_at(self, step: int) -> Tensor:
        """Token ids of shape `(batch, length)`: the next windows of a shuffled pass over the corpus."""
        recipe, size = self.recipe, self.recipe.length
        per_pass = max(1, (len(self.train_ids) - 2 * size) // size)
        rows = []
        for index in range(step * recipe.batch, (step + 1) * recipe.batch):
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + index // per_pass)
            offset = int(torch.randint(size, (1,), generator=generator))
            order = torch.randperm(per_pass, generator=generator)
            start = offset + int(order[index % per_pass]) * size
            rows.append(self.train_ids[start : start + size])
        return torch.stack(rows)

    def step(self, step: int) -> dict[str, float]:
        """Runs one optimizer step and returns its losses."""
        depth, draft_depth = self.target.config.num_hidden_layers, self.draft.config.num_hidden_layers
        ids = self.batch_at(step)
        rng = random.Random(self.recipe.seed * 1_000_003 + step)
        skip = dropped_layers(rng, depth, step / self.recipe.steps)
        with self.precision():
            states = self.forward(self.target, ids, {*exits_at(step, depth), depth}, skip)
            logits = {at: self.target.lm_head(state) for at, state in states.items()}
            losses = {at: self.next_token_loss(values, ids) for at, values in logits.items()}
            state = self.forward(self.draft, ids, {draft_depth})[draft_depth]
            distilled = self.draft_loss(self.draft.lm_head(state), logits[depth], ids)
        self.optimizer.zero_grad()
        (with_exits(losses, depth) + distilled).backward()
        for model in (self.target, self.draft):
            nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(step)
        self.optimizer.step()
        return {"loss": losses[depth].item(), "draft": distilled.item()}

    def evaluate(self, batches: list[Tensor] | None = None, first: int = 0) -> dict:
        """Measurements on held-out batches, or on those given; see `evaluate.evaluate`."""
        with self.precision():
            return evaluate(self.forward, self.target, self.draft, batches or self.test_batches, first)


def affordable_steps(probe: Trainer, minutes: float, timed: int = 8) -> int:
    """How many steps fit into `minutes`, by timing a few on a trainer that is thrown away."""
    probe.step(0)
    probe.step(1)
    start = time.perf_counter()
    for step in range(2, 2 + timed):
        probe.step(step)
    return max(1, int(60 * minutes * timed / (time.perf_counter() - start)))


def windows(ids: Tensor, recipe: Recipe) -> list[Tensor]:
    """Evenly spread evaluation batches of shape `(batch, length)`, `recipe.evaluate_batches` at most."""
    count = min(recipe.evaluate_batches, len(ids) // (recipe.length * recipe.batch)) * recipe.batch
    if count == 0:
        return [ids[: recipe.length][None]]
    starts = torch.linspace(0, len(ids) - recipe.length, count).long()
    rows = torch.stack([ids[s : s + recipe.length] for s in starts])
    return list(rows.split(recipe.batch))
