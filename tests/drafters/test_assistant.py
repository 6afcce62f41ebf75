"""Model drafts against logits computed with no cache at all: verification would hide a drafter whose cache is wrong."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specdec import ExactConfig
from hf_specdec.drafters import DRAFTERS, AssistantDrafter, DraftSettings
from hf_specdec.errors import DrafterError
from hf_specdec.records import Budget, Context
from tests.families import FAMILIES
from tests.toys import noisy_copy, prompts, tiny_llama


@pytest.fixture(autouse=True)
def _without_gradients():
    """Drafters run inside `generate`, which switches gradients off."""
    with torch.no_grad():
        yield


class LoggedStreams:
    """Dice of which every throw is remembered, row by row."""

    def __init__(self, rows, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.thrown = [[] for _ in range(rows)]

    def uniforms(self, rows):
        numbers = torch.rand(len(rows), dtype=torch.float64, generator=self.generator)
        for row in rows.nonzero()[:, 0].tolist():
            self.thrown[row].append(float(numbers[row]))
        return numbers


def sliding_window_model():
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(config).eval()


def absolute_position_model():
    """Its logits change when a text is shifted, as those of rotary embeddings do not."""
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def sparse_attention_model():
    """Its cache holds an index beside keys and values, and cannot shift one row against another."""
    return FAMILIES["deepseek_v32"].build()


MODELS = {
    "same vocabulary": lambda: tiny_llama(layers=2),
    "larger vocabulary": lambda: tiny_llama(vocab_size=72, layers=2),
    "smaller vocabulary": lambda: tiny_llama(vocab_size=56, layers=2),
    "sliding window": sliding_window_model,
    "absolute positions": absolute_position_model,
    "rows cannot be realigned": sparse_attention_model,
}


def cacheless_logits(model, text):
    """The draft logits after every prefix of a text, laid on 64 ids: what it lacks is -inf, what it has more is cut."""
    known = model.get_input_embeddings().weight.shape[0]
    logits = model(text.clamp(max=known - 1)[None], use_cache=False).logits[0, :, :64]
    return torch.nn.functional.pad(logits, (0, 64 - logits.shape[-1]), value=float("-inf"))


def inverted(law, number):
    """The token at which the distribution function passes a number, and whether that is clear of rounding."""
    cumulated = law.double().cumsum(-1)
    token = int((cumulated <= number * cumulated[-1]).sum())
    return token, float((cumulated - number * cumulated[-1]).abs().min()) > 1e-5


class Game:
    """Texts that grow as in a run: rows accept a random part of their drafts and take a random token after it.

    That token is often 0, the filler which shorter rows are fed beside longer ones.
    """

    def __init__(self, seed, rows=4):
        self.generator = torch.Generator().manual_seed(seed)
        inputs = prompts(rows, columns=8, seed=seed)
        self.prompt_mask = inputs["attention_mask"]
        self.texts = [row.tolist() for row in inputs["input_ids"]]
        self.unfinished = torch.ones(rows, dtype=torch.bool)

    def number(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.generator))

    @property
    def context(self):
        """Ragged rows, with filler after each row's end."""
        columns = max(map(len, self.texts)) + self.number(0, 3)
        tokens = [row + [self.number(0, 64) for _ in range(columns - len(row))] for row in self.texts]
        lengths = torch.tensor([len(row) for row in self.texts])
        return Context(torch.tensor(tokens), lengths, self.prompt_mask, self.unfinished.clone())

    def real(self, row):
        """The text of a row without its padding."""
        return torch.tensor(self.texts[row][int((self.prompt_mask[row] == 0).sum()) :])

    def advance(self, draft, acceptance):
        for row in range(len(self.texts)):
            if self.unfinished[row]:
                length = int(draft.lengths[row])
                accepted = {"all": length, "none": 0, "some": self.number(0, length + 1)}[acceptance]
                self.texts[row] += [*draft.tokens[row, :accepted].tolist(), max(0, self.number(-64, 64))]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("name", "acceptance"),
    [
        ("same vocabulary", "all"),
        ("same vocabulary", "some"),
        ("same vocabulary", "none"),
        ("larger vocabulary", "some"),
        ("smaller vocabulary", "some"),
        ("sliding window", "all"),
        ("sliding window", "some"),
        ("absolute positions", "some"),
        ("rows cannot be realigned", "some"),
    ],
)
def test_drafts_equal_those_of_a_model_without_a_cache(do_sample, name, acceptance):
    """Many rounds over ragged, padded rows: zero-length rows, rounds in which nobody drafts, rows that finish."""
    model, game, streams = MODELS[name](), Game(seed=len(acceptance)), LoggedStreams(4)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(20)])
    settings = DraftSettings(64, do_sample=do_sample, warpers=warpers, streams=streams, keep_logits=True)
    drafter = AssistantDrafter(settings, model)
    compared = largest = 0
    for round_ in range(12):
        gap = round_ in (4, 5, 9)  # rounds that another drafter served, or nobody
        most = 0 if gap else 1 if round_ in (2, 3, 6, 7) else 4
        budget = Budget(torch.tensor([game.number(0, most + 1) for _ in range(4)]))
        if round_ == 8:
            game.unfinished[1] = False
        context = game.context
        before = [len(thrown) for thrown in streams.thrown]
        draft = drafter.propose(context, budget).check(context, budget, 64)
        for row in range(4):
            length = int(draft.lengths[row])
            assert length == (int(budget.max_tokens[row]) if game.unfinished[row] else 0)
            assert len(streams.thrown[row]) - before[row] == (length if do_sample else 0)
            if length == 0:
                continue
            text = torch.cat([game.real(row), draft.tokens[row, :length]])
            raw = cacheless_logits(model, text)[-length - 1 : -1]
            known = raw.isfinite()
            assert torch.equal(draft.logits[row, :length].isfinite(), known)
            largest = max(largest, float((draft.logits[row, :length] - raw)[known].abs().max()))
            scores = warpers(None, raw.clone())
            for position, token in enumerate(draft.tokens[row, :length].tolist()):
                if do_sample:
                    law = scores[position].softmax(-1)
                    assert float((draft.q[row, position] - law).abs().max()) < 1e-5
                    expected, clear = inverted(law, streams.thrown[row][before[row] + position])
                else:
                    expected, clear = int(scores[position].argmax()), True
                assert token == expected or not clear
                compared += 1
        if not do_sample:
            assert draft.q is None
        game.advance(draft, acceptance)
    assert compared > 30
    assert largest < 1e-4


def test_the_cache_is_used():
    """Each round feeds what is new to the model, and not the whole text again."""
    model, fed = tiny_llama(layers=2), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    game = Game(seed=1, rows=1)
    drafter = AssistantDrafter(DraftSettings(64), model)
    read = []
    for acceptance in ("all", "none", "some", "all"):
        draft = drafter.propose(game.context, Budget(torch.tensor([3])))
        read.append(draft.num_read)
        game.advance(draft, acceptance)
    assert read == [8, 2, 1, fed[9]]
    # The prompt once; later at most the last draft, which was never fed, and the token after it; then draft by draft.
    assert fed[:3] == [8, 1, 1]
    assert fed[3:6] == [2, 1, 1]
    assert fed[6:9] == [1, 1, 1]
    assert len(fed) == 12
    assert max(fed[3:]) <= 2


def test_rows_draft_the_same_alone_and_together():
    model, game = tiny_llama(layers=2), Game(seed=3)
    drafter = AssistantDrafter(DraftSettings(64), model)
    for _ in range(4):
        context = game.context
        together = drafter.propose(context, Budget(torch.full((4,), 3)))
        for row in range(4):
            alone = AssistantDrafter(DraftSettings(64), model).propose(
                Context.of(game.real(row)[None]), Budget(torch.tensor([3]))
            )
            assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        game.advance(together, "some")


def test_processors_see_each_rows_own_text():
    """A penalty that depends on the prefix: with each row's committed tokens and its drafts so far, padding included."""
    model, game = tiny_llama(layers=2), Game(seed=2)
    penalty = RepetitionPenaltyLogitsProcessor(penalty=3.0)
    drafter = AssistantDrafter(DraftSettings(64, warpers=LogitsProcessorList([penalty])), model)
    changed = 0
    for _ in range(5):
        context = game.context
        draft = drafter.propose(context, Budget(torch.full((4,), 3)))
        for row in range(4):
            text = torch.cat([game.real(row), draft.tokens[row]])
            raw = cacheless_logits(model, text)[-4:-1]
            for position, token in enumerate(draft.tokens[row].tolist()):
                prefix = torch.tensor([game.texts[row] + draft.tokens[row, :position].tolist()])
                assert token == int(penalty(prefix, raw[position : position + 1].clone()).argmax())
                changed += token != int(raw[position].argmax())
        game.advance(draft, "some")
    assert changed > 5


def test_a_row_ends_its_draft_with_an_eos():
    model, context = tiny_llama(layers=2), Context.of(torch.tensor([[3, 9, 4], [8, 5, 6]]))
    free = AssistantDrafter(DraftSettings(64), model).propose(context, Budget(torch.tensor([5, 5])))
    eos = int(free.tokens[0, 1])
    first = free.tokens[0].tolist().index(eos) + 1
    cut = AssistantDrafter(DraftSettings(64, eos_token_ids=(eos,)), model).propose(
        context, Budget(torch.tensor([5, 5]))
    )
    other = free.tokens[1].tolist()
    assert cut.lengths.tolist() == [first, other.index(eos) + 1 if eos in other else 5]
    assert cut.tokens[0, :first].tolist() == free.tokens[0, :first].tolist()


def test_nothing_runs_without_a_budget():
    model = tiny_llama(layers=1)
    drafter = AssistantDrafter(DraftSettings(64), model)
    draft = drafter.propose(Context.of(torch.tensor([[3, 9, 4]])), Budget(torch.tensor([0])))
    assert draft.width == 0
    assert drafter.lm is None


def test_the_table_names_it():
    assert DRAFTERS["model"] is AssistantDrafter


# --- vocabularies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [72, 56])
def test_no_id_is_drafted_that_one_of_the_models_lacks(vocab_size):
    """The unknown ids would win: the bias of the draft model's last ids is made huge."""
    model = tiny_llama(vocab_size=vocab_size, layers=1)
    model.lm_head.weight[min(vocab_size, 64) :] *= 50
    settings = DraftSettings(64, do_sample=True, streams=LoggedStreams(6), keep_logits=True)
    texts = torch.randint(0, 64, (6, 5))
    texts[:, -1] = 63  # an id that the smaller model has no embedding for
    draft = AssistantDrafter(settings, model).propose(Context.of(texts), Budget(torch.full((6,), 4)))
    assert draft.q.shape == draft.logits.shape == (6, 4, 64)
    assert int(draft.tokens.max()) < min(vocab_size, 64)
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(6, 4))
    assert bool((draft.q[..., vocab_size:] == 0).all())
    assert bool((draft.logits[..., vocab_size:] == float("-inf")).all())


@pytest.mark.parametrize("vocab_size", [72, 56])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_padded_vocabularies_change_no_text(vocab_size, batch_size):
    target, inputs = tiny_llama(layers=2), prompts(batch_size)
    draft_model = tiny_llama(vocab_size=vocab_size, layers=2)
    weights = noisy_copy(
        target, noise=0.05
    ).state_dict()  # the same as far as they reach, so that drafts are often right
    for name, values in draft_model.state_dict().items():
        rows = min(len(values), len(weights[name]))
        values[:rows] = weights[name][:rows]
    out = target.generate(
        **inputs,
        assistant_model=draft_model,
        speculative_config=ExactConfig(drafting="model", length=4, on_drafter_error="raise"),
        do_sample=False,
        max_new_tokens=20,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, target.generate(**inputs, do_sample=False, max_new_tokens=20))
    assert out.speculative_stats.num_accepted_tokens > 0


# --- failure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("min_confidence", [0.0, 0.5])
def test_nan_logits_are_a_drafter_error_that_names_the_model(do_sample, min_confidence):
    model = tiny_llama(layers=1)
    model.lm_head.weight[5] = float("nan")
    settings = DraftSettings(64, do_sample=do_sample, streams=LoggedStreams(2))
    with pytest.raises(DrafterError, match="LlamaForCausalLM contain NaN"):
        AssistantDrafter(settings, model).propose(
            Context.of(torch.tensor([[3, 9, 4], [8, 5, 6]])), Budget(torch.tensor([3, 3]), min_confidence)
        )
