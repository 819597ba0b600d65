"""A tokenizer from a tokenizer.json of the `tokenizers` package, as in Hugging Face folders.

A corpus or run that was made with such a tokenizer keeps a copy of the file. Reading the folder's settings
and writing tokenizer.json are in hf/tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from data.bpe import BYTES, MAX_FILE
from data.pieces import cut_before_space
from runtime.errors import UserError
from runtime.files import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_VOCABULARY = 2**22
STEPS = ("normalizers", "pretokenizers", "decoders", "processors")     # keys of the parts of a sequence
LOSSLESS = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts"}   # pre-tokenizers
# "surrogateescape" decodes a byte outside UTF-8 as the character U+DC00 + byte
NOT_UTF8 = re.compile("([\udc80-\udcff]+)")
Part = dict[str, Any]           # a normalizer, pre-tokenizer, decoder or post-processor in tokenizer.json
T = TypeVar("T")


class PretrainedTokenizer:
    """A tokenizer.json: byte-level BPE, or the SentencePiece style, where "▁" is a space and <0x0A> a byte.

    Text is UTF-8; any other byte becomes the id of that byte. Special tokens in the text are encoded as plain
    text. For a byte-level tokenizer `token_bytes` restores the text, and bits per byte are exact. If the
    tokenizer first changes the text (Qwen's NFC, the space that Llama 2 puts before a document), both refer
    to the changed text: for Llama 2, one byte too many per document.

    Special tokens from id n_rows on, for which a model has no embedding, are left out: Gemma 3's for images.
    """

    on_unknown = "error"        # a character without an id: an error; "skip"; or "replace" by U+FFFD or "?"

    def __init__(self, path: Path, eot: int, n_rows: int | None = None) -> None:
        from tokenizers import Tokenizer as Library  # here: most runs do not need the package

        try:
            text = read_text(path, MAX_FILE)
            with no_panic(path):
                self.library = Library.from_str(text)
            self.content: dict[str, Any] = json.loads(text)
            added = self.content["added_tokens"]
            kept = [token for token in added
                    if n_rows is None or token["id"] < n_rows or not token["special"]]
            if len(kept) < len(added):
                self.content["added_tokens"] = kept
                self.library = Library.from_str(json.dumps(self.content))
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing; convert other kinds of tokenizers with transformers "
                            "(AutoTokenizer, save_pretrained)") from error
        except UserError:
            raise
        except Exception as error:      # the tokenizers package raises plain Exception
            raise UserError(f"{path}: not a file of the tokenizers package ({error}); get it "
                            "again") from error
        self.library.encode_special_tokens = True
        self.library.no_truncation()
        self.library.no_padding()
        self.path = path
        self.open_with(eot)
        self._added = {token["id"]: token for token in kept}
        decoders = types_of(self.content["decoder"])
        self.is_byte_level = "ByteLevel" in decoders
        steps = [*_steps(self.content["normalizer"]), *_steps(self.content["pre_tokenizer"])]
        self._adds_prefix = any(_without_prefix(step) != step for step in steps)
        model = self.content["model"]
        unknown = model.get("unk_token")
        self._unknown = model.get("unk_id") if unknown is None else self.library.token_to_id(unknown)
        if not self.is_byte_level and not decoders & {"Metaspace", "ByteFallback", "Replace"}:
            raise UserError(f"{path}: decoder {', '.join(sorted(decoders)) or 'none'}; only byte-level and "
                            "SentencePiece tokenizers are supported")

    def open_with(self, eot: int) -> None:
        """Set the id that opens documents. Raises UserError if the vocabulary is implausibly large."""
        self.name, self.eot = f"hf:{eot}", eot
        self.vocab_size = 1 + max([eot, *self.library.get_vocab(with_added_tokens=True).values()])
        if self.vocab_size > MAX_VOCABULARY:
            raise UserError(f"{self.path}: has ids up to {self.vocab_size - 1}, more than any model; get it "
                            "again")

    @cached_property
    def is_lossless(self) -> bool:
        """Whether decoding gives back exactly the bytes of the text: nothing is changed, added or dropped."""
        steps = _steps(self.content["pre_tokenizer"])
        drops_spaces = any(added.get("lstrip") or added.get("rstrip") for added in self._added.values()
                           if not added["special"])
        return (self.is_byte_level and self.content["normalizer"] is None and not self._adds_prefix
                and not drops_spaces and len(self.byte_ids) == 256
                and "ByteLevel" in {step["type"] for step in steps}
                and all(step["type"] in LOSSLESS and step.get("behavior") != "Removed" for step in steps))

    @cached_property
    def sha256(self) -> str:
        """Computed as for BytePairTokenizer, so that the same vocabulary has the same checksum in both."""
        ids = hashlib.sha256()
        for token in range(self.vocab_size):
            added = self._added.get(token)
            ids.update((added["content"].encode() if added else self.token_bytes(token)) + b"\0")
        if self.content["normalizer"] is not None or not self.is_byte_level:
            ids.update(json.dumps(self.content, sort_keys=True).encode())
        return ids.hexdigest()

    @cached_property
    def byte_ids(self) -> dict[bytes, int]:
        """The id of each single byte."""
        pairs = ((self.token_bytes(token), token) for token in reversed(range(self.vocab_size)))
        return {byte: token for byte, token in pairs if len(byte) == 1}

    @cached_property
    def known_bytes(self) -> bytes:
        """The bytes that have ids."""
        return b"".join(self.byte_ids)

    @cached_property
    def continuing(self) -> Library:
        """The same tokenizer without the prefix of a document, a space or "▁": for text inside a document."""
        content = json.loads(self.library.to_str())
        for name in ("normalizer", "pre_tokenizer"):
            content[name] = _without_prefix(content[name])
        with no_panic(self.path):
            library = type(self.library).from_str(json.dumps(content))
        library.encode_special_tokens = True
        return library

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(text, is_inside=False)

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text in which the names of added tokens stand for these tokens."""
        with no_panic(self.path):
            self.library.encode_special_tokens = False
            try:
                return self.library.encode(text, add_special_tokens=False).ids
            finally:
                self.library.encode_special_tokens = True

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        ids = []
        for i, text in enumerate(texts):
            is_inside = continues and i == 0
            ids += [np.array([] if is_inside else [self.eot], np.uint32), self._encode(text, is_inside)]
        return np.concatenate(ids)

    def cut(self, window: bytes) -> int:
        """Before a space that follows anything but white space: there every tokenizer starts a word."""
        place = len(window)
        while (place := window.rfind(b" ", 1, place)) > 0:
            if not window[place - 1:place].isspace():
                return place
        return cut_before_space(window)

    def _encode(self, text: bytes, is_inside: bool) -> np.ndarray:
        """Ids of a text, which starts inside a document or opens one."""
        parts = NOT_UTF8.split(text.decode("utf-8", errors="surrogateescape"))
        ids: list[int] = []
        for i, part in enumerate(parts):        # odd parts are bytes outside UTF-8
            ids += self._ids(part, is_inside or i > 0) if i % 2 == 0 else self._single_bytes(part)
        return np.array(ids, dtype=np.uint32)

    def _ids(self, text: str, is_inside: bool) -> list[int]:
        if not text:
            return []
        library = self.continuing if is_inside and self._adds_prefix else self.library
        if self.is_byte_level and len(self.byte_ids) < 256:     # the package drops bytes that have no id
            changed = library.normalizer.normalize_str(text) if library.normalizer else text
            if lost := changed.encode().translate(None, self.known_bytes):
                if self.on_unknown == "error":
                    raise UserError(f"text has the byte 0x{lost[0]:02X}, for which this tokenizer has no id; "
                                    "remove the byte, or prepare the text with --unknown-bytes skip or "
                                    "replace")
                text = "".join(c if self._is_known(c) else self._stand_in for c in text)
        with no_panic(self.path):
            encoded = library.encode(text, add_special_tokens=False)
        if self._unknown in encoded.ids and self.on_unknown == "skip":
            return [token for token in encoded.ids if token != self._unknown]
        if self._unknown in encoded.ids and self.on_unknown == "error":
            start, end = encoded.offsets[encoded.ids.index(self._unknown)]
            raise UserError(f"text has {text[start:end][:20]!r}, for which this tokenizer has no id; remove "
                            "it, or prepare the text with --unknown-bytes skip or replace")
        return encoded.ids

    def _single_bytes(self, escaped: str) -> list[int]:
        ids: list[int] = []
        for value in escaped.encode("utf-8", errors="surrogateescape"):
            known = self.byte_ids.get(bytes([value]))
            if known is None and self.on_unknown == "error":
                raise UserError(f"text is not UTF-8, and this tokenizer has no id for its byte "
                                f"0x{value:02X}; convert the text to UTF-8, or prepare it with "
                                "--unknown-bytes skip or replace")
            ids += self._ids(self._stand_in, is_inside=True) if known is None else [known]
        return ids

    def _is_known(self, text: str) -> bool:
        return not text.encode().translate(None, self.known_bytes)

    @property
    def _stand_in(self) -> str:
        """What a character without an id becomes."""
        if self.on_unknown == "skip":
            return ""
        return "\N{REPLACEMENT CHARACTER}" if self._is_known("\N{REPLACEMENT CHARACTER}") else "?"

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id; empty for special tokens and for ids that do not exist."""
        added, piece = self._added.get(token), self.library.id_to_token(token)
        if added or piece is None or token == self.eot:
            return added["content"].encode() if added and not added["special"] else b""
        if self.is_byte_level:
            return bytes(BYTES[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


@contextmanager
def no_panic(path: Path) -> Iterator[None]:
    """Raise UserError where the tokenizers package, which is written in Rust, panics.

    What it raises then is no Exception, and its class cannot be imported. Some regular expressions do it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: the tokenizers package fails on it ({error}); get it again, or use another "
                        "tokenizer") from error


def _steps(part: Part | None) -> list[Part]:
    """The steps of a part in order, with nested sequences flattened."""
    if part is None:
        return []
    inside = [step for name in STEPS for step in part.get(name) or ()]
    return [part] if part["type"] != "Sequence" else [step for one in inside for step in _steps(one)]


def types_of(part: Part | None) -> set[str]:
    """The types of the steps of a part."""
    return {step["type"] for step in _steps(part)}


def _without_prefix(part: Part | None) -> Part | None:
    """The normalizer or pre-tokenizer without anything that puts a prefix before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        return {**part, **{name: [step for one in part[name] if (step := _without_prefix(one))]
                           for name in STEPS if name in part}}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def read_saved(path: Path, eot: int) -> PretrainedTokenizer:
    """Read the tokenizer.json that a corpus or run keeps; `eot` is the id that opens documents."""
    def read() -> PretrainedTokenizer:
        tokenizer = PretrainedTokenizer(path, eot)
        assert tokenizer.sha256                                         # decodes every token
        return tokenizer

    return checked(read, path.parent)


def checked(read: Callable[[], T], folder: Path) -> T:
    """What `read` returns. Raises UserError if the files of the folder do not have the expected structure."""
    try:
        return read()
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: tokenizer.json or tokenizer_config.json: not as transformers writes them "
                        f"({type(error).__name__}: {error}); get them again") from error
