"""Tokenizers: any bytes come back, pieces encode as the whole, bpe:N is the same in both libraries."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import call, needs, words

from base.errors import UserError
from data.prepare import prepare
from data.tokenizer import (
    SEPARATOR,
    Tokenizer,
    byte_lengths,
    decode,
    learn,
    load_tokenizer,
    pieces,
    tokenizer_of,
)
from evaluation.scoring import open_text
from runtime.checkpoint import load_run
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


def test_any_text_comes_back_and_the_byte_tokenizer_keeps_any_bytes(tokenizer: Tokenizer) -> None:
    lengths = byte_lengths(tokenizer)

    @relaxed
    @given(some_bytes)
    def check(text: bytes) -> None:
        kept = text if tokenizer.name == "byte" else text.decode(errors="replace").encode()
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == kept
        assert decode(tokenizer, [tokenizer.separator, *ids.tolist()]) == text.decode(errors="replace")
        assert lengths[ids].sum() == len(kept)
        assert tokenizer.separator not in ids                           # its name in text is text
        assert not len(ids) or int(ids.max()) < tokenizer.vocab_size

    check()


def test_pieces_encode_as_the_whole(tokenizer: Tokenizer) -> None:
    """Wherever a place to cut is found, the ids are those of the text in one."""
    @relaxed
    @given(some_text, st.integers(4, 40))
    def check(text: str, size: int) -> None:
        parts = list(pieces(text, size))
        assert "".join(parts) == text and all(0 < len(part) <= size for part in parts)
        if all(b[0] in " \n" and not a[-1].isspace() for a, b in itertools.pairwise(parts)):
            whole = tokenizer.encode(text.encode()).tolist()
            assert [i for part in parts for i in tokenizer.encode(part.encode())] == whole

    check()
    with pytest.MonkeyPatch.context() as patch:
        whole = tokenizer.encode(PROSE).tolist()
        patch.setattr("data.tokenizer.MAX_PIECE", 64)
        assert tokenizer.encode(PROSE).tolist() == whole


def test_gpt2_without_its_files_says_how_to_provide_them(tmp_path: Path, monkeypatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    import requests

    def offline(*arguments):
        raise requests.ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")


@pytest.mark.slow
def test_a_learned_vocabulary_is_the_same_in_both_libraries(folder: Path) -> None:
    from tokenizers import Tokenizer as Library

    ours, theirs = load_tokenizer("bpe:400", folder), Library.from_file(str(folder / "tokenizer.json"))
    assert theirs.get_vocab_size() == ours.vocab_size == 400
    assert theirs.token_to_id(SEPARATOR) == ours.separator == 399

    @relaxed
    @given(some_text.filter(lambda text: SEPARATOR not in text))
    def check(text: str) -> None:
        assert theirs.encode(text).ids == ours.encode(text.encode()).tolist()
        assert theirs.decode(ours.encode(text.encode()).tolist(), skip_special_tokens=False) == text

    check()
    prose = needs("wikitext-2", "valid.txt").read_text()[:200_000]
    assert theirs.encode(prose).ids == ours.encode(prose.encode()).tolist()


@pytest.mark.parametrize(("name", "message"), [
    ("bpe:256", "257"), ("bpe:4e3", "choose byte"), ("hf:7", "tokenizer.json: missing")])
def test_a_wrong_name_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(name)
    assert len(caught.value.problems) == 1


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
    # a model may have ids beyond, where its vocabulary is rounded up
    assert decode(tokenizer, [*tokenizer.encode(PROSE).tolist(), 300, 303]) == PROSE.decode()
    text = open_text(str(tmp_path / "a.txt"), "", tokenizer)
    assert text.documents[0].tolist() == [299, *tokenizer.encode((tmp_path / "a.txt").read_bytes())]
    sampled = call("sample", run, "--prompt", "caf\udce9 \ud83d", "--tokens", 2)  # no UTF-8
    assert sampled.code == 0 and sampled.out.startswith("caf\ufffd \ufffd")
    assert sampled.err == "warning: --prompt is not UTF-8: 2 bytes became U+FFFD\n"
    (run / "tokenizer.json").write_text(learn([PROSE], 300))
    with pytest.raises(UserError, match="made with another bpe:300 tokenizer"):
        load_run(run)


def test_a_corpus_takes_the_vocabulary_of_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(words(ord(name), 4000) + PROSE)
    first = prepare(str(tmp_path / "a.txt"), tmp_path / "one", "bpe:300")
    second = prepare(str(tmp_path / "b.txt"), tmp_path / "two", str(tmp_path / "one"))
    assert first["tokenizer"] == second["tokenizer"]
    assert tokenizer_of(second, tmp_path / "two").name == "bpe:300"
