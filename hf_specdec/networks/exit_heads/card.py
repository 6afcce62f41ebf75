"""The model card of exit heads, made from their config."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

from hf_specdec.networks.exit_heads.configuration import ExitHeadsConfig


__all__ = ["CARD", "render_card"]

CARD = "README.md"

_BODY = """# Exit heads

{kind} exit heads after {layers} layers of {target}, for exact self-drafting (SpecBound, arXiv 2604.12247).

```python
import hf_specdec
from hf_specdec import SelfDraftConfig

config = SelfDraftConfig(exit_heads="THIS_REPOSITORY")
model.generate(**inputs, speculative_config=config)
```

The heads decide what is drafted. The text is the model's own, whatever they say.
"""


_SCORED = """
They score {size} of {vocab_size} token ids (a draft vocabulary, FR-Spec, arXiv 2502.14856), which are saved with them, and
those of the prompt.
"""


def render_card(config: ExitHeadsConfig) -> str:
    """The card's text; figures are those that fitting measured, and a card without them has none."""
    named = config.target_name if config.target_name and config.target_name.count("/") == 1 else None
    data = ModelCardData(
        base_model=named,
        base_model_relation="adapter" if named else None,
        library_name="hf_specdec",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "self-drafting", "arxiv:2604.12247"],
    )
    layers = ", ".join(map(str, config.exit_layers))
    target = f"`{named}`" if named else "their target"
    body = _BODY.format(kind=config.kind.capitalize(), layers=layers, target=target)
    known = config.draft_vocabulary
    scored = "" if known is None else _SCORED.format(size=known["size"], vocab_size=known["vocab_size"])
    return f"---\n{data.to_yaml()}\n---\n\n{body}{scored}{_figures(config.figures)}"


def _figures(figures: dict[str, Any] | None) -> str:
    if not figures or not figures.get("agreement"):
        return ""
    rows = [
        f"| {depth} | {each['top1']:.3f} | "
        + " | ".join(f"{point['coverage']:.2f} / {point['precision']:.2f}" for point in each["at"].values())
        + " |"
        for depth, each in figures["agreement"].items()
    ]
    thresholds = list(next(iter(figures["agreement"].values()))["at"])
    head = "| layers | top-1 | " + " | ".join(f"above {each}" for each in thresholds) + " |"
    rule = "|---" * (2 + len(thresholds)) + "|"
    intro = (
        f"\nFitted on {figures['num_tokens']} tokens. On {figures['num_held_out_tokens']} held-out ones: agreement with the "
        "final argmax, and coverage / precision of the tokens whose largest probability is above a threshold.\n\n"
    )
    return intro + "\n".join([head, rule, *rows]) + "\n"
