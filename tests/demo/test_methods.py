"""`specdec demo --method`: the bundled drafters draft, every text is the target's own, and all runs take turns."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from hf_specdec import AutoDrafter, RCSDConfig, linear
from hf_specdec.demo import comparison, timing
from hf_specdec.demo.methods import OF_THE_PAIR, bundled_drafters, chosen_names, load_method
from hf_specdec.demo.pair import Pair, bundled_weights, load_pair, load_prompts
from hf_specdec.demo.traces import Step, Trace
from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.drafters.bundle import TARGET_NAME
from tests.demo import console_of, tiny_pair_of


@pytest.fixture(scope="module")
def bundled() -> Pair:
    return load_pair()


@pytest.fixture
def tiny_pair(monkeypatch) -> Pair:
    pair = tiny_pair_of()
    monkeypatch.setattr(comparison, "load_pair", lambda: pair)
    return pair


@pytest.mark.parametrize("name", bundled_drafters())
def test_a_bundled_drafter_drafts_and_the_text_is_the_targets_own(bundled, name):
    with bundled_weights() as folder:
        network = AutoDrafter.from_pretrained(
            folder / "drafters" / name, target=bundled.target, tokenizer=bundled.tokenizer
        )
    inputs = bundled.tokenizer(load_prompts()[0].text, return_tensors="pt")
    plain = bundled.target.generate(**inputs, max_new_tokens=24, do_sample=False)
    output = bundled.target.generate(
        **inputs,
        assistant_model=network,
        speculative_config=RCSDConfig(steps=3, on_drafter_error="raise"),
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    assert output.speculative_stats.tokens_per_round > 1.2


def test_the_bundled_settings_of_self_drafting_suit_the_target(bundled):
    """Unlike the defaults, under which hardly a token leaves."""
    config = load_method("self-draft", bundled).config
    inputs = bundled.tokenizer(load_prompts()[0].text, return_tensors="pt")
    asked = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = bundled.target.generate(**inputs, **asked)
    output = bundled.target.generate(**inputs, **asked, speculative_config=replace(config, length=6))
    assert torch.equal(output.sequences, plain.sequences)
    assert output.speculative_stats.tokens_per_round > 1.5


@pytest.mark.parametrize("name", bundled_drafters())
def test_a_bundled_drafter_is_bf16_and_stores_nothing_of_its_target(name):
    with bundled_weights() as folder:
        config = json.loads((folder / "drafters" / name / "config.json").read_text())
        assert {path.name for path in (folder / "drafters" / name).iterdir()} == {"config.json", "model.safetensors"}
        with safe_open(folder / "drafters" / name / "model.safetensors", framework="pt") as tensors:
            kinds = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    own_maps = {"d2t": "I64", "t2d": "BOOL"}
    assert {key: kind for key, kind in kinds.items() if kind != "BF16"}.items() <= own_maps.items()
    assert not [key for key in kinds if "embed_tokens" in key]
    assert config["model_type"] == "eagle3_drafter" or not [key for key in kinds if "lm_head" in key]
    assert config["target_name"] == TARGET_NAME


def test_every_method_is_known_by_name():
    assert chosen_names(["all"]) == (*OF_THE_PAIR, *bundled_drafters())
    assert chosen_names(["lookup, assistant", "lookup"]) == ("lookup", "assistant")
    assert {"hass", "eagle3"} <= set(bundled_drafters())
    with pytest.raises(InvalidConfigError, match=r"assistant, lookup, self-draft, .*hass.* or all, got 'medusa'"):
        chosen_names(["hass,medusa"])


def test_the_figures_of_every_method_are_plain_json(tiny_pair):
    console = console_of()
    names, prompts = ("assistant", "lookup", "self-draft"), ["The json", "module"]
    result = comparison.compare_methods(console, names, max_new_tokens=8, prompts=prompts, as_json=True)
    assert console.file.getvalue() == ""
    assert result["same_text"] is True
    assert result["plain_tokens_per_second"] > 0
    assert tuple(result["methods"]) == names
    for found in result["methods"].values():
        assert found["same_text"] is True
        assert found["tokens_per_second"] > 0 < found["speedup"]
        assert found["tokens_per_round"] == found["stats"]["tokens_per_round"] >= 1.0
        assert [each["name"] for each in found["prompts"]] == ["'The json'", "'module'"]
        assert all(len(each["speculative_seconds"]) == result["num_runs"] for each in found["prompts"])
    json.dumps(result)


def test_plain_decoding_is_packed_as_the_methods_are(tiny_pair, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 0)
    comparison.compare_methods(console_of(), ("lookup",), max_new_tokens=2, prompts=["The"], as_json=True)
    packed = {
        type(layer.mlp.up_proj).__name__ for layer in (*tiny_pair.target.model.layers, *tiny_pair.draft.model.layers)
    }
    assert packed == {"PackedLinear"}


def test_runs_take_turns_in_alternating_order_and_another_text_is_noticed(tiny_pair, monkeypatch):
    order = []

    def trace(name, tokens):
        order.append(name)
        return Trace([Step(0.5, tokens)], seconds=1.0)

    monkeypatch.setattr(timing, "trace_plain", lambda *_: trace("plain", [1, 2]))
    monkeypatch.setattr(
        timing,
        "trace_speculative",
        lambda pair, drafter, inputs, count, config: trace(config.drafting, [1, 2 + (config.drafting == "ngram")]),
    )
    monkeypatch.setattr(comparison, "REPEATS", 2)
    names, prompts = ("assistant", "lookup"), ["The"]
    result = comparison.compare_methods(console_of(), names, max_new_tokens=2, prompts=prompts, as_json=True)
    assert order[3:] == ["plain", "model", "ngram", "ngram", "model", "plain"]
    assert {name: found["same_text"] for name, found in result["methods"].items()} == {
        "assistant": True,
        "lookup": False,
    }
    assert result["same_text"] is False


@pytest.mark.parametrize("width", [100, 250])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_method_has_a_panel_and_a_line(tiny_pair, terminal, width):
    console = console_of(width=width, terminal=terminal)
    comparison.compare_methods(console, OF_THE_PAIR, max_new_tokens=3, prompts=["The json module"])
    drawn = console.file.getvalue()
    assert all(drawn.count(name) >= 2 for name in OF_THE_PAIR)
    assert drawn.count("The json module") >= 1 + len(OF_THE_PAIR)
    assert "tokens per round" in drawn
    assert "Every text is the same, token for token." in drawn


def test_many_panels_of_a_low_terminal_show_the_end_of_the_text(tiny_pair):
    console = console_of(width=80, height=14, terminal=True)
    prompt = "".join(f"line {number}\n" for number in range(20))
    comparison.compare_methods(console, OF_THE_PAIR, max_new_tokens=1, prompts=[prompt])
    drawn = console.file.getvalue()
    assert "line 19" in drawn
    assert "line 3\n" not in drawn
    assert "line 3 " not in drawn
