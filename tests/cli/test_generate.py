"""`specdec generate`: text, colours, prompts, options, JSON, and errors in one line."""

import json
import re

import pytest
import torch
import typer

import hf_specdec
from hf_specdec.cli.texts import encode_prompt
from tests.networks import drafter_for


PROMPT = "w1 w2 w3 w4"
RAW = ["--no-chat", "--max-new-tokens", 24]


def plain_tokens(pair, ids, num_tokens=24, **options):
    inputs = torch.tensor([ids])
    options = {"do_sample": False} | options
    return pair.model.generate(inputs, max_new_tokens=num_tokens, **options)[0, len(ids) :].tolist()


def plain_text(pair, prompt=PROMPT, **kwargs):
    return pair.tokenizer.decode(plain_tokens(pair, pair.tokenizer(prompt)["input_ids"], **kwargs))


def without_colors(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_text_is_the_plain_text(run, pair):
    result = run("generate", *pair.options, *RAW, "--prompt", PROMPT)
    assert result.stdout.strip() == plain_text(pair)
    assert result.stderr == ""


def test_json_is_one_object_with_text_tokens_and_statistics(run_json, pair):
    result = run_json("generate", *pair.options, *RAW, "--prompt", PROMPT, "--drafting", "model")
    (output,) = result["outputs"]
    tokens = plain_tokens(pair, [6, 7, 8, 9])
    assert (output["prompt"], output["tokens"]) == (PROMPT, tokens)
    assert output["text"].strip() == pair.tokenizer.decode(tokens)
    assert output["stats"]["lossless"] is True
    assert 0 < output["stats"]["num_accepted_tokens"] < len(tokens)
    assert output["stats"]["num_new_tokens"] == len(tokens)
    assert result["config"]["preset"] == "ExactConfig"
    assert (result["target"], result["assistant"]) == (pair.target, pair.draft)
    assert result["options"] == {"do_sample": False, "max_new_tokens": 24}


def test_a_drafter_network_drafts(run_json, pair, tmp_path):
    drafter_for(pair.model, "eagle").save_pretrained(tmp_path / "eagle")
    given = ["--target", pair.target, "--assistant", tmp_path / "eagle", *RAW, "--prompt", PROMPT]
    (output,) = run_json("generate", *given, "--drafting", "model", "--length", 2)["outputs"]
    assert output["tokens"] == plain_tokens(pair, [6, 7, 8, 9])
    assert output["stats"]["num_draft_tokens"] > 0


def test_accepted_drafts_and_only_they_are_coloured(run, pair):
    rounds = []
    pair.model.generate(
        torch.tensor([[6, 7, 8, 9]]),
        do_sample=False,
        max_new_tokens=24,
        assistant_model=pair.assistant,
        speculative_config=hf_specdec.ExactConfig(drafting="model", length=3),
        round_callback=rounds.append,
    )
    accepted = [token for each in rounds for token in each.emitted[0][: int(each.num_accepted[0])]]
    assert 0 < len(accepted) < 24
    result = run(*["generate", *pair.options, *RAW, "-p", PROMPT, "--drafting", "model", "--length", 3, "--color"])
    green = re.findall(re.escape(typer.style("\0", fg="green")).replace("\0", "(.*?)"), result.stdout)
    assert " ".join(green).split() == [pair.tokenizer.decode([token]) for token in accepted]
    assert without_colors(result.stdout).strip() == plain_text(pair)
    assert result.stderr.count("drafted and accepted") == 1


def test_no_colour_where_output_is_no_terminal(run, pair):
    assert "\x1b" not in run("generate", *pair.options, *RAW, "--prompt", PROMPT).output


def test_statistics_are_shown_beside_the_text(run, pair):
    result = run("generate", *pair.options, *RAW, "--prompt", PROMPT, "--stats")
    assert result.stdout.strip() == plain_text(pair)
    assert "per round (exactly the target's law)" in result.stderr


def test_plain_decoding(run, run_json, pair):
    result = run("generate", "--target", pair.target, *RAW, "--prompt", PROMPT, "--plain", "--stats")
    assert result.stdout.strip() == plain_text(pair)
    assert "24 tokens in" in result.stderr
    (output,) = run_json("generate", *pair.options, *RAW, "-p", PROMPT, "--plain")["outputs"]
    assert output["text"].strip() == plain_text(pair)
    assert output["stats"]["num_new_tokens"] == 24
    assert "num_rounds" not in output["stats"]


def test_without_an_assistant_ngrams_draft(run_json, pair):
    result = run_json("generate", "--target", pair.target, *RAW, "--prompt", "w1 w2 w3 w1 w2 w3 w1 w2")
    assert result["outputs"][0]["stats"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("system", [None, "w9"])
def test_the_chat_template_is_used_where_there_is_one(run_json, pair, system):
    messages = "<user> w1 w2 <assistant>" if system is None else "<system> w9 <user> w1 w2 <assistant>"
    ids = pair.tokenizer(messages)["input_ids"]
    options = [] if system is None else ["--system", system]
    result = run_json("generate", *pair.options, "--max-new-tokens", 12, "--prompt", "w1 w2", *options)
    assert result["outputs"][0]["tokens"] == plain_tokens(pair, ids, 12)


def test_a_tokenizer_without_a_template(pair):
    class Bare:
        chat_template = None

        def __call__(self, text, **kwargs):
            return pair.tokenizer(text, **kwargs)

    assert encode_prompt(Bare(), "w1 w2", None) == [6, 7]
    for arguments, message in (((True,), "no chat template"), ((None, "w9"), "--system needs")):
        with pytest.raises(Exception, match=message):
            encode_prompt(Bare(), "w1 w2", *arguments)


def test_a_template_brings_its_own_special_tokens():
    class WithStart:
        chat_template = "a template"

        def apply_chat_template(self, messages, add_generation_prompt, tokenize):
            assert (add_generation_prompt, tokenize) == (True, False)
            return messages[-1]["content"]

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    assert encode_prompt(WithStart(), "ab", None) == [97, 98]
    assert encode_prompt(WithStart(), "ab", False) == [1, 97, 98]


def test_worked_examples_are_turns_before_the_prompt(pair):
    examples = [("w1", "w2"), ("w3", "w4")]
    turns = "<user> w1 <assistant> w2 <user> w3 <assistant> w4 <user> w5 <assistant>"
    assert encode_prompt(pair.tokenizer, "w5", True, examples=examples) == pair.tokenizer(turns)["input_ids"]
    with pytest.raises(Exception, match="--examples needs a chat template"):
        encode_prompt(pair.tokenizer, "w5", False, examples=examples)


def test_prompts_from_a_text_file(run, run_json, pair, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("w1 w2\n\nw3 w4\nw5 w6\n")
    arguments = ["generate", *pair.options, *RAW, "--file", file, "--limit", 2]
    assert [each["prompt"] for each in run_json(*arguments)["outputs"]] == ["w1 w2", "w3 w4"]
    result = run(*arguments)
    assert result.stdout.split("\n")[:2] == [f" {plain_text(pair, prompt)}" for prompt in ("w1 w2", "w3 w4")]
    assert [line.strip() for line in result.stderr.splitlines()] == ["[1/2] w1 w2", "[2/2] w3 w4"]


def test_prompts_from_a_field_of_a_jsonl_file(run_json, pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": index, "question": f"w{index}"}) + "\n" for index in range(4)))
    result = run_json("generate", *pair.options, *RAW, "--file", file, "--field", "question", "-n", 3)
    assert [each["prompt"] for each in result["outputs"]] == ["w0", "w1", "w2"]


def test_the_prompt_from_standard_input(run_json, pair):
    result = run_json("generate", *pair.options, *RAW, input="w1 w2\nw3\n")
    assert [each["prompt"] for each in result["outputs"]] == ["w1 w2\nw3"]


def test_sampling_is_repeatable_and_each_prompt_starts_from_the_seed(run_json, pair):
    arguments = ["generate", *pair.options, *RAW, "--sample", "--temperature", 1.5, "--top-k", 50]
    first, again = run_json(*arguments, "-p", "w1", "-p", PROMPT, "-p", PROMPT, "--seed", 7)["outputs"][1:]
    assert first["tokens"] == again["tokens"]
    (alone,) = run_json(*arguments, "-p", PROMPT, "--seed", 7)["outputs"]
    (other,) = run_json(*arguments, "-p", PROMPT, "--seed", 8)["outputs"]
    assert alone["tokens"] == first["tokens"] != other["tokens"]


def test_easd_and_its_thresholds(run_json, pair):
    options = ["--config", "easd", "--entropy-threshold", "0", "--overlap-threshold", "0.2", "--top-n", "7"]
    result = run_json("generate", *pair.options, *RAW, "-p", PROMPT, *options)
    stats = result["outputs"][0]["stats"]
    assert stats["lossless"] is False
    assert stats["events"]["easd_fired"] > 0
    assert result["config"]["overlap_threshold"] == 0.2
    assert result["config"]["top_n"] == 7


def test_a_saved_config_and_a_threshold_that_overrides_both_of_its_own(run_json, pair, tmp_path):
    config = hf_specdec.EASDConfig(target_entropy_threshold=0.0, draft_entropy_threshold=0.0, overlap_threshold=0.0)
    config.save_pretrained(tmp_path)
    arguments = ["generate", *pair.options, *RAW, "-p", PROMPT, "--config", tmp_path]
    assert run_json(*arguments)["outputs"][0]["stats"]["events"]["easd_fired"] > 0
    result = run_json(*arguments, "--entropy-threshold", 99)
    assert result["outputs"][0]["stats"]["events"]["easd_fired"] == 0
    assert result["outputs"][0]["tokens"] == plain_tokens(pair, [6, 7, 8, 9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0.5"], "--temperature needs --sample"),
        (["--sample", "--temperature", "0"], "--temperature 0 is greedy"),
        (["--entropy-threshold", "1"], "--entropy-threshold belongs to EASD"),
        (["--length", "many"], "--length must be a number"),
        (["--length", "-1"], "at least 0"),
        (["--plain", "--config", "easd", "--length", "3"], "drop --config, --length"),
        (["--file", "nowhere.txt"], "pass one of them"),
        (["--config", "./nowhere.json"], "no speculative_config.json"),
        (["--config", "easd", "--drafting", "ngram"], "n-gram draft"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_mistakes_are_told_in_one_line(run, pair, arguments, message, form):
    result = run("generate", *pair.options, *RAW, "--prompt", PROMPT, *arguments, *form, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_a_checkpoint_that_is_not_there_is_named(run, pair, tmp_path):
    missing = str(tmp_path / "missing")
    for options in (["--target", missing], ["--target", pair.target, "--assistant", missing]):
        result = run("generate", *options, "--prompt", "w1", code=2)
        assert len(result.stderr.splitlines()) == 1
        assert f"cannot load {'the tokenizer of ' if len(options) == 2 else ''}{missing}" in result.stderr


def test_debug_lets_an_error_through(run, pair, tmp_path):
    result = run("generate", *pair.options, "-p", "w1", "--config", "./nowhere.json", "--debug", code=1)
    assert isinstance(result.exception, hf_specdec.InvalidConfigError)


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ('{"a": "w1", "b": 2}\n', "prompt", "line 1 has no text in the field 'prompt': .*there are a"),
        ('{"prompt": "w1"}\n\n{broken\n', "prompt", "line 3 is not valid JSON"),
        ("[1]\n", "prompt", "line 1 must hold one JSON object"),
        ("\n", "prompt", "holds no text"),
    ],
)
def test_files_that_cannot_be_read(run, pair, tmp_path, content, field, message):
    (tmp_path / "prompts.jsonl").write_text(content)
    arguments = ["--file", tmp_path / "prompts.jsonl", "--field", field]
    result = run("generate", *pair.options, *RAW, *arguments, code=2)
    assert re.search(message, result.stderr)


def test_loading_leaves_transformers_as_it_was(run, pair):
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
        run("generate", *pair.options, *RAW, "--prompt", PROMPT)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(verbosity)


@pytest.fixture
def relaxed(tmp_path):
    config = hf_specdec.NucleusConfig(nucleus_p=0.99, guard=None, length=3, on_drafter_error="raise")
    config.save_pretrained(tmp_path / "relaxed")
    return tmp_path / "relaxed"


def test_a_trace_tells_how_each_token_was_decided(run, run_json, pair, relaxed, tmp_path):
    command = ["generate", *pair.options, *RAW, "--prompt", PROMPT, "--config", relaxed]
    text = run(*command).stdout.strip()
    page = tmp_path / "trace.html"
    result = run(*command, "--trace", "--trace-html", page, "--color")
    assert without_colors(result.stdout).strip() == text
    assert result.stdout.count("\x1b[") > 10
    assert re.search(r"rescued: \d+, a draft that only the relaxed rule kept", result.stderr)
    (output,) = run_json(*command, "--trace-html", page)["outputs"]
    assert output["trace"]["counts"]["rescued"] == output["stats"]["events"]["rescued"] > 0
    assert output["stats"]["mean_step_tv"] > 0
    assert page.read_text().count('<span class="rescued" title=') == output["trace"]["counts"]["rescued"]
    assert run(*command, "--trace").stdout.strip() == text
    assert "--plain decides every token" in run(*command[:-2], "--plain", "--trace", code=2).stderr
