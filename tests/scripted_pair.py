"""A pair of models of any size whose tokens follow a script, so that as many drafts are accepted as a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec._compat import CACHE_KEY


__all__ = ["SHAPES", "llama", "scripted_pair", "unscripted"]

# Hidden size, intermediate size, layers, heads, and words: of a target and of what drafts for it.
SHAPES = {
    "tiny": ((32, 64, 2, 4, 64), (32, 64, 1, 4, 64)),
    "7B": ((4096, 11008, 32, 32, 32000), (1024, 2816, 8, 16, 32000)),
}
_CERTAIN = 1e4
_LONGEST = 2048


def llama(shape: tuple[int, ...], device: Any = "cpu", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama of random weights, drawn on its device."""
    hidden, intermediate, layers, heads, vocab_size = shape
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=_LONGEST, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, dtype=dtype,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def scripted_pair(
    shape: str, device: Any = "cpu", dtype: torch.dtype = torch.float32, wrong_every: int = 4
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, list[int]]:
    """A target, a draft model that is wrong about every `wrong_every`-th place of its text, and the text.

    What the models compute is thrown into the balance, but does not decide: the token of the script is raised above all
    others, by its place in the text.
    """
    target, draft = (llama(each, device, dtype) for each in SHAPES[shape])
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, target.config.vocab_size, (_LONGEST,), generator=generator)
    places = torch.arange(_LONGEST)
    wrong = torch.where(places % wrong_every == 0, text % (target.config.vocab_size - 1) + 1, text)
    assert bool((wrong != text)[places % wrong_every == 0].all())
    for model, script in ((target, text), (draft, wrong)):
        model.register_forward_hook(_raises(script.to(device)), with_kwargs=True)
    return target, draft, text.tolist()


@contextmanager
def unscripted(model: LlamaForCausalLM) -> Iterator[None]:
    """Within it the model says what it computes."""
    hooks = dict(model._forward_hooks)
    model._forward_hooks.clear()
    try:
        yield
    finally:
        model._forward_hooks.update(hooks)


def _raises(script: torch.Tensor) -> Any:
    def hook(module: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        columns = int(kwargs[CACHE_KEY].get_seq_length())
        shown = outputs.logits.shape[1]
        if columns == 0 or columns >= _LONGEST:
            return outputs
        following = script[columns - shown + 1 : columns + 1]
        outputs.logits = outputs.logits.index_put(
            (
                torch.zeros_like(following),
                torch.arange(shown, device=script.device),
                following,
            ),
            torch.full((), _CERTAIN, dtype=outputs.logits.dtype, device=script.device),
        )
        return outputs

    return hook
