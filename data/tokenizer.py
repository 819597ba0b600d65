"""Tokenizers: bytes to ids and back. Each corpus names its own in meta.json, and each run keeps that name."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from config import UserError, shown


class Tokenizer(Protocol):
    """What preparing, evaluating and sampling need of a tokenizer."""

    name: str
    vocab_size: int     # V, ids are 0 ... V - 1
    eot: int            # id of the separator that opens each document

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary: equal ids mean equal bytes."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of a document's bytes, (n,), without the separator."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; none for the separator."""
        ...


class ByteTokenizer:
    """The 256 bytes, and 256 as the separator. Any input at all, no vocabulary to fetch, 1 byte a token."""

    name = "byte"
    vocab_size = 257
    eot = 256
    sha256 = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])


class GPT2Tokenizer:
    """GPT-2's byte pair encoding, 50,257 ids, by tiktoken, which fetches two files once and caches them."""

    name = "gpt2"

    def __init__(self) -> None:
        import tiktoken  # imported here: a run on bytes needs neither the package nor the network
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:    # requests' exceptions are OSErrors
            raise UserError("tokenizer gpt2: its two files are neither cached nor reachable; put them into a "
                            "folder under tiktoken's names and set TIKTOKEN_CACHE_DIR to it, "
                            "or use --tokenizer byte") from error
        self.vocab_size, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    @cached_property
    def sha256(self) -> str:
        ids = hashlib.sha256()
        for token in range(self.vocab_size):
            ids.update(self.encoding.decode_single_token_bytes(token) + b"\0")
        return ids.hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        return self.encoding.encode_to_numpy(text.decode("utf-8"), disallowed_special=())

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.encoding.decode_single_token_bytes(token)


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name. Raises UserError for an unknown one, and where its files cannot be had."""
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer {shown(name)}: unknown; choose from {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def tokenizer_of(meta: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer that the meta.json of a corpus, or a run's corpus.json, names. Raises UserError.

    `folder` is that of the corpus or run. It is an error if the vocabulary is not the one that was recorded.
    """
    tokenizer = load_tokenizer(meta["tokenizer"]["name"])
    theirs = (meta["tokenizer"]["sha256"], meta["vocab_size"], meta["eot"])
    if theirs != (tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot):
        raise UserError(f"{folder}: made with another {tokenizer.name} tokenizer than this one (checksum, "
                        "vocabulary or separator differs); prepare the corpus again with data/prepare.py")
    return tokenizer


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of ids; bytes that are not UTF-8 become U+FFFD, separators vanish."""
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", errors="replace")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes that each id stands for, (V,) int64: what turns nats per token into bits per byte."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
