"""What users of speculative decoding reported elsewhere, one test per report, and the helpers these tests share.

The law behind all: a speculative run gives what the plain run gives, or raises a clear error before the first token.
"""

from functools import cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpeculativeConfig
from hf_specdec._compat import CACHE_KEY
from tests.toys import drafters_for, prompts, tiny_llama


torch.set_num_threads(1)  # models this small run many times slower on several threads

ACCEPTED = ("always", "sometimes", "never")
EXACT = SpeculativeConfig(drafting="model", length=4, on_drafter_error="raise")
NGRAM = SpeculativeConfig(drafting="ngram", length=4, on_drafter_error="raise")
HYBRID = SpeculativeConfig(drafting="hybrid", length=4, on_drafter_error="raise")


@cache
def target(attn_implementation="sdpa"):
    """A model of two layers that no test changes."""
    return tiny_llama(layers=2, attn_implementation=attn_implementation)


@cache
def drafter(accepted, attn_implementation="sdpa"):
    """A drafter that is always, sometimes or never right about `target`."""
    return drafters_for(target(attn_implementation))[accepted]


def plain(inputs, model=None, **options):
    """What transformers' own loop gives; `inputs` are the keyword arguments that say what to continue."""
    if "cache" in options:
        options[CACHE_KEY] = options.pop("cache")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    return (model or target()).generate(**inputs, **options)


def speculative(accepted, inputs, config=EXACT, **options):
    """The same through `speculative_config`; `accepted` names a drafter, or is one."""
    assistant = drafter(accepted) if isinstance(accepted, str) else accepted
    return plain(inputs, assistant_model=assistant, speculative_config=config, **options)


def tokens(output) -> list[list[int]]:
    """The sequences of an output object or tensor as lists, which compare and print well."""
    return (output if isinstance(output, Tensor) else output.sequences).tolist()


def new_tokens(output, inputs) -> list[list[int]]:
    """What was generated after the prompts."""
    return [row[inputs["input_ids"].shape[1] :] for row in tokens(output)]


def text(batch_size=1, max_new_tokens=16) -> list[list[int]]:
    """The greedy continuation of `prompts(batch_size)`."""
    inputs = prompts(batch_size)
    return new_tokens(plain(inputs, max_new_tokens=max_new_tokens), inputs)


def letters(alphabet=None):
    """A tokenizer with one token per character, 64 of them; the pad token is the first."""
    alphabet = alphabet or "_" + "".join(map(chr, range(ord("0"), ord("0") + 63)))
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", padding_side="left")


class Counting(LogitsProcessor):
    """Bans another token at each call, whatever the rows say, and keeps a log of what it was shown."""

    def __init__(self):
        self.num_calls = 0
        self.log = []

    def __call__(self, input_ids, scores):
        self.log.append((tuple(input_ids.shape), input_ids.tolist(), tuple(scores.shape)))
        scores = scores.clone()
        scores[:, (self.num_calls * 7) % scores.shape[1]] = float("-inf")
        self.num_calls += 1
        return scores


class Stops(StoppingCriteria):
    """Stops the rows for which `condition(ids, scores)` holds, and keeps a log of what it was shown."""

    def __init__(self, condition):
        self.condition = condition
        self.log = []

    def __call__(self, input_ids, scores, **kwargs):
        self.log.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.tensor([bool(self.condition(row, scores)) for row in input_ids.tolist()])


class Log(BaseStreamer):
    """Keeps what was put; raises at the put whose index is `fails_at`."""

    def __init__(self, fails_at=None):
        self.puts, self.num_ends, self.fails_at = [], 0, fails_at

    def put(self, value):
        assert self.num_ends == 0
        if len(self.puts) == self.fails_at:
            raise RuntimeError("streamer")
        self.puts.append(value)

    def end(self):
        self.num_ends += 1
