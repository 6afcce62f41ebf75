"""Pieces of text: whole characters, joined to the decoded text, coloured by what completed them."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec.records import Round
from hf_specdec.rendering import Piece, TextPieces, merged


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({"<eos>": 0} | {byte: index for index, byte in enumerate(alphabet, 1)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


TEXT = "na\u00efve \U0001f44b\U0001f3fd \u65e5\u672c\u8a9e, e\u0301 \u2014 ok"


@pytest.mark.parametrize("width", [1, 2, 3, 5, 1000])
def test_pieces_hold_whole_characters_and_join_to_the_text(tokenizer, width):
    tokens = tokenizer(TEXT)["input_ids"]
    assert len(tokens) > len(TEXT)
    pieces = TextPieces(tokenizer)
    found = []
    for start in range(0, len(tokens), width):
        found += pieces.push(tokens[start : start + width], num_accepted=start % 3)
    found += pieces.end()
    assert "".join(piece.text for piece in found) == TEXT
    assert not any("\ufffd" in piece.text for piece in found)


def test_text_appears_as_soon_as_its_character_is_whole(tokenizer):
    pieces = TextPieces(tokenizer)
    tokens = tokenizer("a\u00e9b")["input_ids"]
    assert [[piece.text for piece in pieces.push([token])] for token in tokens] == [["a"], [], ["\u00e9"], ["b"]]
    assert pieces.end() == []


def test_a_character_that_is_never_completed_is_shown_at_the_end(tokenizer):
    pieces = TextPieces(tokenizer)
    shown = pieces.push(tokenizer("a\U0001f44b")["input_ids"][:-1])
    assert [piece.text for piece in shown] == ["a"]
    assert [piece.text for piece in pieces.end()] == ["\ufffd"]
    assert pieces.end() == []


def test_bytes_that_are_no_character_do_not_hold_up_what_follows(tokenizer):
    broken = tokenizer("\u00e9")["input_ids"][:1]
    pieces = TextPieces(tokenizer)
    found = pieces.push([*broken, *tokenizer("xy")["input_ids"]])
    assert "".join(piece.text for piece in found) == "\ufffdxy"


def test_special_tokens_are_left_out(tokenizer):
    tokens = [*tokenizer("ab")["input_ids"], 0, *tokenizer("c")["input_ids"]]
    assert "".join(piece.text for piece in TextPieces(tokenizer).push(tokens)) == "abc"


def test_the_accepted_tokens_of_a_round_come_first(tokenizer):
    round_ = Round([[], tokenizer("abcd")["input_ids"]], *(torch.tensor([0, 3]) for _ in range(3)), torch.ones(2))
    assert TextPieces(tokenizer).push_round(round_, row=1) == [Piece("abc", True), Piece("d", False)]


def test_a_character_belongs_to_the_token_that_completed_it(tokenizer):
    first, second = tokenizer("\u00e9")["input_ids"]
    assert TextPieces(tokenizer).push([first, second], num_accepted=1) == [Piece("\u00e9", False)]
    assert TextPieces(tokenizer).push([first, second], num_accepted=2) == [Piece("\u00e9", True)]


def test_the_prompt_is_context_for_the_first_token():
    raw = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<unk>": 2}, unk_token="<unk>"))
    words = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert [piece.text for piece in TextPieces(words, [0] * 20).push([1])] == [" two"]
    assert [piece.text for piece in TextPieces(words).push([1])] == ["two"]


def test_pieces_are_merged():
    pieces = [Piece("a", True), Piece("b", True), Piece("c", False), Piece("d", True)]
    assert merged(pieces) == [Piece("ab", True), Piece("c", False), Piece("d", True)]
