"""The tokenizer of a Hugging Face folder: read with its settings, and written as tokenizer.json.

transformers 5 does not always take tokenizer.json as it is. tokenizer_config.json, or the type of the model,
names a class, and some classes take only vocabulary and merges from the file, and split text in their own
way. We read the file as it is. `rebuilt_parts` lists them, so that transformers need not be installed to
know where the two differ; the tests compare the list with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.errors import UserError, warn_once
from base.files import read_json
from data.tokenizer import (
    CHARACTERS,
    SEPARATOR,
    TOKENIZER_FILE,
    ByteTokenizer,
    Component,
    PretrainedTokenizer,
    Tokenizer,
    decode,
    open_library,
)

AS_IT_IS = "PreTrainedTokenizerFast"    # the class that takes all of tokenizer.json
# type of a model -> the class that transformers has registered for it, if it has one
REGISTERED = {"mistral": AS_IT_IS, "phi3": AS_IT_IS, "olmo2": AS_IT_IS, "qwen2": "Qwen2Tokenizer",
              "qwen3": "Qwen2Tokenizer", "gpt2": "GPT2Tokenizer", "gpt_neox": "GPTNeoXTokenizer",
              "mpt": "GPTNeoXTokenizer", "gemma3_text": "GemmaTokenizer", "cohere2": "CohereTokenizer"}
ALWAYS = "qwen2"                        # its class is taken whatever tokenizer_config.json names
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# texts that tell pre-tokenizers and normalizers apart, besides the tokens of the vocabulary
PROBES = ["In 1818", " 12 345", "a  b", "\ta\t\tb", "   x", "a\n\n\nb", "a\r\n b \n", "x = (y);\n\n",
          "don't, I'LL", "e\u0301", "\u2160\u00bd \u65e5\u672c", "\U0001f44d\U0001f3fd"]


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json for a tokenizer: it gives the same ids, and decodes to the same text.

    One difference: transformers encodes the separator's name in text as the separator, we as plain text,
    unless AutoTokenizer gets split_special_tokens=True. Our own files add no special token; one that came
    from a Hugging Face folder adds those that it added there.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        content: dict[str, Any] = json.loads(tokenizer.library.to_str())
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


def class_built(model_type: str, settings: dict[str, Any], content: dict[str, Any]) -> str:
    """The class that AutoTokenizer of transformers 5 builds for a model of this type.

    `settings` is tokenizer_config.json, `content` is tokenizer.json.
    """
    named = (settings.get("tokenizer_class") or "").removesuffix("Fast")
    registered = REGISTERED.get(model_type, AS_IT_IS)
    if model_type == ALWAYS or not named:
        return registered
    is_byte_level = "ByteLevel" in json.dumps(content["pre_tokenizer"])
    if REGISTERED.get(model_type) == AS_IT_IS or (named == "LlamaTokenizer" and is_byte_level):
        return AS_IT_IS
    return named


def rebuilt_parts(prefix: bool | None) -> dict[str, dict[str, Component | None]]:
    """Class -> the parts that it puts in place of those of tokenizer.json, under its add_prefix_space."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(prefix), "trim_offsets": True,
                  "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    words = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    metaspace = {"type": "Metaspace", "replacement": "▁", "split": False,
                 "prepend_scheme": "never" if prefix is False else "first"}
    nfc: Component = {"type": "NFC"}
    return {
        "GPT2Tokenizer": {"normalizer": None, "pre_tokenizer": byte_level},
        "GPTNeoXTokenizer": {"normalizer": nfc, "pre_tokenizer": byte_level},
        "CohereTokenizer": {"normalizer": nfc, "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [digits, byte_level]}},
        "Qwen2Tokenizer": {"normalizer": nfc, "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [words, {**byte_level, "use_regex": False}]}},
        "LlamaTokenizer": {"normalizer": None, "pre_tokenizer": metaspace},
        "GemmaTokenizer": {"pre_tokenizer": spaces, "normalizer": {
            "type": "Replace", "pattern": {"String": " "}, "content": "▁"}},
    }


def misreading(tokenizer: Tokenizer, model_type: str, settings: dict[str, Any]) -> str:
    """A text to which AutoTokenizer gives other ids than ours in a folder of this type; empty for none known.

    `settings` is tokenizer_config.json. It tries PROBES, and texts of ids across the vocabulary.
    """
    content = tokenizer_json(tokenizer)
    name = class_built(model_type, settings, content)
    parts = rebuilt_parts(settings.get("add_prefix_space")).get(name)
    if parts is None:
        return ""
    model = {**content["model"], "ignore_merges": False}
    rebuilt = open_library({**content, **parts, "model": model})
    as_it_is = open_library(content)
    some_ids = range(0, tokenizer.vocab_size, tokenizer.vocab_size // 4096 + 1)
    for text in [*PROBES, *(decode(tokenizer, [token]) for token in some_ids)]:
        pair = [library.encode(text, add_special_tokens=False).ids for library in (rebuilt, as_it_is)]
        if pair[0] != pair[1]:
            return text
    return ""


def prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer's own template puts before a text: the separator, if anything."""
    if not isinstance(tokenizer, PretrainedTokenizer):
        return []
    encoded = tokenizer.library.encode("a", add_special_tokens=True)
    n: int = encoded.special_tokens_mask.index(0)                       # of them, before the text
    return list(encoded.ids[:n])


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, given its config.json; a ByteTokenizer if it has the same ids.

    The beginning-of-sequence token opens documents, or else the end-of-sequence token. Warns if transformers
    reads text with other ids. Raises UserError.
    """
    path = folder / "tokenizer_config.json"
    settings = {"tokenizer_class": config.get("tokenizer_class")}
    if path.is_file():
        settings |= read_json(path)

    def separator(library: Any) -> int:
        for name in ("bos_token", "eos_token"):
            token = settings.get(name) or ""                            # a string, or a table
            content = token["content"] if isinstance(token, dict) else token
            for ids in (library.token_to_id(content or ""), config.get(f"{name}_id")):
                if ids is not None:
                    return ids[0] if isinstance(ids, list) else ids
        raise UserError(f"{path}: has neither bos_token nor eos_token, and each document must open with one; "
                        "add one")

    tokenizer: Any = PretrainedTokenizer(folder / TOKENIZER_FILE, separator, config.get("vocab_size"))
    byte = ByteTokenizer()
    is_plain = tokenizer.library.normalizer is None                     # which would change the bytes
    has_bytes = tokenizer.vocab_size == byte.vocab_size and tokenizer.special == byte.special
    if is_plain and has_bytes and all(tokenizer.named_bytes(token) == bytes([token]) for token in range(256)):
        tokenizer = byte
    text = misreading(tokenizer, config.get("model_type", ""), settings)
    if text:
        warn_once(f"{folder}: AutoTokenizer of transformers 5 gives other ids to text such as {text!r} than "
                  "tokenizer.json does, because tokenizer_config.json or the type of the model names a class "
                  "that splits text in its own way; here tokenizer.json is read as it is")
    return tokenizer


def eos_ids(folder: Path) -> set[int]:
    """The ids that end a text, from generation_config.json or else config.json; empty for other folders."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            return set(ids if isinstance(ids, list) else [ids])
    return set()
