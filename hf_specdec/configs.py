"""What users write: configurations and presets, immutable, validated, and savable as `speculative_config.json`."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

from huggingface_hub import HfApi, hf_hub_download

from hf_specdec.acceptance import ACCEPTANCE, EASD, Exact
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import EntropyKind
from hf_specdec.lengths import LENGTHS, AdditiveLength, ConstantLength, CostTable
from hf_specdec.records import AcceptanceRule, LengthController


__all__ = [
    "CONFIG_NAME",
    "PRESETS",
    "STOCK_OPTIONS",
    "BaseConfig",
    "EASDConfig",
    "ExactConfig",
    "RCSDConfig",
    "SpeculativeConfig",
    "load_config",
    "with_stock_options",
]

CONFIG_NAME = "speculative_config.json"

# Options of transformers' own assisted decoding; each contradicts a speculative_config.
STOCK_OPTIONS = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "max_matching_ngram_size",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "target_lookbehind",
    "use_mtp",
)

_PARTS: dict[str, Any] = {**ACCEPTANCE, **LENGTHS, "cost_table": CostTable}
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
        on_drafter_error (`str`): `"continue"` reports a failing drafter once and decodes on plainly, `"raise"` raises.
        batching (`str`): `"ragged"`: rows advance on their own; refused when a processor or criterion is not known to
            judge rows independently. `"lockstep"`: all rows advance by the same number of tokens, and every processor and
            criterion sees the whole batch once per step, just as in plain decoding. `"auto"`: ragged where it is safe.
    """

    drafting: Literal["auto", "model", "ngram", "hybrid"] = "auto"
    length: int | str | LengthController = "auto"
    ngram_size: int = 3
    on_drafter_error: Literal["continue", "raise"] = "continue"
    batching: Literal["auto", "ragged", "lockstep"] = "auto"

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
        # Building the parts validates the method's own options before any model runs.
        _check_part("a length controller", self.controller(deterministic=True), "start")
        _check_part("an acceptance rule", self.rule, "acceptance", "replacement", "count")

    @property
    @abstractmethod
    def rule(self) -> AcceptanceRule:
        """The acceptance rule that these options describe."""

    def controller(self, *, deterministic: bool) -> LengthController:
        """The length controller; `deterministic` says that the draft length cannot change the text."""
        if isinstance(self.length, int):
            return ConstantLength(self.length)
        if isinstance(self.length, str):
            return AdditiveLength() if deterministic else ConstantLength(5)
        return self.length

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
        """Reads a saved config from a folder, a file, or a Hub repository."""
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
        return cls.from_dict(values)

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


@final
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(BaseConfig):
    """The general form; exact acceptance unless another rule is given.

    Args:
        acceptance (rule or its name in [`hf_specdec.acceptance.ACCEPTANCE`]): The acceptance rule.
    """

    acceptance: AcceptanceRule | str = field(default_factory=Exact)

    @property
    def rule(self) -> AcceptanceRule:
        if not isinstance(self.acceptance, str):
            return self.acceptance
        if self.acceptance not in ACCEPTANCE:
            raise InvalidConfigError(f"unknown acceptance {self.acceptance!r}; known: {', '.join(sorted(ACCEPTANCE))}")
        return ACCEPTANCE[self.acceptance]()


@final
@dataclass(frozen=True, kw_only=True)
class ExactConfig(BaseConfig):
    """Exact speculative decoding (arXiv 2211.17192): the law, or the greedy text, of the target itself."""

    @property
    def rule(self) -> AcceptanceRule:
        return Exact()


@final
@dataclass(frozen=True, kw_only=True)
class EASDConfig(BaseConfig):
    """EASD, entropy-aware token rejection (arXiv 2512.23765). See [`hf_specdec.acceptance.EASD`] for what is published.

    Drafts with the model alone: an n-gram draft is a point mass, whose entropy is 0, and the rule could never fire on it.
    `drafting="hybrid"` is possible; rounds that an n-gram match serves are then exact.

    Args:
        entropy_threshold (`float`): Threshold of both entropies, in units of `entropy_base`.
        target_entropy_threshold, draft_entropy_threshold (`float`, *optional*): One of them, where they should differ.
        overlap_threshold (`float`): Least overlap of the two top-n sets, in [0, 1]; above 1 the rule never fires.
        top_n (`int`): Size of the two sets.
        resample (`str`): `"masked"` or `"plain"`.
        apply_to (`str`): `"accepted"` or `"all"`.
        penalty (`float`): Share of the rejected token's probability that survives the mask.
        entropy_kind (`str`): `"full"`, `"topk"` or `"normalized"`.
        entropy_top_k (`int`): Terms of the `"topk"` entropy.
        entropy_base (`float`): Base of the logarithm; e measures in nats.
    """

    entropy_threshold: float = 2.0
    target_entropy_threshold: float | None = None
    draft_entropy_threshold: float | None = None
    overlap_threshold: float = 0.6
    top_n: int = 5
    resample: Literal["masked", "plain"] = "masked"
    apply_to: Literal["accepted", "all"] = "accepted"
    penalty: float = 0.0
    entropy_kind: EntropyKind = "full"
    entropy_top_k: int = 3
    entropy_base: float = math.e

    @property
    def rule(self) -> AcceptanceRule:
        target, draft = self.target_entropy_threshold, self.draft_entropy_threshold
        return EASD(
            target_entropy_threshold=self.entropy_threshold if target is None else target,
            draft_entropy_threshold=self.entropy_threshold if draft is None else draft,
            overlap_threshold=self.overlap_threshold,
            top_n=self.top_n,
            resample=self.resample,
            apply_to=self.apply_to,
            penalty=self.penalty,
            entropy_kind=self.entropy_kind,
            entropy_top_k=self.entropy_top_k,
            entropy_base=self.entropy_base,
        )


@final
@dataclass(frozen=True, kw_only=True)
class RCSDConfig(BaseConfig):
    """Exact decoding with a drafter network of the EAGLE family, such as RCSD trains on HASS (published: exact, steps 3 to 6).

    Args:
        steps (`int`): Tokens drafted per round, unless `length` says how many.
        tree (`str`, *optional*): Reserved for draft trees, which are not implemented: None drafts a chain.
    """

    drafting: Literal["auto", "model", "ngram", "hybrid"] = "model"
    steps: int = 5
    tree: str | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            raise InvalidConfigError(
                f"draft trees are not implemented yet: pass tree=None, which drafts a chain; got {self.tree!r}"
            )
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidConfigError(f"steps must be an integer of at least 1, got {self.steps!r}")
        super().__post_init__()

    @property
    def rule(self) -> AcceptanceRule:
        return Exact()

    def controller(self, *, deterministic: bool) -> LengthController:
        """`steps` tokens in every round, or what `length` says."""
        if self.length == "auto":
            return ConstantLength(self.steps)
        return super().controller(deterministic=deterministic)


PRESETS: MappingProxyType[str, type[BaseConfig]] = MappingProxyType(
    {"easd": EASDConfig, "exact": ExactConfig, "rcsd": RCSDConfig, "speculative": SpeculativeConfig}
)


def load_config(config: BaseConfig | Mapping[str, Any] | str | Path) -> BaseConfig:
    """A config from a config, its dictionary, a preset's name, or the path or Hub id of a saved one."""
    if isinstance(config, BaseConfig):
        return config
    if isinstance(config, Mapping):  # what a saved generation_config.json holds
        return BaseConfig.from_dict({"preset": SpeculativeConfig.__name__, **config})
    if isinstance(config, str) and config in PRESETS:
        return PRESETS[config]()
    if isinstance(config, str | Path):
        return BaseConfig.from_pretrained(config)
    raise InvalidConfigError(
        f"speculative_config must be a config object, its dictionary, one of {', '.join(sorted(PRESETS))}, or the path or Hub "
        f"id of a saved one; got {type(config).__name__}"
    )


def with_stock_options(config: BaseConfig, given: Mapping[str, Any], default_length: int | None = None) -> BaseConfig:
    """Honours `num_assistant_tokens`, and refuses the other options of transformers' own assisted decoding.

    Args:
        config ([`BaseConfig`]): What the user asked for.
        given (`Mapping`): Options of `generate` that the user set; None counts as unset.
        default_length (`int`, *optional*): The checkpoint's own `num_assistant_tokens`, which gives way to `config.length`.
    """
    for name in STOCK_OPTIONS:
        if given.get(name) is not None:
            raise InvalidConfigError(
                f"{name} belongs to transformers' own assisted decoding and contradicts speculative_config. Say it there: "
                "drafting=..., length=..., acceptance=..."
            )
    number = given.get("num_assistant_tokens")
    if config.length == "auto":
        number = default_length if number is None else number
        return config if number is None else replace(config, length=number)
    if number is None or config.length in (number, ConstantLength(number)):
        return config
    raise InvalidConfigError(
        f"num_assistant_tokens={number} and speculative_config.length={config.length} contradict each other: pass one"
    )


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
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidConfigError(
        f"{type(value).__name__} cannot be saved: it is none of this package's rules or controllers"
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
