"""Self-drafting: how it combines with rules, drafters and heads, and what it refuses."""

import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec import (
    ConstantLength,
    EASDConfig,
    ExactConfig,
    ExitHeads,
    ExitHeadsConfig,
    GoodputLength,
    IncompatibleDraftError,
    InvalidConfigError,
    SelfDraftConfig,
    UnsupportedModelError,
    verify_lossless,
)
from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import ExitPolicy, SelfDrafter
from tests.drafters.self_drafting import (
    CONFIG,
    EXITS,
    LAYERS,
    TOKENS,
    Director,
    decode,
    directed,
    sometimes,
    wanders,
)
from tests.drafters.test_stock_loop import settings_of, with_drafter
from tests.toys import noisy_copy, prompts, state_of, tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=LAYERS)


def test_prompt_lookup_where_no_exit_is_confident(model):
    config = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=1.0, length=3, drafting="hybrid")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    reference = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    out = model.generate(
        ids,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        speculative_config=config,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, reference)
    assert out.speculative_stats.num_draft_tokens > 0
    assert out.speculative_stats.events["exit_depths"] == {}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_together_in_a_batch(model, batch_size):
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.0, length=3, drafting="hybrid", on_drafter_error="raise"
    )
    out = directed(model, batch_size, config=config)
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)


def test_other_rules_judge_self_drafts(model):
    heads = ExitHeads(ExitHeadsConfig(exit_layers=[3]))
    never = EASDConfig(overlap_threshold=2.0, length=3, on_drafter_error="raise")
    out = decode(model, config=never, assistant_model=heads)
    assert torch.equal(out.sequences, decode(model, config=None).sequences)
    easd = EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0, length=3, on_drafter_error="raise")
    for config, assistant in (
        (easd, ExitHeads(ExitHeadsConfig(exit_layers=[3]))),
        (SelfDraftConfig(exit_layers=[3], acceptance=easd.rule, length=3, confidence_threshold=0.0), None),
    ):
        stats = decode(model, config=config, assistant_model=assistant).speculative_stats
        assert not stats.lossless
        if stats.num_draft_tokens:
            assert "easd_fired" in stats.events


@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_untrained_heads_are_raw_and_can_be_saved(model, kind, tmp_path):
    heads = ExitHeads(ExitHeadsConfig(kind, EXITS, hidden_size=model.config.hidden_size))
    heads.save_pretrained(tmp_path)
    hidden = torch.randn(2, 3, model.config.hidden_size)
    for each in (heads, ExitHeads.from_pretrained(tmp_path)):
        assert all(torch.equal(each(hidden, layer=layer), hidden) for layer in EXITS)
    config = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise")
    from_file = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise", exit_heads=str(tmp_path))
    raw = decode(model, config=SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.05, length=4))
    by_path = decode(model, config=config, assistant_model=tmp_path)
    for out in (decode(model, config=config, assistant_model=heads), decode(model, config=from_file), by_path):
        assert torch.equal(out.sequences, raw.sequences)
        assert out.speculative_stats.events == raw.speculative_stats.events
        assert sum(out.speculative_stats.events["exit_depths"].values()) > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_heads_that_change_what_they_are_given_do_not_change_the_text(model, kind, batch_size):
    """What a head makes of a hidden state is for its exit alone: the layers above go on from the hidden state itself."""
    heads = ExitHeads(ExitHeadsConfig(kind, EXITS, hidden_size=model.config.hidden_size))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    hidden = torch.randn(1, 1, model.config.hidden_size, generator=generator)
    assert not torch.allclose(heads(hidden, layer=EXITS[0]), hidden, atol=1e-2)
    config = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise")
    out = decode(model, batch_size, config, assistant_model=heads)
    assert out.speculative_stats.num_draft_tokens > 0
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_verify_lossless_checks_it(model, batch_size):
    config = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.0, length=3)
    report = verify_lossless(model, [[5, 6, 7], [9, 8, 7, 6]], config, max_new_tokens=8, batch_size=batch_size)
    assert report.equal
    assert all(comparison.num_draft_tokens > 0 for comparison in report.comparisons)


def test_custom_generate_needs_no_drafter(model):
    out = decode(model, custom_generate=hf_specdec.generate, batch_size=2)
    assert torch.equal(out.sequences, decode(model, 2, None).sequences)
    assert out.speculative_stats.num_draft_tokens > 0


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 5, 6, 7], [10]], ids=["words", "one token"])
@pytest.mark.parametrize("right", [lambda row, column: True, sometimes, lambda row, column: False])
def test_in_transformers_own_assisted_decoding(model, prompt, right):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    reference = model.generate(ids, **options)

    def make(config, processors):
        settings = settings_of(config, processors)
        return SelfDrafter.for_stock_loop(settings, twin, ExitPolicy(exit_layers=EXITS, confidence_threshold=0.0))

    twin, made = with_drafter(model, make)
    before, proposed, original = state_of(twin), [], SelfDrafter.propose

    def propose(drafter, context, budget):
        proposed.append(original(drafter, context, budget))
        return proposed[-1]

    with Director(reference, right, wanders).directing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfDrafter, "propose", propose)
        got = twin.generate(ids, assistant_model=twin, **options)
    assert torch.equal(got, reference)
    assert len(made) == 1
    assert sum(int(draft.lengths[0]) for draft in proposed) > 0
    assert state_of(twin)[4] == before[4], "no gate is left before a layer"


def test_options_out_of_range():
    for options, name in (
        ({"exit_layers": []}, "exit_layers"),
        ({"exit_layers": [3, 2]}, "exit_layers"),
        ({"exit_layers": [0]}, "exit_layers"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"annealing": -1.0}, "annealing"),
        ({"max_width": 0}, "max_width"),
        ({"max_depth": 0}, "max_depth"),
        ({"min_cumulative_confidence": 2.0}, "min_cumulative_confidence"),
        ({"drafting": "ngram"}, "prompt lookup"),
        ({"acceptance": "nonsense"}, "nonsense"),
    ):
        with pytest.raises(InvalidConfigError, match=name):
            SelfDraftConfig(**options)


def test_what_does_not_fit_the_model_is_refused_before_the_first_token(model):
    tiny = tiny_llama(layers=2)
    for error, match, options in (
        (InvalidConfigError, "1..5", {"config": SelfDraftConfig(exit_layers=[6])}),
        (InvalidConfigError, "max_depth", {"config": SelfDraftConfig(exit_layers=[3], max_depth=2)}),
        (InvalidConfigError, "output_attentions", {"output_attentions": True}),
        (InvalidConfigError, "LlamaForCausalLM", {"assistant_model": tiny}),
        (InvalidConfigError, "need heads", {"assistant_model": ExitHeads(ExitHeadsConfig(exit_layers=[2]))}),
        (UnsupportedModelError, "StaticCache", {"cache_implementation": "static"}),
    ):
        with pytest.raises(error, match=match):
            decode(model, **options)
    narrow = ExitHeads(ExitHeadsConfig("linear", EXITS, hidden_size=8))
    with pytest.raises(IncompatibleDraftError, match="width 8"):
        decode(model, assistant_model=narrow)


def test_the_guard_is_the_goodput_controller():
    assert SelfDraftConfig().controller(deterministic=True) == GoodputLength(longest=6)
    assert SelfDraftConfig(max_width=3).controller(deterministic=False) == ConstantLength(3)


def test_a_config_survives_saving(tmp_path):
    config = SelfDraftConfig(exit_layers=[2, 4], annealing=0.25, max_width=3, acceptance=EASDConfig().rule)
    config.save_pretrained(tmp_path)
    assert SelfDraftConfig.from_pretrained(tmp_path) == config
    heads = SelfDraftConfig(exit_heads=tmp_path / "heads")
    assert heads.exit_heads == str(tmp_path / "heads")
    heads.save_pretrained(tmp_path)
    assert SelfDraftConfig.from_pretrained(tmp_path) == heads
    with pytest.raises(InvalidConfigError, match=r"got ExitHeads: pass heads in memory as assistant_model"):
        SelfDraftConfig(exit_heads=ExitHeads(ExitHeadsConfig(exit_layers=[2])))


def test_temperatures_anneal_and_confidences_look_at_the_law_alone():
    policy = ExitPolicy(annealing=0.5)
    assert policy.temperature(28, 28) == 1.0
    assert policy.temperature(7, 28) == pytest.approx(1.375)
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    assert policy.confidence(logits, 28, 28).item() == pytest.approx(logits.softmax(-1).max().item())
    assert policy.confidence(logits, 7, 28) < policy.confidence(logits, 14, 28)
    assert policy.exits_of(28) == (21,)
    assert ExitPolicy(exit_layers=(7, 14, 21), max_depth=16).exits_of(28) == (7, 14)


def test_noisy_weights_change_nothing_of_this():
    """Equality on other weights, with the real exits and nothing directed."""
    for seed in range(3):
        model = noisy_copy(tiny_llama(layers=LAYERS), seed=seed)
        for config in (CONFIG, SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.2)):
            assert torch.equal(decode(model, 3, config).sequences, decode(model, 3, None).sequences)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("more", [{"length": "auto"}, {"drafting": "hybrid"}, {"length": "auto", "drafting": "hybrid"}])
def test_an_adapter_drafts_between_what_others_write(model, more, batch_size):
    """Plain rounds, rests and matches stand between its drafts; columns that it lacked would raise."""
    heads = ExitHeads.for_target(model, "adapter", EXITS)
    options = {"exit_layers": EXITS, "confidence_threshold": 0.1, "length": 3, "on_drafter_error": "raise"} | more
    rounds = []
    out = decode(model, batch_size, SelfDraftConfig(**options), assistant_model=heads, round_callback=rounds.append)
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)
    assert out.speculative_stats.events["exit_depths"]
    if more == {"length": "auto"}:
        sources = [each.num_attempted is not None and bool((each.num_attempted > 0).any()) for each in rounds[1:]]
        assert set(sources) == {True, False}, "some rounds are plain and some are drafted in"


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", [3, "auto"])
@pytest.mark.parametrize("drafting", ["auto", "hybrid"])
def test_an_adapter_drafts_over_a_cache_of_the_users_own(model, drafting, length, batch_size):
    """An empty one, and one that holds part of the text, whose hidden states the adapter has never seen."""
    heads = ExitHeads.for_target(model, "adapter", EXITS)
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.1, length=length, drafting=drafting, on_drafter_error="raise"
    )
    asked = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    given, reference = prompts(batch_size), decode(model, batch_size, None).sequences
    for held in (0, 5):
        cache = DynamicCache(config=model.config)
        if held:
            begun = {name: each[:, :held] for name, each in given.items()}
            positions = (begun["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            model(**begun, position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
        out = model.generate(**given, **asked, **{CACHE_KEY: cache}, speculative_config=config, assistant_model=heads)
        assert torch.equal(out.sequences, reference)
        assert out.speculative_stats.events["exit_depths"]
        assert cache.get_seq_length() == reference.shape[1] - 1


def test_heads_by_path_serve_any_config(model, tmp_path):
    ExitHeads(ExitHeadsConfig("linear", EXITS, hidden_size=model.config.hidden_size)).save_pretrained(tmp_path)
    never = EASDConfig(overlap_threshold=2.0, length=3, on_drafter_error="raise")
    for config in (never, ExactConfig(length=3, on_drafter_error="raise")):
        out = decode(model, config=config, assistant_model=str(tmp_path))
        assert torch.equal(out.sequences, decode(model, config=None).sequences)
        assert "exit_depths" in out.speculative_stats.events
    report = verify_lossless(model, [[5, 6, 7]], assistant_model=tmp_path, max_new_tokens=8)
    assert report.equal
    with pytest.raises(InvalidConfigError, match="pass one of them"):
        decode(model, config=SelfDraftConfig(exit_heads=tmp_path), assistant_model=tmp_path)
