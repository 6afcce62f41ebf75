"""The draft's last lessons: distillation on text that the target itself wrote.

Published (DistillSpec, arXiv 2310.08461): a draft that is distilled on generated text agrees more often
with its target. [ours]: the text is greedy, from prompts of the training corpus, and each batch is half
such text and half corpus. The target does not change any more.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from .models import new_optimizer
from .trainer import Trainer


@dataclass(frozen=True)
class Polish:
    """How much of it; 0 steps leave the draft as it is."""

    steps: int = 800
    texts: int = 1024
    prompt_length: int = 32
    generation_batch: int = 128
    learning_rate: float = 1e-3


@torch.no_grad()
def greedy_texts(target: LlamaForCausalLM, ids: Tensor, polish: Polish, count: int, length: int) -> Tensor:
    """Greedy continuations of evenly spread windows of a corpus, prompts included.

    Args:
        ids (`Tensor` of shape `(num_tokens,)`): The corpus.

    Returns:
        `Tensor` of shape `(count, length)`.
    """
    starts = torch.linspace(0, len(ids) - polish.prompt_length, count).long()
    prompts = torch.stack([ids[start : start + polish.prompt_length] for start in starts])
    new = length - polish.prompt_length
    texts = [
        target.generate(
            input_ids=part,
            attention_mask=torch.ones_like(part),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        for part in prompts.split(polish.generation_batch)
    ]
    return torch.cat(texts)


def polish_draft(trainer: Trainer, polish: Polish) -> None:
    """Distils the trainer's draft further, in place."""
    recipe = trainer.recipe
    if polish.steps == 0:
        return
    texts = greedy_texts(trainer.target, trainer.train_ids, polish, polish.texts, recipe.length)
    optimizer = new_optimizer(trainer.draft, recipe.weight_decay)
    generator = torch.Generator().manual_seed(recipe.seed)
    own = recipe.batch // 2
    for step in range(polish.steps):
        chosen = texts[torch.randint(len(texts), (recipe.batch - own,), generator=generator)]
        ids = torch.cat((chosen, trainer.batch_at(recipe.steps + step)[:own]))
        loss = distillation(trainer, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.draft.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = polish.learning_rate * 0.5 * (1 + math.cos(math.pi * step / polish.steps))
        optimizer.step()


def distillation(trainer: Trainer, ids: Tensor) -> Tensor:
    """The draft's loss on `ids` of shape `(batch, length)`."""
    depth, draft_depth = trainer.target.config.num_hidden_layers, trainer.draft.config.num_hidden_layers
    with trainer.precision():
        with torch.no_grad():
            logits = trainer.target.lm_head(trainer.forward(trainer.target, ids, {depth})[depth])
        state = trainer.forward(trainer.draft, ids, {draft_depth})[draft_depth]
        return trainer.draft_loss(trainer.draft.lm_head(state), logits, ids)


def greedy_agreement(trainer: Trainer, polish: Polish, batches: int = 4) -> dict:
    """The agreement of draft and exits on the target's own greedy text, on held-out prompts."""
    recipe = trainer.recipe
    texts = greedy_texts(trainer.target, trainer.test_ids, polish, batches * recipe.batch, recipe.length)
    figures = trainer.evaluate(list(texts.split(recipe.batch)), first=polish.prompt_length - 1)
    return {f"greedy_{name}": figures[name] for name in ("draft_agreement", "exit_agreement")}
