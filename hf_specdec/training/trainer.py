"""The training loop, on accelerate: one process or many, resumable to the bit."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.training.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from hf_specdec.training.losses import DraftedRounds, PairLoss, Unrolled
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading_order import first_place, texts_of_step, tokens_until
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.survival_head import SurvivalHead
from hf_specdec.training.texts import Text, TextBatch, digest_of, observe, padded
from hf_specdec.training.unroll import chain_masks, drafted_logits, unroll


if TYPE_CHECKING:
    from hf_specdec.training.sharding import Sharding


__all__ = ["Observe", "StepLog", "train"]

Observe = Callable[[Any, DraftNetwork, Sequence[Text]], TextBatch]


@dataclass(frozen=True)
class StepLog:
    """What one optimiser step did.

    Args:
        step (`int`): Number of the step, from 1.
        loss (`float`): Loss of this process's share of the batch, a mean over its anchors.
        acceptance (`tuple[float, ...]`): By position in the chain, how often the drafter's best token is the target's.
        tokens_per_second (`float`): Text tokens of this process per second of wall-clock time, the target's pass included.
        parts (`dict[str, float]`): What the loss is made of, by name, a mean like it; see the loss.
        evaluation (`dict[str, float]`): What the evaluation after this step found; empty if there was none.
        num_tokens (`int`): Text tokens that all processes have read in this stage, up to this step; a text counts each time.
    """

    step: int
    loss: float
    acceptance: tuple[float, ...]
    tokens_per_second: float
    parts: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0


class _Unrolling(nn.Module):
    """The unrolled loss as a module, so that wrappers for several processes see its forward pass."""

    def __init__(self, network: DraftNetwork, recipe: Recipe, reference: DraftNetwork | None) -> None:
        super().__init__()
        self.network, self.recipe = network, recipe
        self.reference = (reference or network).twin().requires_grad_(False) if recipe.reference else None
        self.survival = SurvivalHead(network.config.hidden_size).to(network.device) if recipe.survival else None

    @property
    def trained(self) -> nn.Module:
        """What is trained and saved: the network, with the survival head where there is one."""
        if self.survival is None:
            return self.network
        return nn.ModuleDict({"network": self.network, "survival": self.survival})

    def twin(self) -> _Unrolling:
        """A copy that borrows from the same target."""
        networks = [each for each in (self.network, self.reference) if each is not None]
        return copy.deepcopy(self, {id(each.borrowed): each.borrowed for each in networks})

    def forward(
        self, batch: TextBatch, seeds: Sequence[int] = (), rounds: DraftedRounds | None = None
    ) -> tuple[Tensor, Tensor, Mapping[str, float]]:
        """The loss, the agreements and drafts `(2, num_steps)` of each position, and the parts of the loss."""
        num_steps, detach = self.recipe.num_steps, self.recipe.detach
        unrolled = replace(unroll(self.network, batch, num_steps, detach=detach), seeds=seeds)
        if rounds is not None:
            rounds = rounds.to(batch.tokens.device)
            drafted = drafted_logits(self.network, batch, rounds.tokens, detach=detach)
            unrolled = replace(unrolled, rounds=replace(rounds, student_logits=drafted))
        if self.reference is not None:
            unrolled = _with_reference(unrolled, self.reference, batch, num_steps)
        if self.survival is not None:
            unrolled = replace(unrolled, survival_logits=self.survival(unrolled.student_states))
        counts = []
        for logits, target, mask in zip(unrolled.student_logits, unrolled.target_logits, unrolled.masks, strict=True):
            best = logits.detach().argmax(-1)
            best = best if unrolled.target_ids is None else unrolled.target_ids[best]
            counts.append(torch.stack([((best == target.argmax(-1)) & mask).sum(), mask.sum()]))
        value = self.recipe.loss(unrolled)
        return value.total, torch.stack(counts, 1), value.parts


@torch.no_grad()
def _with_reference(unrolled: Unrolled, reference: DraftNetwork, batch: TextBatch, num_steps: int) -> Unrolled:
    reference.eval()
    rounds = unrolled.rounds
    if rounds is not None:
        rounds = replace(rounds, reference_logits=drafted_logits(reference, batch, rounds.tokens))
    return replace(unrolled, reference_logits=unroll(reference, batch, num_steps).student_logits, rounds=rounds)


def train(
    target: Any,
    network: DraftNetwork,
    texts: Sequence[Text],
    recipe: Recipe,
    options: TrainingOptions,
    *,
    out: Path | None = None,
    resume: bool = False,
    accelerator: Accelerator | None = None,
    steps_before: int = 0,
    fingerprint: str | None = None,
    observer: Observe = observe,
    rounds: Callable[[Sequence[Text], int], DraftedRounds] | None = None,
    reference: DraftNetwork | None = None,
    shard: bool = False,
    evaluate: Callable[[], dict[str, float]] | None = None,
    on_step: Callable[[StepLog], None] | None = None,
) -> list[StepLog]:
    """Trains `network` in place; the target's weights are read only.

    Several processes share each batch. Each text counts by its anchors, so the gradient does not depend on how a batch is
    cut into processes and forward passes, but for rounding.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The network, attached to it, in float32.
        texts (`Sequence[Text]`): Texts of the target.
        recipe ([`Recipe`]): Loss and steps.
        options ([`TrainingOptions`]): Length and pace.
        out (`Path`, *optional*): Folder for checkpoints.
        resume (`bool`): Whether to go on from the newest checkpoint in `out`, if there is one.
        accelerator (`Accelerator`, *optional*): One of your own, with trackers that are already initialised.
        steps_before (`int`): Steps of earlier stages, from which the trackers and the order of the texts count on.
        fingerprint (`str`, *optional*): A digest of what is trained on, which a resumed run must share; that of `texts`
            unless given.
        observer (`Callable`): What gives the target's features of some texts: [`observe`], or a [`KeptFeatures`].
        rounds (`Callable`, *optional*): Gives the recorded rounds of some texts, for so many drafts; see [`RoundBook`].
        reference ([`DraftNetwork`], *optional*): The drafter that recipes with a reference compare with, as it is when the run
            starts; the network itself unless given.
        shard (`bool`): Whether several processes split the drafter, its reference and the moments among them (FSDP), as they
            also do where accelerate is configured for it. A run may be resumed with another choice.
        evaluate (`Callable[[], dict[str, float]]`, *optional*): Run every `eval_every` steps and at the end.
        on_step (`Callable[[StepLog], None]`, *optional*): Sees each step.

    Returns:
        `list[StepLog]`: The steps of this call.

    Raises:
        [`InvalidConfigError`]: If there are no texts, the batch cannot be shared evenly, the network is not in float32, or the
            checkpoint to go on from belongs to another recipe, other options or other texts.
    """
    accelerator = accelerator or Accelerator(mixed_precision=options.mixed_precision)
    _check(network, texts, options, accelerator)
    shard = accelerator.num_processes > 1 and (shard or accelerator.distributed_type == DistributedType.FSDP)
    logs = []
    with _only_drafter_trains(target, network):
        about = {"options": asdict(options), "recipe": str(recipe), "data": fingerprint or digest_of(texts)}
        state = _State.start(
            _Unrolling(network, recipe, reference), options, accelerator, about, out if resume else None, shard
        )
        first = first_place(len(texts), options, steps_before, own_texts=rounds is not None)
        num_tokens = tokens_until(texts, options, first + state.step * options.batch_size)
        num_tokens -= tokens_until(texts, options, first)
        for step in range(state.step + 1, options.max_steps + 1):
            log = _one_step(partial(observer, target, network), rounds, texts, options, state, step, steps_before)
            num_tokens += log.num_tokens
            log = replace(log, num_tokens=num_tokens)
            if evaluate is not None and (step % options.eval_every == 0 or step == options.max_steps):
                network.eval()
                state.collect()
                log = replace(log, evaluation=evaluate())
                network.train()
            accelerator.log({**log.parts, "loss": log.loss, **log.evaluation}, step=steps_before + step)
            if out is not None and options.saves_after(step):
                state.save(out, step)
            if on_step is not None:
                on_step(log)
            logs.append(log)
        state.collect()
    return logs


@contextmanager
def _only_drafter_trains(target: Any, network: DraftNetwork) -> Iterator[None]:
    """No gradients for the target and the drafter's own embeddings (published: frozen)."""
    frozen = [*target.parameters(), *(network.embed_tokens.parameters() if network.config.has_embedding else ())]
    wanted = [parameter.requires_grad for parameter in frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    network.train()
    try:
        yield
    finally:
        network.eval()
        for parameter, was in zip(frozen, wanted, strict=True):
            parameter.requires_grad_(was)


@dataclass
class _State:
    """What changes while training."""

    step: int
    trained: nn.Module
    module: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    accelerator: Accelerator
    about: dict[str, Any]
    sharding: Sharding | None = None

    @classmethod
    def start(
        cls,
        unrolling: _Unrolling,
        options: TrainingOptions,
        accelerator: Accelerator,
        about: dict[str, Any],
        resumed: Path | None,
        shard: bool,
    ) -> _State:
        """The state before the first step, or that of the newest checkpoint in `resumed`."""
        module = unrolling.to(accelerator.device) if shard else accelerator.prepare(unrolling)
        trained = unrolling.trained
        parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = round(options.warmup * options.max_steps)
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, options.max_steps)
        state = cls(0, trained, module, optimizer, scheduler, accelerator, about)
        checkpoint = None if resumed is None else latest_checkpoint(resumed)
        if checkpoint is not None:
            state._load(checkpoint)
        if shard:
            from hf_specdec.training.sharding import Sharding  # not every build of torch has what it needs

            state.sharding = Sharding(unrolling, unrolling.twin(), optimizer)
            state.module, unrolling.reference = state.sharding.module, None
        return state

    def _load(self, checkpoint: Path) -> None:
        saved = load_checkpoint(checkpoint, self.trained, self.optimizer, lambda saved: self._check(saved, checkpoint))
        self.step = saved["step"]
        self.scheduler.load_state_dict(saved["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _check(self, saved: dict[str, Any], checkpoint: Path) -> None:
        """Refuses a checkpoint of another run before anything is filled from it."""
        if saved["options"] != self.about["options"]:
            raise InvalidConfigError(
                f"{checkpoint} was written by a run with {saved['options']}, which cannot go on with {self.about['options']}: "
                "resume with the same options, or write to another folder"
            )
        if saved.get("recipe", self.about["recipe"]) != self.about["recipe"]:
            raise InvalidConfigError(
                f"{checkpoint} was written by a run of {saved['recipe']}, which cannot go on as {self.about['recipe']}: resume "
                "with the recipe and the losses' options as they were, or start anew in another folder"
            )
        if saved.get("data", self.about["data"]) != self.about["data"]:
            raise InvalidConfigError(
                f"{checkpoint} was written by a run on other texts or rounds, which cannot go on with these: resume with the "
                "data as they were, or start anew in another folder"
            )

    @property
    def recipe(self) -> Recipe:
        """Loss and steps."""
        recipe: Recipe = self.accelerator.unwrap_model(self.module).recipe
        return recipe

    def collect(self) -> None:
        """Brings the weights to the network, where they are trained elsewhere."""
        if self.sharding is not None:
            self.sharding.collect()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are not shared yet."""
        return self.accelerator.no_sync(self.module) if self.sharding is None else self.sharding.no_sync()

    def losses(
        self, batch: TextBatch, seeds: Sequence[int], rounds: DraftedRounds | None
    ) -> tuple[Tensor, Tensor, Mapping[str, float]]:
        """What the unrolled module gives."""
        with nullcontext() if self.sharding is None else self.accelerator.autocast():
            found: tuple[Tensor, Tensor, Mapping[str, float]] = self.module(batch, seeds, rounds)
        return found

    def clip(self, largest: float) -> None:
        """Clips the norm of the gradients."""
        if self.sharding is None:
            self.accelerator.clip_grad_norm_(self.trained.parameters(), largest)
        else:
            self.sharding.clip(largest)

    def save(self, out: Path, step: int) -> None:
        """Writes a checkpoint, from one of the processes."""
        self.collect()
        optimizer = self.optimizer if self.sharding is None else self.sharding.whole_optimizer()
        if self.accelerator.is_main_process:
            content = {"scheduler": self.scheduler.state_dict(), **self.about}
            save_checkpoint(out, step, self.trained, optimizer, content)
        self.accelerator.wait_for_everyone()


def _one_step(
    observed: Callable[[Sequence[Text]], TextBatch],
    rounds: Callable[[Sequence[Text], int], DraftedRounds] | None,
    texts: Sequence[Text],
    options: TrainingOptions,
    state: _State,
    step: int,
    steps_before: int,
) -> StepLog:
    started, accelerator = time.perf_counter(), state.accelerator
    first = first_place(len(texts), options, steps_before, own_texts=rounds is not None)
    indices = texts_of_step(len(texts), options, step, first)
    batch = [texts[index] for index in indices]
    anchors = sum(text.num_anchors for text in batch)
    own = batch[accelerator.process_index :: accelerator.num_processes]
    seeds = [(options.seed * 1_000_003 + steps_before + step) * 1_000_003 + index for index in indices]
    seeds = seeds[accelerator.process_index :: accelerator.num_processes]
    size = options.micro_batch_size
    cuts = [slice(start, start + size) for start in range(0, len(own), size)]
    num_steps, density = state.recipe.num_steps, None
    if rounds is not None and isinstance(state.recipe.loss, PairLoss):
        masks = chain_masks(padded(batch)[1], num_steps)
        density = state.recipe.loss.num_pairs(rounds(batch, num_steps), masks) / anchors
    loss, counts = 0.0, torch.zeros(2, num_steps, dtype=torch.long)
    parts: dict[str, float] = defaultdict(float)
    for cut in cuts:
        part = own[cut]
        share = sum(text.num_anchors for text in part) / anchors
        with nullcontext() if cut is cuts[-1] else state.no_sync():
            found = None if rounds is None else replace(rounds(part, num_steps), pairs_per_anchor=density)
            value, seen, made_of = state.losses(observed(part), seeds[cut], found)
            accelerator.backward(value * share * accelerator.num_processes)
        loss += float(value.detach()) * share
        for name, part_value in made_of.items():
            parts[name] += part_value * share
        counts = counts + seen.cpu()
    state.clip(options.clip)
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    own_share = sum(text.num_anchors for text in own) / anchors
    tokens = sum(len(text.tokens) for text in own)
    agreed, drafted = counts
    acceptance = tuple((agreed / drafted.clamp(min=1)).tolist())
    means = {name: value / own_share for name, value in parts.items()}
    seconds = time.perf_counter() - started
    read = sum(len(text.tokens) for text in batch)
    return StepLog(step, loss / own_share, acceptance, tokens / seconds, means, num_tokens=read)


def _check(network: DraftNetwork, texts: Sequence[Text], options: TrainingOptions, accelerator: Accelerator) -> None:
    if not texts:
        raise InvalidConfigError("there are no texts to train on")
    options.check_processes(accelerator.num_processes)
    if network.dtype != torch.float32:
        raise InvalidConfigError(
            f"the weights that are trained must be float32, got {network.dtype}: make or load the network with "
            'dtype=torch.float32; mixed_precision="bf16" computes in bfloat16'
        )
