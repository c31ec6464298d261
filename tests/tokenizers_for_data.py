"""Tokenizers with the habits that data code must cope with, made offline."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = [
    "the answer is forty two. " * 20,
    "what is the question? " * 20,
    "of the and to a in that it is was for on " * 20,
]


def merging_tokenizer(template: str | None = None) -> Any:
    """A byte-level BPE whose tokens cover several characters, spaces among them; eos </s>, no bos."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([])  # merges may run over any border
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, pre_tokenizers.ByteLevel.alphabet())
    return _fast(backend, template, bos_token=None)


def prefixing_tokenizer(template: str | None = None) -> Any:
    """As Llama's: text is read as if a space stood before it, and bos is put first."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = [*(chr(code) for code in range(32, 127)), "\n", "▁"]
    _train(backend, alphabet)
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return _fast(backend, template, bos_token="<s>")


def normalising_tokenizer(template: str | None = None) -> Any:
    """Changes what it reads: capitals become small letters."""
    tokenizer = merging_tokenizer(template)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _train(backend: Tokenizer, alphabet: list[str]) -> None:
    special = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    backend.train_from_iterator(_TEXTS, trainer)


def _fast(backend: Tokenizer, template: str | None, bos_token: str | None) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", bos_token=bos_token
    )
    tokenizer.chat_template = template
    return tokenizer
