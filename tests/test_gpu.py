"""What only a GPU can show of a pair of the usual sizes: how often the host waits, and what the loop costs beside the passes.

The tests marked `gpu` print their figures (`pytest -m gpu -s`); those beside them show on the CPU that the script holds.
"""

import json
import sys
import time
import warnings
from itertools import pairwise

import pytest
import torch
from transformers.cache_utils import StaticLayer

import hf_specdec
import hf_specdec.loop
from hf_specdec import ConfidenceLength, ExactConfig, SpeculativeConfig
from hf_specdec.bench.costs import measure_costs
from hf_specdec.drafters import assistant
from hf_specdec.timing import wait_for
from tests.scripted_pair import SHAPES, llama, scripted_pair, unscripted


LENGTH, NEW_TOKENS, PROMPT = 4, 96, 192
EXACT = SpeculativeConfig(drafting="model", length=LENGTH, on_drafter_error="raise")
OVERHEAD = 0.05  # of what the passes of a round take by themselves


@pytest.fixture(autouse=True)
def _real_clock(monkeypatch, _steady_clock):
    """Seconds are what is asked for here."""
    for module in (hf_specdec.loop, assistant):
        monkeypatch.setattr(module, "time", time)


@pytest.fixture(scope="module")
def pair():
    """The 7B-shaped pair, in half precision on the GPU."""
    yield scripted_pair("7B", "cuda", torch.bfloat16)
    torch.cuda.empty_cache()


def decode(target, draft, text, config=EXACT, prompt=PROMPT, new_tokens=NEW_TOKENS, **options):
    """The output and the new tokens of the script."""
    ids = torch.tensor([text[:prompt]], device=target.device)
    options = {"do_sample": False, "max_new_tokens": new_tokens} | options
    if config is not None:
        options |= {"assistant_model": draft, "speculative_config": config, "return_dict_in_generate": True}
    found = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found, (found if config is None else found.sequences)[0, prompt:].tolist()


def report(name, figures):
    """For whoever runs the tests with `-s`."""
    sys.stdout.write(f"\n{name}: {json.dumps(figures)}\n")


@pytest.mark.parametrize("wrong_every", [2, 4, 9999])
def test_the_script_decides_how_much_is_accepted(wrong_every):
    target, draft, text = scripted_pair("tiny", wrong_every=wrong_every)
    _, plain = decode(target, None, text, config=None, prompt=7, new_tokens=40)
    output, ours = decode(target, draft, text, prompt=7, new_tokens=40)
    assert plain == ours == text[7:47]
    stats = output.speculative_stats
    assert 0 < stats.acceptance_rate <= 1.0
    assert (stats.acceptance_rate == 1.0) is (wrong_every == 9999)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (EXACT, {}),
        (EXACT, {"do_sample": True, "top_k": 0}),
        (SpeculativeConfig(drafting="ngram", length=LENGTH, on_drafter_error="raise"), {}),
        (ExactConfig(length=ConfidenceLength(0.5, longest=LENGTH), drafting="model", on_drafter_error="raise"), {}),
    ],
    ids=["greedy", "sampled", "n-grams", "confidence"],
)
def test_the_host_waits_once_per_round(config, options):
    """As torch itself counts; once more for each decision on the confidence."""
    target, draft, text = scripted_pair("tiny", "cuda", torch.bfloat16)
    rounds, seen = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

        def note(round_):
            rounds.append(round_)
            seen.append(sum("synchronizing" in str(each.message) for each in caught))

        try:
            decode(target, draft, text, config, prompt=16, round_callback=note, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [after - before for before, after in pairwise(seen)][2:-3]
    drafted = [int(each.num_drafted[0]) for each in rounds][3:-3]
    assert len(waits) > 5
    if isinstance(config.length, ConfidenceLength):
        assert waits == [1 + min(each + 1, LENGTH) for each in drafted]
    else:
        assert set(waits) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("right", ["all", "most"])
def test_the_loop_costs_little_beside_its_passes(right, request):
    """Seconds of the decode phase against those of the isolated passes that it consists of, measured in the same process."""
    if right == "most":
        target, draft, text = request.getfixturevalue("pair")
    else:
        target, draft, text = scripted_pair("7B", "cuda", torch.bfloat16, wrong_every=9999)
    decode(target, draft, text)  # warms up
    costs = measure_costs(target, draft, repeats=5, prefix_length=PROMPT, widest=LENGTH + 1)
    turns = []
    for _ in range(5):
        rounds = []
        output, tokens = decode(target, draft, text, round_callback=rounds.append)
        assert tokens == text[PROMPT : PROMPT + NEW_TOKENS]
        stats = output.speculative_stats
        drafted = [int(each.num_drafted[0]) for each in rounds[1:]]
        passes = sum(each * costs.draft_step + costs.pass_seconds(each + 1) for each in drafted)
        taken = stats.total_seconds - stats.prefill_seconds
        assert taken == pytest.approx(stats.draft_seconds + stats.verify_seconds, rel=0.05)
        turns.append(taken / passes - 1.0)
    overhead = sorted(turns)[2]
    figures = {"overhead": overhead, "tokens_per_round": stats.tokens_per_round, "costs": costs.to_dict()}
    report(f"7B-shaped pair, {right} drafts right", figures)
    assert overhead <= OVERHEAD


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler's own parts
def test_figures_of_static_caches_and_compiled_models(pair):
    """Plain decoding and ours, each with a static cache and of a compiled target.

    Transformers compiles for static caches by itself in plain decoding. Before transformers 5.24 such a cache cannot give up
    rejected drafts, so that a speculative call refuses it.
    """
    target, draft, text = pair

    def speed(**options):
        decode(target, draft, text, **options)
        wait_for(target.device)
        started = time.perf_counter()
        _, tokens = decode(target, draft, text, **options)
        wait_for(target.device)
        spent = time.perf_counter() - started
        assert options.get("config", EXACT) is None or tokens == text[PROMPT : PROMPT + NEW_TOKENS]
        return len(tokens) / spent

    static = {"cache_implementation": "static"}
    with unscripted(target):
        figures = {"plain": speed(config=None), "plain, static cache": speed(config=None, **static)}
    figures["ours"] = speed()
    if StaticLayer.is_croppable:
        figures["ours, static cache"] = speed(**static)
    else:
        with pytest.raises(hf_specdec.UnsupportedModelError, match="StaticLayer"):
            speed(**static)
    eager = target.forward
    target.forward = torch.compile(eager, dynamic=True)
    try:
        with unscripted(target):
            figures["plain, compiled"] = speed(config=None)
        figures["ours, compiled"] = speed()
    finally:
        target.forward = eager
        torch._dynamo.reset()
    report("tokens per second", figures)
    assert figures["ours"] > figures["plain"]


def test_a_compiled_target_keeps_its_text():
    """Without code generation, on the CPU."""
    target, draft, text = scripted_pair("tiny")
    target.forward = torch.compile(target.forward, dynamic=True, backend="eager")
    _, tokens = decode(target, draft, text, prompt=7, new_tokens=24)
    assert tokens == text[7:31]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_peak_memory_and_speed_of_quantised_targets(tmp_path):
    """Of the decoding itself, against half precision."""
    hidden, intermediate, _, heads, vocab_size = SHAPES["7B"][0]
    llama((hidden, intermediate, 4, heads, vocab_size), "cuda", torch.bfloat16).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    draft = llama((hidden // 4, intermediate // 4, 2, heads // 4, vocab_size), "cuda", torch.bfloat16)
    text = torch.randint(1, vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    peaks, speeds = {}, {}
    for quantization in (None, "8bit", "4bit"):
        before = torch.cuda.memory_allocated()
        target = hf_specdec.load_model(tmp_path, quantization=quantization, dtype=torch.bfloat16, device_map="cuda")
        decode(target, draft, text, new_tokens=8)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        output, _ = decode(target, draft, text)
        peaks[quantization] = torch.cuda.max_memory_allocated() - before
        speeds[quantization] = output.speculative_stats.tokens_per_second
        del target, output
        torch.cuda.empty_cache()
    report("peak bytes and tokens per second", {str(each): (peaks[each], speeds[each]) for each in peaks})
    assert peaks["4bit"] < peaks["8bit"] < peaks[None]
    assert peaks["8bit"] < 0.75 * peaks[None]
    assert peaks["4bit"] < 0.55 * peaks[None]
