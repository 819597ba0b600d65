"""Tokenizers of Hugging Face: ours as theirs give the same ids and text, theirs as ours give bytes back."""

import json
import os
import random
from pathlib import Path

import pytest
from test_export import EXPORTS
from toys import lively, needs, slow_except, words

from base.errors import UserError, warn_once
from data.tasks import encode
from data.tokenizer import (
    ByteTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    decode,
    learn,
    load_tokenizer,
    open_library,
)
from hf.architectures import ARCHITECTURES
from hf.export import export
from hf.tokenizer import (
    AS_IT_IS,
    class_built,
    merges,
    misreading,
    prefix_ids,
    read_tokenizer,
    rebuilt_parts,
    tokenizer_json,
)

os.environ["HF_HUB_OFFLINE"] = "1"
tokenizers = pytest.importorskip("tokenizers")

RANGES = [(0, 32), (32, 127), (127, 256), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x2000, 0x2070),
          (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A0), (0xE000, 0x10000), (0x1F300, 0x1FAFF),
          (0x10000, 0x110000)]
PIECES = ["'s", "'LL", "don't", "  ", "\n\n", "\r\n", " \t ", "12345", " 1", "word", " Word", "\u200d",
          "\x85", "\u00a0", "\ufeff", "\x00", "<|endoftext|", "e\u0301", "!?", "x" * 20]


NASTY = [
    "In 1818", "12345", " 1 22  333", "3.14159e-10", "\u0661\u0662\u0663 \u00bd \u2163 \u00b2",    # digits
    "\ta", "a\t\tb \t c", " x", "   x", "x   ", " ", "          ", "a\u00a0b\u3000c\u2003d",    # white space
    "\n", "a\n\nb", "\n\n\n\n  a\n \n", "a\r\nb\r\n\r\nc", "a\rb", "x = (y);\n\n}",          # line breaks
    "e\u0301", "\u1e9b\u0323 \u212b A\u030a", "\ufb01 \u00c5", "\u1100\u1161\u11a8 \uac01",    # NFD, NFKC
    "\U0001f44d\U0001f3fd", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea!",    # emoji
    "\x00\x01\x1f\x7f\x85", "\ufeffa\u200bb\u202ec\ufffd\ue000",    # control characters
    "don't I'LL they'Ve 's''s", "\u65e5\u672c\u8a9e\u3002\u0e44\u0e17\u0e22 \u0939\u093f"]


def strings(n: int, seed: int = 0) -> list[str]:
    """Any Unicode: letters, marks, digits, white space, controls, unassigned, and the empty string."""
    rng = random.Random(seed)

    def piece() -> str:
        if rng.random() < 0.4:
            return rng.choice(PIECES)
        start, end = rng.choice(RANGES)
        return "".join(chr(rng.randrange(start, end)) for _ in range(rng.randrange(1, 5)))

    return ["", *("".join(piece() for _ in range(rng.randrange(12))) for _ in range(n - 1))]


def our_tokenizer(name: str, folder: Path, monkeypatch) -> Tokenizer:
    if name == "gpt2":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(needs("tiktoken")))
    if name == "bpe:400":
        texts = [*map(str.encode, strings(200, 1)), words(0, 5000)]
        (folder / "tokenizer.json").write_text(learn(texts, 400))
    return load_tokenizer(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte", "bpe:400", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_written_tokenizer_gives_the_same_ids_and_text(name: str, tmp_path: Path, monkeypatch) -> None:
    """In transformers, and read back."""
    transformers = pytest.importorskip("transformers")
    tokenizer = our_tokenizer(name, tmp_path, monkeypatch)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = strings(1000)
    ids = [tokenizer.encode(text.encode()).tolist() for text in texts]
    assert reference(texts).input_ids == ids
    assert reference.batch_decode(ids) == texts == [decode(tokenizer, row) for row in ids]
    rng = random.Random(1)          # random ids decode to bytes outside UTF-8
    drawn = [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(9))] for _ in texts]
    expected = [decode(tokenizer, row) for row in drawn]
    assert reference.batch_decode(drawn, skip_special_tokens=True) == expected
    back = read_tokenizer(tmp_path, {"bos_token_id": tokenizer.separator})
    assert isinstance(back, ByteTokenizer) == (name == "byte")
    assert (back.vocab_size, back.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert all(back.token_bytes(token) == tokenizer.token_bytes(token) for token in range(back.vocab_size))
    assert [back.encode(text.encode()).tolist() for text in texts] == ids
    if name != "byte":
        assert back.sha256 == tokenizer.sha256


def bpe_file(parts: dict | None = None) -> dict:
    """A tokenizer.json with merges across digits, words, spaces and line breaks, and with other parts."""
    content = json.loads(learn([*map(str.encode, [*NASTY * 50, *strings(200, 1)]), words(0, 5000)], 500))
    return {**content, **(parts or {})}


def write_json(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


QWEN = {**rebuilt_parts(None)["Qwen2Tokenizer"]}
DIGITS = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True}, rebuilt_parts(None)["GPT2Tokenizer"]["pre_tokenizer"]]}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte", "bpe", "qwen", "digits"])
@pytest.mark.parametrize("kind", slow_except([*EXPORTS], "llama", "qwen2", "gemma3_text"))
def test_auto_tokenizer_reads_every_export_with_our_ids(kind: str, name: str, tiny, tmp_path: Path) -> None:
    """Texts that pre-tokenizers split in different ways. With our ids it also decodes them."""
    transformers = pytest.importorskip("transformers")
    tokenizer: Tokenizer = ByteTokenizer()
    if name != "byte":
        write_json(tmp_path, tokenizer=bpe_file({"bpe": {}, "qwen": QWEN, "digits": DIGITS}[name]))
        tokenizer = PretrainedTokenizer(tmp_path / "tokenizer.json", 499)
    encoding, *overrides = EXPORTS[kind]
    config = tiny(encoding, *overrides, f"model.vocab_size={tokenizer.vocab_size}")
    export(tmp_path / "run", tmp_path / "out", lively(config), config, tokenizer)
    model_type = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    assert model_type == ("seed_oss" if kind == "qwen2" and name != "qwen" else kind)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(NASTY) == 30
    for text in NASTY:
        ids = tokenizer.encode(text.encode()).tolist()
        assert theirs(text).input_ids == ids, text
        assert theirs.decode(ids) == decode(tokenizer, ids), text
    exact = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", split_special_tokens=True)
    text = f"a {theirs.bos_token} b"
    assert exact(text).input_ids == tokenizer.encode(text.encode()).tolist()


def test_every_architecture_is_exported_here() -> None:
    assert set(EXPORTS) == {*ARCHITECTURES} - {"seed_oss"}              # which is qwen2 with our tokenizers


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except([*ARCHITECTURES], "llama", "qwen2"))
def test_the_class_that_auto_tokenizer_builds_is_known(kind: str, tmp_path: Path) -> None:
    """Whatever tokenizer_config.json names, and what the class makes of text."""
    transformers = pytest.importorskip("transformers")
    content = bpe_file(DIGITS)
    for named in ("", AS_IT_IS, *rebuilt_parts(None), "GPT2TokenizerFast", "TokenizersBackend"):
        for prefix in (None, False, True):
            settings = {"tokenizer_class": named or None, "add_prefix_space": prefix,
                        "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
            settings = {key: value for key, value in settings.items() if value is not None}
            write_json(tmp_path, tokenizer=content, tokenizer_config=settings, config={"model_type": kind})
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            found, built = class_built(kind, settings, content), type(theirs).__name__
            parts = rebuilt_parts(prefix).get(found, {})
            assert built == (found if parts else "TokenizersBackend"), named
            if built in ("LlamaTokenizer", "GemmaTokenizer"):           # of vocabularies with "▁"
                continue
            ours = open_library({**content, **parts})
            for text in NASTY:
                expected = ours.encode(text, add_special_tokens=False).ids
                assert theirs(text).input_ids == expected, (named, text)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["LlamaTokenizer", "GemmaTokenizer"])
def test_sentencepiece_classes_split_as_here(named: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    content = sentencepiece_like(True)
    for prefix in (None, False, True):
        settings = {"tokenizer_class": named, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if prefix is not None:
            settings["add_prefix_space"] = prefix
        write_json(tmp_path, tokenizer=content, tokenizer_config=settings, config={"model_type": "llama"})
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = open_library({**content, **rebuilt_parts(prefix)[named]})
        for text in (*NASTY, "the cat", " the  cat"):
            assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).ids, text


@pytest.mark.slow
def test_a_class_that_splits_in_another_way_is_told_once_and_not_exported(tiny, tmp_path: Path, monkeypatch,
                                                                         capsys) -> None:
    """SmolLM2's: tokenizer.json has a token for each digit, and GPT2Tokenizer would join them."""
    transformers = pytest.importorskip("transformers")
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "model_max_length": 77}
    config = tiny("rope", "model.vocab_size=500")
    write_json(tmp_path / "first", tokenizer=bpe_file(DIGITS))
    export(tmp_path / "run", tmp_path / "source", lively(config), config,
           PretrainedTokenizer(tmp_path / "first" / "tokenizer.json", 499))
    source = write_json(tmp_path / "source", tokenizer_config=settings)
    warn_once.cache_clear()
    for _ in range(2):
        tokenizer = read_tokenizer(source, json.loads((source / "config.json").read_text()))
    err = capsys.readouterr().err
    assert err.count("AutoTokenizer") == 1 and f"warning: {source}: " in err and "'In 1818'" in err
    export(source, tmp_path / "out", lively(config), config, tokenizer)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {
        **settings, "tokenizer_class": AS_IT_IS}
    ids = tokenizer.encode(b"In 1818").tolist()
    theirs = {place: transformers.AutoTokenizer.from_pretrained(tmp_path / place)("In 1818").input_ids
              for place in ("source", "out")}
    assert theirs["out"] == ids != theirs["source"]
    (source / "tokenizer.json").write_text(json.dumps(bpe_file()))      # with GPT-2's words nothing differs
    assert not misreading(read_tokenizer(source, {}), "llama", settings)
    assert not capsys.readouterr().err


def test_bytes_after_a_normalizer_are_not_plain_bytes(tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    back = read_tokenizer(tmp_path, {"bos_token_id": 256})
    assert back.encode("e\u0301".encode()).tolist() == [*"\u00e9".encode()]


def test_what_a_template_puts_after_a_text_does_not_open_it(tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer())
    name = content["added_tokens"][0]["content"]
    one = {"SpecialToken": {"id": name, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    for parts, expected in (([one, text], [256]), ([text, one], []), ([one, one, text, one], [256, 256])):
        template = {"type": "TemplateProcessing", "single": parts, "pair": [text, text],
                    "special_tokens": {name: {"id": name, "ids": [256], "tokens": [name]}}}
        (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "post_processor": template}))
        assert prefix_ids(PretrainedTokenizer(tmp_path / "tokenizer.json", 256)) == expected


def test_merges_are_those_that_encoding_would_do() -> None:
    """The pair "b", "c" has the lowest rank, so "abc" is "a" + "bc", though "ab" is a token too. No part of
    "ccc" is a token, so it has no merge."""
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 6, b"ccc": 7}
    assert list(merges(ranks)) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"c", b"ab")]


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
    assert tokenizer.separator == 1 and tokenizer.token_bytes(1) == b"" == tokenizer.token_bytes(99_999)
    for text in ("the cat sat", "äöü \n\t the  cat", "</s> is text", "日本", "a"):
        ids = tokenizer.encode(text.encode()).tolist()
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()
        assert not {0, 1, 2} & set(ids)


@pytest.mark.parametrize("metaspace", [False, True])
def test_only_the_start_of_a_document_gets_the_space_prefix(metaspace: bool, tmp_path: Path) -> None:
    """So that pieces of a long document, cut before a space, give the ids of the whole."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece_like(metaspace)))
    tokenizer = PretrainedTokenizer(tmp_path / "tokenizer.json", 1)
    text = "日本 the\ncat"
    whole = tokenizer.encode(text.encode()).tolist()
    for place in (1, 2, 6):                         # before a letter, a space, a line feed
        parts = [tokenizer.encode_piece(part, continues=i > 0).tolist()
                 for i, part in enumerate((text[:place], text[place:]))]
        assert sum(parts, []) == whole
    answer = encode(tokenizer, [" the", "=", "4", "."])                 # of a task
    assert b"".join(map(tokenizer.token_bytes, answer)) == b" the=4."


def test_characters_without_an_id_are_told_once(tmp_path: Path, capsys) -> None:
    content = sentencepiece_like(False)
    content["model"]["byte_fallback"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PretrainedTokenizer(tmp_path / "tokenizer.json", 1)
    warn_once.cache_clear()
    for text, n_told in (("the cat", 0), ("the 日", 1), ("the 日", 0)):
        tokenizer.encode(text.encode())
        assert capsys.readouterr().err.count("no ids for some characters") == n_told


def test_added_tokens_are_text_unless_special(tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer())
    added = content["added_tokens"]
    added += [{**added[0], "id": 257, "content": "<tool>", "special": False},
              {**added[0], "id": 258, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = read_tokenizer(tmp_path, {"eos_token_id": [256, 258]})
    assert isinstance(tokenizer, PretrainedTokenizer) and tokenizer.separator == 256
    assert tokenizer.vocab_size == 259
    assert (tokenizer.token_bytes(257), tokenizer.token_bytes(258)) == (b"<tool>", b"")
    ids = tokenizer.encode(b"a<tool>b<|im_end|>").tolist()
    assert 257 in ids and 258 not in ids and decode(tokenizer, ids) == "a<tool>b<|im_end|>"


@pytest.mark.parametrize(("change", "settings", "expected"), [
    ({}, {}, "neither bos_token nor eos_token"),
    ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, {"bos_token_id": 256}, "WordPiece"),
    ({"model": 3}, {"bos_token_id": 256}, "not a file of the tokenizers package")])
def test_unsupported_files_are_one_error(change: dict, settings: dict, expected: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer_json(ByteTokenizer()), **change}))
    with pytest.raises(UserError, match=expected):
        read_tokenizer(tmp_path, settings)
