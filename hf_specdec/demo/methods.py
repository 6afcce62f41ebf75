"""The ways of decoding that `specdec demo --method` compares: those of the pair alone, and one for each bundled drafter."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hf_specdec import RCSDConfig, SelfDraftConfig, SpeculativeConfig
from hf_specdec.configs import BaseConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.loading import load_assistant

from .pair import Pair, bundled_weights, no_progress_bars


ALL = "all"
LENGTH = 4
OF_THE_PAIR = ("assistant", "lookup", "self-draft")


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Args:
        name (`str`): Such as `"hass"`.
        config ([`BaseConfig`]): How it drafts.
        drafter (`PreTrainedModel`, *optional*): What drafts, where that is another model.
    """

    name: str
    config: BaseConfig
    drafter: PreTrainedModel | None = None


def bundled_drafters() -> tuple[str, ...]:
    """The names of the bundled drafter networks, which are those of their folders."""
    with bundled_weights() as folder:
        return tuple(sorted(config.parent.name for config in folder.glob("drafters/*/config.json")))


def chosen_names(asked: Iterable[str]) -> tuple[str, ...]:
    """Names of methods in the order they were asked for, each once; `all` stands for every method.

    Args:
        asked (`Iterable[str]`): Names, or several with commas between them.

    Raises:
        [`InvalidConfigError`]: For an unknown name, listing the known ones.
    """
    known = (*OF_THE_PAIR, *bundled_drafters())
    names = [name.strip() for each in asked for name in each.split(",")]
    if unknown := [name for name in names if name not in (*known, ALL)]:
        raise InvalidConfigError(f"method must be one of {', '.join(known)} or {ALL}, got {', '.join(unknown)!r}")
    return tuple(dict.fromkeys(each for name in names for each in (known if name == ALL else (name,))))


def load_method(name: str, pair: Pair) -> Method:
    """The method of a name, with its drafter loaded for the pair's target; packed where the target is.

    Args:
        name (`str`): One of those that [`chosen_names`] returns.
        pair ([`Pair`]): The target, and the draft model of the method `assistant`.
    """
    if name == "assistant":
        config = SpeculativeConfig(drafting="model", length=LENGTH, on_drafter_error="raise")
        return Method(name, config, pair.draft)
    if name == "lookup":
        return Method(name, SpeculativeConfig(drafting="ngram", length=LENGTH, on_drafter_error="raise"))
    if name == "self-draft":
        with bundled_weights() as folder:  # found by replaying the target's exits after 4, 7, 10 and 14 layers
            found = SelfDraftConfig.from_pretrained(folder / "self_draft")
        return Method(name, replace(found, on_drafter_error="raise"))
    with bundled_weights() as folder, no_progress_bars():
        drafter = load_assistant(folder / "drafters" / name, pair.target)
        return Method(name, RCSDConfig(steps=LENGTH, on_drafter_error="raise"), drafter)
