"""Draft vocabularies: their ranking, their files, and the tokenizer they belong to."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import DraftVocabulary, ExactConfig, InvalidConfigError
from hf_specdec.drafters import tokenizer_fingerprint
from hf_specdec.drafters.draft_vocabulary import _FORMAT
from tests.cli.conftest import word_tokenizer


def test_the_most_frequent_ids_are_kept_and_ties_go_to_the_smaller():
    counts = {5: 3, 2: 3, 7: 9, 1: 1}
    assert DraftVocabulary.from_counts(counts, 4, vocab_size=9).token_ids == (7, 2, 5, 1)
    assert DraftVocabulary.from_counts(counts, 6, vocab_size=9).token_ids == (7, 2, 5, 1, 0, 3)
    assert DraftVocabulary.from_counts(counts, 3, vocab_size=9, always=[8, 5]).token_ids == (7, 5, 8)


@pytest.mark.parametrize("size", [0, 2, 10])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(InvalidConfigError, match=rf"between 3 .* and 9 .* got {size}"):
        DraftVocabulary.from_counts({}, size, vocab_size=9, always=[1, 2, 3])


@pytest.mark.parametrize(("ids", "message"), [((), "at least one"), ((1, 1), "each of them once"), ((3, 9), "3 to 9")])
def test_malformed_ids_are_refused(ids, message):
    with pytest.raises(InvalidConfigError, match=message):
        DraftVocabulary(ids, 9)


def test_texts_are_counted_with_the_tokenizer_and_special_ids_stay():
    tokenizer = word_tokenizer()
    texts = ["w3 w3 w3 w9", "w9 w4 w9 w9"]
    found = DraftVocabulary.from_texts(tokenizer, texts, 4)
    ids = tokenizer.convert_tokens_to_ids(["w9", "w3", "<pad>", "<unk>"])
    assert found.token_ids == tuple(ids)
    assert found.vocab_size == len(tokenizer)
    assert found.fingerprint == tokenizer_fingerprint(tokenizer)


def test_a_saved_vocabulary_comes_back(tmp_path):
    vocabulary = DraftVocabulary((4, 0, 3), 9, "abc")
    assert DraftVocabulary.load(vocabulary.save(tmp_path / "folder" / "words.safetensors")) == vocabulary
    config = ExactConfig(draft_vocabulary=vocabulary)
    config.save_pretrained(tmp_path)
    assert ExactConfig.from_pretrained(tmp_path) == config
    by_path = ExactConfig(draft_vocabulary=tmp_path / "words.safetensors")
    by_path.save_pretrained(tmp_path)
    assert ExactConfig.from_pretrained(tmp_path) == by_path


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"no draft vocabulary at .*nowhere"):
        DraftVocabulary.load(tmp_path / "nowhere")
    (tmp_path / "text").write_text("these are no tensors")
    with pytest.raises(InvalidConfigError, match="text is not a safetensors file"):
        DraftVocabulary.load(tmp_path / "text")
    save_file({"token_ids": torch.arange(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(
        InvalidConfigError, match=r"weights\.safetensors is a safetensors file, but no draft vocabulary"
    ):
        DraftVocabulary.load(tmp_path / "weights.safetensors")


def test_a_damaged_file_is_told(tmp_path):
    save_file({"token_ids": torch.arange(3)}, tmp_path / "w.safetensors", {"format": _FORMAT, "fingerprint": ""})
    with pytest.raises(InvalidConfigError, match=r"w\.safetensors is a draft vocabulary without 'vocab_size'"):
        DraftVocabulary.load(tmp_path / "w.safetensors")


def test_another_tokenizer_is_told():
    tokenizer = word_tokenizer()
    vocabulary = DraftVocabulary.from_texts(tokenizer, ["w1"], 8)
    vocabulary.check_tokenizer(tokenizer)
    with pytest.raises(InvalidConfigError, match=r"another tokenizer .*fingerprint 0123"):
        dataclasses.replace(vocabulary, fingerprint="0123").check_tokenizer(tokenizer)
    tokenizer.add_tokens("one more")
    with pytest.raises(InvalidConfigError, match="another tokenizer"):
        vocabulary.check_tokenizer(tokenizer)


def test_configs_check_what_they_are_given():
    with pytest.raises(InvalidConfigError, match=r"draft_vocabulary must be .* got int"):
        ExactConfig(draft_vocabulary=16384)
    config = ExactConfig(draft_vocabulary=DraftVocabulary((1,), 4))
    with pytest.raises(InvalidConfigError, match="n-gram drafts have none"):
        config.drafting_for(has_assistant=False, deterministic=True)
    assert config.drafting_for(has_assistant=True, deterministic=True) == "hybrid"
