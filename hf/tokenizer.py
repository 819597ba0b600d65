"""The tokenizer of a Hugging Face folder: read with its settings, and written as tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.bpe import CHARACTERS, SEPARATOR
from data.tokenizer import BytePairTokenizer, ByteTokenizer, Tokenizer
from data.tokenizer_json import PretrainedTokenizer, checked, types_of
from runtime.errors import UserError, shortened
from runtime.files import read_json, read_text

TEMPLATES = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}      # these add special tokens


# -----------------------------------------------------------------------------------------------------------
# Writing


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json for a tokenizer: it gives the same ids, and decodes to the same text.

    One difference: transformers encodes the separator's name in text as the separator, we as plain text.
    No file adds special tokens automatically. A post-processor that does so is left out, because the prompts
    already open with the separator.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        content: dict[str, Any] = json.loads(tokenizer.library.to_str())
        if TEMPLATES & types_of(content["post_processor"]):
            content["post_processor"] = None
        return content
    if isinstance(tokenizer, BytePairTokenizer):
        encoding = tokenizer.encoding
        return byte_level_json(encoding._mergeable_ranks, encoding._pat_str, tokenizer.eot)
    ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)
             if token != tokenizer.eot}
    return byte_level_json(ranks, None, tokenizer.eot)


def byte_level_json(ranks: dict[bytes, int], pattern: str | None, eot: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: the pattern splits the text, then pairs are merged by rank."""
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
                  "ignore_merges": True,        # as in tiktoken: a word in the vocabulary is one token
                  "vocab": {**{spelled(token): i for token, i in ranks.items()}, SEPARATOR: eot},
                  "merges": [[spelled(a), spelled(b)] for a, b in merges(ranks)]},
    }


def spelled(token: bytes) -> str:
    """A token's bytes in the characters of a byte-level vocabulary."""
    return "".join(CHARACTERS[byte] for byte in token)


def merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that merges into each token of several bytes, in order of rank.

    A token's bytes are merged like any text, the pair of the lowest rank first, until two parts are left. The
    text around a token cannot change its last pair: a merge across its border would prevent the token.
    """
    for token in sorted((token for token in ranks if len(token) > 1), key=lambda token: ranks[token]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
            rank, i = min(pairs)
            if rank == len(ranks):
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:     # else it occurs only as a whole word, which ignore_merges handles
            yield parts[0], parts[1]


def oniguruma(pattern: str) -> str:
    r"""Translate a tiktoken pattern for the tokenizers package: \z for the end, (?>...) for {n,m}+."""
    possessive = re.sub(r"(\\p\{\w+\}|\[[^\]]*\]|\\?.)(\{\d+,\d*\})\+", r"(?>\1\2)", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", possessive)


def separator_name(tokenizer: Tokenizer) -> str:
    """The separator's name in tokenizer.json."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.library.id_to_token(tokenizer.eot) or SEPARATOR
    return SEPARATOR


# -----------------------------------------------------------------------------------------------------------
# Reading


def read_tokenizer(folder: Path, config: dict[str, Any]) -> PretrainedTokenizer | ByteTokenizer:
    """The tokenizer of a Hugging Face folder, given its config.json; a ByteTokenizer if it has the same ids.

    The beginning-of-sequence token opens documents, or else the end-of-sequence token. Raises UserError.
    """
    def read() -> PretrainedTokenizer | ByteTokenizer:
        n_rows = config.get("vocab_size")
        tokenizer = PretrainedTokenizer(folder / "tokenizer.json", 0,
                                        n_rows if isinstance(n_rows, int) else None)
        tokenizer.open_with(_separator(folder, config, tokenizer))      # replaces the 0, not used so far
        assert tokenizer.sha256                                         # decodes every token
        return ByteTokenizer() if _is_byte_tokenizer(tokenizer) else tokenizer

    return checked(read, folder)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a Hugging Face folder. Raises OSError and UserError."""
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); get it again") from error


def eos_ids(folder: Path) -> set[int]:
    """The ids that end a text, from generation_config.json or else config.json; empty for other folders.

    Raises UserError if one of the files is damaged.
    """
    for name in ("generation_config.json", "config.json"):
        found = read_object(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(number, int) for number in ids):
                raise UserError(f"{folder / name}: eos_token_id: must be an id or a list of ids, got "
                                f"{shortened(found)}; repair it")
            return set(ids)
    return set()


def chat_ids(folder: Path, tokenizer: Tokenizer, message: str) -> list[int]:
    """A user's message in the folder's chat template, up to where the answer begins. Raises UserError."""
    from jinja2 import TemplateError  # a dependency of torch
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    settings = read_object(folder / "tokenizer_config.json")
    path, template = folder / "chat_template.jinja", settings.get("chat_template")
    if path.is_file():
        template = read_text(path)
    if not isinstance(template, str) or not isinstance(tokenizer, PretrainedTokenizer):
        raise UserError(f"--chat: {folder} has no chat template; leave --chat out")
    names = {f"{kind}_token": token.get("content") if isinstance(token, dict) else token or ""
             for kind in ("bos", "eos", "pad", "unk") for token in [settings.get(f"{kind}_token")]}
    try:
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = sandbox.from_string(template).render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True, **names)
    except TemplateError as error:
        raise UserError(f"--chat: {folder}: its chat template fails ({error}); leave --chat out") from error
    return tokenizer.encode_special(text)


def _separator(folder: Path, config: dict[str, Any], tokenizer: PretrainedTokenizer) -> int:
    """The id of bos_token or eos_token, from tokenizer_config.json or else from config.json."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name) or ""                                # a string, or a table
        content = token["content"] if isinstance(token, dict) else token
        for found in (tokenizer.library.token_to_id(content or ""), config.get(f"{name}_id")):
            if found is not None:
                return found[0] if isinstance(found, list) else found
    raise UserError(f"{path}: has neither bos_token nor eos_token, and each document must open with one; "
                    "add one")


def _is_byte_tokenizer(tokenizer: PretrainedTokenizer) -> bool:
    """Whether it has the same ids as ByteTokenizer."""
    byte = ByteTokenizer()
    return (tokenizer.vocab_size, tokenizer.eot) == (byte.vocab_size, byte.eot) and all(
        tokenizer.token_bytes(token) == byte.token_bytes(token) for token in range(byte.vocab_size))
