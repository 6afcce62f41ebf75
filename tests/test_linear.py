"""Packed CPU linears behave like the ordinary ones they replace."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import linear
from hf_specdec.linear import PackedLinear, SharedLinear, pack_linears
from tests.toys import prompts, tiny_llama


pytestmark = pytest.mark.skipif(linear.packing_problem() is not None, reason=f"{linear.packing_problem()}")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_agree(rows, bias):
    dense = nn.Linear(96, 160, bias=bias)
    inputs = torch.randn(2, rows, 96)
    expected = dense(inputs)
    packed = PackedLinear(dense)(inputs)
    assert torch.linalg.norm(packed - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_the_packed_operator_is_used(monkeypatch):
    packed = PackedLinear(nn.Linear(32, 32))

    def forbidden(*_):
        raise AssertionError("the dense path was taken")

    monkeypatch.setattr(nn.functional, "linear", forbidden)
    assert packed(torch.randn(1, 3, 32)).shape == (1, 3, 32)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_go_through_without_unpacking_in_the_forward_pass(bias, monkeypatch):
    dense = nn.Linear(96, 160, bias=bias)
    mine, theirs = (torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    twin, packed = copy.deepcopy(dense), PackedLinear(dense)
    with torch.enable_grad():
        expected = twin(theirs.requires_grad_())
        monkeypatch.setattr(PackedLinear, "weight", property(lambda layer: pytest.fail("the weight was unpacked")))
        found = packed(mine.requires_grad_())
        for output in (expected, found):
            output.pow(2).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    if bias:
        torch.testing.assert_close(packed.bias.grad, twin.bias.grad, rtol=1e-4, atol=1e-4)


def test_an_original_is_released_before_the_next_layer_is_packed(monkeypatch):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    weights, alive = [weakref.ref(layer.weight) for layer in model], []

    def pack(weight):
        alive.append(sum(each() is not None for each in weights))
        return original(weight)

    original = linear._pack
    monkeypatch.setattr(linear, "_pack", pack)
    assert pack_linears(model, small=True).num_packed == 4
    assert alive == [4, 3, 2, 1]


def test_a_model_that_fails_in_the_middle_still_works(monkeypatch):
    model = tiny_llama()
    inputs = prompts(2)
    expected, packed = model(**inputs).logits, []

    def pack(weight):
        if len(packed) == 5:
            raise MemoryError
        packed.append(weight.shape)
        return original(weight)

    original = linear._pack
    monkeypatch.setattr(linear, "_pack", pack)
    with pytest.raises(MemoryError):
        pack_linears(model, small=True)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_keeps_its_logits_state_and_texts(tmp_path):
    model = tiny_llama()
    inputs = prompts(2)
    logits, text = model(**inputs).logits, model.generate(**inputs, max_new_tokens=12, do_sample=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    report = pack_linears(model, small=True)
    assert report.num_packed == 4 * 7 + 1
    assert not report.skipped
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), text)

    state = model.state_dict()
    assert list(state) == list(weights)
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_ordinary(duplicate):
    model = tiny_llama()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    pack_linears(model, small=True)
    twin = duplicate(model)
    assert not any(isinstance(module, PackedLinear) for module in twin.modules())
    assert all(torch.equal(value, weights[name]) for name, value in twin.state_dict().items())


def test_casting_makes_the_layer_dense_and_casting_back_packs_it_again():
    packed = PackedLinear(nn.Linear(32, 48))
    weight = packed.weight.clone()
    packed.to(torch.bfloat16)
    assert packed(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert packed.weight.dtype == torch.bfloat16
    packed.float()
    torch.testing.assert_close(packed.weight, weight, rtol=1e-2, atol=1e-2)
    assert packed._dense is None


def test_loading_a_state_packs_the_new_weights():
    packed, source = PackedLinear(nn.Linear(16, 24)), nn.Linear(16, 24)
    packed.load_state_dict(source.state_dict())
    assert torch.equal(packed.weight, source.weight)
    inputs = torch.randn(3, 16)
    torch.testing.assert_close(packed(inputs), source(inputs), rtol=1e-4, atol=1e-5)


def test_a_tied_head_is_packed_only_on_request():
    model = tiny_llama(tie_word_embeddings=True)
    report = pack_linears(model, small=True)
    assert report.num_packed == 4 * 7
    assert report.num_shared == 1
    assert isinstance(model.lm_head, SharedLinear)
    assert not report.skipped
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert pack_linears(model, tied_head=True, small=True).num_packed == 1
    assert isinstance(model.lm_head, PackedLinear)


@pytest.mark.parametrize("rows", [1, 3, 4, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_shared_weight_is_read_in_place(rows, bias, monkeypatch):
    dense = nn.Linear(96, 160, bias=bias)
    model = nn.ModuleDict({"head": dense, "embedding": nn.Embedding(160, 96, _weight=dense.weight)})
    model["embedding"].weight = dense.weight
    inputs = torch.randn(2 * 96, rows, 2).transpose(0, 2)[:, :, :96]  # not contiguous
    expected = dense(inputs[0])
    assert pack_linears(model, small=True).num_shared == 1
    if rows >= 4:
        monkeypatch.setattr(nn.functional, "linear", None)
    torch.testing.assert_close(model["head"](inputs[0]), expected, rtol=1e-4, atol=1e-5)


def test_a_shared_layer_follows_its_model(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    inputs = prompts(4)
    text = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    pack_linears(model, small=True)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), text)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).to(torch.bfloat16)):
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        assert twin(**inputs).logits.dtype == twin.dtype
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(**inputs, max_new_tokens=8, do_sample=False), text)
    with torch.enable_grad():
        model.lm_head(torch.randn(8, model.config.hidden_size, requires_grad=True)).sum().backward()


def test_other_layers_are_left_alone():
    model = nn.ModuleDict(
        {"narrow": nn.Linear(8, 8).bfloat16(), "convolution": nn.Conv1d(8, 8, 1), "special": _Special(8, 8)}
    )
    report = pack_linears(model, small=True)
    assert report.num_packed == 0
    assert "bfloat16" in report.skipped["narrow"]
    assert type(model["special"]) is _Special


class _Special(nn.Linear):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 2


def test_load_model_packs_float32_on_the_cpu_only(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert any(isinstance(module, PackedLinear) for module in hf_specdec.load_model(tmp_path, packed=True).modules())
    for options in ({"packed": False}, {"dtype": torch.bfloat16}):
        model = hf_specdec.load_model(tmp_path, **options)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
    with pytest.raises(hf_specdec.InvalidConfigError, match="bfloat16"):
        hf_specdec.load_model(tmp_path, dtype=torch.bfloat16, packed=True)


def test_without_the_operator_layers_stay_dense_with_a_reason(monkeypatch):
    monkeypatch.setattr(linear, "packing_problem", lambda: "no operator here")
    model = tiny_llama()
    report = pack_linears(model, small=True)
    assert report.num_packed == 0
    assert set(report.skipped.values()) == {"no operator here"}
    assert type(model.lm_head) is nn.Linear


def test_small_layers_stay_as_they_are_unless_asked_for():
    model = nn.ModuleDict({"small": nn.Linear(1024, 1024), "large": nn.Linear(1024, 1025)})
    report = pack_linears(model)
    assert report.num_packed == 1
    assert list(report.skipped) == ["small"]
    assert "1024 x 1024" in report.skipped["small"]
    assert type(model["small"]) is nn.Linear
    assert isinstance(model["large"], PackedLinear)


def test_a_small_model_is_not_packed_unless_asked_for(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert not any(isinstance(module, PackedLinear) for module in hf_specdec.load_model(tmp_path).modules())


def test_loading_an_unfit_state_is_refused_as_by_an_ordinary_layer():
    packed = PackedLinear(nn.Linear(16, 24))
    weight, state = packed.weight, nn.Linear(16, 24).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        packed.load_state_dict({"bias": state["bias"]})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        packed.load_state_dict({**state, "weight": torch.randn(23, 16)})
    assert torch.equal(packed.weight, weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        packed.load_state_dict({**state, "more": torch.randn(1)})


def test_a_state_is_loaded_into_a_layer_that_casting_made_dense():
    packed, source = PackedLinear(nn.Linear(16, 24)).to(torch.bfloat16), nn.Linear(16, 24)
    packed.load_state_dict(source.state_dict())
    assert packed.weight.dtype == torch.bfloat16
    assert torch.equal(packed.weight, source.weight.bfloat16())
    assert packed(torch.randn(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_reaches_faster_layers():
    model = nn.ModuleDict({"embedding": nn.Embedding(24, 16), "head": nn.Linear(16, 24), "layer": nn.Linear(16, 16)})
    model["head"].weight = model["embedding"].weight
    pack_linears(model, small=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden_states = model["layer"](torch.randn(6, 16))
        assert hidden_states.dtype == torch.bfloat16
        assert model["layer"](hidden_states).dtype == torch.bfloat16
        assert model["head"](torch.randn(6, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("inputs", [torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 15)])
def test_inputs_that_do_not_fit_are_refused_in_pytorchs_own_words(inputs):
    with pytest.raises(RuntimeError, match=r"dtype|shapes"):
        PackedLinear(nn.Linear(16, 24))(inputs)


def test_a_layer_with_two_names_stays_one_layer():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"first": layer, "second": layer})
    assert pack_linears(model, small=True).num_packed == 1
    assert isinstance(model["first"], PackedLinear)
    assert model["second"] is model["first"]


def test_load_model_says_why_layers_stay_dense(tmp_path, monkeypatch, caplog):
    tiny_llama().save_pretrained(tmp_path)
    hf_specdec.load_model(tmp_path)
    assert not [each for each in caplog.records if each.name == "hf_specdec.loading"]
    for module in (linear, hf_specdec.loading):
        monkeypatch.setattr(module, "packing_problem", lambda: "no operator here")
    for dtype in (torch.bfloat16, torch.float32):
        model = hf_specdec.load_model(tmp_path, dtype=dtype)
        assert type(model.lm_head) is nn.Linear
    assert [each.getMessage() for each in caplog.records if each.name == "hf_specdec.loading"] == [
        f"The linear layers of {tmp_path} stay dense: no operator here."
    ]
    with pytest.raises(hf_specdec.InvalidConfigError, match="no operator here"):
        hf_specdec.load_model(tmp_path, packed=True)
    with pytest.raises(hf_specdec.InvalidConfigError, match="packed must be"):
        hf_specdec.load_model(tmp_path, packed="always")
