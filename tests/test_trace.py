"""Traces: how each token was decided, found again without the loop, and its two pictures."""

import html
import io
import re

import pytest
import torch
from rich.console import Console

from hf_specdec import DecodingTrace, ExactConfig, SpeculativeConfig
from hf_specdec.acceptance import TopK
from hf_specdec.drafters import ScriptedDrafter
from hf_specdec.records import Round
from hf_specdec.trace import DECISIONS, decisions, html_page
from tests.toys import prompts, tiny_llama


class Letters:
    """Token `t` is written as the character number `33 + t`, which may be `<` or `&`."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(chr(33 + token) for token in tokens)


def round_(emitted, drafted, verified, accepted, **more):
    counts = (torch.tensor([each]) for each in (drafted, verified, accepted))
    return Round([emitted], *counts, torch.ones(1, dtype=torch.bool), **more)


@pytest.mark.parametrize(
    ("counts", "emitted", "expected"),
    [
        ((3, 3, 3), 4, ["accepted"] * 3 + ["bonus"]),
        ((3, 2, 1), 2, ["accepted", "resampled"]),
        ((3, 1, 0), 1, ["resampled"]),
        ((1, 1, 1), 2, ["accepted", "bonus"]),
        ((0, 0, 0), 1, ["target"]),
        ((3, 2, 2), 2, ["accepted"] * 2),  # the text ended inside the draft
    ],
)
def test_decisions_of_a_round(counts, emitted, expected):
    assert decisions(round_(list(range(emitted)), *counts)) == expected


def test_rescued_drafts_are_told_apart_by_their_marks():
    marks = {"rescued": torch.tensor([[False, True, True]]), "step_tv": torch.tensor([[0.0, 0.25, float("nan")]])}
    each = round_([1, 2, 3], 3, 3, 2, marks=marks)
    assert decisions(each) == ["accepted", "rescued", "resampled"]
    trace = DecodingTrace(Letters())
    trace.add(each)
    assert [(piece.decision, piece.step_tv) for piece in trace.pieces] == [
        ("accepted", 0.0), ("rescued", 0.25), ("resampled", None),
    ]  # fmt: skip


def test_a_bonus_token_costs_nothing_that_stands_where_nothing_was_drafted():
    """Beside a row with a longer draft."""
    trace = DecodingTrace(Letters())
    trace.add(round_([1, 2], 1, 1, 1, marks={"step_tv": torch.tensor([[0.5, 0.25]])}))
    assert [(piece.decision, piece.step_tv) for piece in trace.pieces] == [("accepted", 0.5), ("bonus", None)]


@pytest.fixture(scope="module")
def run():
    """A relaxed greedy run whose drafts are the plain text with some tokens replaced by the runner-up."""
    model, inputs = tiny_llama(layers=1), prompts()
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    second = model(plain).logits[0].topk(2).indices[:, 1]
    script = [
        int(second[6 + i]) if i == 17 else 63 if i == 6 else int(plain[0, 7 + i]) for i in range(24)
    ]  # fmt: skip
    trace = DecodingTrace(Letters(), inputs["input_ids"][0].tolist())
    config = SpeculativeConfig(
        acceptance=TopK(2), guard=None, drafting="model", length=4, on_drafter_error="raise", diagnostics=True
    )
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=24, speculative_config=config, round_callback=trace.add,
        assistant_model=lambda settings: ScriptedDrafter(settings, [script]), return_dict_in_generate=True,
    )  # fmt: skip
    return model, script, trace, out


def test_what_is_called_rescued_is_no_choice_of_the_target(run):
    model, script, trace, out = run
    text = out.sequences[0, 7:].tolist()
    wanted = model(out.sequences).logits[0, 6:-1].argmax(-1).tolist()
    assert len(trace.pieces) == len(text) == 24
    found = set()
    for token, drafted, best, piece in zip(text, script, wanted, trace.pieces, strict=True):
        found.add(piece.decision)
        assert piece.text == chr(33 + token)
        assert (piece.decision == "rescued") == (token != best)
        assert (piece.step_tv == 1.0) == (piece.decision == "rescued")
        if piece.decision in ("accepted", "rescued"):
            assert token == drafted
        if piece.decision == "resampled":
            assert token != drafted
            assert piece.step_tv == 0.0
    assert found == set(DECISIONS)
    stats = out.speculative_stats
    assert trace.counts["rescued"] == stats.events["rescued"]
    assert trace.counts["resampled"] == stats.events["rejected"]
    assert trace.counts["accepted"] + trace.counts["rescued"] == stats.num_accepted_tokens


def test_an_exact_run_rescues_nothing(run):
    model, script, *_ = run
    trace = DecodingTrace(Letters())
    model.generate(
        **prompts(), do_sample=False, max_new_tokens=24, round_callback=trace.add,
        assistant_model=lambda settings: ScriptedDrafter(settings, [script]),
        speculative_config=ExactConfig(drafting="model", length=4, on_drafter_error="raise"),
    )  # fmt: skip
    assert trace.counts["rescued"] == 0
    assert trace.counts["accepted"] > 0
    assert all(piece.step_tv is None for piece in trace.pieces)


def test_the_page_holds_the_text_escaped_and_coloured(run):
    trace = run[2]
    page = trace.to_html(prompt="<b>", title="a & b")
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)">(.*?)</span>', page, re.DOTALL)
    assert [(name, html.unescape(text)) for name, _, text in spans] == [
        (piece.decision, piece.text) for piece in trace.pieces
    ]
    assert any(piece.text in "<&>" for piece in trace.pieces)  # something was escaped
    assert "rescued, total variation 1.0000" in page
    assert "&lt;b&gt;" in page
    assert "<title>a &amp; b</title>" in page
    assert "<script" not in page
    assert html_page([("one", trace), ("two", trace)]).count("<pre>") == 2


def test_the_terminal_shows_the_text_in_colour(run):
    trace = run[2]
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor").print(trace.to_rich(), soft_wrap=True)
    assert "\x1b[" in out.getvalue()
    # A style remembers the codes it was first drawn with, in whatever colours that console had, so styles are compared.
    assert any("#bf8700" in str(span.style) for span in trace.to_rich().spans)  # a rescued token
    assert trace.to_rich().plain == "".join(piece.text for piece in trace.pieces)
    assert f"rescued: {trace.counts['rescued']}, " in trace.legend().plain


def test_it_is_plain_data_for_json(run):
    told = run[2].to_dict()
    assert sum(told["counts"].values()) == len(told["pieces"]) == 24
    assert told["pieces"][0] == {
        "text": run[2].pieces[0].text,
        "decision": run[2].pieces[0].decision,
        "step_tv": run[2].pieces[0].step_tv,
    }
