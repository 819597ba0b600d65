"""Tokenizers: bytes to ids and back. The meta.json of a corpus names its tokenizer; a run keeps a copy.

All tokenizers made here are lossless on any bytes. A document is encoded in pieces of at most MAX_PIECE
bytes, which give the same ids as the whole (data/pieces.py), so that memory stays small for any document.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data.bpe import FILE as TOKENIZER_FILE
from data.bpe import GPT2_PATTERN, SEPARATOR, read_ranks, size_of
from data.pieces import cut_before_space, pieces
from data.tokenizer_json import NOT_UTF8, read_saved
from runtime.errors import UserError, shortened

if TYPE_CHECKING:
    import tiktoken


class Tokenizer(Protocol):
    """What training, evaluation and sampling need."""

    name: str
    vocab_size: int     # V, ids are 0 ... V - 1
    eot: int            # id of the separator, which opens each document

    @property
    def sha256(self) -> str:
        """Checksum of the vocabulary: if it is equal, equal ids mean equal bytes."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Ids (n,) of a document, without the separator."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id; empty for the separator."""
        ...


class CorpusTokenizer(Tokenizer, Protocol):
    """What preparing a corpus also needs: encoding many documents at once, and long ones in pieces."""

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives back exactly the bytes of the text."""
        ...

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        """Ids of non-empty texts of at most MAX_PIECE bytes, each after a separator.

        If `continues`, the first text is the next piece of a document and has no separator.
        """
        ...

    def cut(self, window: bytes) -> int:
        """Where to cut a window of a document, > 0, so that the two parts give the ids of the whole."""
        ...


class ByteTokenizer:
    """The ids 0 ... 255 are the bytes, 256 is the separator. It takes any input and needs no file."""

    name = "byte"
    is_lossless = True
    vocab_size = 257
    eot = 256
    sha256 = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        ids = np.full(sum(map(len, texts)) + len(texts) - continues, self.eot, dtype=np.uint16)
        end = -1 if continues else 0
        for text in texts:
            start = end + 1                                             # past the separator
            end = start + len(text)
            ids[start:end] = np.frombuffer(text, dtype=np.uint8)
        return ids

    def cut(self, window: bytes) -> int:
        return len(window)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])


class BytePairTokenizer:
    """Byte-level byte pair encoding with GPT-2's pattern for splitting text into words, by tiktoken.

    Text is UTF-8. A byte outside UTF-8 is encoded as the id of that byte, and the text between two of them
    separately. The separator's name in a text is encoded as plain text.
    """

    is_lossless = True

    def __init__(self, name: str, encoding: "tiktoken.Encoding") -> None:
        self.name, self.encoding = name, encoding
        self.vocab_size, self.eot = encoding.n_vocab, encoding.eot_token

    @cached_property
    def sha256(self) -> str:
        ids = hashlib.sha256()
        for token in range(self.vocab_size):
            ids.update(self.encoding.decode_single_token_bytes(token) + b"\0")
        return ids.hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        return np.concatenate([self._encode(piece) for piece in pieces([text], self.cut)] or [self._none])

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        mark = SEPARATOR.encode()
        joined = (b"" if continues else mark) + mark.join(texts)
        if joined.count(mark) == len(texts) - continues:                # no text contains the mark
            try:    # one call for all: tiktoken releases the interpreter's lock meanwhile
                return self._encode_valid(joined.decode("utf-8"), {SEPARATOR})
            except UnicodeDecodeError:      # a text is not UTF-8: encode each separately
                pass
        ids = [part for text in texts for part in (np.array([self.eot], np.uint32), self._encode(text))]
        return np.concatenate(ids[continues:])

    def cut(self, window: bytes) -> int:
        return cut_before_space(window)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.encoding.decode_single_token_bytes(token)

    _none = np.empty(0, dtype=np.uint32)

    def _encode(self, text: bytes) -> np.ndarray:
        """Ids of one piece."""
        parts = NOT_UTF8.split(text.decode("utf-8", errors="surrogateescape"))
        ids = [self._single_bytes(part) if i % 2 else self._encode_valid(part, set())
               for i, part in enumerate(parts) if part]                 # odd parts are bytes outside UTF-8
        return np.concatenate(ids or [self._none])

    def _encode_valid(self, text: str, allowed_special: set[str]) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, allowed_special=allowed_special, disallowed_special=())

    def _single_bytes(self, escaped: str) -> np.ndarray:
        values = escaped.encode("utf-8", errors="surrogateescape")
        return np.array([self.encoding.encode_single_token(bytes([value])) for value in values], np.uint32)


# -----------------------------------------------------------------------------------------------------------
# By name

TOKENIZERS = ("byte", "gpt2", "bpe:N")


def load_tokenizer(name: str, folder: Path | None = None) -> CorpusTokenizer:
    """The tokenizer of a name. Raises UserError if it is unknown, or if its files are missing or damaged.

    "bpe:N" and "hf:SEPARATOR" (a Hugging Face tokenizer, and the id that opens documents) are read from
    tokenizer.json in `folder`, which is that of a corpus or a run.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return _gpt2()
    if folder is not None and re.fullmatch("hf:[0-9]{1,9}", name):
        return read_saved(folder / TOKENIZER_FILE, int(name[3:]))
    size = size_of(name)
    if size is None:
        raise UserError(f"tokenizer {shortened(name)}: unknown; choose from {', '.join(TOKENIZERS)} (N: size "
                        "of a vocabulary to learn from the corpus, such as bpe:4096), or give the folder of "
                        "a corpus, a run or a Hugging Face model")
    if folder is None:
        raise UserError(f"tokenizer {name!r}: belongs to a corpus; its folder is needed to read it")
    import tiktoken  # here: a run on bytes does not need the package
    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=read_ranks(folder, size),
                                 special_tokens={SEPARATOR: size - 1})
    return BytePairTokenizer(name, encoding)


def tokenizer_of(meta: dict[str, Any], folder: Path) -> CorpusTokenizer:
    """The tokenizer that the meta.json of a corpus, or the corpus.json of a run, names.

    `folder` is that of the corpus or run. Raises UserError if the vocabulary is not the recorded one.
    """
    tokenizer = load_tokenizer(meta["tokenizer"]["name"], folder)
    recorded = (meta["tokenizer"]["sha256"], meta["vocab_size"], meta["eot"])
    if recorded != (tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot):
        raise UserError(f"{folder}: made with another {tokenizer.name} tokenizer than this one (checksum, "
                        "vocabulary or separator differs); prepare the corpus again with data/prepare.py")
    return tokenizer


def _gpt2() -> CorpusTokenizer:
    """GPT-2's 50,257 ids; tiktoken downloads two files once and caches them."""
    import tiktoken  # here: a run on bytes needs neither the package nor the network
    try:
        return BytePairTokenizer("gpt2", tiktoken.get_encoding("gpt2"))
    except OSError as error:    # requests' exceptions are OSErrors
        raise UserError("tokenizer gpt2: its two files are neither cached nor reachable; put them into a "
                        "folder under tiktoken's names and set TIKTOKEN_CACHE_DIR to it, "
                        "or use --tokenizer byte") from error


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of ids: bytes outside UTF-8 become U+FFFD; separators and unknown ids are dropped.

    A model has ids that the tokenizer does not know if its vocabulary size is rounded up.
    """
    known = (token for token in tokens if token < tokenizer.vocab_size)
    return b"".join(map(tokenizer.token_bytes, known)).decode("utf-8", errors="replace")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Number of bytes of each id, (V,) int64: converts nats per token into bits per byte."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
