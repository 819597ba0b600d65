"""Sources: every format gives the same documents, every fault is one line that says where."""

import hashlib
import io
import json
import re
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from toys import call, needs, words

from base.errors import UserError
from data import sources
from data.loader import Corpus
from data.prepare import default_out, prepare
from data.sources import Reader, SourceOptions, articles, open_local

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {i}: {words(i, 40 + 7 * i).decode()} naïve 日本" for i in range(120)]
RAW = {i: text.encode() for i, text in enumerate(TEXTS)}


@pytest.fixture(autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))


def rows(texts: list[str], column: str = "text") -> list[dict]:
    return [{"id": i, column: text} for i, text in enumerate(texts)]


def write_table(path: Path, texts: list, column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows(texts, column)), path, row_group_size=50)
    return path


def write_lines(path: Path, lines: list[bytes]) -> Path:
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix in (".gz", ".zst"):
        codec, parts = {".gz": "gzip", ".zst": "zstd"}[path.suffix], (content[:99], content[99:])
        content = b"".join(pyarrow.compress(part, codec, asbytes=True) for part in parts)   # as of `cat`
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_json(path: Path, texts: list[str], column: str = "text") -> Path:
    return write_lines(path, [json.dumps(row).encode() for row in rows(texts, column)])


def documents_of(folder: Path, split: str) -> list[bytes]:
    return [bytes(ids[1:].astype(np.uint8)) for ids in Corpus(folder).documents(split)]


def both(folder: Path) -> tuple[list[bytes], list[bytes]]:
    return documents_of(folder, "train"), documents_of(folder, "val")


def write_hub(folder: Path) -> Path:
    """A folder in the hub's layout: two configurations, one with two train files and a test split."""
    write_table(folder / "raw" / "train-00000-of-00002.parquet", TEXTS[:60])
    write_table(folder / "raw" / "train-00001-of-00002.parquet", TEXTS[60:100])
    write_table(folder / "raw" / "test-00000-of-00001.parquet", TEXTS[100:])
    write_table(folder / "more" / "part.parquet", TEXTS[:50], "content")
    write_json(folder / "more" / "part2.json.gz", TEXTS[50:], "content")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: raw\n  data_files:\n  - split: train\n    path: raw/train-*\n"
        "  - split: test\n    path: raw/test-*\n- config_name: more\n  data_files: more/*\n---\n# Text\n")
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_row_or_line_is_a_document_and_its_hash_picks_the_split(name: str, tmp_path: Path,
                                                                      capsys) -> None:
    write = write_table if name.endswith(".parquet") else write_json
    whole = write(tmp_path / name, [*TEXTS, None, "", "  "], "body")
    meta = prepare(str(whole), tmp_path / "out", "byte", SourceOptions(text_column="body", val_share=0.2))
    assert "warning: 1 rows without text (null) are left out" in capsys.readouterr().err
    expected: tuple[list[bytes], list[bytes]] = ([], [])
    for text in (*RAW.values(), b"  "):
        is_val = int(hashlib.sha256(text).hexdigest()[:8], 16) < 0.2 * 2**32
        expected[is_val].append(text)
    train, val = both(tmp_path / "out")
    assert (train, val) == expected and train and val
    assert meta["source"] == name and meta["options"] == {"text_column": "body", "val_share": 0.2}
    part = write(tmp_path / "part" / name, TEXTS[:60], "body")
    prepare(str(part), tmp_path / "half", "byte", SourceOptions(text_column="body", val_share=0.2))
    assert set(documents_of(tmp_path / "half", "val")) == set(val) & {RAW[i] for i in range(60)}


@pytest.mark.slow
def test_a_dataset_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    hub, out = f"hf:{write_hub(tmp_path / 'hub')}", tmp_path / "out"
    meta = prepare(f"{hub}:raw", out, "byte")
    assert both(out) == ([RAW[i] for i in range(100)], [RAW[i] for i in range(100, 120)])   # test: validation
    assert (meta["source"], meta["revision"]) == (f"{hub}:raw", None)
    prepare(f"{hub}:raw:test", out, "byte", SourceOptions(val_share=0.2), True)     # one split: a hash
    train, val = both(out)
    assert sorted([*train, *val]) == sorted(RAW[i] for i in range(100, 120)) and train and val
    prepare(f"{hub}:more", out, "byte", SourceOptions(text_column="content", val_share=0.2), True)
    by_hash = both(out)
    prepare(str(write_json(tmp_path / "all.jsonl", TEXTS)), out, "byte", SourceOptions(val_share=0.2), True)
    assert both(out) == by_hash                                         # as of one file


@pytest.mark.slow
def test_the_commit_of_a_dataset_is_resolved_first_and_recorded(tmp_path: Path, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    hub, commit = str(write_hub(tmp_path / "hub")), "c0ffee" * 6 + "beef"

    def local(function):
        def call(name, *arguments, revision=None):
            assert name == "some/books" and revision == commit          # pinned in every call
            return function(hub, *arguments)
        return call

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)     # other tests set the variable
    commits = {"main": commit, "v1.0": commit}
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info",
                        lambda self, name, revision: SimpleNamespace(sha=commits.pop(revision)))
    for name in ("load_dataset_builder", "get_dataset_config_names"):
        monkeypatch.setattr(datasets, name, local(getattr(datasets, name)))
    for revision in (None, "v1.0"):
        meta = prepare("hf:some/books:raw", tmp_path / "out", "byte", SourceOptions(revision=revision), True)
        assert (meta["source"], meta["revision"]) == ("hf:some/books:raw", commit)
    assert not commits and len(both(tmp_path / "out")[0]) == 100


def test_offline_a_dataset_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    cached = write_hub(tmp_path / "c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, repo_type, revision: str(cached))
    before = sorted(cached.rglob("*"))
    meta = prepare("hf:some/books:raw", tmp_path / "out", "byte")
    assert (meta["source"], meta["revision"]) == ("hf:some/books:raw", "c0ffee")
    assert len(both(tmp_path / "out")[0]) == 100 and sorted(cached.rglob("*")) == before


def write_texts(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


WIKITEXT = ["", " = One = \n", "", " Text . \n", "", " = = Part = = \n", " where x \n", " = 3 y = \n", "",
            " = Two = \n", "", " More . \n"]
ARTICLES = [b"\n = One = \n\n Text . \n\n = = Part = = \n where x \n = 3 y = \n\n",
            b" = Two = \n\n More . \n"]


@pytest.mark.parametrize("source", ["hf:{}", "{}"])
def test_headings_open_the_articles_of_wikitext(source: str, tmp_path: Path) -> None:
    """Whatever its folder is called: rows that are lines, the first of them a title."""
    write_table(tmp_path / "any" / "train-0.parquet", WIKITEXT[:5])     # the first goes on in the next file
    write_table(tmp_path / "any" / "train-1.parquet", WIKITEXT[5:])
    write_table(tmp_path / "any" / "validation.parquet", WIKITEXT)
    prepare(source.format(tmp_path / "any"), tmp_path / "out", "byte")
    assert both(tmp_path / "out") == (ARTICLES, ARTICLES)


def test_a_text_of_articles_is_split_into_them(tmp_path: Path) -> None:
    lines = [line or "\n" for line in WIKITEXT]
    write_texts(tmp_path, {"wiki.txt": "".join(lines), "rows/a.txt": "= One =\n\nText\n"})
    prepare(str(tmp_path / "wiki.txt"), tmp_path / "out", "byte", SourceOptions(val_share=0.5))
    assert sorted(sum(both(tmp_path / "out"), [])) == sorted(ARTICLES)
    prepare(str(tmp_path / "rows"), tmp_path / "one", "byte")           # a heading of another kind
    assert b"".join(sum(both(tmp_path / "one"), [])) == b"= One =\n\nText\n"
    text = needs("wikitext-2", "valid.txt").read_bytes()
    found = list(articles([Reader("", None, lambda: text.splitlines(keepends=True))]))
    assert len(found) == 60 and b"".join(found) == text                 # as published


def test_rows_are_documents_even_if_they_begin_with_a_title(tmp_path: Path) -> None:
    write_json(tmp_path / "a.jsonl", [text.decode().lstrip("\n") for text in ARTICLES * 2])
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "byte", SourceOptions(val_share=0.5))
    assert len(sum(both(tmp_path / "out"), [])) == 4


@pytest.mark.parametrize("names", [
    ("train/{}.txt", "validation/{}.txt", "test/{}.txt"),               # PG-19
    ("data/train-{}-of-2.txt", "data/valid-{}-of-2.txt", "data/test-{}-of-2.txt"),      # the hub's
    ("wiki.train.{}.txt", "wiki.dev.{}.txt", "wiki.test.{}.txt")])
def test_splits_are_taken_as_they_are_named(names: tuple[str, ...], tmp_path: Path, capsys) -> None:
    write_texts(tmp_path / "s", {name.format(i): f"{name} {i}" for name in names for i in range(3)})
    write_texts(tmp_path / "s", {"metadata.csv": "", "README.md": "", "more/NEWS.md": ""})
    prepare(str(tmp_path / "s"), tmp_path / "out", "byte")
    train, val = both(tmp_path / "out")
    assert train == [f"{names[0]} {i}".encode() for i in range(3)]
    assert val == [f"{names[1]} {i}".encode() for i in range(3)]
    assert "left out of s: 3 in test, 2 .md, 1 .csv (" in capsys.readouterr().out
    (tmp_path / "s" / "another.txt").write_text("one file without a split")
    prepare(str(tmp_path / "s"), tmp_path / "out", "byte", replace=True)
    n = len(sum(both(tmp_path / "out"), []))
    assert n == (6 if names[0].startswith("train/") else 10)            # beside folders, or all by hash


def test_equal_texts_are_on_one_side(tmp_path: Path, capsys) -> None:
    write_texts(tmp_path / "a", {f"{i}.txt": f"text {i // 3}" for i in range(90)})
    prepare(str(tmp_path / "a"), tmp_path / "out", "byte", SourceOptions(val_share=0.3))
    train, val = both(tmp_path / "out")
    assert len(train) + len(val) == 90 and val and not set(train) & set(val)
    write_texts(tmp_path / "b", {"train/1.txt": "one", "train/2.txt": "two", "val/3.txt": "two"})
    prepare(str(tmp_path / "b"), tmp_path / "named", "byte")
    assert both(tmp_path / "named") == ([b"one"], [b"two"])
    assert "left out of b: 1 equal to one of val (" in capsys.readouterr().out


def test_each_file_is_read_once_whatever_links_to_it(tmp_path: Path) -> None:
    write_texts(tmp_path / "s", {f"deep/{i}.txt": f"text {i}" for i in range(20)})
    (tmp_path / "s" / "z").mkdir()
    links = {"z/itself": "s", "z/parent": ".", "z/sibling": "s/deep", "0.txt": "s/deep/0.txt"}
    for name, place in links.items():
        (tmp_path / "s" / name).symlink_to(tmp_path / place)
    prepare(str(tmp_path / "s"), tmp_path / "linked", "byte")
    assert sorted(sum(both(tmp_path / "linked"), [])) == sorted(f"text {i}".encode() for i in range(20))


def test_a_link_does_not_hide_the_file_of_a_split(tmp_path: Path) -> None:
    write_texts(tmp_path / "s", {"train/x.txt": "one", "train/y.txt": "two", "val/v.txt": "three"})
    (tmp_path / "s" / "a.txt").symlink_to(tmp_path / "s" / "train" / "x.txt")
    prepare(str(tmp_path / "s"), tmp_path / "out", "byte")
    assert both(tmp_path / "out") == ([b"one", b"two"], [b"three"])


@pytest.mark.parametrize("n_bytes", [7, 2**20])
@pytest.mark.parametrize("separator", [b"--", b"\n\n\n", b"\n--\n"])
def test_a_separator_may_have_line_ends(separator: bytes, n_bytes: int, monkeypatch) -> None:
    texts = [b"Story %d.\n\nThe end." % i for i in range(9)]
    monkeypatch.setattr(sources, "BYTES_AT_ONCE", n_bytes)
    assert [*sources.split_at(separator, io.BytesIO(separator.join(texts)))] == texts


@pytest.mark.parametrize("separator", ["<|endoftext|>", "<|endoftext|>\n", "<|endoftext|>\r\n"])
def test_a_separator_splits_texts_and_is_asked_for(separator: str, tmp_path: Path, capsys) -> None:
    texts = [f"Story {i}.\nThe end.\n" for i in range(40)]
    path = tmp_path / "stories.txt"
    path.write_text(separator.join(texts), newline="")
    prepare(str(path), tmp_path / "out", "byte")
    is_alone = separator.endswith("\n")
    assert ("--separator '<|endoftext|>' splits .txt" in capsys.readouterr().err) == is_alone
    prepare(str(path), tmp_path / "out", "byte", SourceOptions(separator="<|endoftext|>"), replace=True)
    assert not capsys.readouterr().err
    assert sorted(sum(both(tmp_path / "out"), [])) == sorted(text.encode() for text in texts)


def test_lone_surrogates_are_replaced_and_counted(tmp_path: Path, capsys) -> None:
    texts = [r"half \ud83d of \ude00 one", r"all \ud83d\ude00 of it", r"\udfff"]
    write_lines(tmp_path / "a.jsonl", [f'{{"text": "{text}"}}'.encode() for text in texts])
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "byte")
    expected = ["half \ufffd of \ufffd one", "all \U0001f600 of it", "\ufffd"]
    assert sorted(sum(both(tmp_path / "out"), [])) == sorted(text.encode() for text in expected)
    assert re.fullmatch("warning: 2 documents have U.FFFD.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("n", [2, 22])
@pytest.mark.parametrize("limit", [None, 500])
def test_of_few_rows_one_is_held_out(n: int, limit: int | None, tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", TEXTS[:n])
    prepare(str(path), tmp_path / "out", "byte", SourceOptions(limit_tokens=limit))
    train, val = both(tmp_path / "out")
    assert len(val) == 1 and train and val[0] in RAW.values()
    assert limit or len(train) == n - 1
    prepare(str(path), tmp_path / "out", "byte", SourceOptions(val_share=0.9999), replace=True)
    assert [len(texts) for texts in both(tmp_path / "out")] == [1, n - 1]


@pytest.mark.parametrize("n", [1, 3])
def test_one_text_alone_is_refused_before_a_tokenizer_is_learned(n: int, tmp_path: Path, capsys) -> None:
    path = write_json(tmp_path / "one.jsonl", n * TEXTS[:1])
    with pytest.raises(UserError, match="no text for val; add text that differs"):
        prepare(str(path), tmp_path / "out", "bpe:300")
    assert "learning" not in capsys.readouterr().out


class Stopping(BaseHTTPRequestHandler):
    """Sends 1,000 bytes and ends, unless it is asked for the bytes from 2,000 on."""

    content = RAW[119] * 9
    starts: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        start = int(self.headers["Range"][len("bytes="):-1])
        self.starts.append(start)
        self.send_response(206)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        self.end_headers()
        self.wfile.write(self.content[start:start + 1000] if start < 2000 else self.content[start:])

    def log_message(self, *_: object) -> None:
        pass


def test_an_interrupted_download_goes_on_where_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)     # other tests set the variable
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stopping)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "a.txt.part").write_bytes(Stopping.content[:500])       # of an earlier call
    sources.download(f"http://127.0.0.1:{server.server_port}/a.txt", tmp_path / "a.txt.part")
    server.shutdown()
    assert (tmp_path / "a.txt.part").read_bytes() == Stopping.content
    assert Stopping.starts == [500, 1500, 2500]


def test_two_that_ask_for_a_url_do_not_write_into_one_file(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def download(url: str, part: Path) -> None:
        asked.append(url)
        for character in "abc":
            with part.open("a") as file:
                file.write(character)
            time.sleep(0.05)

    monkeypatch.setattr(sources, "download", download)
    url = "https://host.org/a.txt"
    with ThreadPoolExecutor(2) as pool:
        opened = [*pool.map(lambda _: sources.open_url(url, tmp_path, SourceOptions(), 0.1), range(2))]
    assert asked == [url] and opened[0].revision == opened[1].revision
    assert [path.read_text() for path in tmp_path.glob("*-a.txt")] == ["abc"]


def test_a_url_is_downloaded_once_and_its_keys_are_not_recorded(tmp_path: Path, monkeypatch) -> None:
    asked, url = [], "https://me:secret@host.org/wiki.zip?key=secret"
    with zipfile.ZipFile(tmp_path / "far.zip", "w") as archive:
        archive.writestr("folder/enwik", RAW[0] * 9)
    content = (tmp_path / "far.zip").read_bytes()
    monkeypatch.setattr(sources, "download", lambda url, path: asked.append(url) or path.write_bytes(content))
    for _ in range(2):
        meta = prepare(url, tmp_path / "out", "byte")
    assert asked == [url] and meta["source"] == "https://host.org/wiki.zip"
    assert meta["revision"] == f"sha256 {hashlib.sha256(content).hexdigest()}"
    assert b"".join(sum(both(tmp_path / "out"), [])) == RAW[0] * 9
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def splits_of(folder: Path, *names: str) -> dict[str, set[str]]:
    """The split of each file, after writing those of these names."""
    write_texts(folder, {name: name for name in names})
    splits: dict[str, set[str]] = {"train": set(), "val": set()}
    for reader in open_local(str(folder), SourceOptions(), 0.1).readers:
        splits[reader.split].add(Path(reader.name).relative_to(folder).as_posix())
    return splits


def test_files_are_split_by_a_hash_of_their_path_or_by_folders(tmp_path: Path) -> None:
    names = [f"{i:03}.txt" for i in range(300)]
    found = splits_of(tmp_path / "a", *names)
    assert {"007.txt", "024.txt"} <= found["val"] and "000.txt" not in found["val"] and len(found["val"]) < 60
    more = splits_of(tmp_path / "b", *names, *(f"more/{i}.TXT" for i in range(99)), ".git/x.txt", "z.md")
    assert found["val"] <= more["val"] and found["train"] <= more["train"]      # additions move nothing
    assert sum(map(len, more.values())) == 399
    by_folder = splits_of(tmp_path / "c", "train/a.txt", "train/deep/b.jsonl", "val/c.txt")
    assert by_folder == {"train": {"train/a.txt", "train/deep/b.jsonl"}, "val": {"val/c.txt"}}
    (tmp_path / "d").mkdir()
    for name in ("train", "val"):
        (tmp_path / "d" / name).symlink_to(tmp_path / "c" / name)
    assert splits_of(tmp_path / "d") == by_folder


def test_the_standard_library_is_read_without_its_tests() -> None:
    names = ["os.py", "test/a.py", "json/decoder.py", "idlelib/idle_test/a.py", "lib2to3/tests/a.py",
             "site-packages/a/b.py", "encodings/cp437.py", "unittest/case.py", "config-3.11/python-config.py"]
    kept = [name for name in names if not sources.STDLIB_LEFT_OUT.fullmatch(name)]
    assert kept == ["os.py", "json/decoder.py", "unittest/case.py"]


def test_several_sources_become_one_corpus(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_texts(tmp_path / name, {f"{split}/text.txt": f"{name} {split}" for split in ("train", "val")})
    ended = call("data.prepare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert Corpus(tmp_path / "out").meta["source"] == "a + b"
    assert both(tmp_path / "out") == ([b"a train", b"b train"], [b"a val", b"b val"])


def test_a_single_text_is_cut_between_characters(tmp_path: Path) -> None:
    for n in range(60, 70):
        (tmp_path / "a.txt").write_text(("äöü€𝄞" * 7)[:n])
        readers = open_local(str(tmp_path / "a.txt"), SourceOptions(), 0.1).readers
        train, val = ([*reader.read()][0] for reader in readers)
        assert (train + val).decode() == ("äöü€𝄞" * 7)[:n] and train.decode() and val.decode()


@pytest.mark.parametrize("limit", [2, 500, "a separator", 10**9])
def test_a_limit_of_tokens_is_exact(limit: int | str, tmp_path: Path) -> None:
    write_table(tmp_path / "s" / "train" / "a.parquet", TEXTS)
    write_table(tmp_path / "s" / "val" / "a.parquet", TEXTS[:5])
    prepare(str(tmp_path / "s"), tmp_path / "all", "byte")
    whole = Corpus(tmp_path / "all")
    n = int(whole.offsets["train"][9]) + 1 if limit == "a separator" else limit
    prepare(str(tmp_path / "s"), tmp_path / "out", "byte", SourceOptions(limit_tokens=n))
    part = Corpus(tmp_path / "out")
    n -= limit == "a separator"                                         # no document of a separator alone
    assert np.array_equal(part.tokens["train"], whole.tokens["train"][:n])
    assert np.array_equal(part.tokens["val"], whole.tokens["val"])


@pytest.mark.parametrize(("source", "name"), [
    ("hf:Org/Name:config:train", "Name"), ("hf:./folder/", "folder"), ("dir/a.b.txt", "a.b"),
    ("x.jsonl.zst", "x"), ("stdlib", "stdlib"), ("https://host.org/deep/input.txt?raw=1", "input"),
    ("http://host.org/enwik8.zip", "enwik8"), ("sdists:lists/a.csv:docs", "a")])
def test_a_corpus_is_named_after_its_source(source: str, name: str) -> None:
    assert default_out(source) == Path("data") / name


def one_error(expected: str, source: object, tmp_path: Path, **options) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        prepare(str(source), tmp_path / "near" / "out", "byte", SourceOptions(**options))
    assert len(caught.value.problems) == 1 and not (tmp_path / "near" / "out").exists()


@pytest.mark.parametrize(("line", "expected"), [
    (b'{"body": "x", "url": 3}', r"document 2: no 'text': give one of \['body', 'url'\]"),
    (b'["a"]', "document 2: each line must be an object with a 'text', not b'..a"),
    (b'{"text": 3}', "document 2: the text must be a string; name its column")])
def test_a_bad_line_is_named(line: bytes, expected: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [b'{"text": "fine"}', line, b'{"text": "fine"}'])
    one_error(expected, tmp_path / "a.jsonl", tmp_path)


def test_a_table_without_the_column_or_cut_short_is_one_line(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", TEXTS, "body")
    one_error(r"a.parquet: document 1: no 'text': give one of \['id', 'body'\]", path, tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    one_error("a.parquet: document", path, tmp_path)


@pytest.mark.parametrize("source", ["", ".//" + "../" * 30])
def test_an_unset_variable_is_no_source(source: str, tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl", TEXTS[:9])
    for sources_given in (source, f"{path} + {source}"):
        with pytest.raises(UserError, match="an unset variable"):
            prepare(sources_given, tmp_path / "out", "byte")


@pytest.mark.parametrize(("files", "source", "expected"), [
    (["a.pdf"], "a.pdf", "no text for train; add .* .jsonl"),
    (["s/train/a.txt", "s/val/a.md"], "s", "no text for val"), ([], "hf:../no/such/place", "check the name"),
    (["hub/partial-train/0.jsonl"], "hf:hub", "holds only a part"),
    (["hub/train.csv", "hub/test.csv"], "hf:hub", "cannot read .*train.csv; give the dataset as .txt"),
    ([], "hf:few:train:dev", "check the name"), ([], "hf:few:dev", "no configuration or split 'dev'")])
def test_a_bad_source_is_one_line(files: list[str], source: str, expected: str, tmp_path: Path,
                                  monkeypatch) -> None:
    write_table(tmp_path / "few" / "train.parquet", TEXTS[:3])
    write_texts(tmp_path, dict.fromkeys(files, '{"text": "x"}'))
    monkeypatch.chdir(tmp_path)
    one_error(expected, source, tmp_path)
