"""Tokenizers of Hugging Face: ours as theirs give the same ids and text, theirs as ours give bytes back."""

import functools
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import needs

from data.loader import Corpus
from data.pieces import pieces
from data.prepare import Options, prepare
from data.tokenizer import BytePairTokenizer, ByteTokenizer, Tokenizer, decode, load_tokenizer
from data.tokenizer_json import PretrainedTokenizer
from evaluation.windows import open_text
from hf.tokenizer import merges, oniguruma, read_tokenizer, tokenizer_json
from runtime.errors import UserError

os.environ["HF_HUB_OFFLINE"] = "1"
tokenizers = pytest.importorskip("tokenizers")

RANGES = [(0, 32), (32, 127), (127, 256), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x2000, 0x2070),
          (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A0), (0xE000, 0x10000), (0x1F300, 0x1FAFF),
          (0x10000, 0x110000)]
PIECES = ["'s", "'LL", "don't", "  ", "\n\n", "\r\n", " \t ", "12345", " 1", "word", " Word", "\u200d",
          "\x85", "\u00a0", "\ufeff", "\x00", "<|endoftext|", "e\u0301", "!?", "x" * 20]


def strings(n: int, seed: int = 0) -> list[str]:
    """Any Unicode: letters, marks, digits, white space, controls, unassigned, and the empty string."""
    rng = random.Random(seed)

    def piece() -> str:
        if rng.random() < 0.4:
            return rng.choice(PIECES)
        start, end = rng.choice(RANGES)
        return "".join(chr(rng.randrange(start, end)) for _ in range(rng.randrange(1, 5)))

    return ["", *("".join(piece() for _ in range(rng.randrange(12))) for _ in range(n - 1))]


@functools.cache
def trained(pattern: str, size: int = 600) -> tiktoken.Encoding:
    """A small byte pair encoding: the most frequent pair of some text is merged first."""
    text = " ".join(strings(100, 1)) + "the cat sat on the mat,   the cat's 1234 hats.\n\n  " * 40
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(r" ?\w+|\s+(?!\S)|\S+", text)]
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < size:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[a + b] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if word[i] == a and word[i + 1] == b:
                    word[i:i + 2] = [a + b]
                i += 1
    return tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": size})


GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
          r"\s*[\r\n]|\s+(?!\S)|\s")


def our_tokenizer(name: str, monkeypatch) -> Tokenizer:
    if name == "gpt2":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(needs("tiktoken")))
    if name in ("byte", "gpt2"):
        return load_tokenizer(name)
    return BytePairTokenizer(name, trained(GPT2 if name == "own" else CL100K))


NAMES = [*(pytest.param(name, 10_000, marks=pytest.mark.slow)
           for name in ("byte", "gpt2", "own", "own, cl100k")),
         ("byte", 200), ("own", 200), ("own, cl100k", 200)]


@pytest.mark.parametrize(("name", "n"), NAMES)
def test_transformers_gives_the_same_ids_and_text(name: str, n: int, tmp_path: Path, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = our_tokenizer(name, monkeypatch)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = strings(n)
    ids = [tokenizer.encode(text.encode()).tolist() for text in texts]
    assert reference(texts).input_ids == ids
    assert reference.batch_decode(ids) == texts == [decode(tokenizer, row) for row in ids]
    rng = random.Random(1)          # random ids decode to bytes outside UTF-8
    ids = [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(9))] for _ in range(n)]
    assert reference.batch_decode(ids, skip_special_tokens=True) == [decode(tokenizer, row) for row in ids]


@pytest.mark.parametrize("name", ["byte", "own, cl100k", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_written_tokenizer_is_read_back(name: str, tmp_path: Path, monkeypatch) -> None:
    tokenizer = our_tokenizer(name, monkeypatch)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    back = read_tokenizer(tmp_path, {"bos_token_id": tokenizer.eot})
    assert isinstance(back, ByteTokenizer) == (name == "byte")
    assert (back.vocab_size, back.eot) == (tokenizer.vocab_size, tokenizer.eot)
    assert all(back.token_bytes(token) == tokenizer.token_bytes(token) for token in range(back.vocab_size))
    for text in (*strings(300), "a <|endoftext|> in text is text"):
        assert back.encode(text.encode()).tolist() == tokenizer.encode(text.encode()).tolist()
    if name != "byte":
        assert back.sha256 == tokenizer.sha256


def test_merges_are_those_that_encoding_would_do() -> None:
    """The pair "b", "c" has the lowest rank, so "abc" is "a" + "bc", though "ab" is a token too. No part of
    "ccc" is a token, so it has no merge."""
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 6, b"ccc": 7}
    assert list(merges(ranks)) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"c", b"ab")]


def test_possessive_counts_become_atomic() -> None:
    assert oniguruma(r"\p{N}{1,3}+|[\r\n]{2,}+|\s++$|\$") == r"(?>\p{N}{1,3})|(?>[\r\n]{2,})|\s++\z|\$"


# -----------------------------------------------------------------------------------------------------------
# Other tokenizers


def sentencepiece_like(metaspace: bool) -> dict:
    """The form of Llama 2's tokenizer.json, or with a Metaspace as newer converters write it."""
    letters = ["▁", *"thecasmdonä", "▁the", "▁c", "at", "▁cat", "he"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(letters)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    special = [{"id": vocab[name], "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for name in ("<unk>", "<s>", "</s>")]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None if metaspace else {
            "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": meta if metaspace else None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocab, "merges": [["h", "e"], ["▁", "c"], ["a", "t"], ["▁c", "at"]]},
    }


@pytest.mark.parametrize("metaspace", [False, True])
def test_sentencepiece_decodes_to_the_text_after_a_space(metaspace: bool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece_like(metaspace)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = read_tokenizer(tmp_path, {})
    assert tokenizer.eot == 1 and tokenizer.token_bytes(1) == b"" == tokenizer.token_bytes(99_999)
    for text in ("the cat sat", "äöü \n\t the  cat", "</s> is text", "日本", "a"):
        ids = tokenizer.encode(text.encode()).tolist()
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()
        assert not {0, 1, 2} & set(ids)


@pytest.mark.parametrize("kind", ["own", "own, cl100k", "llama 2", "metaspace"])
def test_pieces_encode_as_the_whole_and_all_bytes_survive(kind: str, tmp_path: Path, monkeypatch) -> None:
    content = sentencepiece_like(kind == "metaspace") if kind in ("llama 2", "metaspace") else tokenizer_json(
        our_tokenizer(kind, monkeypatch))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PretrainedTokenizer(tmp_path / "tokenizer.json", 1 if "own" not in kind else 600)
    assert tokenizer.is_lossless == ("own" in kind)
    text = ("the cat's  123!\n\n hats,     \tä日本\n    the </s> " * 10).encode()
    whole = tokenizer.encode_documents([text], continues=False)
    for size in range(40, 80):
        cut = list(pieces([text], tokenizer.cut, size))
        assert len(cut) > 5 and b"".join(cut) == text
        parts = [tokenizer.encode_documents([piece], continues=i > 0) for i, piece in enumerate(cut)]
        assert np.concatenate(parts).tolist() == whole.tolist() and whole[0] == tokenizer.eot
    two = tokenizer.encode_documents([b"the cat", b"sat"], continues=False).tolist()
    assert two.count(tokenizer.eot) == 2
    for broken in (b"\xff", b"the \xe2\x28 cat\x80\x81", b"\xf0\x9f"):
        found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(broken).tolist()))
        assert found == broken or not tokenizer.is_lossless and found.replace(b" ", b"") == broken.replace(
            b" ", b"")


def test_text_without_an_id_is_an_error_not_dropped(tmp_path: Path) -> None:
    """Byte-level with a prefix, byte-level with 255 bytes, and SentencePiece without byte fallback."""
    def opened(content: dict) -> PretrainedTokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return PretrainedTokenizer(tmp_path / "tokenizer.json", 256)

    content = tokenizer_json(ByteTokenizer())
    assert opened(content).is_lossless
    content["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    spaced = opened(content)
    assert not spaced.is_lossless and decode(spaced, spaced.encode(b"the").tolist()) == " the"
    pair = spaced.encode_documents([b"the", b"cat"], continues=True).tolist()
    assert pair == [*b"the", 256, *b" cat"]
    content = tokenizer_json(ByteTokenizer())
    content["normalizer"] = {"type": "NFC"}
    composing = opened(content)
    assert not composing.is_lossless and composing.encode("e\u0301".encode()).tolist() == [195, 169]
    for normalizer, expected in ((None, "0x41"), ({"type": "Lowercase"}, None)):
        content = {**tokenizer_json(ByteTokenizer()), "normalizer": normalizer}
        del content["model"]["vocab"]["A"]
        tokenizer = opened(content)
        assert not tokenizer.is_lossless
        if expected:
            with pytest.raises(UserError, match=f"{expected}.* no id"):
                tokenizer.encode_documents([b"an Apple"], continues=False)
        else:
            assert tokenizer.encode(b"an Apple").tolist() == [*b"an apple"]
    content = sentencepiece_like(True)
    content["model"]["byte_fallback"] = False
    with pytest.raises(UserError, match="'Z'.* no id"):
        opened(content).encode(b"the Zat")


def without_bytes(*values: int) -> dict:
    """tokenizer.json of bytes, some of which have no id."""
    content = tokenizer_json(ByteTokenizer())
    content["model"]["vocab"] = {piece: token for piece, token in content["model"]["vocab"].items()
                                 if token not in values}
    return content


def test_a_byte_without_an_id_names_file_and_place_or_is_skipped_or_replaced(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps(without_bytes(ord("Z"), 0xC3, 0xFF)))
    (model / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}')
    (model / "config.json").write_text('{"model_type": "llama"}')
    books = tmp_path / "books"
    texts = {"a": b"no such byte", "b": "aé Z".encode(), "c": b"x\xffZ end"}
    for split in ("train", "val"):
        (books / split).mkdir(parents=True)
        for name, text in texts.items():
            (books / split / f"{name}.txt").write_bytes(text)
    with pytest.raises(UserError, match=r"train/b\.txt, byte 1: text has the byte 0xC3.*--unknown-bytes"):
        prepare(str(books), tmp_path / "error", str(model))
    for chosen, expected in (("skip", [b"no such byte", b"a ", b"x end"]),
                             ("replace", [b"no such byte", "a� �".encode(), "x�� end".encode()])):
        prepare(str(books), tmp_path / chosen, str(model), Options(unknown_bytes=chosen))
        documents = Corpus(tmp_path / chosen).documents("val")
        assert [bytes(document[1:].astype(np.uint8)) for document in documents] == expected
    tokenizer = read_tokenizer(model, {})
    with pytest.raises(UserError, match=r"c\.txt, byte 1: text is not UTF-8.*0xFF"):
        open_text(str(books / "val" / "c.txt"), "", tokenizer)
    tokenizer = PretrainedTokenizer(model / "tokenizer.json", 256)
    tokenizer.on_unknown, tokenizer.known_bytes = "replace", b"?az "    # not even U+FFFD: the ids of "?"
    assert tokenizer.encode("a é".encode()).tolist() == [*b"a ?"]


def test_only_the_start_of_a_document_gets_the_space_prefix(tmp_path: Path) -> None:
    for metaspace in (False, True):
        (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece_like(metaspace)))
        tokenizer = PretrainedTokenizer(tmp_path / "tokenizer.json", 1)
        text = "日本 the\ncat".encode()
        whole = tokenizer.encode_documents([text], continues=False).tolist()
        for place in (3, 6, 10):                    # before a letter, a space, a line feed
            parts = [tokenizer.encode_documents([part], continues=i > 0).tolist()
                     for i, part in enumerate((text[:place], text[place:]))]
            assert sum(parts, []) == whole
        ids = tokenizer.encode(b"a\xff cat\xffcat").tolist()
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" a\xff cat\xffcat"


def test_added_tokens_are_text_unless_special(tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer())
    added = content["added_tokens"]
    added += [{**added[0], "id": 257, "content": "<tool>", "special": False},
              {**added[0], "id": 258, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = read_tokenizer(tmp_path, {"eos_token_id": [256, 258]})
    assert isinstance(tokenizer, PretrainedTokenizer) and tokenizer.eot == 256
    assert tokenizer.vocab_size == 259
    assert (tokenizer.token_bytes(257), tokenizer.token_bytes(258)) == (b"<tool>", b"")
    ids = tokenizer.encode(b"a<tool>b<|im_end|>").tolist()
    assert 257 in ids and 258 not in ids and decode(tokenizer, ids) == "a<tool>b<|im_end|>"


def test_unsupported_files_are_one_error(tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="neither bos_token nor eos_token"):
        read_tokenizer(tmp_path, {})
    with pytest.raises(UserError, match="not as transformers writes them"):
        read_tokenizer(tmp_path, {"eos_token_id": []})
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="decoder WordPiece"):
        read_tokenizer(tmp_path, {"bos_token_id": 256})
