"""What a run drafts with: from a config and whatever was given as assistant to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec._compat import undecorated_model
from hf_specdec.compatibility import check_model, check_tokenizers
from hf_specdec.configs import BaseConfig
from hf_specdec.drafters import (
    DrafterBase,
    DraftSettings,
    DraftVocabulary,
    HeadDrafter,
    HybridDrafter,
    PromptLookupDrafter,
    TreeDrafter,
)
from hf_specdec.errors import InvalidConfigError
from hf_specdec.features import TargetFeatures
from hf_specdec.layer_gate import LayerGate
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.loading import load_assistant
from hf_specdec.networks import DraftNetwork
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import DropsRows
from hf_specdec.reduced_head import assistant_drafter, reduced_twins
from hf_specdec.run import Run
from hf_specdec.self_drafting import SelfDraft, self_draft_of
from hf_specdec.stats import SpeculativeStats
from hf_specdec.tree_lm import TreeLM, check_tree_attention, check_tree_target
from hf_specdec.warping import only_row_independent


__all__ = ["Drafting", "check_tree", "drafting_of"]


@dataclass(frozen=True)
class Drafting:
    """How to make a run's drafter, and how its target must be run for it.

    Args:
        make (`Callable`): Makes the drafter of a [`Run`].
        gate ([`LayerGate`], *optional*): Stands before the target's layers while it drafts for itself.
        features ([`TargetFeatures`], *optional*): The hidden states of the target that the drafter reads.
        trees (`bool`): Whether the target is shown trees.
        prompt_states (`tuple[TargetFeatures, ...]`): Hidden states that are kept of the prompt alone.
        twin_for (`Callable`, *optional*): From the prompts' tokens to a target with a smaller head, and the ids it scores.
        twin (`tuple`, *optional*): The two for the prompts of this run.
    """

    make: Callable[[Run], DrafterBase]
    gate: LayerGate | None = None
    features: TargetFeatures | None = None
    trees: bool = False
    prompt_states: tuple[TargetFeatures, ...] = ()
    twin_for: Callable[[Tensor], tuple[Any, Tensor]] | None = None
    twin: tuple[Any, Tensor] | None = None

    def for_prompts(self, tokens: Tensor) -> Drafting:
        """What needs to know the prompts (`(batch, columns)`), which may fail, is made before the target reads them."""
        return self if self.twin_for is None else replace(self, twin=self.twin_for(tokens))

    @contextmanager
    def of_prompt(self, prompt_columns: int) -> Iterator[None]:
        """Around the prompt's forward pass."""
        with ExitStack() as stack:
            for each in self.prompt_states if self.features is None else (self.features, *self.prompt_states):
                stack.enter_context(each.of_prompt(prompt_columns))
            yield

    def target(self, model: PreTrainedModel, forward: Callable[..., Any], **options: Any) -> PrefixLM:
        """The target: its layers run at different times if it has a gate, and its features are stored if they are read.

        Args:
            model (`PreTrainedModel`): The target.
            forward (`Callable`): A forward pass of the decode phase, of a model and its inputs.
            options: As for [`PrefixLM`].
        """
        reducing, forward = forward, partial(forward, model)
        if self.gate is not None:
            layered = LayeredLM(model, gate=self.gate, forward=forward, **options)
            if self.twin is not None:
                twin, token_ids = self.twin
                layered.climb_with(twin, partial(reducing, twin), token_ids)
            return layered
        if self.features is None:
            return PrefixLM(model, forward=forward, **options)
        watched = self.features.around(forward)
        target: PrefixLM
        if self.trees:
            target = TreeLM(model, forward=watched, moved=self.features.store.move, **options)
        else:
            target = PrefixLM(model, forward=watched, **options)
        self.features.follow(target)
        return target

    def start(self, run: Run, cache: Any) -> None:
        """Gives the run its drafter."""
        if self.gate is not None:
            self.gate.install(cache)
        run.drafter = self.make(run)
        run.give_up = partial(self._give_up, run.target)
        can_drop = self.gate is None and isinstance(run.drafter, DropsRows) and run.drafter.can_drop_rows
        run.drops_rows = run.drops_rows and can_drop

    def _give_up(self, target: PrefixLM) -> None:
        """Keeps nothing more of the target's hidden states for a drafter that has failed."""
        if self.features is not None:
            self.features.stop()
        if isinstance(target, LayeredLM):
            target.on_pass = None

    def stop(self) -> None:
        """Leaves the model as it was."""
        if self.gate is not None:
            self.gate.remove()


def drafting_of(
    config: BaseConfig,
    assistant: Any,
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    stats: SpeculativeStats,
    *,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    synced_gpus: bool = False,
) -> Drafting:
    """Everything that can go wrong with a drafter is found out here, before the first token.

    Raises:
        [`InvalidConfigError`], [`UnsupportedModelError`], [`IncompatibleDraftError`]: If something does.
    """
    settings = partial(_settings, generation_config)
    if isinstance(assistant, str | PathLike):
        assistant = load_assistant(assistant, model)
    self_draft = self_draft_of(config, assistant, model)
    if self_draft is not None:
        stats.events["exit_depths"] = {}  # a histogram, also where nothing is drafted
        gate = self_draft.gate(model, generation_config, synced_gpus)
        return _self_drafting(
            self_draft, model, gate, settings, _twin_for(config, self_draft, model, generation_config, tokenizer)
        )
    is_model = isinstance(assistant, nn.Module)
    _check(model, assistant, tokenizer, assistant_tokenizer, stats)
    if is_model:
        config.check_models(model, assistant)
    network = assistant if isinstance(assistant, DraftNetwork) else None
    _check_options(config, assistant, network)
    make_assistant = assistant_drafter(None if network is not None else assistant, config.draft_vocabulary, tokenizer)
    if assistant is not None and not is_model:
        return Drafting(lambda run: assistant(settings(run)))
    deterministic = config.rule.lossless and not generation_config.do_sample
    choice = config.drafting_for(has_assistant=is_model, deterministic=deterministic)
    features = None if network is None or choice == "ngram" else TargetFeatures(model, network.taps_of(model))

    def make(run: Run) -> DrafterBase:
        ngram = PromptLookupDrafter(settings(run), config.ngram_size)
        if choice == "ngram":
            return ngram
        if network is not None and features is not None and config.tree_shape is not None:
            return TreeDrafter(settings(run), network, features, config.tree_shape)
        if network is not None and features is not None:
            drafter: DrafterBase = HeadDrafter(settings(run), network, features)
        else:
            drafter = make_assistant(settings(run), run.sequences.tokens)
        return drafter if choice == "model" else HybridDrafter(settings(run), ngram, drafter)

    return Drafting(make, features=features, trees=config.tree_shape is not None)


def _self_drafting(
    self_draft: SelfDraft,
    model: PreTrainedModel,
    gate: LayerGate,
    settings: Callable[[Run], DraftSettings],
    twin_for: Callable[[Tensor], tuple[Any, Tensor]] | None,
) -> Drafting:
    states = self_draft.prompt_states(model, gate)
    return Drafting(
        lambda run: self_draft.drafter(settings(run), run.target, states),
        gate=gate,
        prompt_states=tuple(states.values()),
        twin_for=twin_for,
    )


def _check_options(config: BaseConfig, assistant: Any, network: DraftNetwork | None) -> None:
    """Refuses options that are about another kind of drafter."""
    if network is None and config.tree_shape is not None:
        raise InvalidConfigError(
            "tree=... needs a drafter network as assistant_model, which AutoDrafter.from_pretrained loads; got "
            f"{type(assistant).__name__}"
        )
    if network is not None and config.tree_shape is not None:
        check_tree_attention(network)
    if network is not None and config.draft_vocabulary is not None:
        raise InvalidConfigError(
            f"draft_vocabulary reduces the head of a causal LM, and {type(network).__name__} has a draft vocabulary of its "
            "own: drop it"
        )


def check_tree(config: BaseConfig, model: PreTrainedModel, cache: Any, generation_config: GenerationConfig) -> None:
    """Raises before the first token if trees are asked for where they cannot be verified or shown."""
    if config.tree_shape is None:
        return
    check_tree_target(model, cache)
    shown = [each for each in ("output_hidden_states", "output_attentions") if getattr(generation_config, each)]
    if generation_config.return_dict_in_generate and shown:
        raise InvalidConfigError(
            f"{' and '.join(shown)} would show the columns of a tree, which are not those of the text: drop it, or draft a "
            "chain with tree=None"
        )


def _twin_for(
    config: BaseConfig,
    self_draft: SelfDraft,
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    tokenizer: Any,
) -> Callable[[Tensor], tuple[Any, Tensor]] | None:
    """The target with the head of a draft vocabulary, the config's or that of the heads, for exits that score nothing else."""
    vocabulary = config.draft_vocabulary or DraftVocabulary.of_heads(self_draft.heads)
    if vocabulary is None:
        return None
    make, eos = reduced_twins(model, vocabulary, tokenizer), generation_config._eos_token_tensor
    ids = () if eos is None else tuple(eos.tolist())
    return lambda prompts: make(prompts, ids, undecorated_model(model).get_output_embeddings().out_features)


def _check(
    model: PreTrainedModel, assistant: Any, tokenizer: Any, assistant_tokenizer: Any, stats: SpeculativeStats
) -> None:
    """Refuses an assistant that does not fit the target, or is none."""
    if isinstance(assistant, DraftNetwork):
        assistant.check_attached(model)
    elif isinstance(assistant, nn.Module):
        check_model(assistant)
        if not check_tokenizers(model, assistant, tokenizer, assistant_tokenizer):
            stats.note("tokenizers_unchecked")
    elif assistant is not None and not callable(assistant):
        raise InvalidConfigError(
            "assistant_model must be a causal LM, a drafter network, exit heads, the path or Hub id of one, or a factory that "
            f"takes DraftSettings and returns a drafter; got {type(assistant).__name__}"
        )


def _settings(generation_config: GenerationConfig, run: Run) -> DraftSettings:
    eos = generation_config._eos_token_tensor
    return DraftSettings(
        vocab_size=run.vocab_size,
        do_sample=run.do_sample,
        warpers=only_row_independent(run.processors),
        streams=run.streams,
        keep_logits=run.rule.needs_draft_logits,
        pad_token_id=run.sequences.pad_token_id,
        eos_token_ids=() if eos is None else tuple(eos.tolist()),
        max_length=run.max_length,
    )
