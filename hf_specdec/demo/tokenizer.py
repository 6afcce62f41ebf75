"""The demo pair's byte-level BPE tokenizer."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer; id 0 is `<|endoftext|>` (both bos and eos) and id 1 is `<|pad|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def load_or_train(folder: Path, texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Loads the tokenizer saved in `folder`, training and saving it there first if there is none."""
    if not (folder / "tokenizer_config.json").exists():
        train(texts, vocab_size).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One stream of token ids, shape `(num_tokens,)`; each document ends with `<|endoftext|>`."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.long)
