"""`specdec calibrate vocabulary`: counted over several files, saved, and ready for a draft model."""

import json

import pytest

from hf_specdec import DraftVocabulary


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lines.txt").write_text("w3 w3 w9\nw3 w5\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"answer": text}) + "\n" for text in ("w9 w9 w9", "w9 w2")))
    return tmp_path


def arguments(pair, folder, *names, size=5):
    data = [part for name in names for part in ("--data", folder / name)]
    out = folder / "made" / "words.safetensors"
    return ["calibrate", "vocabulary", "--tokenizer", pair.target, *data, "--size", size, "--out", out]


def test_files_are_counted_together_and_saved(run, run_json, pair, files):
    found = run_json(*arguments(pair, files, "lines.txt", "rows.jsonl"), "--field", "answer")
    saved = DraftVocabulary.load(files / "made" / "words.safetensors")
    texts = ["w3 w3 w9", "w3 w5", "w9 w9 w9", "w9 w2"]
    assert saved == DraftVocabulary.from_texts(pair.tokenizer, texts, 5)
    assert pair.tokenizer.convert_ids_to_tokens(list(saved.token_ids)) == ["w9", "w3", "w2", "<pad>", "<unk>"]
    assert found == {
        "saved": str(files / "made" / "words.safetensors"),
        "size": 5,
        "vocab_size": 64,
        "fingerprint": saved.fingerprint,
        "num_texts": 4,
        "num_tokens": 10,
        "num_distinct": 4,
        "covered": 0.9,
    }
    result = run(*arguments(pair, files, "lines.txt"))
    assert "5 of 64 ids make up 100.00% of 5 tokens (3 distinct)" in result.stdout


def test_mistakes_are_told_in_one_line(run, pair, files):
    for command, message in (
        (arguments(pair, files, "lines.txt", size=65), "between 2"),
        (arguments(pair, files, "nowhere.txt"), "No such file"),
        (arguments(pair, files, "rows.jsonl"), "there are answer"),
    ):
        result = run(*command, code=2)
        assert len(result.stderr.splitlines()) == 1
        assert message in result.stderr
    assert not (files / "made").exists()
