"""Reading GSM8K and finding the number that a text answers with."""

import json
from decimal import Decimal

import pytest

from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality import Question, extract_answer, is_correct, prompt_for, read_questions
from hf_specdec.quality.gsm8k import EXAMPLES, INSTRUCTION


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 18", "18"),
        ("####18.", "18"),
        ("#### **18**", "18"),
        ("#### $1,234.50", "1234.50"),
        ("#### -7", "-7"),
        ("#### \N{MINUS SIGN}7", "-7"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("####\n18", "18"),
        ("#### 18 dollars in 2 days", "18"),
        ("#### 5 + 3 = 8", "8"),
        ("#### 5 + 3 =", "5"),
        ("#### Final answer: 18 (of 20)", "18"),
        ("#### The answer is 18.", "18"),
        ("#### \\boxed{18}", "18"),
        ("#### \\(18\\)", "18"),
        ("#### 3\nNo, wait.\n#### 4\nThat took 2 steps.", "4"),
        ("#### Step 3: add them\nso it is \\boxed{18}", "18"),
        ("#### Step 3: add them\n2 + 2 = 4", "4"),
        ("#### 3\n#### Check 5", "3"),
        ("####\nno number, 7 before", "7"),
        ("It is \\boxed{18}. Took 2 steps.", "18"),
        ("\\boxed{3} then \\boxed{4}", "4"),
        ("\\boxed{\\$1{,}000}", "1000"),
        ("\\boxed{70\\,000}", "70000"),
        ("\\boxed{18\\text{ dollars}}", "18"),
        ("\\boxed{x = 18}", "18"),
        ("\\boxed {50\\%}", "50"),
        ("\\boxed{18", "18"),
        ("\\boxed{} in the end 9", "9"),
        ("3 apples and 4 pears make 7.", "7"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("x=-3", "-3"),
        ("(4)-3", "3"),
        ("half is .5", "0.5"),
        ("between 1, 2 and 1,2", "2"),
        ("1,234,567 people", "1234567"),
        ("1,2345", "2345"),
        ("- 5 apples", "5"),
        ("**72**", "72"),
        ("18.00", "18"),
    ],
)
def test_the_answer_is_found(text, answer):
    assert extract_answer(text) == Decimal(answer)


@pytest.mark.parametrize("text", ["", "no idea", "####", "\\boxed{x}", "- - $"])
def test_a_text_without_a_number_has_no_answer(text):
    assert extract_answer(text) is None
    assert not is_correct(text, Question(0, "", Decimal(0)))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### 18", True),
        ("#### 18.00", True),
        ("#### $18", True),
        ("#### 18.5", False),
        ("#### -18", False),
        ("81", False),
    ],
)
def test_numbers_are_compared_by_value(text, right):
    assert is_correct(text, Question(0, "", Decimal("18.0"))) is right


def test_questions_are_read(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"Q{i}\u2028?", "answer": f"{i} is 3, no\n#### 1,{i:03}"} for i in range(3)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert read_questions(path) == [Question(i, f"Q{i}\u2028?", Decimal(1000 + i)) for i in range(3)]
    assert [each.index for each in read_questions(path, 2)] == [0, 1]
    assert prompt_for(read_questions(path)[0]).startswith("Q0\u2028?\n\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no question"),
        ("nonsense\n", "line 1"),
        ('{"question": "Q", "answer": "#### 1"}\n{"question": "Q"}\n', "line 2"),
        ('{"question": "Q", "answer": "1"}\n', "no number after ####"),
        ('{"question": "Q", "answer": "1 ####"}\n', "no number after ####"),
        ('{"question": "Q", "answer": 1}\n', "line 1"),
        ("[1]\n", "line 1"),
    ],
)
def test_a_malformed_file_is_explained(tmp_path, content, message):
    (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(InvalidConfigError, match=message):
        read_questions(tmp_path / "test.jsonl")


def test_the_worked_examples_end_with_their_number():
    assert [str(extract_answer(answer)) for _, answer in EXAMPLES] == ["38", "90"]


def test_worked_examples_take_the_place_of_the_instruction():
    question = Question(0, "Q?", Decimal(1))
    assert prompt_for(question, instructed=False) == "Q?"
    assert INSTRUCTION in prompt_for(question)
