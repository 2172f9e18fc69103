"""Rows and small tokenizers for tests of prompts: made in memory, no files, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import pipeline.config
from pipeline.request import RowKey

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
)

_CORPUS = [
    "the strawberry and the blueberry are berries",
    "Summarise the following document in one sentence.",
    "one two three four five six seven eight nine ten",
    "<user></><assistant></><system></>",
]


@dataclass(frozen=True)
class FakeRow:
    """What input/rows.py promises of a Row, on plain values."""

    columns: dict[str, Any]
    key: RowKey = RowKey(0, 0)
    ordinal: int = 0

    def value(self, column: str) -> Any:
        return self.columns[column]

    def values(self, columns: Sequence[str]) -> dict[str, Any]:
        return {column: self.columns[column] for column in columns}


def rows_of(*values: dict[str, Any]) -> list[FakeRow]:
    return [FakeRow(value, RowKey(0, i), i) for i, value in enumerate(values)]


@cache
def tiny() -> Any:
    """The shipped tokenizer: byte-level, a chat template, no BOS."""
    return AutoTokenizer.from_pretrained(Path(pipeline.config.__file__).parent / "assets" / "tiny-model")


def byte_level(chat_template: str | None = None, bos: bool = False, eos: bool = False) -> Any:
    """A byte-level BPE; with bos it puts <s> in front of a text by default, with eos </s> behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return _wrapped(tokenizer, chat_template)


def byte_fallback() -> Any:
    """As SentencePiece models have it: spaces as a symbol, unknown characters as bytes, <s> in front."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocabulary |= {"▁": 259, "h": 260, "i": 261, "▁h": 262, "▁hi": 263}
    model = models.BPE(
        vocab=vocabulary, merges=[("▁", "h"), ("▁h", "i")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, None)


def _wrapped(tokenizer: Tokenizer, chat_template: str | None) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
