"""The results of self-drafting: arms of one text, models side by side in one file."""

import json

from hf_specdec import SelfDraftConfig, linear
from hf_specdec.bench.self_draft import measure, write_results
from hf_specdec.demo.pair import load_pair
from tests.toys import tiny_llama


CONFIG = SelfDraftConfig(exit_layers=(3,), confidence_threshold=0.0, max_width=2, length=2, on_drafter_error="raise")


def test_models_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 0)
    model, tokenizer = tiny_llama(vocab_size=4096), load_pair().tokenizer
    summary, rows = measure("tiny", model, tokenizer, ["A list"], CONFIG, 12)
    assert list(summary) == ["tiny, torch's linears", "tiny, packed linears"]
    for arms in summary.values():
        assert list(arms) == ["plain", "self-draft", "self-draft-hybrid"]
        assert all(figures["text_equal"] == 1.0 for figures in arms.values())
        assert arms["self-draft"]["events"]["exit_depths 3"] > 0
    first = {"other": summary["tiny, torch's linears"]}
    write_results(tmp_path / "found", first, {"other": rows["tiny, torch's linears"]}, {"decoding": "greedy"})
    paths = write_results(tmp_path / "found", summary, rows, {"decoding": "again"})
    held = json.loads(paths[0].read_text())
    assert list(held["summary"]) == list(held["environment"]) == ["other", *summary]
    assert held["environment"]["other"] == {"decoding": "greedy"}
    assert [row["model"] for row in held["rows"]].count("other") == 3
    assert "## other" in paths[1].read_text()
    assert paths[2].read_bytes().startswith(b"\x89PNG")
