"""`specdec calibrate self-draft`: settings by replay, and a config that can be loaded."""

import copy
import time

import pytest
import torch

from hf_specdec import DraftVocabulary, ExitHeads, ExitHeadsConfig, SelfDraftConfig
from hf_specdec._compat import CACHE_KEY
from hf_specdec.cli.self_draft_costs import measure_layer_costs
from hf_specdec.networks.exit_heads import ExitAdapter
from hf_specdec.training.exit_heads import Observer
from tests.toys import prompts


def test_it_saves_settings_that_a_run_takes(pair, tmp_path, run_json, run):
    data = tmp_path / "prompts.txt"
    data.write_text("\n".join(f"w{index} w{index + 3} w{index + 1}" for index in range(3)))
    heads = ExitHeads(ExitHeadsConfig("linear", [1, 2, 3], hidden_size=pair.model.config.hidden_size))
    heads.save_pretrained(tmp_path / "heads")
    options = ["calibrate", "self-draft", "--target", pair.target, "--data", data, "--max-new-tokens", 8]
    for more in ([], ["--exit-heads", tmp_path / "heads", "--exits", "1,3"]):
        found = run_json(*options, *more, "--save", tmp_path / "config")
        config = SelfDraftConfig.from_pretrained(tmp_path / "config")
        assert found["num_texts"] == 3
        assert set(config.exit_layers) <= ({1, 3} if more else {1, 2, 3})
        assert config.exit_heads == (str(tmp_path / "heads") if more else None)
        asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        drafted = pair.model.generate(**prompts(), **asked, speculative_config=config)
        assert drafted.tolist() == pair.model.generate(**prompts(), **asked).tolist()
    assert "1..3" in run(*options, "--exits", "4", code=2).stderr
    assert "numbers of layers" in run(*options, "--exits", "half", code=2).stderr


@pytest.mark.parametrize("kind", [None, "linear", "adapter"])
def test_a_target_in_half_precision_is_calibrated_as_it_is_saved(pair, kind, tmp_path, run_json):
    """`--dtype auto` is the default, and most checkpoints are in bfloat16; heads are in float32 on disk."""
    for each in (copy.deepcopy(pair.model).to(torch.bfloat16), pair.tokenizer):
        each.save_pretrained(tmp_path / "half")
    data = tmp_path / "prompts.txt"
    data.write_text("w1 w4 w2\nw5 w8 w6\n")
    options = ["calibrate", "self-draft", "--target", tmp_path / "half", "--data", data, "--max-new-tokens", 8]
    if kind is not None:
        heads = ExitHeads(ExitHeadsConfig(kind, [1, 3], hidden_size=pair.model.config.hidden_size))
        heads.save_pretrained(tmp_path / "heads")
        options += ["--exit-heads", tmp_path / "heads"]
    found = run_json(*options)
    assert found["num_texts"] == 2
    assert found["tokens_per_round"] >= 1


def test_what_cannot_be_replayed_is_said_before_it_is_measured(pair, tmp_path, run, monkeypatch):
    monkeypatch.setattr("hf_specdec.cli.self_draft_costs.measure_layer_costs", None)
    data = tmp_path / "prompts.txt"
    data.write_text("w1 w2 w3\n")
    options = ["calibrate", "self-draft", "--target", pair.target, "--data", data, "--max-new-tokens", 1]
    refused = run(*options, "--exits", "1,2", "--ablation", code=2).stderr
    assert "--ablation needs 3 exits or more, got [1, 2]" in " ".join(refused.split())
    assert "raise --max-new-tokens" in " ".join(run(*options, code=2).stderr.split())


def test_a_draft_vocabulary_is_replayed_priced_and_saved(pair, tmp_path, run_json, run):
    data = tmp_path / "prompts.txt"
    data.write_text("w1 w4 w2\nw5 w8 w6\n")
    vocabulary = DraftVocabulary.from_texts(pair.tokenizer, ["w1 w2 w3 w4 w5 w6 w7 w8"] * 2, 20)
    path = vocabulary.save(tmp_path / "words.safetensors")
    options = ["calibrate", "self-draft", "--target", pair.target, "--data", data, "--max-new-tokens", 8]
    found = run_json(*options, "--vocabulary", path, "--save", tmp_path / "config")
    assert all(seconds < found["costs"]["step"] for seconds in found["costs"]["heads"].values())
    config = SelfDraftConfig.from_pretrained(tmp_path / "config")
    assert config.draft_vocabulary == str(path)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    drafted = pair.model.generate(**prompts(), **asked, speculative_config=config)
    assert drafted.tolist() == pair.model.generate(**prompts(), **asked).tolist()
    assert "no draft vocabulary at" in run(*options, "--vocabulary", tmp_path / "none", code=2).stderr
    other = DraftVocabulary(vocabulary.token_ids, vocabulary.vocab_size, "another").save(tmp_path / "other.safetensors")
    assert "another tokenizer" in " ".join(run(*options, "--vocabulary", other, code=2).stderr.split())


def test_an_adapter_is_priced_by_exit_as_it_runs(pair, monkeypatch):
    """Beside the keys and values of a text, and by column for what it reads later."""
    model = pair.model
    heads = ExitHeads(ExitHeadsConfig("adapter", [1, 3], hidden_size=model.config.hidden_size))
    original, seen = ExitAdapter.forward, []

    def slow(adapter, hidden_states, **inputs):
        past, columns = inputs[CACHE_KEY].get_seq_length(), hidden_states.shape[1]
        seen.append((past, columns))
        time.sleep(0.01 * columns if adapter is heads.head(1) else 0.05)
        return original(adapter, hidden_states, **inputs)

    monkeypatch.setattr(ExitAdapter, "forward", slow)
    costs = measure_layer_costs(model, Observer(model, [1, 3]), heads)
    assert set(seen) == {(0, 64), (64, 1), (64, 5)}
    assert 0.01 <= costs.heads[1] < 0.05 <= costs.heads[3]
    assert costs.catch_up[1] == pytest.approx(0.01, rel=0.5)
    assert costs.catch_up[3] < 0.005
    monkeypatch.undo()
    linear = ExitHeads(ExitHeadsConfig("linear", [1, 3], hidden_size=model.config.hidden_size))
    raw = measure_layer_costs(model, Observer(model, [1, 3]), None)
    for each in (raw, measure_layer_costs(model, Observer(model, [1, 3]), linear)):
        assert each.heads.keys() == {1, 3}
        assert each.catch_up == {}
    assert raw.heads[1] == raw.heads[3]
