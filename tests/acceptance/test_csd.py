"""CSD: what it rescues, what it learns and what it never learns, and its memory."""

import math
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_specdec import CorrectionMemory, CSDConfig, ExactConfig, InvalidConfigError
from hf_specdec.acceptance import CSD, pair_fingerprint
from hf_specdec.drafters import ScriptedDrafter
from hf_specdec.records import Evidence, Place
from tests.acceptance import place_of
from tests.toys import noisy_copy, prompts, tiny_llama


def memory_of(*pairs, times=7, **options):
    memory = CorrectionMemory(**options)
    for _ in range(times):
        memory.add(pairs)
    return memory


def drafts(tokens, logits=(0.0, 4.0, 3.0, -3.0), scores=None, eos=()):
    """One row per drafted token, at a position where the target wants token 1."""
    tokens = torch.tensor(tokens)[:, None]
    logits = torch.tensor(logits, dtype=torch.float64).expand(len(tokens), 1, -1)
    scores = logits if scores is None else torch.tensor(scores, dtype=torch.float64).expand(len(tokens), 1, -1)
    place = place_of(tokens)
    return Evidence(
        tokens, torch.ones_like(tokens) > 0, scores, logits, False,
        place=Place(place.text, place.columns, place.prompt_columns, eos),
    )  # fmt: skip


# --- what is rescued ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"), [("both", [0, 1, 0]), ("ocm", [0, 1, 1]), ("scg", [1, 1, 0])], ids=["both", "ocm", "scg"]
)
def test_a_mismatch_is_rescued_where_it_is_familiar_and_plausible(mode, expected):
    """Against token 1 (logit 4): token 0 is plausible and unknown, 2 is both, 3 is known and implausible."""
    rule = CSD(mode=mode, memory=memory_of((2, 1), (3, 1)))
    assert rule.acceptance(drafts([0, 2, 3]))[:, 0].tolist() == expected
    assert rule.acceptance(drafts([1]))[:, 0].tolist() == [1]


@pytest.mark.parametrize(("times", "expected"), [(6, 0), (7, 1)])
def test_a_pair_must_be_met_more_often_than_the_threshold(times, expected):
    rule = CSD(memory=memory_of((2, 1), times=times))
    assert rule.acceptance(drafts([2])).tolist() == [[expected]]


@pytest.mark.parametrize(("ratio", "expected"), [(math.exp(-1) - 1e-9, 1), (math.exp(-1) + 1e-9, 0), (1e-9, 1)])
def test_the_gate_compares_raw_logits(ratio, expected):
    rule = CSD(score_ratio=ratio, memory=memory_of((2, 1)))
    assert rule.acceptance(drafts([2])).tolist() == [[expected]]
    hot = [1e6 * z for z in (0.0, 4.0, 3.0, -3.0)]
    assert rule.acceptance(drafts([2], scores=hot)).tolist() == [[expected]]


def test_the_order_of_a_pair_matters():
    assert CSD(memory=memory_of((1, 2))).acceptance(drafts([2])).tolist() == [[0]]


@pytest.mark.parametrize("protected", [(1,), (2,)])
@pytest.mark.parametrize("how", ["eos", "option"])
def test_ends_of_text_and_protected_tokens_are_never_rescued(protected, how):
    memory = memory_of((2, 1))
    rule = CSD(memory=memory, protected_tokens=protected if how == "option" else ())
    assert rule.acceptance(drafts([2], eos=protected if how == "eos" else ())).tolist() == [[0]]


# --- what is learnt -------------------------------------------------------------------------------------------------


def decode(model, drafter, config, batch_size=1, tokens=20, **options):
    torch.manual_seed(2)
    return model.generate(
        **prompts(batch_size),
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **({"do_sample": False} | options),
    )


def csd(memory, **options):
    options = {"drafting": "model", "length": 4, "on_drafter_error": "raise", "guard": None} | options
    return CSDConfig(memory=memory, **options)


def reference_pairs(model, drafter, text, start, length=4):
    """The mismatches that greedy exact decoding of this text meets, found without any cache."""
    pairs, end = [], len(text)

    def argmaxes(lm, tokens):
        with torch.no_grad():
            return lm(torch.tensor([tokens])).logits[0].argmax(-1).tolist()

    at = start + 1  # the prompt's own token has no draft
    while at < end:
        drafted = list(text[:at])
        for _ in range(min(length, end - at - 1)):
            drafted.append(argmaxes(drafter, drafted)[-1])
        for column in range(at, len(drafted)):
            if drafted[column] != text[column]:
                pairs.append((drafted[column], text[column]))
                break
        else:
            column = len(drafted)
        at = column + 1
    return pairs


@pytest.mark.parametrize(("batch_size", "batching"), [(1, "ragged"), (1, "lockstep"), (2, "ragged")])
def test_it_learns_each_reached_mismatch_and_nothing_behind_it(batch_size, batching):
    """With an infinite threshold the run is exact, which is how a memory is calibrated."""
    model = tiny_llama(layers=1)
    drafter, memory = noisy_copy(model, noise=0.3), CorrectionMemory()
    config = csd(memory, frequency_threshold=math.inf, batching=batching)
    out = decode(model, drafter, config, batch_size)
    exact = decode(model, drafter, ExactConfig(drafting="model", length=4, batching=batching), batch_size)
    assert torch.equal(out.sequences, exact.sequences)
    expected = CorrectionMemory(fingerprint=pair_fingerprint(model.config, drafter.config))
    for row, mask in zip(out.sequences.tolist(), prompts(batch_size)["attention_mask"], strict=True):
        padding = int((mask == 0).sum())
        pairs = reference_pairs(model, drafter, row[padding:], 7 - padding)
        assert pairs
        expected.add(pairs)
    assert memory == expected


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_what_a_stopping_criterion_discards_is_not_learnt(batching):
    """The third generated token ends the text; the script is wrong at the fourth, which stands in the same draft."""
    model = tiny_llama(layers=1)
    plain = model.generate(**prompts(), do_sample=False, max_new_tokens=8)[0, 7:].tolist()
    eos = plain[2]
    assert eos not in plain[:2]
    wrong = (plain[3] + 1) % 64
    for ends in (True, False):
        memory = CorrectionMemory()
        config = csd(memory, batching=batching, frequency_threshold=math.inf)
        script = [[*plain[:3], wrong]]
        options = {"eos_token_id": eos, "pad_token_id": 0} if ends else {}
        out = decode(model, lambda settings, s=script: ScriptedDrafter(settings, s), config, tokens=6, **options)
        assert out.sequences[0, 7:].tolist() == (plain[:3] if ends else plain[:6])
        assert memory.count(wrong, plain[3]) == (0 if ends else 1)
        assert len(memory) == (0 if ends else 1)


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_counts_change_between_rounds_and_never_within_one(batching):
    """Whatever was rescued had been counted before, in an earlier round, so every count exceeds the number of rescues."""
    seen = []
    model = tiny_llama(layers=1)
    memory = CorrectionMemory()
    config = csd(memory, mode="ocm", frequency_threshold=0, batching=batching)
    out = decode(model, noisy_copy(model, noise=0.3), config, tokens=30)
    text = out.sequences[0].tolist()
    with torch.no_grad():
        wanted = model(out.sequences).logits[0].argmax(-1).tolist()
    changed = [(text[i], wanted[i - 1]) for i in range(7, len(text)) if text[i] != wanted[i - 1]]
    assert len(changed) == out.speculative_stats.events["relaxed_accepted"]
    for pair in changed:  # met once as a rejection before it was first rescued
        seen.append(pair)
        assert memory.count(*pair) > seen.count(pair)


def test_the_memory_of_the_user_grows_only_if_it_may():
    model = tiny_llama(layers=1)
    drafter = noisy_copy(model, noise=0.3)
    memory = memory_of((2, 1))
    decode(model, drafter, csd(memory, online_update=False))
    assert memory == memory_of((2, 1))
    decode(model, drafter, csd(memory))
    assert len(memory) > 1
    assert memory.fingerprint == ""  # nobody knows whose its first counts were


def test_an_empty_memory_is_that_of_the_pair_that_begins_to_fill_it(tmp_path):
    model, memory = tiny_llama(layers=1), CorrectionMemory()
    decode(model, noisy_copy(model), csd(memory, online_update=False))
    assert memory.fingerprint == ""
    drafter = noisy_copy(model, noise=0.3)
    decode(model, drafter, csd(memory))
    assert memory.fingerprint == pair_fingerprint(model.config, drafter.config)
    memory.save(tmp_path / "memory.safetensors")
    for kept in (memory, tmp_path / "memory.safetensors"):
        with pytest.raises(InvalidConfigError, match="another pair"):
            decode(model, tiny_llama(layers=2), csd(kept))


def test_without_a_memory_object_calls_do_not_depend_on_each_other(tmp_path):
    model = tiny_llama(layers=1)
    drafter = noisy_copy(model, noise=0.3)
    learnt = CorrectionMemory()
    decode(model, drafter, csd(learnt))
    learnt.save(tmp_path / "memory.safetensors")
    before = (tmp_path / "memory.safetensors").read_bytes()
    for memory in (None, str(tmp_path / "memory.safetensors")):
        config = csd(memory, mode="ocm", frequency_threshold=0)
        first, second = (decode(model, drafter, config).sequences for _ in range(2))
        assert torch.equal(first, second)
    assert (tmp_path / "memory.safetensors").read_bytes() == before


# --- the memory -----------------------------------------------------------------------------------------------------


def test_a_full_memory_drops_the_rarest_and_oldest_pairs():
    memory = CorrectionMemory(max_entries=10)
    memory.add([(0, 1)] * 3)
    memory.add((i, 0) for i in range(1, 10))
    assert len(memory) == 10
    memory.add([(1, 0), (50, 51)])  # 1 is common now; 2 and 3 are the rarest and oldest
    assert len(memory) == 9
    assert [memory.count(i, 0) for i in (1, 2, 3, 4)] == [2, 0, 0, 1]
    assert memory.count(0, 1) == 3
    assert memory.count(50, 51) == 1


def test_of_equally_frequent_pairs_the_one_not_met_for_longest_is_dropped():
    memory = CorrectionMemory(max_entries=5)
    memory.add([(i, 0) for i in (0, 1, 2, 3, 4, 1, 2, 3, 4, 0)])
    memory.add([(9, 0), (9, 0)])
    assert [memory.count(i, 0) for i in (0, 1, 2, 3, 4, 9)] == [2, 0, 2, 2, 2, 2]


def test_merging_adds_counts_in_any_order():
    first, second, third = memory_of((1, 2), times=2), memory_of((1, 2), (3, 4), times=1), memory_of((3, 4), times=5)
    left, right = first.copy(), third.copy()
    left.merge(second)
    left.merge(third)
    right.merge(second)
    right.merge(first)
    assert left == right
    assert (left.count(1, 2), left.count(3, 4)) == (3, 6)
    assert first == memory_of((1, 2), times=2)


def test_threads_lose_no_counts():
    memory = CorrectionMemory()

    def work():
        for _ in range(300):
            memory.add([(1, 2), (3, 4)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.count(1, 2) == memory.count(3, 4) == 1200


def test_a_saved_memory_comes_back_equal(tmp_path):
    for memory in (memory_of((1, 2), (5, 3), max_entries=50, fingerprint="abc"), CorrectionMemory()):
        memory.save(tmp_path / "m.safetensors")
        assert CorrectionMemory.load(tmp_path / "m.safetensors") == memory
        assert CorrectionMemory.load(tmp_path / "m.safetensors", memory.fingerprint) == memory


def test_a_memory_of_another_pair_is_refused(tmp_path):
    target, draft = tiny_llama().config, tiny_llama(layers=1).config
    fingerprint = pair_fingerprint(target, draft)
    assert fingerprint == pair_fingerprint(tiny_llama(seed=4).config, draft)
    assert fingerprint != pair_fingerprint(draft, target)
    memory = memory_of((1, 2), fingerprint=fingerprint)
    memory.save(tmp_path / "m.safetensors")
    assert CorrectionMemory.load(tmp_path / "m.safetensors", fingerprint) == memory
    other = pair_fingerprint(target, target)
    with pytest.raises(InvalidConfigError, match="another pair"):
        CorrectionMemory.load(tmp_path / "m.safetensors", other)
    with pytest.raises(InvalidConfigError, match="another pair"):
        memory.merge(CorrectionMemory(fingerprint=other))


def test_memories_of_two_pairs_do_not_meet_in_one_of_none():
    mine, other, unknown = (
        CorrectionMemory(fingerprint="a" * 32),
        CorrectionMemory(fingerprint="b" * 32),
        CorrectionMemory(),
    )
    for memory in (mine, other, unknown):
        memory.add([(1, 2)])
    both = CorrectionMemory()
    both.merge(mine)
    assert both == mine
    for left, right in ((both, other), (mine, unknown), (unknown, mine)):
        with pytest.raises(InvalidConfigError, match=r"pair of models|another pair"):
            left.merge(right)
    mine.merge(CorrectionMemory())  # which holds nothing
    assert mine.count(1, 2) == 1
    unknown.merge(unknown.copy())
    assert unknown.count(1, 2) == 2


def test_files_that_are_no_memory_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(InvalidConfigError, match="no correction memory"):
        CorrectionMemory.load(path)
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(InvalidConfigError, match="not a safetensors file"):
        CorrectionMemory.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InvalidConfigError, match="expected"):
        CorrectionMemory.load(path)
    memory_of((1, 2)).save(path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {"pairs": file.get_tensor("pairs")}
    save_file(tensors, path, about)
    with pytest.raises(InvalidConfigError, match="lacks parts of a correction memory"):
        CorrectionMemory.load(path)


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_threshold": -1},
        {"frequency_threshold": math.nan},
        {"score_ratio": 0.0},
        {"mode": "x"},
        {"memory": 3},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(options):
    for cls in (CSD, CSDConfig):
        with pytest.raises(InvalidConfigError, match=next(iter(options))):
            cls(**options)
    with pytest.raises(InvalidConfigError, match="max_entries"):
        CorrectionMemory(0)
