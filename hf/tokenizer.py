"""Tokenizers of Hugging Face: ours written as their tokenizer.json, and any of theirs read for our use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from data.bpe import BYTES, CHARACTERS, SEPARATOR
from data.tokenizer import ByteTokenizer, Tokenizer, cut_before_space
from runtime.errors import UserError
from runtime.files import read_json, read_text

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as Inner

MAX_FILE = 2**26        # bytes of a tokenizer.json; Llama 3's has 17 million
MAX_VOCABULARY = 2**22
STEPS = ("normalizers", "pretokenizers", "decoders", "processors")     # what a sequence may hold
TEMPLATES = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}      # these add special tokens
KEEPING = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts"}     # lose no text when cutting
Pair = tuple[bytes, bytes]
AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer)


def written(token: bytes) -> str:
    """A token's bytes as a byte-level vocabulary writes them."""
    return "".join(CHARACTERS[byte] for byte in token)


# -----------------------------------------------------------------------------------------------------------
# Ours as theirs


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json: same ids for text, and same text for ids.

    One thing differs: theirs read the separator's name in text as the separator, ours as text. None adds
    special tokens by itself: what does that in one of theirs is left out, or prompts would open twice.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        about = json.loads(tokenizer.inner.to_str())
        if TEMPLATES & _types(about["post_processor"]):
            about["post_processor"] = None
        return about
    encoding: tiktoken.Encoding | None = getattr(tokenizer, "encoding", None)
    if encoding is None:
        ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)
                 if token != tokenizer.eot}
        return byte_level_json(ranks, None, tokenizer.eot)
    return byte_level_json(encoding._mergeable_ranks, encoding._pat_str, tokenizer.eot)


def byte_level_json(ranks: dict[bytes, int], pattern: str | None, eot: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: text is split by the pattern, pairs are joined by rank."""
    splits = [] if pattern is None else [
        {"type": "Split", "pattern": {"Regex": oniguruma(pattern)}, "behavior": "Isolated", "invert": False}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": eot, "content": SEPARATOR, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": True,        # as tiktoken: a word that is a token is that token
                  "vocab": {**{written(token): i for token, i in ranks.items()}, SEPARATOR: eot},
                  "merges": [[written(a), written(b)] for a, b in merges(ranks)]},
    }


def merges(ranks: dict[bytes, int]) -> Iterator[Pair]:
    """The pair that joins into each token of several bytes, in order of rank.

    A token's bytes are joined as text is, the pair of the lowest rank first, until two are left. Nothing
    around it can change that: a join across its border would keep the token from coming about.
    """
    for token in sorted((token for token in ranks if len(token) > 1), key=lambda token: ranks[token]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
            rank, i = min(pairs)
            if rank == len(ranks):
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:     # else it never comes about but as a whole word, which ignore_merges sees to
            yield parts[0], parts[1]


def oniguruma(pattern: str) -> str:
    r"""A pattern of tiktoken's in the dialect of tokenizers: \z for the end, (?>...) for {n,m}+."""
    possessive = re.sub(r"(\\p\{\w+\}|\[[^\]]*\]|\\?.)(\{\d+,\d*\})\+", r"(?>\1\2)", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", possessive)


# -----------------------------------------------------------------------------------------------------------
# Theirs as ours


class PretrainedTokenizer:
    """A tokenizer.json: byte-level, or SentencePiece's kind, where "▁" is a space and <0x0A> a byte.

    Text is UTF-8; other bytes are ids of their own. Special tokens in it are text like any other. For a
    byte-level tokenizer `token_bytes` gives back the text and makes bits per byte right. Where text is
    changed before it is cut (NFC of Qwen, the space that Llama 2 puts before a document) they are the bytes
    of the changed text: for Llama 2, one too many a document.
    """

    def __init__(self, path: Path, eot: int) -> None:
        from tokenizers import Tokenizer as Inner  # here: ordinary runs do not need the package

        try:
            text = read_text(path, MAX_FILE)
            self.inner = Inner.from_str(text)
            self.about = json.loads(text)
        except FileNotFoundError as error:
            raise UserError(f"{path}: not there; convert another kind of tokenizer with transformers "
                            "(AutoTokenizer, save_pretrained)") from error
        except Exception as error:      # tokenizers raises no class of its own
            raise UserError(f"{path}: not a tokenizer of the package tokenizers ({error}); get it "
                            "again") from error
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.path = path
        self.open_with(eot)
        self._added = {token["id"]: token for token in self.about["added_tokens"]}
        parts = _types(self.about["decoder"])
        self.is_byte_level = "ByteLevel" in parts
        steps = [*_steps(self.about["normalizer"]), *_steps(self.about["pre_tokenizer"])]
        self._adds_prefix = any(_without_prefix(step) != step for step in steps)
        model = self.about["model"]
        unknown = model.get("unk_token")
        self._unknown = model.get("unk_id") if unknown is None else self.inner.token_to_id(unknown)
        if not self.is_byte_level and not parts & {"Metaspace", "ByteFallback", "Replace"}:
            raise UserError(f"{path}: decoder {', '.join(sorted(parts)) or 'none'}; only byte-level and "
                            "SentencePiece's kind of tokenizer are supported")

    def open_with(self, eot: int) -> None:
        """Let this id open documents. Raises UserError for a vocabulary of absurd size."""
        self.name, self.eot = f"hf:{eot}", eot
        self.vocab_size = 1 + max([eot, *self.inner.get_vocab(with_added_tokens=True).values()])
        if self.vocab_size > MAX_VOCABULARY:
            raise UserError(f"{self.path}: has ids up to {self.vocab_size - 1}, more than any model; get it "
                            "again")

    @cached_property
    def is_lossless(self) -> bool:
        """Whether a text's ids stand for its very bytes: nothing is changed, put in front or swallowed."""
        steps = _steps(self.about["pre_tokenizer"])
        swallows = any(added.get("lstrip") or added.get("rstrip") for added in self._added.values()
                       if not added["special"])
        return (self.is_byte_level and self.about["normalizer"] is None and not self._adds_prefix
                and not swallows and len(self.byte_ids) == 256 and "ByteLevel" in {s["type"] for s in steps}
                and all(s["type"] in KEEPING and s.get("behavior") != "Removed" for s in steps))

    @cached_property
    def sha256(self) -> str:
        """As that of our byte pair encodings, so that one of these is known in both forms."""
        ids = hashlib.sha256()
        for token in range(self.vocab_size):
            added = self._added.get(token)
            ids.update((added["content"].encode() if added else self.token_bytes(token)) + b"\0")
        if self.about["normalizer"] is not None or not self.is_byte_level:
            ids.update(json.dumps(self.about, sort_keys=True).encode())
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
    def continuing(self) -> Inner:
        """The same for text that goes on: without what is put in front of a document, a space or "▁"."""
        about = json.loads(self.inner.to_str())
        for name in ("normalizer", "pre_tokenizer"):
            about[name] = _without_prefix(about[name])
        inner = type(self.inner).from_str(json.dumps(about))
        inner.encode_special_tokens = True
        return inner

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(text, goes_on=False)

    def encode_documents(self, texts: Sequence[bytes], continues: bool) -> np.ndarray:
        ids = []
        for i, text in enumerate(texts):
            goes_on = continues and i == 0
            ids += [np.array([] if goes_on else [self.eot], np.uint32), self._encode(text, goes_on)]
        return np.concatenate(ids)

    def cut(self, window: bytes) -> int:
        """Before a space after anything but white space, which begins a word for all of these."""
        place = len(window)
        while (place := window.rfind(b" ", 1, place)) > 0:
            if not window[place - 1:place].isspace():
                return place
        return cut_before_space(window)

    def _encode(self, text: bytes, goes_on: bool) -> np.ndarray:
        """Ids of a text that goes on with a document, or opens one."""
        # a byte that is not UTF-8 comes out as a lone surrogate, U+DC00 + byte
        parts = re.split("([\udc80-\udcff]+)", text.decode("utf-8", errors="surrogateescape"))
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += self._ids(part, goes_on or i > 0) if i % 2 == 0 else self._bytes_alone(part)
        return np.array(ids, dtype=np.uint32)

    def _ids(self, text: str, goes_on: bool) -> list[int]:
        if not text:
            return []
        inner = self.continuing if goes_on and self._adds_prefix else self.inner
        if self.is_byte_level and len(self.byte_ids) < 256:             # what has no id would vanish
            changed = inner.normalizer.normalize_str(text) if inner.normalizer else text
            if lost := changed.encode().translate(None, self.known_bytes):
                raise UserError(f"text has the byte 0x{lost[0]:02X}, for which this tokenizer has no id; "
                                "take the byte out, or take a tokenizer that has all 256")
        encoded = inner.encode(text, add_special_tokens=False)
        if self._unknown in encoded.ids:
            start, end = encoded.offsets[encoded.ids.index(self._unknown)]
            raise UserError(f"text has {text[start:end][:20]!r}, for which this tokenizer has no id; take it "
                            "out, or take a tokenizer with ids for bytes")
        return encoded.ids

    def _bytes_alone(self, escaped: str) -> list[int]:
        values = escaped.encode("utf-8", errors="surrogateescape")
        for value in values:
            if bytes([value]) not in self.byte_ids:
                raise UserError(f"text is not UTF-8, and this tokenizer has no id for its byte "
                                f"0x{value:02X}; convert the text")
        return [self.byte_ids[bytes([value])] for value in values]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for; none for special tokens and those that do not exist."""
        added, piece = self._added.get(token), self.inner.id_to_token(token)
        if added or piece is None or token == self.eot:
            return added["content"].encode() if added and not added["special"] else b""
        if self.is_byte_level:
            return bytes(BYTES[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer, decoder or post-processor, in order, sequences opened."""
    if part is None:
        return []
    inside = [step for name in STEPS for step in part.get(name) or ()]
    return [part] if part["type"] != "Sequence" else [step for one in inside for step in _steps(one)]


def _types(part: dict[str, Any] | None) -> set[str]:
    """The types of a decoder, or of the sequence that it is."""
    return {step["type"] for step in _steps(part)}


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts nothing in front of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        return {**part, **{name: [step for one in part[name] if (step := _without_prefix(one))]
                           for name in STEPS if name in part}}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def read_tokenizer(folder: Path, config: dict[str, Any]) -> PretrainedTokenizer | ByteTokenizer:
    """The tokenizer of a folder of Hugging Face, given its config.json; ours, where it is our bytes.

    The separator that opens documents is the beginning-of-sequence token, or the end's where there is none.
    """
    return _checked(lambda: _read_tokenizer(folder, config), folder)


def read_saved(path: Path, eot: int) -> PretrainedTokenizer:
    """The tokenizer.json that a corpus or run keeps, and the id that opens documents with it."""
    return _checked(lambda: PretrainedTokenizer(path, eot), path.parent)


def _checked(read: Callable[[], AnyTokenizer], folder: Path) -> AnyTokenizer:
    """What `read` gives, looked at whole. Raises UserError."""
    try:
        tokenizer = read()
        assert tokenizer.sha256         # looks at each token
        return tokenizer
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: tokenizer.json or tokenizer_config.json: not as transformers writes them "
                        f"({type(error).__name__}: {error}); get them again") from error


def _read_tokenizer(folder: Path, config: dict[str, Any]) -> PretrainedTokenizer | ByteTokenizer:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    tokenizer = PretrainedTokenizer(folder / "tokenizer.json", 0)
    candidates = [found for end in ("bos_token", "eos_token") for found in (
        tokenizer.inner.token_to_id(_content(settings.get(end))), config.get(f"{end}_id"))]
    ids = [found[0] if isinstance(found, list) else found for found in candidates if found is not None]
    if not ids:
        raise UserError(f"{path}: names neither bos_token nor eos_token, one of which must open each "
                        "document; add one")
    tokenizer.open_with(ids[0])         # nothing has been asked of it that depends on this
    ours = ByteTokenizer()
    if tokenizer.vocab_size == ours.vocab_size and tokenizer.eot == ours.eot and all(
            tokenizer.token_bytes(token) == ours.token_bytes(token) for token in range(ours.vocab_size)):
        return ours
    return tokenizer


def _content(token: Any) -> str:
    """A special token of tokenizer_config.json, which is a string or a table; "" for none."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def separator_name(tokenizer: Tokenizer) -> str:
    """What the separator is called in tokenizer.json."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.inner.id_to_token(tokenizer.eot) or SEPARATOR
    return SEPARATOR
