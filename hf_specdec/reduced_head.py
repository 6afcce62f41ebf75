"""A draft model whose head scores the rows of a draft vocabulary only (FR-Spec, arXiv 2502.14856).

The model itself stays as it is. What drafts is a *twin*: an object of the same class that shares every submodule and
parameter with it, except that the output head is a smaller one. The family's own `forward` runs, so its logit scales and soft
caps are applied by its own code. A short probe compares both; a model whose head is not a linear layer on the decoder's states
is refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec._compat import undecorated_model
from hf_specdec.compatibility import saved_tokenizer
from hf_specdec.drafters import AssistantDrafter, DraftSettings, DraftVocabulary
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.linear import PackedLinear, SharedLinear, packing_problem
from hf_specdec.placement import is_sharded


__all__ = ["ReducedHead", "assistant_drafter", "reduce_head", "reduced_twins"]

_PROBE_TOKENS = 4
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, of the probe; packing alone agrees to 1e-4
_HALF_TOLERANCE = 3e-2


class ReducedHead(nn.Module):
    """Some rows of an output head: those of a vocabulary, kept ready, and those that one run adds.

    Args:
        kept (`nn.Linear` or [`PackedLinear`]): The rows of the vocabulary.
        more (`nn.Linear`, *optional*): The rows added.
    """

    def __init__(self, kept: nn.Module, more: nn.Module | None = None) -> None:
        super().__init__()
        self.kept, self.more = kept, more

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.kept(hidden_states)
        return logits if self.more is None else torch.cat([logits, self.more(hidden_states)], -1)


@dataclass(frozen=True)
class _Kept:
    """Rows taken from a weight, the weight itself, and what tells whether it is still the same."""

    token_ids: tuple[int, ...]
    weight: Tensor
    storage: weakref.ref[Tensor]
    state: tuple[int, int]
    rows: nn.Module

    def serves(self, token_ids: tuple[int, ...], head: Any) -> bool:
        storage = _storage(head)
        return self.storage() is storage and self.state == _state(storage) and self.token_ids == token_ids


_KEPT: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def assistant_drafter(
    assistant: Any, vocabulary: DraftVocabulary | str | Path | None, tokenizer: Any = None
) -> Callable[[DraftSettings, Tensor], AssistantDrafter]:
    """How to make the drafter of a run from its settings and its prompts' tokens.

    Args:
        assistant (`PreTrainedModel`): The draft model, or None or a drafter factory where there is none.
        vocabulary ([`DraftVocabulary`] or path, *optional*): What its head shall score; everything by default.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The run's tokenizer, which must be the vocabulary's. One that is not
            given is looked for where the draft model was loaded from, in the local cache only.

    Raises:
        [`InvalidConfigError`]: If the vocabulary is another tokenizer's, or there is no draft model to reduce.
        [`UnsupportedModelError`]: If the model's head cannot be reduced.
    """
    if vocabulary is None:
        return lambda settings, prompts: AssistantDrafter(settings, assistant)
    if assistant is not None and not isinstance(assistant, nn.Module):
        raise InvalidConfigError(
            "draft_vocabulary reduces the head of a draft model, and assistant_model is a drafter factory: drop one of them"
        )
    if assistant is None:
        raise InvalidConfigError("draft_vocabulary reduces the head of a draft model: pass assistant_model=...")
    twin_for = reduced_twins(assistant, vocabulary, tokenizer)

    def make(settings: DraftSettings, prompts: Tensor) -> AssistantDrafter:
        twin, token_ids = twin_for(prompts, settings.eos_token_ids, settings.vocab_size)
        return AssistantDrafter(settings, twin, token_ids)

    return make


def reduced_twins(
    model: Any, vocabulary: DraftVocabulary | str | Path, tokenizer: Any = None
) -> Callable[[Tensor, tuple[int, ...], int], tuple[Any, Tensor]]:
    """How to make the twin of a run, and the ids that it scores, from its prompts' tokens, its EOS ids and the number of ids.

    Args:
        model (`PreTrainedModel`): What drafts.
        vocabulary, tokenizer: As for [`assistant_drafter`].

    Raises:
        As [`assistant_drafter`].
    """
    if not isinstance(vocabulary, DraftVocabulary):
        vocabulary = DraftVocabulary.load(vocabulary)
    if tokenizer is None:
        tokenizer = saved_tokenizer(undecorated_model(model).config.name_or_path)
    if tokenizer is not None:
        vocabulary.check_tokenizer(tokenizer)
    token_ids = vocabulary.token_ids
    reduce_head(model, token_ids)

    def twin(prompts: Tensor, eos_token_ids: tuple[int, ...], vocab_size: int) -> tuple[Any, Tensor]:
        more = {*prompts.unique().tolist(), *eos_token_ids}.difference(token_ids)
        usable = range(min(vocab_size, _head(model).out_features))
        added = tuple(sorted(token for token in more if token in usable))
        return reduce_head(model, token_ids, added), torch.tensor(token_ids + added)

    return twin


@torch.no_grad()
def reduce_head(model: Any, token_ids: tuple[int, ...], more: tuple[int, ...] = ()) -> Any:
    """A twin of the model whose logits are those of `token_ids` and then of `more`, in this order.

    The rows of `token_ids` are taken, and on the CPU in float32 packed, once per model and vocabulary. Of a packed head the
    ordinary weight is kept beside it, since taking rows from it for each run would mean to unpack it each time.

    Args:
        model (`PreTrainedModel`): A causal LM, possibly wrapped by PEFT. It is not changed.
        token_ids (`tuple[int, ...]`): Ids to keep.
        more (`tuple[int, ...]`): Further ids, for this twin only.

    Raises:
        [`InvalidConfigError`]: If the model has no row for one of the ids.
        [`UnsupportedModelError`]: If its logits are not those rows times the decoder's states.
    """
    plain, head = undecorated_model(model), _head(model)
    if max(token_ids) >= head.out_features:
        raise InvalidConfigError(
            f"the draft vocabulary holds the id {max(token_ids)} and {type(plain).__name__} scores {head.out_features} ids "
            "only: it was counted with another tokenizer"
        )
    kept = _KEPT.get(plain)
    if kept is None or not kept.serves(token_ids, head):
        storage, weight = _storage(head), head.weight.detach()
        rows = _rows(weight, head.bias, token_ids, packs=True)
        kept = _Kept(token_ids, weight, weakref.ref(storage), _state(storage), rows)
        _probe(model, _twin(plain, head, ReducedHead(kept.rows)), token_ids)
        _KEPT[plain] = kept
    return _twin(plain, head, ReducedHead(kept.rows, _rows(kept.weight, head.bias, more) if more else None))


def _head(model: Any) -> Any:
    plain = undecorated_model(model)
    head = plain.get_output_embeddings()
    # Other subclasses of nn.Linear compute something else.
    if type(head) is not nn.Linear and not isinstance(head, PackedLinear | SharedLinear):
        raise UnsupportedModelError(
            f"the output head of {type(plain).__name__} is a {type(head).__name__} and no plain linear layer, so it cannot be "
            "reduced. Drop draft_vocabulary"
        )
    if is_sharded(head):
        raise UnsupportedModelError(
            f"the output head of {type(plain).__name__} is cut into shards, so it cannot be reduced. Drop draft_vocabulary"
        )
    return head


def _storage(head: Any) -> Tensor:
    return head.storage if isinstance(head, PackedLinear) else head.weight


def _state(storage: Tensor) -> tuple[int, int]:
    if storage.is_mkldnn:  # an opaque layout, replaced as a whole
        return 0, 0
    return storage.data_ptr(), 0 if storage.is_inference() else storage._version


def _rows(weight: Tensor, bias: Tensor | None, token_ids: tuple[int, ...], *, packs: bool = False) -> nn.Module:
    index = torch.tensor(token_ids, device=weight.device)
    linear = nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight[index], requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach()[index], requires_grad=False)
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return PackedLinear(linear) if packs and fits and packing_problem() is None else linear


def _twin(module: nn.Module, head: Any, new_head: nn.Module) -> Any:
    """An object of the module's class that shares everything with it but the head, and what leads to the head."""
    name = next((name for name, each in module.named_modules(remove_duplicate=False) if each is head), None)
    if name is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hold the output head it names. Drop draft_vocabulary"
        )
    if "forward" in vars(module):
        raise UnsupportedModelError(
            f"the forward of this {type(module).__name__} was replaced (as accelerate does over several devices), so "
            "its head cannot be reduced. Drop draft_vocabulary, or load the draft model on one device"
        )
    first, _, rest = name.partition(".")
    child = new_head if not rest else _twin(module._modules[first], head, new_head)  # type: ignore[arg-type]
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin)["_modules"] = {**module._modules, first: child}
    vars(twin)["_compiled_call_impl"] = None  # it is bound to the module it was compiled for
    return twin


def _probe(model: Any, twin: Any, token_ids: tuple[int, ...]) -> None:
    embedded = undecorated_model(model).get_input_embeddings().weight.shape[0]
    tokens = [token for token in token_ids[: 4 * _PROBE_TOKENS] if token < embedded][:_PROBE_TOKENS] or [0]
    inputs = torch.tensor([tokens], device=undecorated_model(model).device)
    full = model(input_ids=inputs, use_cache=False).logits
    reduced = twin(input_ids=inputs, use_cache=False).logits
    if reduced.shape == (*full.shape[:-1], len(token_ids)):
        expected = full[..., torch.tensor(token_ids, device=full.device)].float()
        distance = torch.linalg.norm(reduced.float() - expected) / torch.linalg.norm(expected).clamp(min=1e-12)
        if float(distance) <= _TOLERANCE.get(full.dtype, _HALF_TOLERANCE):
            return
    raise UnsupportedModelError(
        f"the logits of {type(undecorated_model(model)).__name__} are not its head's rows times the decoder's states (some are "
        "treated apart, or it is in training mode), so its head cannot be reduced. Drop draft_vocabulary"
    )
