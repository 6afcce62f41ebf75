"""The build command at its smallest: it trains, it resumes, and what it saves loads again."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.demo import corpus, losses
from hf_specdec.demo.build import build
from hf_specdec.demo.costs import expected_tokens, predicted_speedup
from hf_specdec.demo.export import size_in_bytes
from hf_specdec.demo.forward import TrainingForward
from hf_specdec.demo.models import new_model
from hf_specdec.demo.polish import Polish
from hf_specdec.demo.shape import Shape
from hf_specdec.demo.trainer import Recipe
from hf_specdec.training.checkpoints import latest_checkpoint


WEIGHTS = Path(corpus.__file__).parent / "weights"
TINY = Shape(layers=4, width=32, heads=2, kv_heads=1, mlp=64)
POLISH = Polish(steps=1, texts=2, prompt_length=4)
RECIPE = Recipe(steps=2, batch=2, length=16, evaluate_every=1, fast=False)
MODULE = '''"""A module of numbers."""


class Number:
    """One number.

    It may be even.
    """

    def double(self, times: int = 1) -> "Number":
        """Return the number, doubled."""
        return self


def undocumented():
    return None
'''


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    docs, library = tmp_path / "docs.jsonl", tmp_path / "library"
    library.mkdir()
    (library / "numbers.py").write_text(MODULE)
    pages = {f"page{i}.rst": f"Page {i}\n======\n\nThe {i} module counts to {i}.\n" * 8 for i in range(60)}
    records = [{"id": name, "text": text} for name, text in pages.items()]
    docs.write_text("".join(json.dumps(record) + "\n" for record in records))
    return docs, library


def run_build(sources: tuple[Path, Path], out: Path, **options) -> dict:
    docs, library = sources
    return build(docs, out, RECIPE, TINY, polish=POLISH, vocab_size=300, library=library, **options)


def test_a_build_saves_a_pair_that_transformers_loads(sources, tmp_path):
    figures = run_build(sources, tmp_path / "out")
    assert figures["step"] == 2
    assert set(figures["exit_agreement"]) == {"1", "2", "3"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "target")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "draft")
    assert target.dtype == draft.dtype == torch.bfloat16
    assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (4, 2)
    text = "The 3 module counts:\n    ünïcode\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.bos_token_id
    inputs = tokenizer("The", return_tensors="pt")
    assert target.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs.input_ids.shape[1]


def test_a_killed_build_continues_to_the_same_weights(sources, tmp_path):
    run_build(sources, tmp_path / "whole")
    run_build(sources, tmp_path / "parts", stop_at=1)
    assert latest_checkpoint(tmp_path / "parts/checkpoint").name == "checkpoint-00000001"
    run_build(sources, tmp_path / "parts")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        last = Path("checkpoint/checkpoint-00000002") / name
        whole, parts = (load_file(tmp_path / run / last) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_minutes_become_a_number_of_steps_that_is_kept(sources, tmp_path):
    run_build(sources, tmp_path / "out", minutes=0.0001)
    schedule = json.loads((tmp_path / "out/checkpoint/schedule.json").read_text())
    assert schedule["steps"] >= 1


def test_the_training_forward_is_the_transformers_forward():
    torch.manual_seed(0)
    model = new_model(TINY, 4, 300).eval()
    ids = torch.randint(300, (2, 16))
    states = TrainingForward()(model, ids, {2, 4})
    torch.testing.assert_close(model.lm_head(states[4]), model(input_ids=ids).logits)
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[2], model.model.norm(hidden[2]))


def test_docstrings_stand_below_what_they_document():
    module, number, double = corpus.docstrings_of(MODULE)
    assert module == '"""A module of numbers."""'
    assert number == 'class Number:\n    """One number.\n\n    It may be even.\n    """'
    assert double == 'def double(self, times: int=1):\n    """Return the number, doubled."""'


def test_layer_dropout_grows_and_never_drops_the_first_layer():
    rng = random.Random(0)
    counts = [0] * 8
    for _ in range(4000):
        for layer in losses.dropped_layers(rng, 8, progress=1.0):
            counts[layer] += 1
    assert counts[0] == 0
    assert counts[7] / 4000 == pytest.approx(losses.MAX_LAYER_DROPOUT, abs=0.02)
    assert not losses.dropped_layers(rng, 8, progress=0.0)


def test_every_exit_is_trained_in_turn():
    seen = {depth for step in range(7) for depth in losses.exits_at(step, 28)}
    assert seen == set(losses.exit_depths(28)) == {4, 7, 10, 14, 18, 21, 24}


def test_cost_model():
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert predicted_speedup(0.5, 2, draft_cost=0.1, verify_cost=1.05) == pytest.approx(1.4)


def test_the_bundled_weights_are_small_and_bf16():
    assert size_in_bytes(WEIGHTS) < 16_000_000
    for name in ("target", "draft"):
        with safe_open(WEIGHTS / name / "model.safetensors", framework="pt") as tensors:
            assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}  # noqa: SIM118
