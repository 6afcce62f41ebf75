"""Configuration of the EAGLE-3 network."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


__all__ = ["Eagle3Config"]


@strict
class Eagle3Config(LlamaConfig):
    r"""
    Configuration of an [`Eagle3Drafter`] (EAGLE-3, arXiv 2503.01840; the norm variants: EAGLE 3.1, arXiv 2605.09992, and
    published checkpoints).

    Args:
        draft_vocab_size (`int`, *optional*): Size of the draft vocabulary; that of the target by default.
        target_hidden_size (`int`, *optional*): Hidden size of the target; `hidden_size` by default.
        taps (`list[int]`, *optional*): Indices into the target's `hidden_states` (0: embeddings); `2, n // 2, n - 3` for `n`
            layers by default (published).
        norm_before_residual (`bool`, defaults to `False`): Whether the residual is the normalised state.
        norm_before_fc (`bool`, defaults to `False`): Whether the tapped states are normalised together before `fc`.
        fc_norm (`bool`, defaults to `False`): Whether each tapped state is normalised before `fc`.
        norm_output (`bool`, defaults to `False`): Whether the state that recurs is the normalised one.
        qk_norm (`bool`, defaults to `False`): Whether queries and keys are normalised per head, as in Qwen3.
        has_embedding (`bool`, defaults to `False`): Whether the checkpoint owns `embed_tokens.weight`.
        has_head (`bool`, defaults to `True`): Whether it owns `lm_head.weight`; otherwise the target's is used.
        target_name, target_tokenizer, target_weights (`str`, *optional*): The target it was made for.
        recipe (`str`, *optional*): Names of the recipes that trained it, one after another, with `+` between them.
        kwargs: As in `LlamaConfig`; `attention_bias` is about queries, keys and values only.
    """

    model_type = "eagle3_drafter"

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    taps: list[int] | tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    has_embedding: bool = False
    has_head: bool = True
    target_name: str | None = None
    target_tokenizer: str | None = None
    target_weights: str | None = None
    recipe: str | None = None

    def __post_init__(self, **kwargs):
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)
