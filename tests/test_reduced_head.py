"""Draft models with a reduced head: the same laws on fewer ids, texts that stay the target's, models that stay as they are."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

import hf_specdec
from hf_specdec import DraftVocabulary, EASDConfig, ExactConfig, InvalidConfigError, SpeculativeConfig, linear
from hf_specdec.drafters import AssistantDrafter, DraftSettings, ScriptedDrafter
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.linear import PackedLinear, pack_linears
from hf_specdec.records import Budget, Context
from hf_specdec.reduced_head import assistant_drafter, reduce_head
from hf_specdec.verify import RandomStreams
from tests import test_sampling
from tests.cli.conftest import word_tokenizer
from tests.families import FAMILIES
from tests.toys import noisy_copy, prompts, state_of, tiny_llama


KEPT = tuple(range(60, 3, -3))  # 19 of 64 ids, in no order of their own


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def logits_of(model, ids=((3, 9, 60, 4, 8),)):
    return model(input_ids=torch.tensor(ids), use_cache=False).logits


def same_state(first, second):
    return (
        first[:2] == second[:2]
        and first[3:] == second[3:]
        and first[2].keys() == second[2].keys()
        and all(torch.equal(value, second[2][name]) for name, value in first[2].items())
    )


# --- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    "llama gemma2 gemma3 gemma3n gemma4 cohere cohere2 granite granitemoe nanochat vaultgemma gpt2 opt phi mpt gptj qwen3_moe"
    " bloom".split(),
)
def test_logits_are_the_models_own_on_the_kept_ids(name):
    """Soft caps (Gemma, NanoChat), scales (Cohere, Granite) and biases (Phi, GPT-J) included; all are made to count."""
    if name not in FAMILIES:
        pytest.skip("this transformers lacks the family")
    model = FAMILIES[name].build()
    for option, value in (("final_logit_softcapping", 3.0), ("logits_scaling", 4.0)):
        if hasattr(model.config, option):
            setattr(model.config, option, value)
    if model.get_output_embeddings().bias is not None:
        model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(0))
    before = state_of(model)
    found = logits_of(reduce_head(model, KEPT, (1, 62)))
    torch.testing.assert_close(found, logits_of(model)[..., [*KEPT, 1, 62]], rtol=1e-4, atol=1e-4)
    assert same_state(before, state_of(model))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_and_tied_heads(packed, tied):
    model = tiny_llama(layers=1, tie_word_embeddings=tied)
    expected = logits_of(model)[..., list(KEPT)]
    if packed:
        pack_linears(model, tied_head=True, small=True)
    twin = reduce_head(model, KEPT)
    torch.testing.assert_close(logits_of(twin), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(twin.lm_head.kept, PackedLinear) == (linear.packing_problem() is None)
    assert type(twin) is type(model)
    assert twin.model is model.model
    assert model.lm_head is not twin.lm_head


def test_other_dtypes_are_not_packed():
    model = tiny_llama(layers=1).to(torch.bfloat16)
    assert type(reduce_head(model, KEPT).lm_head.kept) is nn.Linear


def test_rows_are_taken_once_and_again_when_the_weights_change():
    model = tiny_llama(layers=1)
    first = reduce_head(model, KEPT).lm_head.kept
    assert reduce_head(model, KEPT, (1,)).lm_head.kept is first
    assert reduce_head(model, KEPT[:5]).lm_head.kept is not first
    stale = reduce_head(model, KEPT).lm_head.kept
    model.lm_head.weight.mul_(-1.0)
    assert reduce_head(model, KEPT).lm_head.kept is not stale
    torch.testing.assert_close(
        logits_of(reduce_head(model, KEPT)), logits_of(model)[..., list(KEPT)], atol=1e-4, rtol=1e-4
    )
    if linear.packing_problem() is None:
        pack_linears(model, small=True)
        packed = reduce_head(model, KEPT).lm_head.kept
        model.load_state_dict(tiny_llama(seed=5, layers=1).state_dict())
        assert reduce_head(model, KEPT).lm_head.kept is not packed


def test_a_reduced_model_does_not_outlive_its_model():
    model = tiny_llama(layers=1)
    reduce_head(model, KEPT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class _Doubled(nn.Linear):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 2


def _doubled(model):
    model.lm_head = _Doubled(32, 64, bias=False)


def _dispatched(model):
    model.forward = model.forward


def _treated_apart(model):
    """What this model adds to an id's logit depends on where the id stands in its vocabulary."""

    def add(module, inputs, outputs):
        outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1])

    model.register_forward_hook(add)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_doubled, "head of LlamaForCausalLM is a _Doubled"),
        (_dispatched, "forward of this LlamaForCausalLM was replaced"),
        (_treated_apart, "logits of LlamaForCausalLM are not"),
    ],
)
def test_heads_that_are_more_than_a_linear_layer_are_refused_before_the_first_token(spoil, message):
    target, model = tiny_llama(layers=1), tiny_llama(layers=1)
    spoil(model)
    fed = []
    target.register_forward_hook(lambda *call: fed.append(1))
    config = ExactConfig(draft_vocabulary=DraftVocabulary(KEPT, 64), on_drafter_error="raise")
    with pytest.raises(UnsupportedModelError, match=message):
        target.generate(**prompts(), assistant_model=model, speculative_config=config, max_new_tokens=4)
    assert fed == []


# --- the drafts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_vocab", [64, 72, 40])
def test_q_is_the_law_on_the_reduced_vocabulary(target_vocab):
    """Warpers act on the reduced law; prompts and EOS are in it; ids that the target lacks are not."""
    model = tiny_llama(layers=2)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(9)])
    settings = DraftSettings(
        target_vocab, do_sample=True, warpers=warpers, streams=RandomStreams(3), keep_logits=True, eos_token_ids=(2,)
    )
    texts = torch.tensor([[3, 9, 4, 11], [8, 5, 6, 11], [9, 9, 9, 10]])
    drafter = assistant_drafter(model, DraftVocabulary(KEPT, 64))(settings, texts)
    draft = drafter.propose(Context.of(texts), Budget(torch.full((3,), 3)))
    known = sorted(token for token in {*KEPT, *texts.unique().tolist(), 2} if token < target_vocab)
    if 2 in draft.tokens:
        assert int(draft.lengths.min()) <= 3
    for row in range(3):
        for position in range(int(draft.lengths[row])):
            prefix = torch.cat([texts[row], draft.tokens[row, :position]])
            raw = torch.full((target_vocab,), float("-inf"))
            raw[known] = model(prefix[None]).logits[0, -1, known]
            torch.testing.assert_close(draft.logits[row, position], raw, rtol=1e-4, atol=1e-4)
            law = warpers(None, raw[None])[0].softmax(-1)
            torch.testing.assert_close(draft.q[row, position], law, rtol=1e-4, atol=1e-5)
            assert law[draft.tokens[row, position]] > 0


@pytest.mark.parametrize("drafting", ["model", "hybrid"])
@pytest.mark.parametrize("setting", test_sampling.SETTINGS)
def test_sampled_texts_follow_the_targets_joint_law(setting, drafting):
    """The draft model can say six ids of eight: the one of the vocabulary and the prompt's five."""
    options = test_sampling.SETTINGS[setting]
    vocabulary = DraftVocabulary((6,), test_sampling.VOCAB_SIZE)
    target, assistant = test_sampling.target(), test_sampling.draft_model()
    out = target.generate(
        torch.tensor([test_sampling.PROMPT]),
        attention_mask=torch.ones(1, len(test_sampling.PROMPT)),
        assistant_model=assistant,
        speculative_config=SpeculativeConfig(
            drafting=drafting, length=3, on_drafter_error="raise", draft_vocabulary=vocabulary
        ),
        do_sample=True,
        max_new_tokens=test_sampling.NEW_TOKENS,
        num_return_sequences=test_sampling.NUM_TEXTS,
        return_dict_in_generate=True,
        **{"top_k": 0, **options},
    )
    stats = out.speculative_stats
    assert 0 < stats.num_accepted_tokens < stats.num_verified_tokens
    fit = test_sampling.Fit.of(out.sequences, test_sampling.joint_law(**options))
    assert fit.good, fit


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("drafting", ["model", "hybrid"])
@pytest.mark.parametrize("vocab_size", [56, 64, 72])
def test_greedy_texts_are_plain(batch_size, drafting, vocab_size):
    target, inputs = tiny_llama(layers=2), prompts(batch_size)
    assistant = tiny_llama(vocab_size=vocab_size, layers=2)
    weights = noisy_copy(target, noise=0.05).state_dict()
    for name, values in assistant.state_dict().items():
        rows = min(len(values), len(weights[name]))
        values[:rows] = weights[name][:rows]
    before = state_of(assistant), state_of(target)
    config = ExactConfig(
        length=4,
        drafting=drafting,
        draft_vocabulary=DraftVocabulary(tuple(token for token in range(56) if token % 4), 64),
        on_drafter_error="raise",
    )
    options = {**inputs, "do_sample": False, "max_new_tokens": 24}
    out = target.generate(**options, assistant_model=assistant, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(out.sequences, target.generate(**options))
    assert out.speculative_stats.num_accepted_tokens > 0
    assert all(map(same_state, before, (state_of(assistant), state_of(target))))


def test_only_kept_ids_are_drafted():
    """A target that drafts for itself: whatever its next token is, if the vocabulary has it, it is accepted."""
    target, inputs = tiny_llama(), prompts()
    text = target.generate(**inputs, do_sample=False, max_new_tokens=40)[0, 7:]
    kept = tuple(sorted(set(text.tolist()))[::2])
    known = {*kept, *inputs["input_ids"].unique().tolist()}
    config = ExactConfig(
        drafting="model", length=1, draft_vocabulary=DraftVocabulary(kept, 64), on_drafter_error="raise"
    )
    out = target.generate(
        **inputs, assistant_model=target, speculative_config=config, do_sample=False, max_new_tokens=40,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences[0, 7:], text)
    place, expected = 1, []
    while place < 39:
        hit = int(text[place]) in known
        expected.append(int(hit))
        place += 1 + hit
    assert out.speculative_stats.num_accepted_tokens == sum(expected)
    assert 0 < sum(expected) < len(expected)


def test_where_every_kept_id_is_banned_nothing_is_drafted():
    model, text = tiny_llama(layers=1), torch.tensor([[3, 9, 4]])
    banned = LogitsProcessorList([SuppressTokensLogitsProcessor([3, 9, 4, 7])])
    for do_sample in (False, True):
        settings = DraftSettings(64, do_sample=do_sample, warpers=banned, streams=RandomStreams(1))
        drafter = assistant_drafter(model, DraftVocabulary((7,), 64))(settings, text)
        assert drafter.propose(Context.of(text), Budget(torch.tensor([3]))).lengths.tolist() == [0]


def test_relaxed_rules_work_on_it():
    target = tiny_llama()
    out = target.generate(
        **prompts(2), assistant_model=noisy_copy(target), do_sample=True, max_new_tokens=12, return_dict_in_generate=True,
        speculative_config=EASDConfig(draft_vocabulary=DraftVocabulary(KEPT, 64), on_drafter_error="raise"),
    )  # fmt: skip
    assert out.speculative_stats.num_verified_tokens > 0
    assert not out.speculative_stats.problems


def test_threads_draft_with_their_own_vocabularies():
    target, inputs = tiny_llama(), prompts()
    assistant = noisy_copy(target)
    plain, texts = target.generate(**inputs, do_sample=False, max_new_tokens=24), {}

    def run(number):
        kept = tuple(range(number, 64, 4))
        config = ExactConfig(length=4, draft_vocabulary=DraftVocabulary(kept, 64), on_drafter_error="raise")
        texts[number] = target.generate(
            **inputs, assistant_model=assistant, speculative_config=config, do_sample=False, max_new_tokens=24
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(texts) == 4
    assert all(torch.equal(text, plain) for text in texts.values())


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_reduced_is_told(tmp_path):
    model = tiny_llama(layers=1)
    vocabulary = DraftVocabulary(KEPT, 64)
    with pytest.raises(InvalidConfigError, match="drafter factory"):
        assistant_drafter(lambda settings: ScriptedDrafter(settings, [[]]), vocabulary)
    with pytest.raises(InvalidConfigError, match="pass assistant_model"):
        assistant_drafter(None, vocabulary)
    with pytest.raises(InvalidConfigError, match="no draft vocabulary at"):
        assistant_drafter(model, str(tmp_path / "nowhere"))
    with pytest.raises(InvalidConfigError, match="id 80 and LlamaForCausalLM scores 64 ids"):
        assistant_drafter(model, DraftVocabulary((80,), 99))
    with pytest.raises(InvalidConfigError, match="another tokenizer"):
        assistant_drafter(model, DraftVocabulary(KEPT, 70), word_tokenizer())


def test_the_tokenizer_beside_the_draft_model_is_asked(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    tiny_llama(layers=1).save_pretrained(tmp_path)
    model = hf_specdec.load_model(tmp_path)
    path = DraftVocabulary(KEPT, 64, "of another").save(tmp_path / "words.safetensors")
    with pytest.raises(InvalidConfigError, match="another tokenizer"):
        assistant_drafter(model, str(path))
    DraftVocabulary.from_texts(word_tokenizer(), ["w1 w2"], 9).save(path)
    make = assistant_drafter(model, str(path))
    assert make(DraftSettings(64), torch.tensor([[1]])).token_ids.numel() >= 9


def test_a_draft_model_given_by_its_path(tmp_path):
    target, inputs = tiny_llama(), prompts()
    copy.deepcopy(target).save_pretrained(tmp_path / "draft")
    out = target.generate(
        **inputs, assistant_model=str(tmp_path / "draft"), do_sample=False, max_new_tokens=16, return_dict_in_generate=True,
        speculative_config=ExactConfig(
            drafting="model", length=4, draft_vocabulary=DraftVocabulary(tuple(range(64)), 64), on_drafter_error="raise"
        ),
    )  # fmt: skip
    assert torch.equal(out.sequences, target.generate(**inputs, do_sample=False, max_new_tokens=16))
    assert out.speculative_stats.acceptance_rate == 1.0


def test_without_a_vocabulary_the_whole_head_drafts():
    model = tiny_llama(layers=1)
    drafter = assistant_drafter(model, None)(DraftSettings(64), torch.tensor([[1]]))
    assert isinstance(drafter, AssistantDrafter)
    assert drafter.model is model
    assert drafter.token_ids is None
