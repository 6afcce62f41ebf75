"""The cards of the bundled drafters: each is what its figures say, to the letter."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.demo.methods import bundled_drafters
from hf_specdec.demo.pair import bundled_weights
from hf_specdec.hub.card import check_card, render_card


def rendered(name, results, card):
    with bundled_weights() as folder:
        return render_card(folder / "drafters" / name, results, existing=card)


def test_every_bundled_drafter_has_a_card_and_no_card_is_left_over(repo):
    cards = {path.parent.name for path in (repo / "model_cards").glob("*/README.md")}
    assert cards == set(bundled_drafters())


@pytest.mark.parametrize("name", bundled_drafters())
def test_a_card_is_what_its_figures_say(repo, tmp_path, name):
    card, results = repo / "model_cards" / name / "README.md", repo / "model_cards" / name / "results.json"
    assert rendered(name, results, card) == card.read_text(encoding="utf-8")
    check_card(card.parent)
    assert "(results.png)" in card.read_text(encoding="utf-8")
    assert (card.parent / "results.png").read_bytes().startswith(b"\x89PNG")
    measured = json.loads(results.read_text())
    assert measured["environment"]["assistant"] == name
    assert all(figures["text_equal"] == 1.0 for arms in measured["summary"].values() for figures in arms.values())
    arms = next(iter(measured["summary"].values()))
    arms["model-3"]["tokens_per_round"] += 0.01
    (tmp_path / "results.json").write_text(json.dumps(measured))
    assert rendered(name, tmp_path / "results.json", card) != card.read_text(encoding="utf-8")


PAPERS = {"eagle": "arxiv:2401.15077", "eagle3": "arxiv:2503.01840", "hass": "arxiv:2408.15766"}
METHODS = {
    "eagle3": {"eagle3"},
    "hass": {"eagle", "hass"},
    "rcsd-dpo": {"eagle", "hass", "rcsd", "rcsd-dpo"},
    "rcsd-grpo": {"eagle", "hass", "rcsd", "rcsd-grpo"},
}


@pytest.mark.parametrize("name", bundled_drafters())
def test_the_metadata_names_target_method_and_figures(repo, name):
    """The checks of the Hub that need no Hub."""
    data = ModelCard.load(repo / "model_cards" / name / "README.md").data
    assert (data.base_model, data.base_model_relation) == ("hf_specdec/demo-target", "adapter")
    assert (data.library_name, data.pipeline_tag) == ("hf_specdec", "text-generation")
    assert (data.license, data.language, data.metrics) == ("apache-2.0", ["en"], ["acceptance_length", "speedup"])
    papers = {PAPERS[method] for method in METHODS[name] if method in PAPERS}
    assert set(data.tags) == {"speculative-decoding", "draft-model"} | METHODS[name] | papers
    assert {each.metric_type for each in data.eval_results} == {"acceptance_length", "speedup"}


@pytest.mark.parametrize("name", bundled_drafters())
def test_launch_lines_are_those_of_the_export(repo, name, tmp_path, monkeypatch):
    text = (repo / "model_cards" / name / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\nspecdec (export .*)\ncd (.*)\n(.*)\n```", text)
    assert len(commands) == 2
    for export, folder, line in commands:
        words = [str(repo / word) if word.startswith("hf_specdec/") else word for word in export.split()]
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert f"```bash\n{line}\n```" in (tmp_path / folder / "serve.md").read_text(encoding="utf-8")
