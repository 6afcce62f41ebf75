"""Configurations: checked when they are made, saved and read back as they were."""

import dataclasses
import json

import pytest

from hf_specdec import (
    AdditiveLength,
    ConfidenceLength,
    ConstantLength,
    CorrectionMemory,
    CoSpecConfig,
    CSDConfig,
    EarlyExactGuard,
    EASDConfig,
    ExactConfig,
    InvalidConfigError,
    NucleusConfig,
    SpeculativeConfig,
    configs,
)
from hf_specdec.acceptance import ACCEPTANCE, EASD, Exact, RelaxedThinking, TopK
from hf_specdec.configs import BaseConfig, load_config


CONFIGS = [
    SpeculativeConfig(),
    SpeculativeConfig(drafting="hybrid", length=4, ngram_size=2, on_drafter_error="raise", batching="lockstep"),
    SpeculativeConfig(acceptance=EASD(top_n=3, resample="plain"), length=ConfidenceLength(0.3, 9)),
    SpeculativeConfig(acceptance="easd", length=AdditiveLength(2, 1, 8)),
    ExactConfig(length=ConstantLength(7)),
    EASDConfig(entropy_threshold=1.5, draft_entropy_threshold=2.5, entropy_kind="normalized", penalty=0.25),
    EASDConfig(guard=3),
    NucleusConfig(nucleus_p=0.8, score_temperature=0.6, guard=None),
    CSDConfig(frequency_threshold=3, mode="scg", online_update=False, protected_tokens=(4, 5), guard=7),
    CoSpecConfig(threshold=0.7, floor_ratio=0.0),
    SpeculativeConfig(acceptance=EarlyExactGuard(TopK(3), 4, schedule="power", gamma=2.0)),
    SpeculativeConfig(acceptance=RelaxedThinking(end_token_id=7), guard=1),
    NucleusConfig(guard=EarlyExactGuard(length=5, schedule="linear")),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_saved_configs_come_back_equal(config, tmp_path):
    path = config.save_pretrained(tmp_path / "saved")
    assert path.name == "speculative_config.json"
    assert type(config).from_pretrained(tmp_path / "saved") == config
    assert load_config(str(tmp_path / "saved")) == config
    assert load_config(path) == config
    assert load_config(json.loads(json.dumps(config.to_dict()))) == config
    assert BaseConfig.from_pretrained(path).rule == config.rule


@pytest.mark.parametrize("name", sorted(set(ACCEPTANCE) - {"csd", "judge", "relaxed_thinking"}))
def test_rules_with_their_defaults_are_saved(name, tmp_path):
    config = SpeculativeConfig(acceptance=ACCEPTANCE[name]())
    config.save_pretrained(tmp_path)
    assert SpeculativeConfig.from_pretrained(tmp_path) == config
    assert SpeculativeConfig(acceptance=name).rule == config.rule


@pytest.mark.parametrize("name", ["judge", "relaxed_thinking"])
def test_a_rule_that_needs_something_says_what_when_asked_for_by_name(name):
    with pytest.raises(InvalidConfigError, match=r"needs the id|None comes with"):
        SpeculativeConfig(acceptance=name)


def test_a_memory_is_saved_by_its_path(tmp_path):
    memory = CorrectionMemory()
    memory.add([(1, 2)] * 9)
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    config = CSDConfig(memory=str(path), guard=None)
    config.save_pretrained(tmp_path)
    assert CSDConfig.from_pretrained(tmp_path).rule.memory == config.rule.memory == memory
    assert config.rule.memory is not config.rule.memory  # each call learns on a copy
    assert CSDConfig(memory=memory, guard=None).rule.memory is memory
    with pytest.raises(InvalidConfigError, match="given by its path"):
        CSDConfig(memory=memory).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="no correction memory at nowhere"):
        CSDConfig(memory="nowhere")


def test_presets_by_name():
    assert load_config("nucleus") == NucleusConfig()
    assert load_config("csd") == CSDConfig()
    assert load_config("cospec") == CoSpecConfig()
    assert load_config("exact") == ExactConfig()
    assert load_config("easd") == EASDConfig()
    assert load_config(CONFIGS[1]) is CONFIGS[1]


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SpeculativeConfig, {"drafting": "magic"}, "drafting"),
        (SpeculativeConfig, {"on_drafter_error": "ignore"}, "on_drafter_error"),
        (SpeculativeConfig, {"batching": "wild"}, "batching"),
        (SpeculativeConfig, {"length": -1}, "length"),
        (SpeculativeConfig, {"length": 2.5}, "length"),
        (SpeculativeConfig, {"length": True}, "length"),
        (SpeculativeConfig, {"length": "long"}, "length"),
        (SpeculativeConfig, {"ngram_size": 0}, "ngram_size"),
        (SpeculativeConfig, {"acceptance": "always"}, "easd, ensemble, exact"),
        (EASDConfig, {"entropy_threshold": float("nan")}, "entropy_threshold"),
        (EASDConfig, {"overlap_threshold": -0.1}, "overlap_threshold"),
        (EASDConfig, {"top_n": 0}, "top_n"),
        (EASDConfig, {"resample": "other"}, "resample"),
        (EASDConfig, {"apply_to": "none"}, "apply_to"),
        (EASDConfig, {"penalty": 2.0}, "penalty"),
        (EASDConfig, {"entropy_kind": "half"}, "entropy_kind"),
    ],
)
def test_wrong_values_are_refused_at_once(cls, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        cls(**options)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ConstantLength, {"length": -1}),
        (AdditiveLength, {"initial": 0}),
        (AdditiveLength, {"initial": 9, "longest": 4}),
        (ConfidenceLength, {"threshold": 1.5}),
        (ConfidenceLength, {"longest": 0}),
    ],
)
def test_wrong_controllers_are_refused(cls, options):
    with pytest.raises(InvalidConfigError):
        cls(**options)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="num_tokens"):
        SpeculativeConfig(num_tokens=3)


def test_configs_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculativeConfig().length = 3


def test_a_float_sets_both_thresholds():
    rule = EASDConfig(entropy_threshold=1.25).rule
    assert (rule.target_entropy_threshold, rule.draft_entropy_threshold) == (1.25, 1.25)
    assert EASDConfig().rule == EASD()
    assert SpeculativeConfig().rule == ExactConfig().rule == Exact()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "EASDConfig", "num_tokens": 3}, "num_tokens"),
        ({"preset": "OtherConfig"}, "OtherConfig"),
        ({"preset": "SpeculativeConfig", "length": {"type": "constant", "size": 3}}, "size"),
        ({"preset": "SpeculativeConfig", "length": {"type": "unheard"}}, "unknown"),
        ({"preset": "SpeculativeConfig", "drafting": "magic"}, "drafting"),
    ],
)
def test_a_saved_file_that_does_not_fit_is_explained(values, message, tmp_path):
    path = tmp_path / "speculative_config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InvalidConfigError, match=message):
        load_config(path)


def test_another_preset_is_refused_by_its_name(tmp_path):
    EASDConfig().save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="ExactConfig"):
        ExactConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_broken_files_are_explained(content, tmp_path):
    path = tmp_path / "speculative_config.json"
    path.write_text(content)
    with pytest.raises(InvalidConfigError, match="JSON"):
        load_config(path)


@pytest.mark.parametrize("given", [3, 2.5, object(), ["easd"]])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(InvalidConfigError, match="speculative_config must be"):
        load_config(given)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidConfigError, match="nowhere"):
        load_config(str(tmp_path / "nowhere"))


def test_what_cannot_be_saved_says_so(tmp_path):
    class Rule:
        lossless, needs_draft_logits, throws_dice = True, False, False

        def acceptance(self, evidence): ...
        def replacement(self, evidence): ...
        def count(self, evidence, outcome): ...

    with pytest.raises(InvalidConfigError, match="Rule cannot be saved"):
        SpeculativeConfig(acceptance=Rule()).save_pretrained(tmp_path)


def test_push_to_hub_sends_the_saved_file(monkeypatch):
    calls = {}

    class Api:
        def create_repo(self, repo_id, **options):
            calls["repo"] = (repo_id, options)

        def upload_file(self, **options):
            calls["file"] = options
            return type("Commit", (), {"commit_url": "address"})()

    monkeypatch.setattr(configs.base, "HfApi", Api)
    config = EASDConfig(top_n=7)
    assert config.push_to_hub("someone/rule", private=True) == "address"
    assert calls["repo"] == ("someone/rule", {"private": True, "exist_ok": True})
    assert calls["file"]["path_in_repo"] == "speculative_config.json"
    assert EASDConfig.from_dict(json.loads(calls["file"]["path_or_fileobj"])) == config


def test_auto_drafting_resolves_as_documented():
    def resolve(config, assistant, deterministic=True):
        return config.drafting_for(has_assistant=assistant, deterministic=deterministic)

    assert resolve(SpeculativeConfig(), True) == "hybrid"
    assert resolve(SpeculativeConfig(), True, deterministic=False) == "model"
    assert resolve(SpeculativeConfig(), False) == "ngram"
    assert resolve(EASDConfig(), True) == "model"
    assert resolve(EASDConfig(drafting="hybrid"), True) == "hybrid"
    for config, message in ((EASDConfig(), "point mass"), (SpeculativeConfig(drafting="model"), "assistant_model")):
        with pytest.raises(InvalidConfigError, match=message):
            resolve(config, False)
