"""`verify_lossless`: equal texts pass, planted faults are found, planted near-ties are called rounding."""

import json
from dataclasses import replace

import pytest
import torch

import hf_specdec
import hf_specdec.loop
from hf_specdec import EASDConfig, ExactConfig, InvalidConfigError, SpeculativeConfig
from hf_specdec.losslessness import checking, default_tolerance, verify_lossless
from hf_specdec.losslessness.runs import GreedyRuns, RowTexts
from hf_specdec.stats import RowStats
from tests.toys import drafters_for, noisy_copy, state_of, tiny_llama


MODEL = tiny_llama()
DRAFT = noisy_copy(MODEL)
PROMPTS = [[5, 6, 7], torch.tensor([9, 8, 7, 6, 5, 4]), torch.tensor([[21, 3]])]
FIXED = ExactConfig(
    drafting="model", length=4
)  # the default's drafts depend on the clock, and a planted fault on drafts
ALWAYS = EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0)


def accepts_one_too_many(verify):
    """A fault in verification: the first rejected draft is accepted as well."""

    def faulty(rule, evidence, bonus_scores, streams, rows):
        verdict = verify(rule, evidence, bonus_scores, streams, rows)
        lengths = evidence.valid.sum(-1).cpu()
        return replace(verdict, num_accepted=torch.minimum(verdict.num_accepted + 1, lengths))

    return faulty


def says_instead(verify, token, other):
    """A fault in verification: wherever the target chooses one token, another one is emitted."""

    def faulty(*arguments):
        verdict = verify(*arguments)
        return replace(verdict, next_tokens=torch.where(verdict.next_tokens == token, other, verdict.next_tokens))

    return faulty


@pytest.fixture
def plant(monkeypatch):
    def planted(fault, *arguments):
        monkeypatch.setattr(hf_specdec.loop, "verify", fault(hf_specdec.loop.verify, *arguments))

    return planted


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["never", "sometimes", "always"])
def test_equal_texts_pass(name, batch_size):
    report = verify_lossless(
        MODEL,
        PROMPTS,
        ExactConfig(drafting="model"),
        assistant_model=drafters_for(MODEL)[name],
        max_new_tokens=20,
        batch_size=batch_size,
    )
    assert (report.passed, report.equal, report.lossless) == (True, True, True)
    assert (report.num_equal, report.num_rounding, report.num_faults, report.num_relaxed) == (3, 0, 0, 0)
    assert [each.index for each in report.comparisons] == [0, 1, 2]
    assert [each.num_prompt_tokens for each in report.comparisons] == [3, 6, 2]
    assert all(len(each.plain_tokens) == 20 for each in report.comparisons)
    assert (report.num_accepted_tokens > 0) == (name != "never")
    assert ("no draft was accepted" in report.summary()) == (name == "never")


def test_the_texts_are_those_of_generate():
    report = verify_lossless(MODEL, PROMPTS[:1], assistant_model=DRAFT, max_new_tokens=12)
    ids = torch.tensor([PROMPTS[0]])
    expected = MODEL.generate(ids, do_sample=False, max_new_tokens=12)[0, 3:].tolist()
    assert list(report.comparisons[0].plain_tokens) == list(report.comparisons[0].speculative_tokens) == expected


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_planted_fault_is_found_where_it_acts(plant, batch_size):
    sound = verify_lossless(MODEL, PROMPTS, assistant_model=DRAFT, max_new_tokens=20).comparisons
    plant(accepts_one_too_many)
    report = verify_lossless(MODEL, PROMPTS, FIXED, assistant_model=DRAFT, max_new_tokens=20, batch_size=batch_size)
    assert report.num_faults == 3
    assert not report.passed
    assert not report.equal
    for each, before in zip(report.comparisons, sound, strict=True):
        assert each.plain_tokens == before.plain_tokens
        both = list(zip(each.plain_tokens, each.speculative_tokens, strict=True))
        assert each.position == next(index for index, pair in enumerate(both) if pair[0] != pair[1])
        assert each.shortfall >= each.gap > each.tolerance == pytest.approx(1e-4)
    assert report.summary().endswith("FAILED: 3 of the texts show a fault")


def test_the_gap_is_that_of_a_forward_pass_without_a_cache(plant):
    plant(accepts_one_too_many)
    (each,) = verify_lossless(MODEL, PROMPTS[:1], FIXED, assistant_model=DRAFT, max_new_tokens=20).comparisons
    prefix = torch.tensor([[*PROMPTS[0], *each.plain_tokens[: each.position]]])
    with torch.no_grad():
        logits = MODEL(prefix, use_cache=False).logits[0, -1]
    best = logits.topk(2)
    assert each.plain_tokens[each.position] == int(best.indices[0])
    assert each.gap == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-5)
    taken = logits[each.speculative_tokens[each.position]]
    assert each.shortfall == pytest.approx(float(best.values[0] - taken), abs=1e-5)


def tied_twin(token, other, distance):
    """The toy model in which one output token is almost as good as another, always."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[token] * (1 - distance)
    return model


@pytest.mark.parametrize(("distance", "kind"), [(1e-6, "rounding"), (1e-2, "fault")])
def test_a_near_tie_is_rounding_and_a_clear_choice_is_not(plant, distance, kind):
    token = int(verify_lossless(MODEL, PROMPTS[:1], max_new_tokens=1).comparisons[0].plain_tokens[0])
    model = tied_twin(token, 63, distance)
    plant(says_instead, token, 63)
    (each,) = verify_lossless(model, PROMPTS[:1], assistant_model=model, max_new_tokens=8).comparisons
    assert (each.kind, each.position, each.plain_tokens[0], each.speculative_tokens[0]) == (kind, 0, token, 63)
    assert each.gap == pytest.approx(each.shortfall)


def test_a_near_tie_does_not_excuse_a_third_token(plant):
    token = int(verify_lossless(MODEL, PROMPTS[:1], max_new_tokens=1).comparisons[0].plain_tokens[0])
    model = tied_twin(token, 63, 1e-6)
    plant(says_instead, token, 62)
    report = verify_lossless(model, PROMPTS[:1], assistant_model=model, max_new_tokens=8)
    assert report.comparisons[0].gap < report.comparisons[0].tolerance
    assert report.num_faults == 1


def test_a_given_tolerance_decides(plant):
    plant(accepts_one_too_many)
    report = verify_lossless(MODEL, PROMPTS, FIXED, assistant_model=DRAFT, max_new_tokens=20, tolerance=1e3)
    assert (report.num_rounding, report.passed, report.equal) == (3, True, False)


def test_the_default_tolerance_follows_the_number_format():
    half, single = tiny_llama(), tiny_llama()
    half.to(torch.bfloat16)
    assert default_tolerance(single, 20.0) == 1e-4
    assert default_tolerance(single, 1e4) == pytest.approx(4 * 2**-23 * 1e4)
    assert default_tolerance(half, 20.0) == 4 * 2**-7 * 20.0
    assert default_tolerance(half, -20.0) == default_tolerance(half, 20.0)
    half.hf_quantizer = object()
    assert default_tolerance(half, 20.0) == 8 * 2**-7 * 20.0


@pytest.mark.parametrize(("plain", "speculative"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_a_text_that_ends_elsewhere_is_a_fault(plain, speculative):
    prompt = torch.tensor([[5]])
    runs = GreedyRuns(MODEL, None, None, ExactConfig(), 8, {})
    texts = RowTexts(prompt, torch.ones_like(prompt), plain, speculative, RowStats())
    each = checking.compare_texts(0, runs, texts, None)
    assert (each.kind, each.position, each.gap) == ("fault", 2, None)


def test_processors_act_on_the_scores_that_judge(plant):
    plant(accepts_one_too_many)
    options = {"repetition_penalty": 1.8, "min_new_tokens": 18, "eos_token_id": 1}
    reports = verify_lossless(MODEL, PROMPTS, FIXED, assistant_model=DRAFT, max_new_tokens=20, **options)
    for each, prompt in zip(reports.comparisons, PROMPTS, strict=True):
        ids = torch.as_tensor(prompt).reshape(1, -1)
        expected = MODEL.generate(
            ids,
            do_sample=False,
            max_new_tokens=each.position + 1,
            output_scores=True,
            return_dict_in_generate=True,
            **(options | {"min_new_tokens": min(18, each.position + 1)}),
        ).scores[-1][0]
        best = expected.topk(2).values
        assert each.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_a_least_length_counts_from_the_prompt():
    prompt = torch.tensor([[5, 6, 7]])
    runs = GreedyRuns(MODEL, None, None, ExactConfig(), 8, {"min_new_tokens": 3, "eos_token_id": 11})
    texts = RowTexts(prompt, torch.ones_like(prompt), [1, 2, 3, 4], [], RowStats())
    assert [runs.scores_after(texts, place)[11].isfinite().item() for place in range(5)] == [False] * 3 + [True] * 2


def test_rows_of_a_batch_are_cut_where_they_end():
    plain = verify_lossless(MODEL, PROMPTS, assistant_model=DRAFT, max_new_tokens=20).comparisons
    eos = [plain[0].plain_tokens[4], plain[1].plain_tokens[9]]
    options = {"assistant_model": DRAFT, "max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": 0}
    alone = verify_lossless(MODEL, PROMPTS, **options).comparisons
    together = verify_lossless(MODEL, PROMPTS, **options, batch_size=3).comparisons
    assert [each.plain_tokens for each in together] == [each.plain_tokens for each in alone]
    assert all(each.equal for each in together)
    assert len(together[0].plain_tokens) <= 5


def test_a_relaxed_config_may_differ_and_gets_no_verdict():
    report = verify_lossless(MODEL, PROMPTS, ALWAYS, assistant_model=DRAFT, max_new_tokens=20)
    assert (report.lossless, report.passed, report.num_faults) == (False, True, 0)
    assert report.num_relaxed > 0
    assert "differences are expected" in str(report)
    assert "passed" not in str(report)


def test_a_config_that_travels_on_the_generation_config_reaches_neither_run():
    settings = MODEL.generation_config.__class__(max_new_tokens=20)
    settings.speculative_config = ALWAYS
    report = verify_lossless(MODEL, PROMPTS, assistant_model=DRAFT, max_new_tokens=20, generation_config=settings)
    assert report.equal
    assert settings.speculative_config is ALWAYS


def test_it_works_without_the_hook():
    hf_specdec.uninstall()
    try:
        assert verify_lossless(MODEL, PROMPTS, assistant_model=DRAFT, max_new_tokens=8).equal
        assert verify_lossless(MODEL, PROMPTS, max_new_tokens=8).equal
    finally:
        hf_specdec.install()


def test_without_an_assistant_ngrams_draft():
    report = verify_lossless(MODEL, [[5, 6, 7, 5, 6, 7, 5, 6]], max_new_tokens=8)
    assert report.comparisons[0].num_draft_tokens > 0
    with pytest.raises(InvalidConfigError, match="n-gram draft has none"):
        verify_lossless(MODEL, PROMPTS, EASDConfig())


def test_a_failing_drafter_raises():
    class Failing(hf_specdec.DrafterBase):
        def propose(self, context, budget):
            raise RuntimeError("out of ideas")

    with pytest.raises(RuntimeError, match="out of ideas"):
        verify_lossless(MODEL, PROMPTS, SpeculativeConfig(length=3), assistant_model=Failing)


def test_an_assistant_on_disk_is_loaded_once(tmp_path, monkeypatch):
    DRAFT.save_pretrained(tmp_path)
    calls = []
    load = checking.load_assistant
    monkeypatch.setattr(checking, "load_assistant", lambda *a: calls.append(a) or load(*a))
    monkeypatch.setattr("hf_specdec.drafting.load_assistant", None)
    assert verify_lossless(MODEL, PROMPTS, assistant_model=str(tmp_path), max_new_tokens=4).equal
    assert calls == [(str(tmp_path), MODEL)]


def test_the_models_stay_as_they_were(plant):
    plant(accepts_one_too_many)
    before = state_of(MODEL), state_of(DRAFT)
    verify_lossless(MODEL, PROMPTS, assistant_model=DRAFT, max_new_tokens=8)
    for old, new in zip(before, (state_of(MODEL), state_of(DRAFT)), strict=True):
        assert old[:2] + old[3:] == new[:2] + new[3:]
        assert all(torch.equal(old[2][name], new[2][name]) for name in old[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"do_sample": True}, "greedy texts"),
        ({"generation_config": MODEL.generation_config.__class__(do_sample=True)}, "greedy texts"),
        ({"streamer": object()}, "streamer itself"),
        ({"batch_size": 0}, "batch_size"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": ["text"]}, "pass tokenizer"),
        ({"prompts": [[]]}, "non-empty row"),
        ({"prompts": [torch.ones(2, 3, dtype=torch.long)]}, "non-empty row"),
        ({"prompts": [[0.5]]}, "non-empty row"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    with pytest.raises(InvalidConfigError, match=message):
        verify_lossless(MODEL, **({"prompts": PROMPTS, "assistant_model": DRAFT} | arguments))


def test_a_checkpoint_that_samples_by_default_is_decoded_greedily():
    model = tiny_llama()
    model.generation_config.do_sample = True
    assert verify_lossless(model, PROMPTS, assistant_model=DRAFT, max_new_tokens=8).equal


def test_strings_progress_and_plain_values():
    def tokenizer(text):
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    calls = []
    report = verify_lossless(
        MODEL, ["abc", "de"], tokenizer=tokenizer, max_new_tokens=4, progress=lambda *a: calls.append(a)
    )
    assert calls == [(1, 2), (2, 2)]
    values = json.loads(json.dumps(report.to_dict()))
    assert values["num_prompts"] == values["num_equal"] == 2
    assert values["comparisons"][0]["plain_tokens"] == list(report.comparisons[0].plain_tokens)
    assert report.plain_seconds > 0
    assert report.speculative_seconds > 0
