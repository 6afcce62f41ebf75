"""What a long prompt costs in memory: its cache and, for networks, its features, but never its logits."""

import gc

import pytest
import torch
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM

from hf_specdec import AutoDrafter, ExactConfig, RCSDConfig, SelfDraftConfig, SpeculativeConfig, TreeShape
from hf_specdec._compat import CACHE_KEY
from hf_specdec.errors import DrafterError
from hf_specdec.features import FeatureStore
from tests.toys import noisy_copy, tiny_llama


VOCAB_SIZE, SHORT, LONG, STEPS = 1024, 96, 224, 2
FLOAT = 4  # bytes
METHODS = {
    "causal LM": (noisy_copy, ExactConfig(length=STEPS, drafting="model", on_drafter_error="raise")),
    "prompt lookup": (lambda model: None, SpeculativeConfig(drafting="ngram", length=STEPS, on_drafter_error="raise")),
    "self-draft": (
        lambda model: None,
        SelfDraftConfig(exit_layers=[2], confidence_threshold=0.0, length=STEPS, on_drafter_error="raise"),
    ),
    "eagle": (lambda model: AutoDrafter.from_target(model, "eagle"), RCSDConfig(steps=STEPS, on_drafter_error="raise")),
    "eagle3": (
        lambda model: AutoDrafter.from_target(model, "eagle3", taps=(1, 2, 3), draft_token_ids=torch.arange(64)),
        RCSDConfig(steps=STEPS, on_drafter_error="raise"),
    ),
    "tree": (
        lambda model: AutoDrafter.from_target(model, "eagle3", taps=(1, 2, 3), draft_token_ids=torch.arange(64)),
        RCSDConfig(tree=TreeShape(2, 2, 4), on_drafter_error="raise"),
    ),
}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=4, vocab_size=VOCAB_SIZE)


def run(model, columns, assistant, config, **options):
    ids = torch.randint(1, VOCAB_SIZE, (1, columns), generator=torch.Generator().manual_seed(0))
    method = {} if config is None else {"assistant_model": assistant, "speculative_config": config}
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **method, **options
    )


def peak(function):
    """Most bytes that tensors held at once, beyond those that were there before."""
    gc.collect()
    with profile(profile_memory=True) as recorded:
        function()
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = torch.tensor([event.nbytes() for event in events]).cumsum(0)
    return int(held.max())


def growth(model, assistant, config):
    """Bytes for each further token of the prompt."""
    sizes = [peak(lambda columns=columns: run(model, columns, assistant, config)) for columns in (SHORT, LONG)]
    return (sizes[1] - sizes[0]) / (LONG - SHORT)


@pytest.mark.parametrize("method", METHODS)
def test_a_long_prompt_needs_little_more_than_in_plain_decoding(model, method):
    make, config = METHODS[method]
    plain, ours = growth(model, None, None), growth(model, make(model), config)
    assert plain < VOCAB_SIZE * FLOAT / 2  # the logits of a token would show
    width = model.config.hidden_size
    features = 3 * width if method in ("eagle3", "tree") else width if method == "eagle" else 0
    # Features are held twice, as they come from the layers and side by side, and a drafter reads the prompt after its target
    # has: what remains is its own cache. Half of what plain decoding needs is the cache of a causal LM with room to spare.
    assert ours < plain + 3 * features * FLOAT + (plain / 2 if method == "causal LM" else 64)


@pytest.mark.parametrize("method", METHODS)
def test_no_pass_computes_logits_that_nobody_reads(model, method):
    make, config = METHODS[method]
    assistant, seen = make(model), []
    heads = {model.lm_head} | ({assistant.lm_head} if hasattr(assistant, "lm_head") else set())
    handles = [head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])) for head in heads]
    try:
        run(model, SHORT, assistant, config)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) > 3
    assert max(seen) <= 1 + (4 if method == "tree" else STEPS)


class AllLogits(LlamaForCausalLM):
    """A model without `logits_to_keep`, as some are; it remembers what became of the logits of its passes."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        options = {CACHE_KEY: kwargs.get(CACHE_KEY), "use_cache": use_cache, "return_dict": True}
        outputs = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **options)
        self.passes.append((outputs.logits.shape[1], StorageWeakRef(outputs.logits.untyped_storage())))
        return outputs


def test_the_prompts_logits_are_gone_after_the_first_token(model):
    whole = AllLogits(model.config).eval()
    whole.load_state_dict(model.state_dict())
    whole.passes, alive = [], []

    def look(round_):
        columns, logits = whole.passes[0]
        assert columns == SHORT
        alive.append(not logits.expired())

    config = METHODS["prompt lookup"][1]
    found = run(whole, SHORT, None, config, round_callback=look)
    assert torch.equal(found, run(model, SHORT, None, None))
    assert len(alive) > 2
    assert not any(alive)


def test_features_of_a_prompt_are_not_copied():
    store, features = FeatureStore(), torch.randn(2, 5, 4)
    store.begin(3, features)
    assert store.take(torch.arange(3, 8).expand(2, -1)).data_ptr() == features.data_ptr()
    assert torch.equal(store.take(torch.tensor([[4, 6], [7, -1]]))[0], features[0, [1, 3]])
    store.put(torch.tensor([[8], [8]]), torch.ones(2, 1, 4))
    assert torch.equal(store.take(torch.tensor([[8], [7]]))[:, 0], torch.stack([torch.ones(4), features[1, 4]]))


def test_features_behind_a_gap_are_not_known():
    store = FeatureStore()
    store.begin(0, torch.randn(2, 3, 4))
    store.put(torch.tensor([[4], [3]]), torch.ones(2, 1, 4))
    with pytest.raises(DrafterError, match=r"known from 0 up to \[3, 4\]"):
        store.take(torch.tensor([[4], [3]]))
    store.put(torch.tensor([[3, 4], [4, -1]]), torch.ones(2, 2, 4))
    assert torch.equal(store.take(torch.tensor([[4], [4]])), torch.ones(2, 1, 4))
