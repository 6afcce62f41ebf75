"""Fitting exit heads: the closed form, the gradient descent, and going on where a run was stopped."""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import (
    ConstantLength,
    DraftVocabulary,
    ExitHeads,
    IncompatibleDraftError,
    InvalidConfigError,
    SelfDraftConfig,
)
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.training.checkpoints import latest_checkpoint
from hf_specdec.training.exit_heads import (
    FitOptions,
    HeldOut,
    NormalEquations,
    Observer,
    fit_exit_heads,
    measure_agreement,
)
from hf_specdec.training.texts import Text
from tests.families import FAMILIES
from tests.toys import prompts, state_of, tiny_llama


EXITS = (2, 4)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=6)


@pytest.fixture(scope="module")
def texts(model):
    """Greedy texts of the model."""
    ids = torch.randint(1, 64, (24, 6), generator=torch.Generator().manual_seed(0))
    rows = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    return [Text(tuple(row), 6) for row in rows.tolist()]


def options(kind, **others):
    return FitOptions(**{"kind": kind, "max_tokens": 600, "ridge_tokens": 200, "tokens_per_step": 60} | others)


def same(one, two):
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_ridge_is_the_solution_of_the_penalised_least_squares():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, 8, generator=generator) for _ in range(2))
    equations, ridge = NormalEquations(8), 0.3
    for start in range(0, 50, 7):
        equations.add(x[start : start + 7], y[start : start + 7])
    weight = ridge * float((x.double() ** 2).sum(0).mean())
    penalty = torch.cat([torch.eye(8), torch.zeros(8, 1)], 1).double() * weight**0.5
    rows = torch.cat([torch.nn.functional.pad(x.double(), (0, 1), value=1.0), penalty])
    expected = torch.linalg.lstsq(rows, torch.cat([y.double(), torch.zeros(8, 8).double()])).solution
    torch.testing.assert_close(equations.solve(ridge), expected, rtol=1e-9, atol=1e-9)
    assert equations.num_rows == 50


@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_a_target_in_half_precision_is_read_as_it_is(model, texts, kind):
    """Heads stay in float32, and what they give goes through the target's own norm and head."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    heads = fit_exit_heads(half, texts[:20], EXITS, options(kind), held_out=texts[20:])
    assert heads.dtype == torch.float32
    raw = measure_agreement(Observer(half, EXITS), None, texts[20:])
    found = measure_agreement(Observer(half, EXITS), heads, texts[20:])
    assert sum(each.kl for each in found.values()) < sum(each.kl for each in raw.values())


def test_a_draft_vocabulary_travels_with_the_heads(model, texts, tmp_path):
    vocabulary = DraftVocabulary(tuple(range(8, 40)), 64, "of a tokenizer")
    heads = fit_exit_heads(model, texts[:20], EXITS, options("linear"), vocabulary=vocabulary, out=tmp_path)
    assert DraftVocabulary.of_heads(heads) == vocabulary
    loaded = ExitHeads.from_pretrained(tmp_path)
    assert DraftVocabulary.of_heads(loaded) == vocabulary
    assert "They score 32 of 64 token ids" in (tmp_path / "README.md").read_text()
    seen = []
    climb = LayeredLM.climb

    def watched(lm, *args):
        seen.append(lm.climb_ids)
        return climb(lm, *args)

    config = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.0, on_drafter_error="raise")
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**prompts(), **asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayeredLM, "climb", watched)
        drafted = model.generate(**prompts(), **asked, speculative_config=config, assistant_model=loaded)
    assert torch.equal(drafted, plain)
    wanted = {*vocabulary.token_ids, *prompts()["input_ids"].unique().tolist()}
    assert seen
    assert all(wanted == set(ids.tolist()) for ids in seen)
    assert DraftVocabulary.of_heads(fit_exit_heads(model, texts[:20], EXITS, options("linear"))) is None


def test_no_rows_are_refused():
    with pytest.raises(InvalidConfigError, match="no tokens"):
        NormalEquations(3).solve(0.1)


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "bloom", "opt", "granite"])
def test_the_readout_of_the_last_layer_is_what_the_model_says(name):
    target = FAMILIES[name].build()
    before = state_of(target)
    observer = Observer(target, [1])
    seen = observer.observe(Text((5, 6, 7, 8, 9), 0))
    with torch.no_grad():
        torch.testing.assert_close(observer.readout(seen.final), seen.logits)
        assert not torch.allclose(observer.readout(seen.final + 1 + seen.final.sign()), seen.logits)
    after = state_of(target)
    assert [before[0], before[1], before[3], before[4]] == [after[0], after[1], after[3], after[4]]


def test_a_reduced_readout_has_the_vocabularys_rows(model, texts):
    ids = (3, 40, 7, 9)
    whole, reduced = Observer(model, EXITS), Observer(model, EXITS, ids)
    logits = whole.observe(texts[0]).logits
    torch.testing.assert_close(reduced.observe(texts[0]).logits, logits[..., list(ids)], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reduced.observe(texts[0], whole=True).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "linear+kl", "adapter"])
def test_fitting_helps_and_leaves_the_target_alone(model, texts, kind):
    before = state_of(model)
    grads = [parameter.requires_grad for parameter in model.parameters()]
    logs = []
    heads = fit_exit_heads(model, texts, EXITS, options(kind), held_out=texts, on_step=logs.append)
    found, raw = (measure_agreement(Observer(model, EXITS), each, texts) for each in (heads, None))
    for depth in EXITS:
        assert found[depth].kl < raw[depth].kl
        assert found[depth].top1 > raw[depth].top1
    if kind != "linear":
        first, last = logs[0].evaluation["agreement"], heads.config.figures["agreement"]
        assert all(last[str(depth)]["kl"] < first[str(depth)]["kl"] for depth in EXITS), "KL goes down from the ridge"
    after = state_of(model)
    assert all(torch.equal(before[2][name], value) for name, value in after[2].items())
    assert [before[3], before[4]] == [after[3], after[4]]
    assert [parameter.requires_grad for parameter in model.parameters()] == grads


def test_evaluations_read_the_target_once(model, texts, monkeypatch):
    """They go on from its states, however many there are, and say the same as reading it anew."""
    read, original = [], Observer.observe

    def observe(observer, text, *, whole=False):
        if whole:
            read.append(text)
        return original(observer, text, whole=whole)

    monkeypatch.setattr(Observer, "observe", observe)
    logs, vocabulary = [], DraftVocabulary(tuple(range(4, 64)), 64)
    given = {"held_out": texts[20:], "vocabulary": vocabulary, "on_step": logs.append}
    heads = fit_exit_heads(model, texts[:20], EXITS, options("linear+kl", save_every=2), **given)
    assert sum(bool(log.evaluation) for log in logs) > 2
    assert read == texts[20:]
    anew = measure_agreement(Observer(model, EXITS, vocabulary.token_ids), heads, texts[20:])
    assert heads.config.figures["agreement"] == {str(depth): each.to_dict() for depth, each in anew.items()}


def test_texts_beyond_the_memory_for_them_are_read_anew(model, texts):
    observer = Observer(model, EXITS)
    first, second = list(HeldOut(observer, texts[:2]))
    held_out = HeldOut(observer, texts[:2], most_bytes=first.num_bytes)
    for _ in range(2):
        assert [torch.equal(a.final, b.final) for a, b in zip(held_out, (first, second), strict=True)] == [True, True]
    one, two = (list(held_out) for _ in range(2))
    assert one[0] is two[0]
    assert one[1] is not two[1]
    columns, positions = len(texts[0].tokens), first.final.shape[1]
    assert first.num_bytes == 32 * 4 * (2 * columns + positions) + 8 * positions


class StopError(Exception):
    pass


@pytest.mark.parametrize("kind", ["linear+kl", "adapter"])
def test_a_stopped_fit_goes_on_to_the_bit(model, texts, kind, tmp_path):
    plan = options(kind, save_every=3, max_tokens=360)
    whole = fit_exit_heads(model, texts, EXITS, plan, out=tmp_path / "whole")

    def stop(log):
        if log.step == 4:
            raise StopError

    with pytest.raises(StopError):
        fit_exit_heads(model, texts, EXITS, plan, out=tmp_path / "part", on_step=stop)
    assert latest_checkpoint(tmp_path / "part").name == "checkpoint-00000003"
    usable = ExitHeads.from_pretrained(tmp_path / "part")
    assert not same(usable, whole)
    resumed = fit_exit_heads(model, texts, EXITS, plan, out=tmp_path / "part", resume=True)
    assert same(resumed, whole)
    assert same(ExitHeads.from_pretrained(tmp_path / "part"), whole)
    with pytest.raises(InvalidConfigError, match="same options"):
        fit_exit_heads(model, texts, EXITS, options(kind, seed=1), out=tmp_path / "part", resume=True)
    curves = [(tmp_path / name / "curve.jsonl").read_text() for name in ("whole", "part")]
    assert curves[0] == curves[1]
    seen = [json.loads(line) for line in curves[0].splitlines()]
    assert [each["stage"] for each in seen] == ["ridge", "kl", "kl"]
    assert seen[1]["num_tokens"] < seen[2]["num_tokens"]


def test_a_fit_goes_on_with_its_own_texts_only(model, texts, tmp_path):
    fit_exit_heads(model, texts, EXITS, options("linear"), out=tmp_path)
    vocabulary = DraftVocabulary(tuple(range(8, 40)), 64)
    for match, others in (
        ("other texts", (model, texts[1:], {})),
        ("other vocabulary", (model, texts, {"vocabulary": vocabulary})),
        ("other target", (tiny_llama(layers=6, seed=5), texts, {})),
    ):
        target, read, more = others
        with pytest.raises(InvalidConfigError, match=match):
            fit_exit_heads(target, read, EXITS, options("linear"), out=tmp_path, resume=True, **more)
    fit_exit_heads(model, texts[1:], EXITS, options("linear"), out=tmp_path)
    assert len((tmp_path / "curve.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", ["linear+kl", "adapter"])
def test_fitted_heads_are_fitted_further(model, texts, kind, tmp_path):
    """On other texts, without another regression; the heads that were given stay as they are, and tokens add up."""
    vocabulary = DraftVocabulary(tuple(range(4, 64)), 64)
    first = fit_exit_heads(model, texts[:10], EXITS, options(kind), vocabulary=vocabulary, held_out=texts[20:])
    kept, logs = copy.deepcopy(first.state_dict()), []
    asked = {"held_out": texts[20:], "out": tmp_path, "start": first, "on_step": logs.append}
    more = fit_exit_heads(model, texts[10:20], EXITS, options(kind, learning_rate=1e-3), **asked)
    assert all(torch.equal(kept[name], value) for name, value in first.state_dict().items())
    assert DraftVocabulary.of_heads(more) == vocabulary
    assert logs[0].evaluation == first.config.figures, "nothing has changed before the first step"
    for depth in map(str, EXITS):
        assert more.config.figures["agreement"][depth]["kl"] < first.config.figures["agreement"][depth]["kl"]
    assert more.config.figures["num_tokens"] == first.config.figures["num_tokens"] + logs[-1].num_tokens
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [each["stage"] for each in curve] == ["start", "kl"]
    with pytest.raises(InvalidConfigError, match="other start"):
        fit_exit_heads(model, texts[10:20], EXITS, options(kind), out=tmp_path, start=more, resume=True)
    for match, given in (
        ("same kind and exits", {"exits": (1, 4)}),
        ("another draft vocabulary", {"vocabulary": DraftVocabulary(tuple(range(8, 40)), 64)}),
        ("from nothing", {"options": options("linear")}),
    ):
        wanted = {"exits": EXITS, "options": options(kind), "start": first} | given
        with pytest.raises(InvalidConfigError, match=match):
            fit_exit_heads(model, texts, **wanted)
    with pytest.raises(IncompatibleDraftError, match="base weights"):
        fit_exit_heads(tiny_llama(layers=6, seed=5), texts, EXITS, options(kind), start=first)


def test_a_target_without_a_fingerprint_is_known_by_its_name(model, texts, tmp_path):
    """Values in float16 are rounded, and tell no fingerprint."""
    one, other = (copy.deepcopy(model).half() for _ in range(2))
    one.config.name_or_path, other.config.name_or_path = "org/one", "org/other"
    for _ in range(2):
        fit_exit_heads(one, texts[:4], EXITS, options("linear"), out=tmp_path, resume=True)
    with pytest.raises(InvalidConfigError, match="other target"):
        fit_exit_heads(other, texts[:4], EXITS, options("linear"), out=tmp_path, resume=True)


def test_a_stopped_regression_goes_on(model, texts, tmp_path, monkeypatch):
    from hf_specdec.training.exit_heads import ridge

    monkeypatch.setattr(ridge, "_TEXTS_PER_SAVE", 4)
    whole = fit_exit_heads(model, texts, EXITS, options("linear"))
    read = []

    def stop(num_tokens):
        read.append(num_tokens)
        if len(read) == 10:
            raise StopError

    with pytest.raises(StopError):
        fit_exit_heads(model, texts, EXITS, options("linear"), out=tmp_path, on_ridge=stop)
    again = []
    resumed = fit_exit_heads(model, texts, EXITS, options("linear"), out=tmp_path, resume=True, on_ridge=again.append)
    assert again[0] == read[8], "goes on after the eight texts that were saved"
    assert same(resumed, whole)
    with pytest.raises(InvalidConfigError, match="other exit layers"):
        fit_exit_heads(model, texts, [1], options("linear"), out=tmp_path, resume=True)


def test_an_adapter_says_what_it_says_without_any_cache(model, texts, monkeypatch):
    """Its keys and values are those of the committed text, whatever was drafted, rejected or never climbed to it."""
    heads = fit_exit_heads(model, texts, EXITS, options("adapter", max_tokens=60))
    observer, original, depths = Observer(model, EXITS), LayeredLM.climb, []

    def climb(lm, tokens, lengths, depth, *others):
        logits = original(lm, tokens, lengths, depth, *others)
        seen = observer.observe(Text(tuple(tokens[0, : int(lengths[0])].tolist()), 0))
        with torch.no_grad():
            expected = observer.readout(heads(seen.states[depth], layer=depth))[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        depths.append(depth)
        return logits

    monkeypatch.setattr(LayeredLM, "climb", climb)
    config = SelfDraftConfig(confidence_threshold=0.15, length=ConstantLength(2), on_drafter_error="raise")
    asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        **prompts(), **asked, assistant_model=heads, speculative_config=config, return_dict_in_generate=True
    )
    assert set(depths) == set(EXITS)
    assert 0 < out.speculative_stats.num_accepted_tokens < out.speculative_stats.num_draft_tokens


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_fitted_adapter_drafts_what_it_says_without_any_cache(model, texts, batch_size):
    """Whatever was rejected in between: each draft is the argmax of the adapter on the whole text."""
    heads = fit_exit_heads(model, texts, EXITS, options("adapter"))
    config = SelfDraftConfig(confidence_threshold=0.3, length=ConstantLength(4), on_drafter_error="raise")
    rounds, inputs = [], prompts(batch_size)
    observer = Observer(model, EXITS)
    asked = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        **inputs, **asked, assistant_model=heads, speculative_config=config, round_callback=rounds.append
    )
    assert torch.equal(out, model.generate(**inputs, **asked))
    accepted = sum(int(each.num_accepted.sum()) for each in rounds)
    drafted = sum(int(each.num_drafted.sum()) for each in rounds)
    assert 0 < accepted < drafted, "some drafts are rejected, so that the adapter has to take entries back"
    # The text is known, so what each exit would say along it is known too: count the drafts that must be accepted.
    for row in range(batch_size):
        assert _accepted(rounds, row) == _foretold(observer, heads, config, out[row], inputs, row, rounds)


def _accepted(rounds, row):
    return [int(each.num_accepted[row]) for each in rounds if not each.is_prefill and each.emitted[row]]


@torch.no_grad()
def _foretold(observer, heads, config, text, inputs, row, rounds):
    """Accepted drafts of each round, from one pass over the finished text."""
    start = int((inputs["attention_mask"][row] == 0).sum())
    tokens = text[start:].tolist()
    seen = observer.observe(Text(tuple(tokens), 0))
    laws = {}
    for depth in EXITS:
        logits = observer.readout(heads(seen.states[depth], layer=depth))[0]
        sure = config.confidence(logits, depth, 6) >= config.confidence_threshold
        laws[depth] = (sure.tolist(), logits.argmax(-1).tolist())
    column, counts = inputs["input_ids"].shape[1] - start + 1, []  # the prefill has given the first token
    for each in rounds:
        if each.is_prefill or not each.emitted[row]:
            continue
        count = 0
        while count < int(each.num_drafted[row]):
            at = column - 1 + count
            exit_ = next((depth for depth in EXITS if laws[depth][0][at]), None)
            if exit_ is None or at + 1 >= len(tokens) or laws[exit_][1][at] != tokens[at + 1]:
                break
            count += 1
        counts.append(count)
        column += len(each.emitted[row])
    return counts


def test_heads_of_another_model_are_refused(model, texts, tmp_path, monkeypatch):
    heads = fit_exit_heads(model, texts, EXITS, options("linear"), out=tmp_path)
    other, read = copy.deepcopy(tiny_llama(seed=5, layers=6)), []
    load = ExitHeads.from_pretrained
    monkeypatch.setattr(
        ExitHeads, "from_pretrained", lambda *args, **options: read.append(args) or load(*args, **options)
    )
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for given in (
        {"assistant_model": heads, "speculative_config": SelfDraftConfig()},
        {"speculative_config": SelfDraftConfig(exit_heads=str(tmp_path))},
    ):
        model.generate(**prompts(), **asked, **given)
        with pytest.raises(IncompatibleDraftError, match="base weights"):
            other.generate(**prompts(), **asked, **given)
    model.generate(**prompts(), **asked, **given)
    assert len(read) == 2, "once for each model"
    os.utime(tmp_path / "config.json", ns=(1, 1))
    model.generate(**prompts(), **asked, **given)
    assert len(read) == 3, "and again when they have changed"


def test_the_card_shows_what_was_measured(model, texts, tmp_path):
    heads = fit_exit_heads(model, texts, EXITS, options("linear"), held_out=texts[:4], out=tmp_path)
    card = (tmp_path / "README.md").read_text()
    top1 = heads.config.figures["agreement"]["2"]["top1"]
    assert f"| 2 | {top1:.3f} |" in card
    assert "arxiv:2604.12247" in card


def test_heads_are_pushed_in_one_commit_with_their_card(model, monkeypatch):
    commits = []

    class Api:
        def create_repo(self, repo_id, *, private, exist_ok):
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            commits.append((repo_id, files, commit_message))
            return SimpleNamespace(commit_url="address")

    monkeypatch.setattr("hf_specdec.networks.exit_heads.modeling.HfApi", Api)
    heads = ExitHeads.for_target(model, "linear", EXITS)
    assert heads.push_to_hub("heads", private=True) == "address"
    [(repo, files, message)] = commits
    assert (repo, message) == ("me/heads", "Upload exit heads")
    assert files.keys() == {"README.md", "config.json", "model.safetensors"}
    assert heads.config.target_weights.encode() in files["config.json"]


def test_heads_are_never_read_from_a_pickle(model, tmp_path):
    heads = ExitHeads.for_target(model, "linear", EXITS)
    heads.save_pretrained(tmp_path)
    torch.save(heads.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        ExitHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_weights_that_are_not_all_there_are_named(model, kind, tmp_path):
    """Transformers would only log it, and a head that is left as it began drafts like a raw exit."""
    ExitHeads.for_target(model, kind, EXITS).save_pretrained(tmp_path)
    weights = {name: value.clone() for name, value in load_file(tmp_path / "model.safetensors").items()}
    lost = next(name for name in weights if name.startswith("heads.4."))
    renamed = {name.replace(lost, "heads.4.odd"): value for name, value in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IncompatibleDraftError, match=rf"missing \['{lost}'\]; unexpected \['heads.4.odd'\]"):
        ExitHeads.from_pretrained(tmp_path)
    with pytest.raises(IncompatibleDraftError, match=r"heads.4.odd"):
        model.generate(**prompts(), speculative_config=SelfDraftConfig(exit_heads=tmp_path), max_new_tokens=4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    heads, info = ExitHeads.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert same(heads, ExitHeads.for_target(model, kind, EXITS))
