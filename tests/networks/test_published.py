"""Published drafters from the Hub. Without HF_SPECDEC_HUB they are skipped, and they download gigabytes with it.

What is expected of each is what its authors' config or its target's says.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import AutoDrafter, Eagle3Drafter, EagleDrafter, RCSDConfig
from hf_specdec.networks.auto import load_network
from hf_specdec.networks.checkpoint import read_checkpoint


pytestmark = pytest.mark.hub

# Hub id, commit: (class, hidden size, target vocabulary, draft vocabulary)
PUBLISHED = {
    ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "02d97adb0cacd1a50d4af8db61f4aca424ba2531"): (
        EagleDrafter, 4096, 128256, None,
    ),
    ("HArmonizedSS/HASS-LLaMA3-Instruct-8B", "main"): (EagleDrafter, 4096, 128256, None),  # no commit of it is known to us
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "ada412b672e293d682423de84a095447bf38a637"): (
        Eagle3Drafter, 4096, 128256, 32000,
    ),
    ("AngelSlim/Qwen3-1.7B_eagle3", "94441b48acc5804677ae12259617c83323b543a9"): (Eagle3Drafter, 2048, 151936, 32000),
    ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "f4fa34a8f803a0ba75d048d6b3dbc1ad5149e9ac"): (
        Eagle3Drafter, 4096, 128256, 32000,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "facts"), PUBLISHED.items(), ids=[name for name, _ in PUBLISHED])
def test_it_loads_with_every_tensor_accounted_for(source, facts):
    """A tensor that is missing, unexpected or misshapen would have raised."""
    name, revision = source
    kind, hidden_size, vocab_size, draft_vocab_size = facts
    network = load_network(read_checkpoint(name, revision=revision, allow_bin=True))
    assert isinstance(network, kind)
    assert (network.config.hidden_size, network.config.vocab_size) == (hidden_size, vocab_size)
    if draft_vocab_size is not None:
        assert network.draft_vocab_size == draft_vocab_size
        assert len(network.target_ids.unique()) == draft_vocab_size
        assert int(network.target_ids.max()) < vocab_size
    assert all(value.isfinite().all() for value in network.state_dict().values() if value.is_floating_point())


# Published on its card: 2.13, 2.20 and 2.17 tokens per round on GSM8K, HumanEval and MT-bench, the bonus token counted, with
# two drafted tokens in vLLM.
PUBLISHED_TAU = 2.17
TARGET = ("Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e")
DRAFTER = ("AngelSlim/Qwen3-1.7B_eagle3", "94441b48acc5804677ae12259617c83323b543a9")
QUESTIONS = [
    "Explain in three sentences why the sky is blue.",
    "Tom has 12 apples, gives away a third and buys 5 more. How many has he?",
    "Write a Python function that tells whether a word is a palindrome.",
]


@pytest.mark.slow
def test_it_is_as_right_as_published_and_more_often_with_its_own_taps_than_with_others():
    """Wrong taps leave the text as it is and take the acceptance away, so that nobody notices."""
    (name, revision), (drafter, drafter_revision) = TARGET, DRAFTER
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    own = AutoDrafter.from_pretrained(drafter, target=model, revision=drafter_revision)
    others = [index - 1 for index in own.taps_of(model)]
    taus = []
    wrong = AutoDrafter.from_pretrained(drafter, target=model, revision=drafter_revision, taps=others)
    for network in (own, wrong):
        found = [_tokens_per_round(model, tokenizer, network, question) for question in QUESTIONS]
        taus.append(sum(found) / len(found))
    assert taus[0] == pytest.approx(PUBLISHED_TAU, rel=0.2)
    assert taus[0] > taus[1]


def _tokens_per_round(model, tokenizer, network, question):
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {**inputs, "max_new_tokens": 64, "do_sample": False}
    out = model.generate(
        **options,
        assistant_model=network,
        speculative_config=RCSDConfig(steps=2, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, model.generate(**options))
    return out.speculative_stats.tokens_per_round
