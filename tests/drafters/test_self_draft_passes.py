"""What one pass of the model has prepared serves later rounds, and completes them, where nobody could tell."""

import pytest
import torch
from transformers import DynamicCache

from hf_specdec import SelfDraftConfig
from hf_specdec.layer_gate import LayerGate
from hf_specdec.layered_lm import LayeredLM
from tests.drafters.self_drafting import Director, sometimes
from tests.families import FAMILIES
from tests.toys import prompts, tiny_llama


TOKENS, LAYERS = 24, 4
CONFIG = SelfDraftConfig(exit_layers=(1, 3), length=3, confidence_threshold=0.0, on_drafter_error="raise")


def wanders(row, column, depth):
    return (row + column) % 4 < depth


def decode(model, batch_size=1, config=CONFIG, **options):
    return model.generate(
        **prompts(batch_size),
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
        **({} if config is None else {"speculative_config": config}),
    )


@pytest.fixture
def model_calls(monkeypatch):
    """Counts the calls of a target's own forward pass."""
    calls, call = [], LayeredLM._call_with_view

    def counted(lm, **inputs):
        calls.append(inputs["input_ids"].shape)
        return call(lm, **inputs)

    monkeypatch.setattr(LayeredLM, "_call_with_view", counted)
    return calls


def directed(model, batch_size=1, **options):
    """A run whose tokens leave at changing depths, some with wrong drafts."""
    plain = decode(model, batch_size, None, **options)
    with Director(plain.sequences, sometimes, wanders).directing():
        out = decode(model, batch_size, **options)
    assert torch.equal(out.sequences, plain.sequences)
    return plain, out, out.speculative_stats.num_target_forwards - 1


def test_a_run_calls_its_model_once_to_prepare_and_once_to_compare(model_calls):
    plain, out, rounds = directed(tiny_llama(layers=LAYERS), output_logits=True)
    assert rounds > 8
    assert len(model_calls) <= 3  # the last token of a text is settled by the model as well
    for one, other in zip(out.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_text_outgrows_what_was_prepared(model_calls, monkeypatch):
    monkeypatch.setattr("hf_specdec.layered_lm._WIDTH", 10)
    directed(tiny_llama(layers=LAYERS))
    prepared = [shape for shape in model_calls if shape[1] == 10]
    assert TOKENS // 10 <= len(prepared) <= TOKENS // 5


def test_rows_that_advance_on_their_own_are_prepared_for_each_round(model_calls):
    _, _, rounds = directed(tiny_llama(layers=LAYERS), 3)
    assert len(model_calls) >= rounds // 2


@pytest.mark.parametrize("whose", ["model", "decoder"])
def test_a_hook_of_the_user_sees_every_pass(whose, model_calls):
    model, seen = tiny_llama(layers=LAYERS), []
    watched = model if whose == "model" else model.get_decoder()
    handle = watched.register_forward_hook(lambda *passed: seen.append(1))
    try:
        _, _, rounds = directed(model)
    finally:
        handle.remove()
    assert len(model_calls) > rounds
    assert len(seen) > rounds


def after(layer, change):
    """A hook that changes what a layer gives."""
    return layer.register_forward_hook(lambda _, args, output: change(output))


def before(layer, change):
    """A hook that changes what a layer is given."""
    return layer.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "unprepared"])
@pytest.mark.parametrize("change", [torch.add, torch.Tensor.add_], ids=["new", "in-place"])
@pytest.mark.parametrize(("hook", "steered"), [(after, 0), (after, 1), (before, 1)])
def test_hooks_that_steer_a_layer_are_heeded_once(hook, steered, change, prepares, monkeypatch):
    if not prepares:
        monkeypatch.setattr("hf_specdec.layered_lm.has_fixed_positions", lambda config: False)
    model, batch_size = tiny_llama(layers=LAYERS), 1 if prepares else 2
    unsteered = decode(model, batch_size, None).sequences
    steering = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 2
    hook(model.model.layers[steered], lambda states: change(states, steering))
    plain, _, _ = directed(model, batch_size)
    assert not torch.equal(plain.sequences, unsteered)


def test_outputs_besides_logits_come_from_the_model(model_calls):
    plain, out, rounds = directed(tiny_llama(layers=LAYERS), output_hidden_states=True)
    assert len(model_calls) > rounds
    for mine, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_its_logits_says_them_itself(model_calls):
    _, _, rounds = directed(FAMILIES["gemma2"].build("eager", seed=0))
    assert len(model_calls) >= rounds


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_scale_that_is_none_is_nothing_to_say(scale, model_calls):
    model = FAMILIES["cohere"].build("eager", seed=0)
    model.logit_scale = scale
    _, _, rounds = directed(model)
    assert (len(model_calls) >= rounds) == (scale != 1.0)


def test_what_was_prepared_for_a_longer_text_serves_no_shorter_one():
    model = tiny_llama(layers=LAYERS)

    def climber():
        held = torch.zeros(1, 0, dtype=torch.long)
        return LayeredLM(model, LayerGate(model), cache=DynamicCache(config=model.config), held=held)

    def climb(lm, text):
        with torch.no_grad(), lm.alone():
            return lm.climb(text, torch.tensor([text.shape[1]]), 2)

    longer, used = torch.arange(1, 21)[None], climber()
    climb(used, longer)
    torch.testing.assert_close(climb(used, longer[:, :9]), climb(climber(), longer[:, :9]), rtol=1e-4, atol=1e-4)
