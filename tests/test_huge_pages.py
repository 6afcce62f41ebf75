"""Weights are put in huge pages: only whole ones, only of weights, each once, and nothing of them changes."""

import sys

import pytest
import torch
from torch import nn

from hf_specdec import ExitHeads, load_model, pack_linears
from hf_specdec.huge_pages import use_huge_pages
from hf_specdec.loading import load_assistant, load_exit_heads
from tests.networks import drafter_for, small_target
from tests.toys import tiny_llama


MIB = 1 << 20


def model_of(*, packed):
    model = nn.Sequential(nn.Linear(1024, 1536, bias=False), nn.Linear(1536, 1024, bias=False), nn.Linear(8, 8))
    if packed:
        pack_linears(model)
    return model


@pytest.fixture
def two_mib(tmp_path, monkeypatch):
    file = tmp_path / "size"
    file.write_text(f"{2 * MIB}\n")
    monkeypatch.setattr("hf_specdec.huge_pages._SIZE_FILE", file)


@pytest.mark.parametrize("packed", [False, True])
def test_whole_pages_of_each_weight_are_asked_for(packed, two_mib):
    model, asked = model_of(packed=packed), []

    def advise(address, number, kind):
        asked.append((address, number, kind))
        return 0

    joined = use_huge_pages(model, advise)
    assert {kind for *_, kind in asked} == {14, 25}
    assert all(address % (2 * MIB) == 0 and number % (2 * MIB) == 0 for address, number, _ in asked)
    assert 2 * 4 * MIB <= joined <= 2 * 6 * MIB  # of two weights of 6 MiB, without their ends
    assert len(asked) == 4  # the small layer fills no page
    if not packed:
        for address, number, _ in asked[::2]:
            starts = [each.data_ptr() for each in model.parameters()]
            assert any(start <= address and address + number <= start + 6 * MIB for start in starts)


def test_a_weight_that_two_modules_share_is_asked_for_once(two_mib):
    model = model_of(packed=False)
    model.append(nn.Linear(1024, 1536, bias=False))
    model[3].weight = model[0].weight
    asked = []
    use_huge_pages(model, lambda *given: asked.append(given) or 0)
    assert len(asked) == len(set(asked)) == 4


def test_refused_advice_changes_nothing(two_mib):
    assert use_huge_pages(model_of(packed=True), lambda *given: -1) == 0


def test_without_huge_pages_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_specdec.huge_pages._SIZE_FILE", tmp_path / "missing")
    assert use_huge_pages(model_of(packed=False), lambda *given: pytest.fail("asked")) == 0


def test_on_a_system_without_the_call_nothing_happens(two_mib, monkeypatch):
    monkeypatch.setattr(sys, "platform", "other")
    assert use_huge_pages(model_of(packed=False)) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_weights_say_stays_the_same(packed):
    model = model_of(packed=packed)[:2]
    inputs = torch.randn(3, 1024)
    with torch.no_grad():
        before = model(inputs)
        use_huge_pages(model)
        assert torch.equal(model(inputs), before)


def test_loading_asks_for_them(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("hf_specdec.loading.use_huge_pages", asked.append)
    tiny_llama().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert asked == [model]


def test_a_network_goes_where_its_target_is(tmp_path, monkeypatch):
    target, asked = small_target(), []
    drafter_for(target, "eagle3").save_pretrained(tmp_path)
    monkeypatch.setattr("hf_specdec.loading.use_huge_pages", asked.append)
    network = load_assistant(tmp_path, target)
    assert asked == [network]


def test_exit_heads_go_where_their_target_is(tmp_path, monkeypatch):
    target, asked = tiny_llama(), []
    ExitHeads.for_target(target, "linear", [1]).save_pretrained(tmp_path)
    monkeypatch.setattr("hf_specdec.loading.use_huge_pages", asked.append)
    heads = load_exit_heads(tmp_path, target)
    assert asked == [heads]
