"""Configuration of the EAGLE-1 network."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


__all__ = ["EagleConfig"]


@strict
class EagleConfig(LlamaConfig):
    r"""
    Configuration of an [`EagleDrafter`] (EAGLE, arXiv 2401.15077; also HASS, arXiv 2408.15766, and what is trained on from it).

    Args:
        bias (`bool`, defaults to `False`): Whether `fc` has a bias. Published configs of LLaMA-3 drafters say no; serving
            engines differ.
        has_embedding (`bool`, defaults to `False`): Whether the checkpoint owns `embed_tokens.weight`; otherwise the
            target's is used.
        target_name, target_tokenizer, target_weights (`str`, *optional*): The target it was made for.
        recipe (`str`, *optional*): Names of the recipes that trained it, one after another, with `+` between them.
        kwargs: As in `LlamaConfig`; `attention_bias` is about queries, keys and values only.
    """

    model_type = "eagle_drafter"

    num_hidden_layers: int = 1
    bias: bool = False
    has_embedding: bool = False
    target_name: str | None = None
    target_tokenizer: str | None = None
    target_weights: str | None = None
    recipe: str | None = None
