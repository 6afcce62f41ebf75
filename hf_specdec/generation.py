"""Decoding one `generate` call: from the inputs that transformers prepared to its output object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_specdec._compat import CACHE_KEY, cache_argument, needs_synced_forwards, undecorated_model, user_set
from hf_specdec.acceptance import EarlyExactGuard, RelaxedRule
from hf_specdec.cache_rows import can_realign
from hf_specdec.compatibility import check_model, tell_few_acceptances
from hf_specdec.configs import STOCK_OPTIONS, BaseConfig, SelfDraftConfig, load_config, with_stock_options
from hf_specdec.cropping import read_prompt
from hf_specdec.drafting import Drafting, check_tree, drafting_of
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.lengths import GoodputLength, GoodputTree, NotedLength, TreeLength
from hf_specdec.loop import speculate
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput, StepOutputs, TokenStream, result_of, step_outputs
from hf_specdec.placement import is_sharded
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import AcceptanceRule, LengthController, Observer, Round
from hf_specdec.run import Record, Run
from hf_specdec.sequences import Sequences
from hf_specdec.stats import SpeculativeStats
from hf_specdec.timing import wait_for
from hf_specdec.verify import RandomStreams
from hf_specdec.warping import are_row_independent


__all__ = ["SpeculativeDecoder", "generate", "require_drafter"]

# What the target's own `prepare_inputs_for_generation` is given anew in every round.
_REMADE = ("attention_mask", "position_ids", CACHE_KEY, "use_cache", "logits_to_keep", "input_ids", "inputs_embeds")
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass
class SpeculativeDecoder:
    """The decoding method that `generate` calls once everything is prepared.

    Args:
        config ([`BaseConfig`]): What the user asked for.
        assistant (`PreTrainedModel`, path, Hub id or drafter factory, *optional*): What drafts. A factory is called with
            the run's [`DraftSettings`] and returns a drafter.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): To check that the two models agree.
        stream ([`TokenStream`]): Where tokens are shown.
        stats_callback (`Callable`, *optional*): Called with the statistics before the result is returned.
        synced_gpus (`bool`): Keep running forward passes until every process has finished.
        round_callback (`Callable`, *optional*): Called with every [`Round`] as it ends.
        row_seeds (sequence of `int`, *optional*): A seed for each row's dice, in place of the global generator.
    """

    config: BaseConfig
    assistant: Any = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    stream: TokenStream = field(default_factory=lambda: TokenStream(None))
    stats_callback: Callable[[SpeculativeStats], None] | None = None
    synced_gpus: bool = False
    round_callback: Callable[[Round], None] | None = None
    row_seeds: Sequence[int] | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeDecoderOnlyOutput | Tensor:
        """Decodes; the signature is that of transformers' own decoding methods.

        Returns:
            `(batch, length)` sequences, or with `return_dict_in_generate` a [`SpeculativeDecoderOnlyOutput`].
        """
        started = time.perf_counter()
        check_model(model)
        _check_mode(model, generation_config, model_kwargs)
        stats, given = SpeculativeStats(), cache_argument(model_kwargs)
        drafting = self._drafting(model, given, generation_config, stats)
        texts = _sequences(input_ids, stopping_criteria, generation_config)
        lockstep = self._lockstep(texts, logits_processor, given, generation_config)
        drafting = drafting.for_prompts(texts.tokens[:, : texts.prompt_columns])
        with drafting.of_prompt(texts.prompt_columns):
            outputs = read_prompt(model, input_ids, generation_config, model_kwargs)
        cache = outputs[CACHE_KEY]
        wait_for(outputs.logits.device)  # once in a run, and the first token is read next
        stats.prefill_seconds = time.perf_counter() - started

        target = _target(model, cache, texts, model_kwargs, drafting)
        keeps_cache = bool(generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))
        try:
            steps = step_outputs(generation_config, cache)
            run = self._run(model, target, texts, outputs, logits_processor, generation_config, steps, lockstep)
            noted = run.controller = NotedLength(run.controller)
            run.drops_rows = not keeps_cache and _may_drop_rows(run, model_kwargs)
            drafting.start(run, cache)
            sequences = self._decode(run, outputs, stats)
            _settle(run, keeps_cache)
        except BaseException:
            if keeps_cache:
                target.abandon(texts.lengths - 1)
            raise
        finally:
            drafting.stop()
        self.stream.end()
        stats.num_target_forwards = target.num_forwards + 1
        stats.lossless, stats.costs = run.rule.lossless, noted.costs
        wait_for(outputs.logits.device)
        stats.total_seconds = time.perf_counter() - started
        if (read := drafting.features) is not None:
            tell_few_acceptances(read.tap.name, read.tap.indices, stats.num_accepted_tokens, stats.num_verified_tokens)
        if self.stats_callback is not None:
            self.stats_callback(stats)
        return result_of(generation_config, sequences, run.record, steps, cache, stats)

    def _drafting(
        self, model: PreTrainedModel, cache: Any, generation_config: GenerationConfig, stats: SpeculativeStats
    ) -> Drafting:
        """What drafts, after everything that speaks against it."""
        drafting = drafting_of(
            self.config, self.assistant, model, generation_config, stats, tokenizer=self.tokenizer,
            assistant_tokenizer=self.assistant_tokenizer, synced_gpus=self.synced_gpus,
        )  # fmt: skip
        check_tree(self.config, model, cache, generation_config)
        return drafting

    def _decode(self, run: Run, prompt_outputs: Any, stats: SpeculativeStats) -> Tensor:
        """The final texts, `(batch, length)`; whoever wants to see rounds sees each as it ends."""
        texts = run.sequences
        self.stream.skip(texts.prompt_columns)
        for round_ in speculate(run, prompt_outputs):
            stats.add(round_)
            self.stream.show(texts.tokens, int(texts.lengths.max()))
            if self.round_callback is not None:
                self.round_callback(round_)
        return texts.finish()

    def _run(
        self,
        model: PreTrainedModel,
        target: PrefixLM,
        texts: Sequences,
        outputs: Any,
        processors: LogitsProcessorList,
        generation_config: GenerationConfig,
        steps: StepOutputs | None,
        lockstep: bool,
    ) -> Run:
        wanted = generation_config.return_dict_in_generate
        record = Record(
            keeps_scores=bool(wanted and generation_config.output_scores),
            keeps_logits=bool(wanted and generation_config.output_logits),
        )
        rule, do_sample = self.config.run_rule(), bool(generation_config.do_sample)
        peer = partial(model._has_unfinished_sequences, synced_gpus=self.synced_gpus, device=texts.device)
        return Run(
            target=target,
            sequences=texts,
            drafter=None,
            rule=rule,
            controller=_controller(self.config, model, self.assistant, deterministic=rule.lossless and not do_sample),
            processors=processors,
            do_sample=do_sample,
            max_length=_max_length(model, texts, generation_config),
            vocab_size=outputs.logits.shape[-1],
            streams=RandomStreams(texts.batch_size, self.row_seeds) if do_sample or rule.throws_dice else None,
            lockstep=lockstep,
            prompt_mask=target.visible_prompt_mask,
            on_drafter_error=self.config.on_drafter_error,
            record=record,
            observe_outputs=steps,
            goes_on=(lambda unfinished: peer(not unfinished)) if self.synced_gpus else None,
        )

    def _lockstep(
        self, texts: Sequences, processors: LogitsProcessorList, cache: Any, generation_config: GenerationConfig
    ) -> bool:
        """Whether all rows must advance together; see [`BaseConfig`]."""
        outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
        recorded = generation_config.return_dict_in_generate and any(
            getattr(generation_config, name) for name in outputs
        )
        reasons = []
        if not are_row_independent(processors, texts.criteria):
            reasons.append("a logits processor or stopping criterion is not known to treat rows independently")
        if texts.batch_size > 1:
            if recorded or self.stream.streamer is not None:
                reasons.append("a streamer or per-token outputs show the whole batch at each step")
            if not can_realign(cache):
                reasons.append(f"{type(cache).__name__} cannot give up different numbers of entries per row")
            if any(isinstance(each, MaxTimeCriteria) for each in texts.criteria):
                reasons.append("max_time stops all rows at the same step")
            if not texts.rows_stop_alone:
                reasons.append("without an EOS token, finished rows go on until all have stopped")
        if self.config.batching == "ragged" and reasons and texts.batch_size > 1:
            raise InvalidConfigError(f'batching="ragged" is not possible here: {"; ".join(reasons)}. Use "auto"')
        return bool(reasons) or (self.config.batching == "lockstep")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculative_config: BaseConfig | dict[str, Any] | str | None = None,
    drafter: Any = None,
    draft_tokenizer: Any = None,
    text_tokenizer: Any = None,
    token_streamer: Any = None,
    stats_callback: Callable[[SpeculativeStats], None] | None = None,
    **model_kwargs: Any,
) -> SpeculativeDecoderOnlyOutput | Tensor:
    """Speculative decoding for `model.generate(custom_generate=hf_specdec.generate, ...)`, without the hook.

    Transformers hands a callable neither `assistant_model` nor `tokenizer` nor `streamer`; these have own names here.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: What `generate` prepared.
        speculative_config ([`BaseConfig`], `dict` or `str`, *optional*): The method; exact by default.
        drafter (`PreTrainedModel`, path, Hub id or factory, *optional*): What drafts.
        draft_tokenizer, text_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizers of drafter and target.
        token_streamer (`BaseStreamer`, *optional*): Fed the prompt and then one token per `put`.
        stats_callback (`Callable`, *optional*): Called with the [`SpeculativeStats`].

    Returns:
        As `generate`: sequences, or an output object with `speculative_stats`.

    Raises:
        [`InvalidConfigError`]: If nothing says what should draft.
    """
    given = {name: user_set(generation_config, name, model) for name in (*STOCK_OPTIONS, "num_assistant_tokens")}
    config = with_stock_options(_given_config(speculative_config, generation_config, model), given)
    require_drafter(config, drafter)
    stream = TokenStream(token_streamer)
    decoder = SpeculativeDecoder(
        config, drafter, text_tokenizer, draft_tokenizer, stream, stats_callback, needs_synced_forwards(model, None)
    )
    try:
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
        return decoder(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )
    finally:
        stream.end()


def require_drafter(config: BaseConfig, drafter: Any) -> None:
    """Raises if `custom_generate=hf_specdec.generate` was not told what should draft."""
    if drafter is None and config.drafting != "ngram" and not isinstance(config, SelfDraftConfig):
        raise InvalidConfigError(
            "custom_generate=hf_specdec.generate got no drafter. Pass drafter=... (transformers withholds assistant_model from "
            'a callable), or speculative_config=SpeculativeConfig(drafting="ngram")'
        )


def _given_config(given: Any, generation_config: GenerationConfig, model: Any) -> BaseConfig:
    if given is None:  # a checkpoint's own generation config is not asked: it must not relax acceptance by itself
        given = user_set(generation_config, "speculative_config", model)
    return load_config("exact" if given is None else given)


def _check_mode(model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    mode = generation_config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedModelError(
            f"speculative decoding works with greedy search and sampling, got {mode.value.replace('_', ' ')}. Set num_beams=1 "
            "and drop the options of the other mode."
        )
    if not model_kwargs.get("use_cache", True):
        raise UnsupportedModelError("speculative decoding needs the KV cache: call generate with use_cache=True")
    if cache_argument(model_kwargs) is None:
        raise UnsupportedModelError(
            f"{type(undecorated_model(model)).__name__} brings a cache of its own kind, which hf_specdec cannot crop. Call it "
            "without `speculative_config`."
        )


def _controller(config: BaseConfig, model: Any, assistant: Any, *, deterministic: bool) -> LengthController:
    """How far to draft. Processes that hold shards call them together, so nothing that each of them measures may decide it."""
    sharded = any(isinstance(each, nn.Module) and is_sharded(each) for each in (model, assistant))
    controller = config.controller(deterministic=deterministic and not sharded)
    if not sharded or not isinstance(controller, GoodputLength | GoodputTree) or controller.costs is not None:
        return controller
    if isinstance(controller, GoodputTree) and config.length == "auto":
        return TreeLength(controller.shape)
    raise InvalidConfigError(
        f"{type(controller).__name__} drafts as far as pays by the seconds it measures. Those differ between the processes of "
        "a sharded (tensor-parallel) model, which would then wait for one another forever: pass length=<number>, or costs=... "
        f"to {type(controller).__name__}"
    )


def _may_drop_rows(run: Run, model_kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the texts, the caches and the dice knows which row is which."""
    by_row = [value for key, value in model_kwargs.items() if key not in _REMADE and value is not None]
    by_row += [getattr(each, "prompt_ignore_length", None) for each in run.processors]
    return (
        not run.lockstep
        and run.sequences.batch_size > 1
        and run.goes_on is None
        and not _knows_rows(run.rule)
        and not any(isinstance(value, Tensor) for value in by_row)
    )


def _knows_rows(rule: AcceptanceRule) -> bool:
    """Whether a rule may keep something for each row of the batch: it observes rounds, and is none that only counts."""
    inner = rule.inner if isinstance(rule, EarlyExactGuard) else rule
    return isinstance(inner, Observer) and not isinstance(inner, RelaxedRule)


def _settle(run: Run, keeps_cache: bool) -> None:
    """Leaves the cache as plain decoding does. Where processes run in step, all of them run the extra forward pass."""
    tokens, lengths = run.sequences.tokens, run.sequences.lengths - 1
    lacking = keeps_cache and run.target.lacks(tokens, lengths)
    if run.goes_on is not None and run.goes_on(lacking) and not lacking:
        run.target.idle()
    if keeps_cache:
        run.target.settle(tokens, lengths)


def _sequences(input_ids: Tensor, criteria: StoppingCriteriaList, generation_config: GenerationConfig) -> Sequences:
    pad = generation_config._pad_token_tensor
    return Sequences(
        input_ids,
        criteria,
        pad_token_id=0 if pad is None else int(pad),
        pads_finished_rows=any(hasattr(each, "eos_token_id") for each in criteria),
    )


def _max_length(model: PreTrainedModel, texts: Sequences, generation_config: GenerationConfig) -> int:
    """The longest sequence that drafts may reach; never past the positions that the model knows, if it is not there yet."""
    limit = texts.criteria.max_length or generation_config.max_length
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(limit, positions) if positions else limit


def _target(
    model: PreTrainedModel, cache: Any, texts: Sequences, model_kwargs: dict[str, Any], drafting: Drafting
) -> PrefixLM:
    """The target, whose cache holds the prompts already."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    rest = {key: value for key, value in model_kwargs.items() if key not in _REMADE and value is not None}
    return drafting.target(
        model,
        partial(_target_forward, rest),
        pad_token_id=texts.pad_token_id,
        prompt_mask=mask,
        cache=cache,
        held=texts.tokens[:, : texts.prompt_columns],
        hidden_columns=max(0, int(cache.get_seq_length()) - texts.prompt_columns),
        next_position=None if positions is None else positions[..., -1:] + 1,
    )


def _target_forward(rest: dict[str, Any], model: PreTrainedModel, *, input_ids: Tensor, **inputs: Any) -> Any:
    """A forward pass of the decode phase, through the model's own preparation of its inputs."""
    width = input_ids.shape[1]
    types = {
        key: rest[key][..., -1:].expand(*rest[key].shape[:-1], width)
        if key == "token_type_ids"
        else rest[key].new_zeros(*rest[key].shape[:-1], width)
        for key in _TOKEN_TYPES
        if key in rest
    }
    inputs.pop("return_dict")
    prepared = model.prepare_inputs_for_generation(input_ids, **(rest | types), **inputs)
    with model._optimize_model_for_decode():
        return model(**prepared, return_dict=True)
