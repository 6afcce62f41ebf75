"""`specdec demo --method` on the models that come with the package."""

from hf_specdec.demo import comparison
from hf_specdec.demo.pair import load_prompts


def test_the_command_compares_bundled_drafters(run_json, monkeypatch):
    monkeypatch.setattr(comparison, "REPEATS", 1)
    monkeypatch.setattr(comparison, "load_prompts", lambda: load_prompts()[:1])
    printed = run_json("demo", "--method", "hass,lookup", "--method", "eagle3", "--max-new-tokens", 4)
    assert list(printed["methods"]) == ["hass", "lookup", "eagle3"]
    assert printed["same_text"] is True


def test_an_unknown_method_is_one_line(run):
    assert "method must be one of assistant" in " ".join(run("demo", "--method", "tea", code=2).stderr.split())
