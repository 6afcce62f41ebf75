"""A drafter's folder that is also a `custom_generate` repository, whose code `model.generate(custom_generate=...)` runs."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCardData

from hf_specdec.hub.card import CARD, target_named
from hf_specdec.hub.methods import method_of
from hf_specdec.hub.repo_id import check_repo_id, is_repo_id
from hf_specdec.hub.results import BEGIN, END
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.export import export_drafter


__all__ = ["export_custom_generate"]

# Transformers runs a copy of this file, which cannot find the folder that it came from by itself.
_CODE = '''"""Speculative decoding with a drafter network; needs `pip install hf_specdec`.

Use it as `model.generate(**inputs, custom_generate=THIS)` with `trust_remote_code` set, where THIS is the folder or the Hub id.
"""

import inspect
import weakref

import hf_specdec
from hf_specdec.loading import load_assistant
from hf_specdec.networks.checkpoint import is_draft_checkpoint


DRAFTER = {drafter!r}  # Hub id of the drafter that is loaded where none is passed and THIS holds none

_LOADED = weakref.WeakKeyDictionary()


def generate(*args, model, drafter=None, draft_config="rcsd", **kwargs):
    """As `GenerationMixin.generate`, with a drafter.

    Args:
        drafter: A drafter network, or the folder or Hub id of one; by default what this code came with. `assistant_model=` is
            the same.
        draft_config: A config of hf_specdec, the name of a preset, or the folder or Hub id of a saved config.
    """
    assistant = kwargs.pop("assistant_model", None)
    if drafter is not None and assistant is not None:
        raise ValueError("assistant_model and drafter mean the same: pass one of them")
    drafter = assistant if drafter is None else drafter
    if drafter is None:
        place = _own_place()
        drafter = place if place is not None and is_draft_checkpoint(place) else DRAFTER
    if drafter is None:
        raise ValueError(
            "custom_generate does not know which drafter to load: pass drafter=..., the folder or Hub id of a drafter network. "
            "Its author names one with `specdec export --format custom_generate --repo ORG/NAME`."
        )
    if isinstance(drafter, str) or hasattr(drafter, "__fspath__"):
        loaded = _LOADED.setdefault(model, {{}})
        if str(drafter) not in loaded:
            loaded[str(drafter)] = load_assistant(drafter, model)
        drafter = loaded[str(drafter)]
    kwargs.pop("custom_generate", None)
    kwargs.pop("trust_remote_code", None)
    decode = hf_specdec.SpeculativeGenerationMixin.generate
    return decode(model, *args, assistant_model=drafter, speculative_config=draft_config, **kwargs)


def _own_place():
    """THIS, as the caller of `generate` named it: transformers does not hand it on, but its own call still holds it."""
    place = inspect.currentframe().f_back.f_back.f_locals.get("custom_generate")
    return place if isinstance(place, str) else None
'''


_TEXT = """# Speculative decoding with a drafter network

## Description

Custom generation code for `model.generate`, with the drafter network that it decodes with ({method}). Greedy texts are the
model's own, token for token; sampled texts have its law.

## Base model

{target}

## Model compatibility

The drafter reads the hidden states of the model that it was trained for, and is checked against it. Another drafter takes the
code to another model.

## Additional arguments

- `drafter`: a drafter network, or the folder or Hub id of one; by default the one of this repository. `assistant_model` is the
  same.
- `draft_config`: a config of `hf_specdec`, the name of a preset such as `"rcsd"` (the default), or the folder or Hub id of a
  saved config.

## Output type changes

None. With `return_dict_in_generate=True` the output has `speculative_stats` too.

## Example usage

Needs `pip install hf_specdec`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer("The difference between a list and a tuple", return_tensors="pt")
trust = {{"trust_remote_code": True}}  # runs this repository's generate.py: read it first
out = model.generate(**inputs, custom_generate="{repo}", **trust, max_new_tokens=64)
print(tokenizer.decode(out[0], skip_special_tokens=True))
```

# Results

{begin}
{end}
"""


def export_custom_generate(network: DraftNetwork, directory: str | Path, repo: str | None = None) -> Path:
    """Writes a drafter in this package's own format, with `custom_generate/generate.py` and a card beside it.

    A card that is there stays as it is.

    Args:
        network ([`DraftNetwork`]): The network. It is not changed.
        directory (`str` or path): Folder to write to.
        repo (`str`, *optional*): Hub id under which the folder will be published. The code loads the drafter from there where
            the caller passes none and transformers has not been told where the code is.

    Returns:
        `Path`: The folder.

    Raises:
        [`InvalidConfigError`]: If `repo` is no Hub id.
    """
    if repo is not None:
        check_repo_id(repo)
    folder = export_drafter(network, directory, "hf")
    code = folder / "custom_generate" / "generate.py"
    code.parent.mkdir(exist_ok=True)
    code.write_text(_CODE.format(drafter=repo), encoding="utf-8")
    if not (folder / CARD).exists():
        (folder / CARD).write_text(_card(network, repo), encoding="utf-8")
    return folder


def _card(network: DraftNetwork, repo: str | None) -> str:
    """A card without figures, with a place where `specdec card` puts them."""
    config = network.config.to_dict() | {"architectures": [type(network).__name__]}
    target, method = target_named(config), method_of(config)
    known = target is not None and is_repo_id(target)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["custom_generate", "speculative-decoding", "draft-model", *method.tags],
        base_model=target if known else None,
        base_model_relation="adapter" if known else None,
    )
    text = _TEXT.format(
        method=method.title,
        target=f"[{target}](https://huggingface.co/{target})"
        if known
        else "The model that the drafter was trained for.",
        name=target or "TARGET",
        repo=repo or "FOLDER",
        begin=BEGIN,
        end=END,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"
