"""The tokenizer of a Hugging Face folder: read with its settings, and written as tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import read_json
from data.tokenizer import (
    CHARACTERS,
    SEPARATOR,
    TOKENIZER_FILE,
    ByteTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    steps,
)

TEMPLATES = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}      # these add special tokens


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json for a tokenizer: it gives the same ids, and decodes to the same text.

    One difference: transformers encodes the separator's name in text as the separator, we as plain text.
    No file adds special tokens automatically. A post-processor that does so is left out, because the prompts
    already open with the separator.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        content: dict[str, Any] = json.loads(tokenizer.library.to_str())
        if TEMPLATES & {step["type"] for step in steps(content["post_processor"])}:
            content["post_processor"] = None
        return content
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)
             if token != tokenizer.separator}
    spelled = {token: "".join(CHARACTERS[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: i for token, i in ranks.items()}
    model = models.BPE(vocab={**vocab, SEPARATOR: tokenizer.separator},
                       merges=[(spelled[a], spelled[b]) for a, b in merges(ranks)],
                       ignore_merges=True)      # as in tiktoken: a word in the vocabulary is one token
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)        # GPT-2's words
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(SEPARATOR, special=True)])
    return json.loads(library.to_str())


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


def separator_name(tokenizer: Tokenizer) -> str:
    """The separator's name in tokenizer.json."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.library.id_to_token(tokenizer.separator) or SEPARATOR
    return SEPARATOR


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, given its config.json; a ByteTokenizer if it has the same ids.

    The beginning-of-sequence token opens documents, or else the end-of-sequence token. Raises UserError.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}

    def separator(library: Any) -> int:
        for name in ("bos_token", "eos_token"):
            token = settings.get(name) or ""                            # a string, or a table
            content = token["content"] if isinstance(token, dict) else token
            for ids in (library.token_to_id(content or ""), config.get(f"{name}_id")):
                if ids is not None:
                    return ids[0] if isinstance(ids, list) else ids
        raise UserError(f"{path}: has neither bos_token nor eos_token, and each document must open with one; "
                        "add one")

    tokenizer = PretrainedTokenizer(folder / TOKENIZER_FILE, separator, n_rows=config.get("vocab_size"))
    byte = ByteTokenizer()
    is_byte = tokenizer.vocab_size == byte.vocab_size and tokenizer.special == byte.special and all(
        tokenizer.named_bytes(token) == bytes([token]) for token in range(256))
    return byte if is_byte else tokenizer


def eos_ids(folder: Path) -> set[int]:
    """The ids that end a text, from generation_config.json or else config.json; empty for other folders."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            return set(ids if isinstance(ids, list) else [ids])
    return set()
