"""Published drafters from the Hub. Without HF_SPECDEC_HUB they are skipped, and they download gigabytes with it.

What is expected of each is what its authors' config or its target's says, and the acceptance length that was published for it.
"""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import AutoDrafter, Eagle3Drafter, EagleDrafter, RCSDConfig, TreeShape
from hf_specdec.networks.auto import load_network
from hf_specdec.networks.checkpoint import read_checkpoint
from tests.networks.pins import commit_of


pytestmark = pytest.mark.hub

LLAMA3 = ("meta-llama/Meta-Llama-3-8B-Instruct", "5f0b02c75b57c5855da9ae460ce51323ea669d8a")
LLAMA31 = ("meta-llama/Llama-3.1-8B-Instruct", "0e9e39f249a16976918f6564b8830bc894c89659")
QWEN3 = ("Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e")


@dataclass(frozen=True)
class Published:
    """A checkpoint, what its config says, and what was published of it.

    `tau` counts the bonus token, as in all these sources. Those of EAGLE and HASS are the means over MT-bench, HumanEval and
    GSM8K of HASS's paper (arXiv 2408.15766) with trees of 60 tokens, the root included; that of EAGLE-3 for Llama is the one on
    MT-bench with chains of three, from SpecBundle's table; that of Qwen3 is from its card, on MT-bench with chains of two.
    RedHatAI's has no figure known to us and is held to that of the other EAGLE-3 drafter of its target.
    """

    name: str
    pin: str
    kind: type
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None
    target: tuple[str, str]
    tau: float
    config: dict[str, object]

    @property
    def revision(self):
        return commit_of(self.name, self.pin)


TREE = {"tree": TreeShape(depth=6, top_k=10, total_nodes=59)}
PUBLISHED = [
    Published(
        "yuhuili/EAGLE-LLaMA3-Instruct-8B", "02d97adb0cacd1a50d4af8db61f4aca424ba2531",
        EagleDrafter, 4096, 128256, None, LLAMA3, 4.52, TREE,
    ),
    Published(
        "HArmonizedSS/HASS-LLaMA3-Instruct-8B", "2025-12-31",
        EagleDrafter, 4096, 128256, None, LLAMA3, 5.08, TREE,
    ),
    Published(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "ada412b672e293d682423de84a095447bf38a637",
        Eagle3Drafter, 4096, 128256, 32000, LLAMA31, 2.93, {"steps": 3},
    ),
    Published(
        "AngelSlim/Qwen3-1.7B_eagle3", "94441b48acc5804677ae12259617c83323b543a9",
        Eagle3Drafter, 2048, 151936, 32000, QWEN3, 2.17, {"steps": 2},
    ),
    Published(
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "f4fa34a8f803a0ba75d048d6b3dbc1ad5149e9ac",
        Eagle3Drafter, 4096, 128256, 32000, LLAMA31, 2.93, {"steps": 3},
    ),
]  # fmt: skip
# Targets of this size need a GPU, where bfloat16 may part from the plain text by rounding.
LARGE = [each for each in PUBLISHED if each.target is not QWEN3]
QWEN3_DRAFTER = next(each for each in PUBLISHED if each.target is QWEN3)

QUESTIONS = [
    "Explain in three sentences why the sky is blue.",
    "Tom has 12 apples, gives away a third and buys 5 more. How many has he?",
    "Write a Python function that tells whether a word is a palindrome.",
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.name)
def test_it_loads_with_every_tensor_accounted_for(published):
    """A tensor that is missing, unexpected or misshapen would have raised."""
    network = load_network(read_checkpoint(published.name, revision=published.revision, allow_bin=True))
    assert isinstance(network, published.kind)
    assert (network.config.hidden_size, network.config.vocab_size) == (published.hidden_size, published.vocab_size)
    if published.draft_vocab_size is not None:
        assert network.draft_vocab_size == published.draft_vocab_size
        assert len(network.target_ids.unique()) == published.draft_vocab_size
        assert int(network.target_ids.max()) < published.vocab_size
    assert all(value.isfinite().all() for value in network.state_dict().values() if value.is_floating_point())


@pytest.mark.slow
def test_it_is_as_right_as_published_and_more_often_with_its_own_taps_than_with_others():
    """Wrong taps leave the text as it is and take the acceptance away, so that nobody notices."""
    model, tokenizer = _target(QWEN3, dtype=torch.float32)
    own = _drafter(QWEN3_DRAFTER, model)
    wrong = _drafter(QWEN3_DRAFTER, model, taps=[index - 1 for index in own.taps_of(model)])
    taus = [_tau(model, tokenizer, network, QWEN3_DRAFTER.config, same_text=True) for network in (own, wrong)]
    assert taus[0] == pytest.approx(QWEN3_DRAFTER.tau, rel=0.2)
    assert taus[0] > taus[1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("published", LARGE, ids=lambda each: each.name)
def test_it_is_as_right_as_published(published):
    model, tokenizer = _target(published.target, dtype=torch.bfloat16, device_map="cuda")
    tau = _tau(model, tokenizer, _drafter(published, model), published.config, same_text=False)
    assert tau == pytest.approx(published.tau, rel=0.2)


def _target(source, **options):
    name, revision = source
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision, **options)
    return model, AutoTokenizer.from_pretrained(name, revision=revision)


def _drafter(published, model, **options):
    return AutoDrafter.from_pretrained(
        published.name, target=model, revision=published.revision, allow_bin=True, **options
    )


def _tau(model, tokenizer, network, config, same_text):
    """Mean tokens per round over the questions, greedily."""
    found = [_tokens_per_round(model, tokenizer, network, config, same_text, question) for question in QUESTIONS]
    return sum(found) / len(found)


def _tokens_per_round(model, tokenizer, network, config, same_text, question):
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {**inputs.to(model.device), "max_new_tokens": 64, "do_sample": False}
    out = model.generate(
        **options,
        assistant_model=network,
        speculative_config=RCSDConfig(**config, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    if same_text:
        assert torch.equal(out.sequences, model.generate(**options))
    return out.speculative_stats.tokens_per_round
