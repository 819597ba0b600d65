"""Tokenizers: any bytes come back, pieces encode as the whole, bpe:N is the same in both libraries."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import needs, words
from hypothesis import given, settings
from hypothesis import strategies as st

from data import pieces as pieces_module
from data.bpe import SEPARATOR, learn, read_ranks
from data.loader import read_meta
from data.pieces import pieces
from data.prepare import Options, prepare
from data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    byte_lengths,
    decode,
    load_tokenizer,
    tokenizer_of,
)
from evaluation.windows import open_text
from runtime.checkpoint import load_run
from runtime.errors import UserError
from train import train

PROSE = ("It isn't 1,234 naïve  cafés;\n\n\tthey'll say \u3000ok\u00a0ok... "
         "日本語 text\r\n  and 👩‍👩‍👧. " * 40).encode()
some_text = st.one_of(
    st.text(max_size=300),
    st.lists(st.sampled_from(["\n", " ", "\t", "\n" * 5, " " * 7, "\u3000", "word", "1234567", "日"]))
    .map("".join),
    st.text(alphabet="ab1 .'\n\t\u00a0\u3000é日\x1c" + "sdmtlvre", max_size=300),   # what words break at
    st.sampled_from([SEPARATOR, "x" + SEPARATOR * 2, " ", "\n", " \n ", "a" * 200, " " * 200, "日" * 70]))
some_bytes = st.one_of(some_text.map(str.encode), st.binary(max_size=200),
                       st.lists(st.one_of(some_text.map(str.encode), st.binary(max_size=6)), max_size=6)
                       .map(b"".join))
relaxed = settings(deadline=None, max_examples=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizer.json of bpe:400 lies."""
    folder = tmp_path_factory.mktemp("tokenizer")
    blank = b"a" + b"b".join(b"\n" * n + b" " * n for n in range(1, 9))    # white space of many lengths
    texts = [PROSE, words(0, 5000), blank * 9, b"1234567 " * 9]
    (folder / "tokenizer.json").write_text(learn(texts, 400))
    return folder


@pytest.fixture(scope="module", params=["byte", "gpt2", "bpe:400"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Iterator[Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpt2":
            patch.setenv("TIKTOKEN_CACHE_DIR", str(needs("tiktoken")))
        yield load_tokenizer(request.param, folder)


def test_any_bytes_come_back(tokenizer: Tokenizer) -> None:
    lengths = byte_lengths(tokenizer)

    @relaxed
    @given(some_bytes)
    def check(text: bytes) -> None:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == text
        assert lengths[ids].sum() == len(text) and tokenizer.eot not in ids
        assert not len(ids) or int(ids.max()) < tokenizer.vocab_size

    check()


def test_pieces_encode_as_the_whole(tokenizer: Tokenizer) -> None:
    """Cut anywhere that `cut` allows, the ids are tiktoken's of the text in one; the blocks do not matter."""
    def check(text: str, size: int, block: int) -> None:
        content = text.encode()
        parts = list(pieces([content], tokenizer.cut, size))
        blocks = [content[i:i + block] for i in range(0, len(content), block)]
        assert parts == list(pieces(blocks, tokenizer.cut, size))
        assert b"".join(parts) == content and all(0 < len(part) <= size for part in parts)
        at, is_forced = 0, False
        for i, part in enumerate(parts):                                # as going on after an interruption
            assert list(pieces([content[at:]], tokenizer.cut, size)) == parts[i:]
            window = content[at:at + size].decode(errors="ignore")
            has_place = any(b in " \n" and not a.isspace() for a, b in itertools.pairwise(window))
            is_forced |= i < len(parts) - 1 and not has_place
            at += len(part)
        if not is_forced and hasattr(tokenizer, "encoding"):
            whole = tokenizer.encoding.encode_ordinary(text)
            assert np.concatenate([[], *map(tokenizer.encode, parts)]).tolist() == whole
        for part in parts:
            part.decode()                                               # no character is torn apart

    if isinstance(tokenizer, ByteTokenizer):
        assert list(pieces([b"abc", b"defg"], tokenizer.cut, 4)) == [b"abcd", b"efg"]
        return
    relaxed(given(some_text, st.integers(4, 40), st.integers(1, 50))(check))()
    for blank in itertools.product(("\n", " ", "\n\n", "   ", "\t", "a"), repeat=3):
        for size in (5, 8, 9, 10, 11, 12):
            check(f"ab     {''.join(blank)}cd", size, 7)


def test_long_text_is_encoded_in_pieces_however_it_comes(folder: Path, monkeypatch) -> None:
    tokenizer = load_tokenizer("bpe:400", folder)
    text = PROSE[:700] + b"y" * 500 + bytes(range(256)) + PROSE
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(pieces_module, "MAX_PIECE", 64)
    parts = list(pieces([text], tokenizer.cut))
    assert len(parts) > 20
    assert tokenizer.encode(text).tolist() == [i for part in parts for i in tokenizer.encode(part)]
    ordinary = PROSE.replace("日本語".encode(), b"it")                    # white space everywhere
    in_pieces = tokenizer.encode(ordinary).tolist()
    monkeypatch.undo()
    assert in_pieces == tokenizer.encode(ordinary).tolist() and whole == tokenizer.encode(text).tolist()


def test_documents_at_once_are_documents_one_by_one(tokenizer: Tokenizer) -> None:
    @relaxed
    @given(st.lists(some_bytes.filter(len), min_size=1, max_size=5), st.booleans())
    def check(texts: list[bytes], continues: bool) -> None:
        ids = [i for text in texts for i in (tokenizer.eot, *tokenizer.encode(text))]
        assert tokenizer.encode_documents(texts, continues).tolist() == ids[continues:]

    check()


def test_a_separator_in_text_is_text(tokenizer: Tokenizer) -> None:
    texts = [b"a" + SEPARATOR.encode(), b"<|endof", b"text|>"]
    ids = tokenizer.encode_documents(texts, continues=False)
    assert (ids == tokenizer.eot).sum() == 3
    assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == b"".join(texts)


def test_a_learned_vocabulary_is_the_same_in_both_libraries(folder: Path) -> None:
    from tokenizers import Tokenizer as Library

    ours, theirs = load_tokenizer("bpe:400", folder), Library.from_file(str(folder / "tokenizer.json"))
    assert theirs.get_vocab_size() == ours.vocab_size == 400
    assert theirs.token_to_id(SEPARATOR) == ours.eot == 399

    @relaxed
    @given(some_text.filter(lambda text: SEPARATOR not in text))
    def check(text: str) -> None:
        assert theirs.encode(text).ids == ours.encode(text.encode()).tolist()
        assert theirs.decode(ours.encode(text.encode()).tolist(), skip_special_tokens=False) == text

    check()
    prose = needs("wikitext-2", "valid.txt").read_text()[:200_000]
    assert theirs.encode(prose).ids == ours.encode(prose.encode()).tolist()


def test_a_vocabulary_depends_on_the_text_alone(monkeypatch) -> None:
    texts = [words(i, 900) for i in range(9)] + [PROSE]
    first = learn(texts, 350)
    monkeypatch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "false")
    assert learn(texts[::-1], 350) == first != learn(texts[1:], 350)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(alphabet="ab ", max_size=60), min_size=1, max_size=5), st.integers(257, 290))
def test_merges_of_repeated_letters_are_in_the_order_of_their_ids(texts: list[str], size: int) -> None:
    """What makes an id enough to tell a merge's priority; `learn` asserts it."""
    try:
        assert len(json.loads(learn(map(str.encode, texts), size))["model"]["merges"]) == size - 257
    except UserError as error:
        assert "pairs for" in str(error)


@pytest.mark.parametrize(("name", "message"), [
    ("bpe:256", "257"), ("bpe:0", "257"), ("bpe:9999999", "1000000"), ("bpe:", "choose from"),
    ("bpe:-300", "choose from"), ("bpe:4e3", "choose from"), ("bpe:300", "its folder is needed")])
def test_a_wrong_size_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(name)
    assert len(caught.value.problems) == 1


def test_too_little_text_for_a_vocabulary_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc abc abd" * 3)
    with pytest.raises(UserError, match="pairs for only 2[0-9]+ ids"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", "bpe:4096")
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_damaged_tokenizer_file_is_one_line(folder: Path, tmp_path: Path) -> None:
    good = json.loads((folder / "tokenizer.json").read_text())
    vocab = good["model"]["vocab"]

    def change(**parts) -> bytes:
        return json.dumps({**good, **parts}).encode()

    def vocabulary(**entries) -> bytes:
        return change(model={**good["model"], "vocab": {**vocab, **entries}})

    token = next(token for token in vocab if len(token) == 2)
    bad = [b"", b"{", b"null", b"[1]", b"\xff\xfe", b"[" * 200_000, json.dumps(good).encode()[:-9],
           change(model=3),
           change(pre_tokenizer=None), change(pre_tokenizer={"type": "Whitespace"}), change(added_tokens=[]),
           change(added_tokens=[{"content": SEPARATOR, "id": 7}]), change(model={"vocab": {}}),
           vocabulary(**{token: "7"}), vocabulary(**{token: True}), vocabulary(**{token: 10**30}),
           vocabulary(more=399), vocabulary(**{"": 5}), vocabulary(**{"\u4e00": 5}),
           vocabulary(**{"!": vocab["a"]}),
           change(model={**good["model"], "vocab": {f"{t}!": i for t, i in vocab.items()}})]
    for content in bad:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match="tokenizer.json: damaged") as caught:
            read_ranks(tmp_path, 400)
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value), content[:60]
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)                                            # a sparse terabyte
    with pytest.raises(UserError, match="more than"):
        read_ranks(tmp_path, 400)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        read_ranks(tmp_path, 400)


def test_a_run_keeps_the_vocabulary_of_its_corpus(tiny, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(words(3, 9000) + PROSE)
    prepare(str(tmp_path / "a.txt"), tmp_path / "corpus", "bpe:300")
    run = tmp_path / "run"
    config = tiny("rope", f"data.dir={tmp_path / 'corpus'}", "model.vocab_size=300", "train.steps=2")
    assert train(config, []) == 0
    assert (run / "tokenizer.json").read_bytes() == (tmp_path / "corpus" / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "corpus")                                  # a run needs it no more
    _, _, tokenizer = load_run(run)
    assert tokenizer.name == "bpe:300"
    assert decode(tokenizer, tokenizer.encode(PROSE).tolist()) == PROSE.decode()
    beyond = [300, 303]                         # a model may have such, where its vocabulary is rounded up
    assert decode(tokenizer, [*tokenizer.encode(PROSE).tolist(), *beyond]) == PROSE.decode()
    text = open_text(str(tmp_path / "a.txt"), "", tokenizer)
    assert text.documents[0].tolist() == [299, *tokenizer.encode((tmp_path / "a.txt").read_bytes())]
    (run / "tokenizer.json").write_text(learn([PROSE], 300))
    with pytest.raises(UserError, match="made with another bpe:300 tokenizer"):
        load_run(run)
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        load_run(run)


def test_a_corpus_takes_the_vocabulary_of_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(words(ord(name), 4000) + PROSE)
    first = prepare(str(tmp_path / "a.txt"), tmp_path / "one", "bpe:300")
    second = prepare(str(tmp_path / "b.txt"), tmp_path / "two", str(tmp_path / "one"))
    assert first["tokenizer"] == second["tokenizer"] and first["tokenizer"]["name"] == "bpe:300"
    assert tokenizer_of(read_meta(tmp_path / "two" / "meta.json"), tmp_path / "two").vocab_size == 300
    other = prepare(str(tmp_path / "b.txt"), tmp_path / "three", "bpe:300", Options(limit_tokens=100))
    assert other["tokenizer"]["sha256"] != first["tokenizer"]["sha256"]
    (tmp_path / "two" / "tokenizer.json").write_bytes((tmp_path / "three" / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="made with another bpe:300 tokenizer"):
        tokenizer_of(second, tmp_path / "two")
