"""Tokenizers: bytes to ids and back. Each corpus names its own in meta.json, and each run keeps that name.

All take any bytes and give back the same bytes. A document is encoded in pieces of at most MAX_PIECE bytes,
cut where the ids cannot tell, so that a corpus of any size goes through little memory (`pieces`).
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data.bpe import FILE as TOKENIZER_FILE
from data.bpe import GPT2_PATTERN, SEPARATOR, read_ranks, size_of
from runtime.errors import UserError, shortened

if TYPE_CHECKING:
    import tiktoken

MAX_PIECE = 2**19       # bytes that are encoded at a time


class Tokenizer(Protocol):
    """What training, evaluating and sampling need of a tokenizer."""

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


class CorpusTokenizer(Tokenizer, Protocol):
    """What preparing a corpus needs besides: documents in pieces, many at a time."""

    @property
    def is_lossless(self) -> bool:
        """Whether a text's ids stand for its very bytes."""
        ...

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        """Ids of texts of at most MAX_PIECE bytes, none empty, the separator before each.

        If it `continues`, the first text goes on with a document, and has no separator.
        """
        ...

    def cut(self, window: bytes) -> int:
        """Where to cut a window out of a document, > 0, so that both sides encode as they do together."""
        ...


class ByteTokenizer:
    """The 256 bytes, and 256 as the separator. Any input at all, no vocabulary to fetch, 1 byte a token."""

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
    """Byte-level byte pair encoding with GPT-2's rule for splitting text into words, by tiktoken.

    Text is UTF-8. A byte that is not part of any is an id of its own, and what stands between such bytes is
    encoded by itself. In text, the separator's name is text like any other.
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
        if joined.count(mark) == len(texts) - continues:                # else a text has it too
            try:    # one call for all, in which other threads run
                return self._encode_valid(joined.decode("utf-8"), {SEPARATOR})
            except UnicodeDecodeError:      # some text is not UTF-8: each by itself
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
        # a byte that is not UTF-8 comes out as a lone surrogate, U+DC00 + byte; splitting keeps every other
        # part a run of these
        parts = re.split("([\udc80-\udcff]+)", text.decode("utf-8", errors="surrogateescape"))
        ids = [self._bytes_alone(part) if i % 2 else self._encode_valid(part, set())
               for i, part in enumerate(parts) if part]
        return np.concatenate(ids or [self._none])

    def _encode_valid(self, text: str, allowed_special: set[str]) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, allowed_special=allowed_special, disallowed_special=())

    def _bytes_alone(self, escaped: str) -> np.ndarray:
        values = escaped.encode("utf-8", errors="surrogateescape")
        return np.array([self.encoding.encode_single_token(bytes([value])) for value in values], np.uint32)


def pieces(blocks: Iterable[bytes], cut: Callable[[bytes], int], size: int | None = None) -> Iterator[bytes]:
    """A document that comes in blocks, in pieces of at most `size` bytes (default MAX_PIECE), none empty.

    Where they are cut depends on the document alone, not on the blocks, and starting at one of the cuts gives
    the same ones from there on.
    """
    size = size or MAX_PIECE
    rest = b""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > size:
            end = start + cut(rest[start:start + size])
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def cut_before_space(window: bytes) -> int:
    """The last place in a window where GPT-2's rule starts anew, whatever stands before and after it.

    That is before a space or line feed that follows a character other than white space: no word of that rule
    has white space after anything else, and what is looked ahead for is whether white space ends. Where there
    is none, the window's end, or the start of a character that may go on beyond it: text without any white
    space is cut there, every MAX_PIECE bytes.
    """
    end = len(window)
    while True:
        place = max(window.rfind(b" ", 1, end), window.rfind(b"\n", 1, end))
        if place < 1:
            break
        before = window[max(0, place - 4):place].decode("utf-8", errors="replace")[-1]
        if not before.isspace():
            return place
        end = place
    for place in range(len(window) - 1, max(0, len(window) - 4), -1):
        if window[place] >= 0xC0:                                       # the first byte of several
            return place
        if window[place] < 0x80:
            break
    return len(window)


# -----------------------------------------------------------------------------------------------------------
# By name

TOKENIZERS = ("byte", "gpt2", "bpe:N")


def load_tokenizer(name: str, folder: Path | None = None) -> CorpusTokenizer:
    """The tokenizer of that name; "bpe:N" is read from tokenizer.json in `folder`, of a corpus or a run.

    So is "hf:SEPARATOR": a tokenizer of Hugging Face, and the id that opens documents with it. Raises
    UserError for an unknown one, and where its files cannot be had or are damaged.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return _gpt2()
    if folder is not None and re.fullmatch("hf:[0-9]{1,9}", name):
        from hf.tokenizer import read_saved  # here: other corpora do not need the package
        return read_saved(folder / TOKENIZER_FILE, int(name[3:]))
    size = size_of(name)
    if size is None:
        raise UserError(f"tokenizer {shortened(name)}: unknown; choose from {', '.join(TOKENIZERS)} (N: size "
                        "of a vocabulary to learn from the corpus, such as bpe:4096), or the folder of a "
                        "corpus, run or model of Hugging Face")
    if folder is None:
        raise UserError(f"tokenizer {name!r}: belongs to a corpus, whose folder is needed to read it")
    import tiktoken  # imported here: a run on bytes does not need the package
    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=read_ranks(folder, size),
                                 special_tokens={SEPARATOR: size - 1})
    return BytePairTokenizer(name, encoding)


def tokenizer_of(meta: dict[str, Any], folder: Path) -> CorpusTokenizer:
    """The tokenizer that the meta.json of a corpus, or a run's corpus.json, names. Raises UserError.

    `folder` is that of the corpus or run. It is an error if the vocabulary is not the one that was recorded.
    """
    tokenizer = load_tokenizer(meta["tokenizer"]["name"], folder)
    theirs = (meta["tokenizer"]["sha256"], meta["vocab_size"], meta["eot"])
    if theirs != (tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot):
        raise UserError(f"{folder}: made with another {tokenizer.name} tokenizer than this one (checksum, "
                        "vocabulary or separator differs); prepare the corpus again with data/prepare.py")
    return tokenizer


def _gpt2() -> CorpusTokenizer:
    """GPT-2's 50,257 ids; tiktoken fetches two files once and caches them."""
    import tiktoken  # imported here: a run on bytes needs neither the package nor the network
    try:
        return BytePairTokenizer("gpt2", tiktoken.get_encoding("gpt2"))
    except OSError as error:    # requests' exceptions are OSErrors
        raise UserError("tokenizer gpt2: its two files are neither cached nor reachable; put them into a "
                        "folder under tiktoken's names and set TIKTOKEN_CACHE_DIR to it, "
                        "or use --tokenizer byte") from error


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of ids; bytes that are not UTF-8 become U+FFFD, separators vanish.

    So do ids beyond the vocabulary, which a model has where its own is rounded up.
    """
    known = (token for token in tokens if token < tokenizer.vocab_size)
    return b"".join(map(tokenizer.token_bytes, known)).decode("utf-8", errors="replace")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes that each id stands for, (V,) int64: what turns nats per token into bits per byte."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
