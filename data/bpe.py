"""Learning a byte-level byte pair encoding with the `tokenizers` package, saved as tokenizer.json.

transformers and `tokenizers` read the file. Ids 0 ... 255 are the bytes, then comes one for each merge, then
the separator. So an id is also the priority of its merge, which is all that tiktoken needs to encode.
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
# GPT-2's pattern for splitting text into words, which merges never cross: Radford et al. 2019. `ByteLevel` of
# the tokenizers package uses it, too. In no alternative does white space follow another character.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def _byte_characters() -> list[str]:
    """The character for each byte in byte-level vocabularies: itself if it is printable, else 256 and up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTERS = _byte_characters()
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


def size_of(name: str) -> int | None:
    """N of "bpe:N", the size of the vocabulary including the separator; None for other names."""
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

    The result depends only on the counts of words, not on the order of texts or the number of threads.
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
        raise UserError(f"tokenizer bpe:{size}: the text has pairs for only {found} ids; use --tokenizer "
                        f"bpe:{found} or less, or more text")
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True)])
    content = json.loads(tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    # tiktoken ranks merges by id; both encode in the same way only if the package does so too
    assert [vocab[a + b] for a, b in merges] == list(range(256, size - 1))
    return json.dumps(content)


def read_ranks(folder: Path, size: int) -> dict[bytes, int]:
    """Bytes -> id, without the separator, from the tokenizer.json of a folder. Raises UserError."""
    path = folder / FILE
    fix = "prepare the corpus again with data/prepare.py, or copy the file from an undamaged corpus or run"
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
    """Raises ValueError, KeyError, TypeError or AttributeError for content that `learn` does not write."""
    rule = content["pre_tokenizer"]
    if (rule["type"], rule["add_prefix_space"], rule["use_regex"]) != ("ByteLevel", False, True):
        raise ValueError("pre_tokenizer is not GPT-2's")
    if [(added["content"], added["id"]) for added in content["added_tokens"]] != [(SEPARATOR, size - 1)]:
        raise ValueError(f"the only added token must be {SEPARATOR} with id {size - 1}")
    vocab = content["model"]["vocab"]
    ranks = {bytes(BYTES[character] for character in token): rank for token, rank in vocab.items()}
    if b"" in ranks or any(type(rank) is not int for rank in ranks.values()):
        raise ValueError("vocab must map text to integers")
    if sorted(ranks.values()) != list(range(size - 1)):
        raise ValueError(f"vocab must have the ids 0 ... {size - 2}, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("vocab lacks a byte")
    return ranks
