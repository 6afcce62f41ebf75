"""What every config shares: immutable, validated, and savable as `speculative_config.json`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, hf_hub_download

from hf_specdec.acceptance import ACCEPTANCE, EarlyExactGuard
from hf_specdec.acceptance.correction_memory import check_pair
from hf_specdec.configs.guarding import budgeted
from hf_specdec.drafters import DraftVocabulary
from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths import LENGTHS, ConstantLength, CostTable, GoodputLength, GoodputTree, TreeLength
from hf_specdec.records import AcceptanceRule, LengthController
from hf_specdec.trees import TreeShape


__all__ = ["CONFIG_NAME", "BaseConfig"]

CONFIG_NAME = "speculative_config.json"

_PARTS: dict[str, Any] = {
    **ACCEPTANCE,
    **LENGTHS,
    "cost_table": CostTable,
    "draft_vocabulary": DraftVocabulary,
    "early_exact_guard": EarlyExactGuard,
    "tree_shape": TreeShape,
}
_CHOICES = {
    "drafting": ("auto", "model", "ngram", "hybrid"),
    "on_drafter_error": ("continue", "raise"),
    "batching": ("auto", "ragged", "lockstep"),
}


@dataclass(frozen=True, kw_only=True)
class BaseConfig(ABC):
    """Options that every method shares.

    Args:
        drafting (`str`): What drafts. `"model"`: the assistant; `"ngram"`: prompt lookup; `"hybrid"`: the n-gram match
            where there is one, else the assistant; `"auto"`: hybrid for exact greedy decoding with an assistant, the
            assistant alone when sampling or under a relaxed rule, prompt lookup without an assistant.
        length (`int`, `"auto"` or a length controller): How far to draft. `"auto"` adapts in exact greedy decoding, where
            it cannot change the text, and is constantly 5 elsewhere, so that a seed or threshold reproduces its text.
        ngram_size (`int`): Longest suffix that prompt lookup searches for, in tokens.
        draft_vocabulary ([`DraftVocabulary`] or path, *optional*): The frequent ids that the draft model's head shall score,
            and no others but the prompt's own (FR-Spec, arXiv 2502.14856). The text's law stays the target's.
        on_drafter_error (`str`): `"continue"` reports a failing drafter once and decodes on plainly, `"raise"` raises.
        batching (`str`): `"ragged"`: rows advance on their own; refused when a processor or criterion is not known to
            judge rows independently. `"lockstep"`: all rows advance by the same number of tokens, and every processor and
            criterion sees the whole batch once per step, just as in plain decoding. `"auto"`: ragged where it is safe.
        diagnostics (`bool`): Whether a relaxed rule's total variation to the target's law is measured at every judged
            position, and rescued, rejected and changed tokens are counted. It passes over the vocabulary a few times more.
        max_step_tv (`float`, *optional*): A step of a relaxed rule that would leave the target's law farther, in total
            variation, is judged exactly; so is one whose distance is not known. Measures too.
        tv_budget (`float`, *optional*): Most total variation of a row's steps together; acceptance is exact after it.
    """

    drafting: Literal["auto", "model", "ngram", "hybrid"] = "auto"
    length: int | str | LengthController = "auto"
    ngram_size: int = 3
    draft_vocabulary: DraftVocabulary | str | Path | None = None
    on_drafter_error: Literal["continue", "raise"] = "continue"
    batching: Literal["auto", "ragged", "lockstep"] = "auto"
    diagnostics: bool = False
    max_step_tv: float | None = None
    tv_budget: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if isinstance(self.ngram_size, bool) or not isinstance(self.ngram_size, int) or self.ngram_size < 1:
            raise InvalidConfigError(f"ngram_size must be an integer of at least 1, got {self.ngram_size!r}")
        if isinstance(self.length, str) and self.length != "auto":
            raise InvalidConfigError(f'length must be an integer, "auto" or a length controller, got {self.length!r}')
        if isinstance(self.length, bool | float):
            raise InvalidConfigError(f"length must be an integer, got {self.length!r}")
        if isinstance(self.draft_vocabulary, Path):  # so that it can be saved
            object.__setattr__(self, "draft_vocabulary", str(self.draft_vocabulary))
        if not isinstance(self.draft_vocabulary, DraftVocabulary | str | None):
            given = type(self.draft_vocabulary).__name__
            raise InvalidConfigError(
                f"draft_vocabulary must be a DraftVocabulary or the path of a saved one, got {given}"
            )
        if isinstance(self.length, GoodputTree | TreeLength) and self.tree_shape is None:
            raise InvalidConfigError(
                f"{type(self.length).__name__} sizes trees, which {type(self).__name__} does not draft: pass "
                "RCSDConfig(tree=...)"
            )
        # Building the parts validates the method's own options before any model runs.
        _check_part("a length controller", self.controller(deterministic=True), "start")
        _check_part("an acceptance rule", self.rule, "acceptance", "replacement", "count")
        self.run_rule()

    @property
    @abstractmethod
    def rule(self) -> AcceptanceRule:
        """The acceptance rule that these options describe."""

    @property
    def tree_shape(self) -> TreeShape | None:
        """The largest tree that is drafted; None for chains."""
        return None

    def run_rule(self) -> AcceptanceRule:
        """The rule of one run: `rule` itself, or behind its [`hf_specdec.acceptance.TVBudget`] where that is asked for."""
        return budgeted(self.rule, self.diagnostics, self.max_step_tv, self.tv_budget)

    @property
    def fingerprint(self) -> str:
        """Of the pair of models that something in this config was learnt from; empty where nothing was, or it is unknown."""
        return ""

    def check_models(self, target: Any, draft: Any) -> None:
        """Raises an [`InvalidConfigError`] if something in this config was learnt from another pair of models."""
        if self.fingerprint:
            check_pair(self.fingerprint, target.config, draft.config)

    def controller(self, *, deterministic: bool) -> LengthController:
        """The length controller; `deterministic` says that the draft length cannot change the text.

        Raises:
            [`InvalidConfigError`]: If it goes by what it measures where that would change the text.
        """
        if isinstance(self.length, int):
            return ConstantLength(self.length)
        if isinstance(self.length, str):
            return self.auto_length(deterministic)
        if isinstance(self.length, GoodputLength) and self.length.costs is None and not deterministic:
            raise InvalidConfigError(
                "GoodputLength drafts as far as pays by the seconds it measures. Where tokens are sampled, under a rule "
                "that is not exact, and for a target in shards, nothing timed may decide that: a seed or threshold would "
                "not reproduce its text, and shards would wait for one another. Pass GoodputLength(costs=...), with the "
                "costs of a greedy exact run's speculative_stats, or length=<number>"
            )
        return self.length

    def auto_length(self, deterministic: bool) -> LengthController:
        """What `length="auto"` stands for."""
        return GoodputLength() if deterministic else ConstantLength(5)

    def drafting_for(self, *, has_assistant: bool, deterministic: bool) -> str:
        """Resolves `"auto"`, and raises if what should draft is not there."""
        if self.drafting == "auto":
            if not has_assistant:
                choice = "ngram"
            else:
                choice = "hybrid" if deterministic and self.rule.lossless else "model"
        else:
            choice = self.drafting
        if choice in ("model", "hybrid") and not has_assistant:
            raise InvalidConfigError(
                f'drafting="{choice}" needs a draft model: pass assistant_model=..., or drafting="ngram"'
            )
        if self.draft_vocabulary is not None and choice == "ngram":
            raise InvalidConfigError(
                "draft_vocabulary reduces the head of a draft model and n-gram drafts have none: pass assistant_model=... and "
                'drafting="model", or drop draft_vocabulary'
            )
        if self.rule.needs_draft_logits and choice == "ngram":
            raise InvalidConfigError(
                f"{type(self).__name__} compares the laws of two models and an n-gram draft has none (a point mass), so the "
                'rule could never fire: pass assistant_model=... and drafting="model"'
            )
        return choice

    def to_dict(self) -> dict[str, Any]:
        """The options as plain Python values, with the preset's name under `"preset"`."""
        values = {each.name: _to_plain(getattr(self, each.name)) for each in fields(self)}
        return {"preset": type(self).__name__, **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BaseConfig:
        """The config that [`~BaseConfig.to_dict`] described.

        Raises:
            [`InvalidConfigError`]: If the preset or an option is unknown, or this class is another preset.
        """
        from hf_specdec.configs.presets import PRESETS  # the presets derive from this class

        values = dict(values)
        name = values.pop("preset", cls.__name__)
        preset = {each.__name__: each for each in PRESETS.values()}.get(name)
        if preset is None or not issubclass(preset, cls):
            raise InvalidConfigError(f"expected a saved {cls.__name__}, got preset {name!r}")
        known = {each.name for each in fields(preset)}
        if unknown := sorted(set(values) - known):
            raise InvalidConfigError(f"unknown options {unknown} for {name}; known: {sorted(known)}")
        return preset(**{key: _from_plain(value) for key, value in values.items()})

    def save_pretrained(self, save_directory: str | Path) -> Path:
        """Writes `speculative_config.json` into a folder and returns its path."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / CONFIG_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=True) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(cls, id_or_path: str | Path, revision: str | None = None) -> BaseConfig:
        """Reads a saved config from a folder, a file, or a Hub repository. Weights that it names and that are gone are taken
        from its own folder, which may have been moved as a whole."""
        path = Path(id_or_path)
        if path.is_dir():
            path = path / CONFIG_NAME
        if not path.is_file():
            if path.suffix == ".json" or path.is_absolute() or str(id_or_path).startswith("."):
                raise InvalidConfigError(f"there is no {CONFIG_NAME} at {id_or_path}")
            path = Path(hf_hub_download(str(id_or_path), CONFIG_NAME, revision=revision))
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise InvalidConfigError(f"{path.name} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidConfigError(f"{path.name} must hold one JSON object, got {type(values).__name__}")
        return cls.from_dict({name: _beside(path.parent, value) for name, value in values.items()})

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, commit_message: str | None = None) -> str:
        """Uploads `speculative_config.json` to a Hub repository and returns the commit's address."""
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_file(
            path_or_fileobj=json.dumps(self.to_dict(), indent=2, sort_keys=True).encode(),
            path_in_repo=CONFIG_NAME,
            repo_id=repo_id,
            commit_message=commit_message or f"Upload {CONFIG_NAME}",
        )
        return str(commit.commit_url)


def _beside(folder: Path, value: Any) -> Any:
    if not isinstance(value, str) or not value.endswith(".safetensors") or Path(value).exists():
        return value
    moved = folder / Path(value).name
    return str(moved) if moved.is_file() else value


def _check_part(role: str, part: Any, *methods: str) -> None:
    if isinstance(part, type) or not all(callable(getattr(part, name, None)) for name in methods):
        raise InvalidConfigError(f"{part!r} is not {role}: it needs the methods {', '.join(methods)}")


def _to_plain(value: Any) -> Any:
    """Rules and controllers become `{"type": name, ...}`."""
    for name, cls in _PARTS.items():
        if isinstance(value, cls):
            return {"type": name, **{each.name: _to_plain(getattr(value, each.name)) for each in fields(value)}}
    if isinstance(value, tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidConfigError(
        f"{type(value).__name__} cannot be saved: it is none of this package's rules or controllers. What has a file of its "
        "own, such as a correction memory, is given by its path"
    )


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    values = dict(value)
    cls = _PARTS.get(values.pop("type", ""))
    if cls is None:
        raise InvalidConfigError(f"unknown rule or controller in a saved config: {value}")
    known = {each.name for each in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise InvalidConfigError(f"unknown options {unknown} for {cls.__name__}; known: {sorted(known)}")
    return cls(**{key: _from_plain(each) for key, each in values.items()})
