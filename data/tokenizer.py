"""Tokenizers: bytes to ids and back. The meta.json of a corpus names its tokenizer; a run keeps a copy.

byte     the 256 bytes and a separator
gpt2     GPT-2's byte pair encoding, by tiktoken, 3.4 times as fast as the tokenizers package
bpe:N    a byte pair encoding of N ids, learned from the corpus into tokenizer.json; it also runs on tiktoken
hf:ID    the tokenizer.json of a Hugging Face folder (hf/tokenizer.py); ID is that of the separator
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from base.errors import UserError, warn_once

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as Library

MAX_PIECE = 2**19       # characters that are encoded at a time
LEARN_PIECE = 2**14     # characters that are learned from at a time
# up to the last character before a space, or before a line feed
LAST_SPACE = re.compile(r".*\S(?= )", re.DOTALL)
LAST_LINE = re.compile(r".*\S(?=\n)", re.DOTALL)
TOKENIZER_FILE = "tokenizer.json"
SEPARATOR = "<|endoftext|>"
# GPT-2's pattern for splitting text into words, which merges never cross: Radford et al. 2019. `ByteLevel` of
# the tokenizers package uses it, too.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# types of normalizers and pre-tokenizers that may put a space or "▁" before a text -> what stops them
NO_PREFIX: dict[str, dict[str, Any]] = {
    "Prepend": {"prepend": ""}, "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False}}
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
# the character of each byte in byte-level vocabularies: itself if it is printable, else one from 256 on
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTERS = [chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)]
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}
Component = dict[str, Any]      # a normalizer, pre-tokenizer, decoder or post-processor in tokenizer.json


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text into non-empty pieces of at most `size` characters whose ids, joined, are those of the text.

    A cut is where a word starts in any surrounding text and for every tokenizer: before the last space that
    follows a character other than white space, else before such a line feed. In no word of GPT-2's pattern
    does white space follow another character, and the only lookahead asks where white space ends. Without
    such a place, a piece has `size` characters.
    """
    start = 0
    while len(text) - start > size:
        last = LAST_SPACE.match(text, start, start + size) or LAST_LINE.match(text, start, start + size)
        end = last.end() if last else start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def to_utf8(text: str) -> tuple[bytes, int]:
    """UTF-8 of a text, and how many lone surrogates, for which UTF-8 has no bytes, became U+FFFD."""
    whole, n_surrogates = re.subn("[\ud800-\udfff]", "\ufffd", text)
    return whole.encode(), n_surrogates


class Tokenizer:
    """Bytes to ids and back. Text is UTF-8; other bytes become U+FFFD, except with the byte tokenizer."""

    name: str
    vocab_size: int             # V, ids are 0 ... V - 1
    separator: int              # the id that opens each document; its text is SEPARATOR, or a model's own
    special: set[int]           # ids without text, the separator among them
    file = ""                   # content of tokenizer.json; empty if it needs none
    rules = b""                 # JSON that says how text is changed before it is encoded

    @cached_property
    def sha256(self) -> str:
        """Checksum of the vocabulary: if it is equal, equal ids mean equal bytes."""
        ids = b"".join(self.named_bytes(token) + b"\0" for token in range(self.vocab_size))
        return hashlib.sha256(ids + self.rules).hexdigest()

    def encode(self, text: bytes, continues: bool = False) -> np.ndarray:
        """Ids (n,) of a document, without the separator, or of text that continues one."""
        ids = [np.empty(0, dtype=np.uint32)]
        for piece in pieces(text.decode("utf-8", errors="replace"), MAX_PIECE):
            ids.append(self.encode_piece(piece, continues))
            continues = True
        return np.concatenate(ids)

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        """Ids of the start of a document, or of a piece that continues one."""
        raise NotImplementedError

    def named_bytes(self, token: int) -> bytes:
        """The bytes of an id; the name of a separator or another special token."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id; empty for the separator and other special tokens."""
        return b"" if token in self.special else self.named_bytes(token)


class ByteTokenizer(Tokenizer):
    """The ids 0 ... 255 are the bytes, 256 is the separator. Lossless on any input, and needs no file."""

    name, vocab_size, separator, special = "byte", 257, 256, {256}
    sha256 = hashlib.sha256(b"byte").hexdigest()    # type: ignore[assignment]

    def encode(self, text: bytes, continues: bool = False) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def named_bytes(self, token: int) -> bytes:
        return bytes([token])


class BytePairTokenizer(Tokenizer):
    """Byte-level byte pair encoding with GPT-2's pattern. The separator's name in a text is plain text."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, file: str = "") -> None:
        self.name = name
        self.encoding = encoding
        self.file = file
        self.vocab_size = encoding.n_vocab
        self.separator = encoding.eot_token
        self.special = {encoding.eot_token}

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def named_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)


class PretrainedTokenizer(Tokenizer):
    """A tokenizer.json: byte-level BPE, or the SentencePiece style, where "▁" is a space and <0x0A> a byte.

    Special tokens in the text are encoded as plain text. For a byte-level tokenizer `token_bytes` restores
    the text, and bits per byte are exact. If the tokenizer first changes the text (Qwen's NFC, the space that
    Llama 2 puts before a document), both refer to the changed text: for Llama 2, one byte too many per
    document. Special tokens from id n_rows on, for which a model has no embedding, are left out: Gemma 3's
    for images. `separator` is an id, or finds it. Raises UserError.
    """

    def __init__(self, path: Path, separator: int | Callable[[Library], int],
                 n_rows: int | None = None) -> None:
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            added = [token for token in content["added_tokens"]
                     if n_rows is None or token["id"] < n_rows or not token["special"]]
            content["added_tokens"] = added
            self.library = open_library(content)
            self.file = json.dumps(content, ensure_ascii=False)
            decoders = {*re.findall(r'"type": "(\w+)"', json.dumps(content["decoder"]))}
        except Exception as error:      # the tokenizers package raises plain Exception
            raise UserError(f"{path}: missing or not a file of the tokenizers package ({error}); get it "
                            "again") from error
        self.is_byte_level = "ByteLevel" in decoders
        if not self.is_byte_level and not decoders & {"Metaspace", "ByteFallback", "Replace"}:
            raise UserError(f"{path}: decoder {', '.join(sorted(decoders)) or 'none'}; only byte-level and "
                            "SentencePiece tokenizers are supported")
        self.separator = separator if isinstance(separator, int) else separator(self.library)
        self.name = f"hf:{self.separator}"
        self.vocab_size = 1 + max([self.separator, *self.library.get_vocab(with_added_tokens=True).values()])
        self._added = {token["id"]: token["content"] for token in added}
        self.special = {self.separator, *(token["id"] for token in added if token["special"])}
        model = content["model"]
        self._unknown = model.get("unk_id", self.library.token_to_id(model.get("unk_token") or ""))
        if content["normalizer"] is not None or not self.is_byte_level:
            self.rules = json.dumps(content, sort_keys=True).encode()
        # the same without the prefix of a document: for text inside a document
        self.continuing = open_library(json.loads(self.file, object_hook=without_prefix))

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        library = self.continuing if continues else self.library
        ids = np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        if self._unknown in ids:
            warn_once("this tokenizer has no ids for some characters of the text")
        return ids

    def named_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self.library.id_to_token(token) or ""
        if self.is_byte_level:
            return bytes(BYTES[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def open_library(content: dict[str, Any]) -> Library:
    """The tokenizer of the tokenizers package for a tokenizer.json."""
    from tokenizers import Tokenizer as Library  # here: most runs do not need the package

    library = Library.from_str(json.dumps(content))
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    return library


def without_prefix(step: dict[str, Any]) -> dict[str, Any]:
    """An object of tokenizer.json, changed so that it puts nothing before a text."""
    return {**step, **NO_PREFIX.get(step.get("type", ""), {})}


# -----------------------------------------------------------------------------------------------------------
# By name


def size_of(name: str) -> int | None:
    """N of "bpe:N", the size of the vocabulary including the separator; None for other names."""
    if not re.fullmatch("bpe:[0-9]+", name):
        return None
    size = int(name.removeprefix("bpe:"))
    if size < 257:
        raise UserError(f"tokenizer {name}: the bytes and the separator need 257 ids; bpe:4096 suits a few "
                        "megabytes of text")
    return size


def learn(texts: Iterable[bytes], size: int) -> str:
    """The content of tokenizer.json for a byte-level vocabulary of `size` ids, learned from texts.

    Ids 0 ... 255 are the bytes, then comes one for each merge, then the separator. The result depends only on
    the counts of words, not on the order of texts or the number of threads. Raises UserError.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    decoded = (text.decode("utf-8", errors="ignore") for text in texts)
    tokenizer.train_from_iterator((piece for text in decoded for piece in pieces(text, LEARN_PIECE)), trainer)
    n_ids = tokenizer.get_vocab_size() + 1
    if n_ids < size:
        raise UserError(f"tokenizer bpe:{size}: the text has pairs for only {n_ids} ids; use --tokenizer "
                        f"bpe:{n_ids} or less, or more text")
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True)])
    return json.dumps(json.loads(tokenizer.to_str()))


def load_tokenizer(name: str, folder: Path = Path()) -> Tokenizer:
    """The tokenizer of a name. Raises UserError if it is unknown, or if GPT-2's files cannot be had.

    "bpe:N" and "hf:ID" are read from tokenizer.json in `folder`, which is that of a corpus or a run.
    """
    if name == "byte":
        return ByteTokenizer()
    path = folder / TOKENIZER_FILE
    if re.fullmatch("hf:[0-9]+", name):
        return PretrainedTokenizer(path, int(name.removeprefix("hf:")))
    import tiktoken  # here: a run on bytes needs neither the package nor the network

    if name == "gpt2":
        try:
            return BytePairTokenizer(name, tiktoken.get_encoding("gpt2"))
        except OSError as error:    # requests' exceptions are OSErrors
            raise UserError("tokenizer gpt2: its two files are neither cached nor reachable; put them into a "
                            "folder under tiktoken's names and set TIKTOKEN_CACHE_DIR to it, "
                            "or use --tokenizer byte") from error
    size = size_of(name)
    if size is None:
        raise UserError(f"tokenizer {name!r}: unknown; choose byte, gpt2, bpe:N, such as bpe:4096, or the "
                        "folder of a corpus, a run or a Hugging Face model")
    file = path.read_text(encoding="utf-8")
    vocab = json.loads(file)["model"]["vocab"]          # an id is also the priority of its merge
    ranks = {bytes(BYTES[c] for c in token): rank for token, rank in vocab.items() if rank < size - 1}
    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens={SEPARATOR: size - 1}, explicit_n_vocab=size)
    return BytePairTokenizer(name, encoding, file)


def tokenizer_of(meta: dict[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer that the meta.json of a corpus, or the corpus.json of a run, names.

    `folder` is that of the corpus or run. Raises UserError if the vocabulary is not the recorded one.
    """
    tokenizer = load_tokenizer(meta["tokenizer"]["name"], folder)
    if meta["tokenizer"]["sha256"] != tokenizer.sha256:
        raise UserError(f"{folder}: made with another {tokenizer.name} tokenizer than this one; prepare the "
                        "corpus again with data/prepare.py")
    return tokenizer


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of ids: bytes outside UTF-8 become U+FFFD; separators and unknown ids are dropped.

    A model has ids that the tokenizer does not know if its vocabulary size is rounded up.
    """
    known = (token for token in tokens if token < tokenizer.vocab_size)
    return b"".join(map(tokenizer.token_bytes, known)).decode("utf-8", errors="replace")


@cache
def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Number of bytes of each id, (V,) int64: converts nats per token into bits per byte."""
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
