"""Length controllers: what each does row by row, and that none of them touches the law."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from hf_specdec import ExactConfig, InvalidConfigError
from hf_specdec.drafters import AssistantDrafter, DrafterBase, DraftSettings, ScriptedDrafter
from hf_specdec.lengths import LENGTHS, AdditiveLength, ConfidenceLength, ConstantLength
from hf_specdec.records import Budget, Context, Round
from hf_specdec.verify import RandomStreams
from tests.test_sampling import Fit, joint_law, texts_of
from tests.test_sampling import draft_model as small_draft_model
from tests.toys import noisy_copy, prompts, tiny_llama


def round_of(drafted, accepted):
    """A finished round in which row `b` drafted and accepted so many tokens."""
    drafted, accepted = torch.tensor(drafted), torch.tensor(accepted)
    rows = len(drafted)
    return Round(
        emitted=[[0]] * rows,
        num_drafted=drafted,
        num_verified=drafted,
        num_accepted=accepted,
        unfinished=torch.ones(rows, dtype=torch.bool),
    )


def lengths_of(schedule):
    return schedule.next_budget().max_tokens.tolist()


def test_the_table_names_the_controllers():
    ours = {"additive": AdditiveLength, "confidence": ConfidenceLength, "constant": ConstantLength}
    assert {name: LENGTHS[name] for name in ours} == ours


@pytest.mark.parametrize("controller", [ConstantLength(3), AdditiveLength(), ConfidenceLength()], ids=repr)
def test_a_controller_never_changes_and_serves_many_runs(controller):
    with pytest.raises(FrozenInstanceError):
        setattr(controller, "longest" if hasattr(controller, "longest") else "length", 1)
    before = repr(controller)
    first, second = controller.start(2), controller.start(2)
    started = lengths_of(second)
    for _ in range(3):
        first.observe(round_of(lengths_of(first), [0, 0]))
    assert lengths_of(second) == started
    assert lengths_of(controller.start(2)) == started
    assert repr(controller) == before


# --- constant -------------------------------------------------------------------------------------------------------


def test_constant_stays_whatever_is_accepted():
    schedule = ConstantLength(4).start(3)
    for accepted in ([0, 4, 2], [4, 4, 4], [0, 0, 0]):
        assert lengths_of(schedule) == [4, 4, 4]
        assert schedule.next_budget().min_confidence == 0.0
        schedule.observe(round_of([4, 4, 4], accepted))


@pytest.mark.parametrize("length", [-1, 2.0, True, "4"])
def test_a_constant_length_is_a_count(length):
    with pytest.raises(InvalidConfigError, match="length"):
        ConstantLength(length)


# --- additive -------------------------------------------------------------------------------------------------------


def test_additive_adapts_each_row_by_itself():
    schedule = AdditiveLength(initial=5, shortest=1, longest=8).start(4)
    assert lengths_of(schedule) == [5, 5, 5, 5]
    schedule.observe(round_of([5, 5, 5, 0], [5, 4, 0, 0]))  # whole, part, nothing, not drafted
    assert lengths_of(schedule) == [7, 4, 4, 5]
    schedule.observe(round_of([7, 4, 4, 5], [7, 4, 1, 0]))
    assert lengths_of(schedule) == [8, 6, 3, 4]
    schedule.observe(round_of([2, 6, 3, 4], [2, 0, 0, 0]))  # cut by what the run had left, and still accepted whole
    assert lengths_of(schedule) == [8, 5, 2, 3]


def test_additive_stays_within_its_bounds():
    schedule = AdditiveLength(initial=3, shortest=2, longest=4).start(2)
    for _ in range(4):
        schedule.observe(round_of(lengths_of(schedule), [lengths_of(schedule)[0], 0]))
        assert lengths_of(schedule) == [4, 2]


@pytest.mark.parametrize(
    "options", [{"shortest": 0}, {"initial": 20}, {"initial": 1, "shortest": 2}, {"longest": 4}], ids=str
)
def test_additive_refuses_impossible_bounds(options):
    with pytest.raises(InvalidConfigError, match="shortest <= initial <= longest"):
        AdditiveLength(**options)


def rounds_of(model, inputs, assistant, length, tokens, **options):
    rounds: list = []
    out = model.generate(
        **inputs,
        assistant_model=assistant,
        speculative_config=ExactConfig(drafting="model", length=length, on_drafter_error="raise"),
        round_callback=rounds.append,
        max_new_tokens=tokens,
        **{"do_sample": False, **options},
    )
    return out, [round_.num_drafted.tolist() for round_ in rounds if not round_.is_prefill]


def test_additive_in_a_run_whose_rows_differ():
    """Row 0 is drafted for by an oracle, row 1 by a drafter that is always wrong; the last rounds have less room."""
    model, inputs = tiny_llama(layers=1), prompts(2)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=40)[:, 7:]
    wrong = (text[1] + 1) % 64
    out, drafted = rounds_of(
        model,
        inputs,
        lambda settings: ScriptedDrafter(settings, [text[0].tolist(), wrong.tolist()]),
        AdditiveLength(initial=3, longest=6),
        40,
    )
    assert torch.equal(out[:, 7:], text)
    assert [row for row, _ in drafted[:8]] == [3, 5, 6, 6, 6, 6, 0, 0]  # 1 + 4 + 6 + 7 + 7 + 7 + 7 = 39 tokens, no room
    assert [row for _, row in drafted[:6]] == [3, 2, 1, 1, 1, 1]


def test_constant_length_zero_decodes_plainly():
    model, inputs = tiny_llama(layers=1), prompts(2)
    out, drafted = rounds_of(model, inputs, noisy_copy(model), 0, 6)
    assert torch.equal(out, model.generate(**inputs, do_sample=False, max_new_tokens=6))
    assert drafted == [[0, 0]] * 5


# --- confidence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"threshold": -0.1}, {"threshold": 1.1}, {"threshold": float("nan")}, {"longest": 0}]
)
def test_confidence_refuses_impossible_options(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        ConfidenceLength(**options)


def test_confidence_is_a_bound_for_the_drafter():
    schedule = ConfidenceLength(0.3, longest=7).start(2)
    schedule.observe(round_of([7, 1], [0, 1]))
    assert lengths_of(schedule) == [7, 7]
    assert schedule.next_budget().min_confidence == 0.3


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_row_stops_before_the_first_law_that_is_not_sure_and_ignores_the_token(do_sample):
    """The lengths follow from laws computed without a cache; likely and unlikely tokens alike are kept once drawn."""
    model, bound = tiny_llama(vocab_size=16, layers=1), 0.45
    settings = DraftSettings(vocab_size=16, do_sample=do_sample, streams=RandomStreams(1))
    lengths, unlikely_kept = set(), 0
    for seed in range(40):
        text = torch.randint(0, 16, (1, 5), generator=torch.Generator().manual_seed(seed))
        draft = AssistantDrafter(settings, model).propose(Context.of(text), Budget(torch.tensor([6]), bound))
        length = int(draft.lengths[0])
        with torch.no_grad():
            laws = model(torch.cat([text, draft.tokens[:, :length]], 1)).logits[0, 4:].softmax(-1)
        assert bool((laws[:length].max(-1).values >= bound - 1e-5).all())
        assert length == 6 or float(laws[length].max()) < bound + 1e-5
        lengths.add(length)
        kept = laws[:length].gather(-1, draft.tokens[0, :length, None])
        unlikely_kept += int((kept < bound - 1e-3).sum())
    assert len(lengths) > 3
    assert (unlikely_kept >= 5) == do_sample


def test_rows_stop_by_themselves():
    model = tiny_llama(vocab_size=16, layers=1)
    texts = torch.randint(0, 16, (12, 5))
    settings = DraftSettings(vocab_size=16)
    draft = AssistantDrafter(settings, model).propose(Context.of(texts), Budget(torch.full((12,), 6), 0.45))
    alone = [
        AssistantDrafter(settings, model).propose(Context.of(text[None]), Budget(torch.tensor([6]), 0.45)).lengths
        for text in texts
    ]
    assert draft.lengths.tolist() == torch.cat(alone).tolist()
    assert len(set(draft.lengths.tolist())) > 2


@pytest.mark.parametrize("drafting", ["model", "hybrid"])
def test_sampling_stays_exact_under_confidence(drafting):
    setting = {"temperature": 0.7, "top_k": 5}
    sequences = texts_of(small_draft_model(), drafting=drafting, length=ConfidenceLength(0.5, longest=3), **setting)
    fit = Fit.of(sequences, joint_law(**setting))
    assert fit.good, fit


def test_deciding_from_the_token_would_be_found():
    """The same test with the tempting bug: unlikely tokens are thrown away after they were seen."""

    class Discarding(DrafterBase):
        def __init__(self, settings):
            super().__init__(settings)
            self.inner = AssistantDrafter(settings, small_draft_model())

        def propose(self, context, budget):
            draft = self.inner.propose(context, budget)
            if draft.width == 0:
                return draft
            kept = (draft.q.gather(-1, draft.tokens[..., None])[..., 0] >= 0.5) & draft.valid
            return replace(draft, lengths=kept.long().cumprod(-1).sum(-1))

    setting = {"temperature": 0.7, "top_k": 5}
    sequences = texts_of(Discarding, num_texts=2000, **setting)
    assert Fit.of(sequences, joint_law(**setting)).p_value < 1e-7
