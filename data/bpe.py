"""A byte-level byte pair encoding of one's own: learned by the `tokenizers` library, kept as tokenizer.json.

The file is what transformers and `tokenizers` read. Ids are 0 ... 255 for the bytes, then one for each merge,
then the separator, so that an id is also the merge's priority, which is all that tiktoken needs to encode.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime.errors import UserError

FILE = "tokenizer.json"
MAX_FILE = 2**26        # bytes
MIN_SIZE, MAX_SIZE = 257, 1_000_000
SEPARATOR = "<|endoftext|>"
# GPT-2's rule for splitting text into words, between which no merge goes: Radford et al. 2019. Also what
# `ByteLevel` of the tokenizers library does. No alternative has white space after another character.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def _byte_characters() -> list[str]:
    """The character that byte-level vocabularies write for each byte: itself where it shows, else 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


CHARACTERS = _byte_characters()
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


def size_of(name: str) -> int | None:
    """N of "bpe:N", the size of the vocabulary with the separator; None for any other name."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    if not match:
        return None
    size = int(match[1])
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UserError(f"tokenizer {name!r}: the vocabulary needs {MIN_SIZE} (bytes and separator) to "
                        f"{MAX_SIZE} ids, got {size}; bpe:4096 suits a few megabytes of text")
    return size


def learn(texts: Iterable[bytes], size: int) -> str:
    """The content of tokenizer.json for a vocabulary of `size` ids, learned from texts. Raises UserError.

    A function of the counts of words in the texts: neither their order nor the number of threads matters.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((text.decode("utf-8", errors="ignore") for text in texts), trainer)
    found = tokenizer.get_vocab_size() + 1
    if found < size:
        raise UserError(f"tokenizer bpe:{size}: the text has pairs for {found} ids only; use --tokenizer "
                        f"bpe:{found} or less, or more text")
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True)])
    content = json.loads(tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    # else the library would rank a merge otherwise than by its id, and tiktoken would not encode alike
    assert [vocab[a + b] for a, b in merges] == list(range(256, size - 1))
    return json.dumps(content)


def read_ranks(folder: Path, size: int) -> dict[bytes, int]:
    """Bytes -> id of all but the separator, from tokenizer.json in a folder. Raises UserError."""
    path = folder / FILE
    fix = "prepare the corpus again with data/prepare.py, or copy the file from where it is whole"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
    except FileNotFoundError as error:
        raise UserError(f"tokenizer bpe:{size}: {path} is missing; {fix}") from error
    if len(text) > MAX_FILE:
        raise UserError(f"tokenizer {path}: more than {MAX_FILE:,} bytes; {fix}")
    try:
        return _ranks(json.loads(text), size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"tokenizer {path}: damaged ({type(error).__name__}: {error}); {fix}") from error


def _ranks(content: dict[str, Any], size: int) -> dict[bytes, int]:
    """Raises ValueError, KeyError, TypeError or AttributeError for what `learn` would not have written."""
    rule = content["pre_tokenizer"]
    if (rule["type"], rule["add_prefix_space"], rule["use_regex"]) != ("ByteLevel", False, True):
        raise ValueError("pre_tokenizer is not GPT-2's")
    if [(added["content"], added["id"]) for added in content["added_tokens"]] != [(SEPARATOR, size - 1)]:
        raise ValueError(f"the only added token must be {SEPARATOR} with id {size - 1}")
    ranks = {bytes(BYTES[sign] for sign in token): rank for token, rank in content["model"]["vocab"].items()}
    if b"" in ranks or any(type(rank) is not int for rank in ranks.values()):
        raise ValueError("vocab must map text to integers")
    if sorted(ranks.values()) != list(range(size - 1)):
        raise ValueError(f"vocab must have the ids 0 ... {size - 2}, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("vocab lacks a byte")
    return ranks
