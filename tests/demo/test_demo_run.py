"""The side-by-side display: what it returns, what it draws, and that both come from the same runs."""

import json

import pytest
import torch

from hf_specdec.demo import display, run
from hf_specdec.demo.pair import Pair, Prompt, load_pair, load_prompts
from hf_specdec.demo.traces import Step, Trace
from tests.demo import console_of, tiny_pair_of


@pytest.fixture
def tiny_pair(monkeypatch) -> Pair:
    pair = tiny_pair_of()
    monkeypatch.setattr(run, "load_pair", lambda: pair)
    return pair


def test_the_result_has_the_figures_and_is_plain_json(tiny_pair):
    console = console_of()
    result = run.run_demo(console, max_new_tokens=8, prompts=["The json", "module"], as_json=True)
    assert console.file.getvalue() == ""
    assert result["same_text"] is True
    assert result["speedup"] > 0
    assert result["plain_tokens_per_second"] > 0 < result["speculative_tokens_per_second"]
    assert result["stats"]["num_new_tokens"] == sum(each["num_tokens"] for each in result["prompts"])
    assert [each["name"] for each in result["prompts"]] == ["'The json'", "'module'"]
    json.dumps(result)


@pytest.mark.parametrize("terminal", [False, True])
def test_both_texts_and_the_figures_are_drawn(tiny_pair, terminal):
    console = console_of(terminal=terminal)
    run.run_demo(console, max_new_tokens=4, prompts=["The json module"])
    drawn = console.file.getvalue()
    assert drawn.count("The json module") >= 2
    assert "The text is the same, token for token." in drawn


def test_the_number_of_threads_is_put_back(tiny_pair):
    before = torch.get_num_threads()
    with run.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_replay_shows_what_was_there_at_that_moment():
    trace = Trace([Step(0.1, [65], 0), Step(0.2, [66, 67, 68], 2)], seconds=0.2)

    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    assert display.written(trace, ">", decode, 0.15).plain == ">A"
    text = display.written(trace, ">", decode, 0.2)
    assert text.plain == ">ABCD"
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == display.ACCEPTED_STYLE]
    assert green == ["B", "C"]


def test_half_a_character_is_held_back():
    whole = "é".encode()
    trace = Trace([Step(0.1, [whole[0]]), Step(0.2, [whole[1]])], seconds=0.2)

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    assert display.written(trace, "", decode, 0.1).plain == ""
    assert display.written(trace, "", decode, 0.2).plain == "é"


def test_the_bundled_pair_writes_the_same_text_both_ways():
    pair, prompts = load_pair(), load_prompts()
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    assert 3 <= len(prompts) <= 4
    assert pair.target.dtype == torch.float32
    result = run.run_demo(console_of(), max_new_tokens=12, prompts=[prompts[0].text], as_json=True)
    assert result["same_text"] is True
