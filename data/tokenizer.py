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
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from base.errors import UserError

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as Library

MAX_PIECE = 2**19       # bytes that are encoded at a time
TOKENIZER_FILE = "tokenizer.json"
SEPARATOR = "<|endoftext|>"
# GPT-2's pattern for splitting text into words, which merges never cross: Radford et al. 2019. `ByteLevel` of
# the tokenizers package uses it, too.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
STEPS = ("normalizers", "pretokenizers", "decoders", "processors")     # keys of a sequence's components
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
# the character of each byte in byte-level vocabularies: itself if it is printable, else one from 256 on
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTERS = [chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)]
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}
Component = dict[str, Any]      # a normalizer, pre-tokenizer, decoder or post-processor in tokenizer.json


def pieces(text: bytes, size: int | None = None) -> Iterator[bytes]:
    """Cut a document into non-empty pieces of at most `size` bytes (MAX_PIECE).

    Their ids, joined, are those of the whole document.
    """
    size = size or MAX_PIECE
    start = 0
    while len(text) - start > size:
        end = start + cut_before_space(text[start:start + size])
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def cut_before_space(window: bytes) -> int:
    """The last place in a window, > 0, where a word starts in any surrounding text and for every tokenizer.

    That is before a space that follows a character other than white space, else before such a line feed: in
    no word of GPT-2's pattern does white space follow another character, and the only lookahead asks where
    white space ends. A window without such a place is cut at its end, but not inside a UTF-8 character.
    """
    for space in (b" ", b"\n"):
        place = len(window)
        while (place := window.rfind(space, 1, place)) > 0:
            before = window[max(0, place - 4):place].decode("utf-8", errors="replace")[-1]
            if not before.isspace():
                return place
    for place in range(len(window) - 1, max(0, len(window) - 4), -1):
        if window[place] >= 0xC0:                                       # the first byte of several
            return place
        if window[place] < 0x80:
            break
    return len(window)


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
        for piece in pieces(text):
            ids.append(self.encode_piece(piece.decode("utf-8", errors="replace"), continues))
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

    has_warned = False

    def __init__(self, path: Path, separator: int | Callable[[Library], int],
                 n_rows: int | None = None) -> None:
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            added = [token for token in content["added_tokens"]
                     if n_rows is None or token["id"] < n_rows or not token["special"]]
            content["added_tokens"] = added
            self.library = open_library(content)
            self.file = json.dumps(content, ensure_ascii=False)
            decoders = {step["type"] for step in steps(content["decoder"])}
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
        # the same without the prefix of a document, a space or "▁": for text inside a document
        for name in ("normalizer", "pre_tokenizer"):
            content[name] = without_prefix(content[name])
        self.continuing = open_library(content)

    def encode_piece(self, text: str, continues: bool) -> np.ndarray:
        library = self.continuing if continues else self.library
        ids = np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        if not self.has_warned and self._unknown in ids:
            self.has_warned = True
            print("warning: this tokenizer has no ids for some characters of the text", file=sys.stderr)
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


def steps(component: Component | None) -> list[Component]:
    """The steps of a component of tokenizer.json in order, with nested sequences flattened."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    flat: list[Component] = []
    for name in STEPS:
        for step in component.get(name) or ():
            flat += steps(step)
    return flat


def without_prefix(component: Component | None) -> Component | None:
    """The normalizer or pre-tokenizer without anything that puts a prefix before a text."""
    kept = [step for step in steps(component) if step["type"] != "Prepend"]
    if not kept:
        return None
    for i, step in enumerate(kept):
        if step["type"] == "Metaspace":
            kept[i] = {**step, "prepend_scheme": "never"}
        if step["type"] == "ByteLevel":
            kept[i] = {**step, "add_prefix_space": False}
    return {"type": "Sequence", "normalizers": kept, "pretokenizers": kept}


# -----------------------------------------------------------------------------------------------------------
# By name


def size_of(name: str) -> int | None:
    """N of "bpe:N", the size of the vocabulary including the separator; None for other names."""
    size = int(name[4:]) if re.fullmatch(r"bpe:[0-9]{1,9}", name) else None
    if size is not None and size < 257:
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
    tokenizer.train_from_iterator((text.decode("utf-8", errors="ignore") for text in texts), trainer)
    n_ids = tokenizer.get_vocab_size() + 1
    if n_ids < size:
        raise UserError(f"tokenizer bpe:{size}: the text has pairs for only {n_ids} ids; use --tokenizer "
                        f"bpe:{n_ids} or less, or more text")
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True)])
    return json.dumps(json.loads(tokenizer.to_str()))


def load_tokenizer(name: str, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a name. Raises UserError if it is unknown, or if its files are missing or damaged.

    "bpe:N" and "hf:ID" are read from tokenizer.json in `folder`, which is that of a corpus or a run.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        import tiktoken  # here: a run on bytes needs neither the package nor the network

        try:
            return BytePairTokenizer(name, tiktoken.get_encoding("gpt2"))
        except OSError as error:    # requests' exceptions are OSErrors
            raise UserError("tokenizer gpt2: its two files are neither cached nor reachable; put them into a "
                            "folder under tiktoken's names and set TIKTOKEN_CACHE_DIR to it, "
                            "or use --tokenizer byte") from error
    size = size_of(name)
    if size is None and not re.fullmatch("hf:[0-9]{1,9}", name):
        raise UserError(f"tokenizer {name!r}: unknown; choose byte, gpt2, bpe:N, such as bpe:4096, or the "
                        "folder of a corpus, a run or a Hugging Face model")
    if folder is None:
        raise UserError(f"tokenizer {name!r}: belongs to a corpus; its folder is needed to read it")
    if size is None:
        return PretrainedTokenizer(folder / TOKENIZER_FILE, int(name[3:]))
    import tiktoken
    try:
        file = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        vocab = json.loads(file)["model"]["vocab"]      # an id is also the priority of its merge
        ranks = {bytes(BYTES[c] for c in token): rank for token, rank in vocab.items() if rank < size - 1}
        encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                     special_tokens={SEPARATOR: size - 1}, explicit_n_vocab=size)
        return BytePairTokenizer(name, encoding, file)
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise UserError(f"{folder / TOKENIZER_FILE}: missing or damaged ({type(error).__name__}: {error}); "
                        "copy it from a corpus or run that has it, or prepare the corpus again") from error


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
