"""The cards of the bundled drafters: each is what its figures say, to the letter."""

import json

import pytest

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
