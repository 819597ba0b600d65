"""Sources: every format gives the same documents, every fault is one line that says where."""

import gzip
import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import needs, words
from test_prepare import contents

from data import remote, sources
from data.loader import Corpus
from data.prepare import Options, default_out, prepare
from data.remote import articles
from data.tokenizer import ByteTokenizer
from runtime.errors import UserError

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
    if path.suffix == ".gz":
        content = gzip.compress(content[:99]) + gzip.compress(content[99:])     # two members, as of `cat`
    elif path.suffix == ".zst":
        parts = (content[:99], content[99:])
        content = b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_json(path: Path, texts: list[str], column: str = "text") -> Path:
    return write_lines(path, [json.dumps(row).encode() for row in rows(texts, column)])


def documents_of(folder: Path, split: str) -> list[bytes]:
    corpus = Corpus(folder)
    tokens, offsets = np.asarray(corpus.tokens[split]), corpus.offsets[split]
    return [b"".join(map(ByteTokenizer().token_bytes, tokens[a:b].tolist()))
            for a, b in zip(offsets, offsets[1:], strict=False)]


def both(folder: Path) -> tuple[list[bytes], list[bytes]]:
    return documents_of(folder, "train"), documents_of(folder, "val")


def write_hub(folder: Path) -> Path:
    """A folder in the hub's layout: two configurations, one with two train files and a test split."""
    write_table(folder / "raw" / "train-00000-of-00002.parquet", TEXTS[:60])
    write_table(folder / "raw" / "train-00001-of-00002.parquet", TEXTS[60:100])
    write_table(folder / "raw" / "test-00000-of-00001.parquet", TEXTS[100:])
    write_table(folder / "more" / "part.parquet", TEXTS, "content")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: raw\n  data_files:\n  - split: train\n    path: raw/train-*\n"
        "  - split: test\n    path: raw/test-*\n- config_name: more\n  data_files: more/*\n---\n# Text\n")
    return folder


# -----------------------------------------------------------------------------------------------------------
# The same documents from everywhere


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_row_or_line_is_a_document_and_its_hash_picks_the_split(name: str, tmp_path: Path) -> None:
    write = write_table if name.endswith(".parquet") else write_json
    whole = write(tmp_path / name, [*TEXTS, "", "  "], "body")
    meta = prepare(str(whole), tmp_path / "out", "byte", Options(text_column="body", val_share=0.2))
    train, val = both(tmp_path / "out")
    in_val = [int(hashlib.sha256(text).hexdigest()[:8], 16) < 0.2 * 2**32 for text in (*RAW.values(), b"  ")]
    assert val == [text for text, is_val in zip((*RAW.values(), b"  "), in_val, strict=True) if is_val] != []
    assert train == [text for text, is_val in zip((*RAW.values(), b"  "), in_val, strict=True) if not is_val]
    assert meta["source"] == name and meta["options"] == {"text_column": "body", "val_share": 0.2}
    part = write(tmp_path / "part" / name, TEXTS[:60], "body")
    prepare(str(part), tmp_path / "half", "byte", Options(text_column="body", val_share=0.2))
    assert set(documents_of(tmp_path / "half", "val")) == set(val) & {RAW[i] for i in range(60)}


def test_a_folder_may_hold_all_kinds(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_json(source / "train" / "deep" / "a.jsonl.gz", TEXTS[:20])
    write_table(source / "train" / "b.parquet", TEXTS[20:40])
    (source / "train" / "c.txt").write_bytes(RAW[40])
    (source / "val").mkdir()
    (source / "val" / "d.txt").write_bytes(RAW[41])
    (source / "val" / "notes.md").write_text("not text")
    prepare(str(source), tmp_path / "out", "byte")
    train, val = both(tmp_path / "out")
    assert sorted(train) == sorted(RAW[i] for i in range(41)) and val == [RAW[41]]
    source.rename(tmp_path / "mixed")
    (tmp_path / "mixed" / "val" / "d.txt").unlink()
    (tmp_path / "mixed" / "val" / "notes.md").unlink()
    (tmp_path / "mixed" / "val").rmdir()
    prepare(str(tmp_path / "mixed"), tmp_path / "out", "byte", Options(val_share=0.1))
    train, val = both(tmp_path / "out")
    assert sorted([*train, *val]) == sorted(RAW[i] for i in range(41)) and RAW[40] in train and val


def test_endings_in_capitals_count_and_hidden_files_do_not(tmp_path: Path) -> None:
    source = tmp_path / ".hidden" / "source"            # above the source nothing is looked at
    write_json(source / "train" / "A.JSONL", TEXTS[:10])
    write_lines(source / "train" / "b.jsonl.gz", [b'{"text": "x"}']).rename(source / "train" / "B.JSONL.GZ")
    write_table(source / "train" / "C.PARQUET", TEXTS[10:20])
    (source / "train" / "D.TXT").write_bytes(RAW[20])
    for name in (".git/x.txt", "deep/.cache/x.txt", ".x.txt"):
        path = source / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hidden")
    (source / "val").mkdir()
    (source / "val" / "e.txt").write_bytes(RAW[21])
    prepare(str(source), tmp_path / "out", "byte")
    assert sorted(both(tmp_path / "out")[0]) == sorted([*(RAW[i] for i in range(21)), b"x"])
    shutil.rmtree(source / "val")
    prepare(str(source), tmp_path / "out", "byte", Options(val_share=0.5))
    assert not any(b"hidden" in text for part in both(tmp_path / "out") for text in part)


def test_a_dataset_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    hub, out = f"hf:{write_hub(tmp_path / 'hub')}", tmp_path / "out"
    meta = prepare(f"{hub}:raw", out, "byte")
    assert both(out) == ([RAW[i] for i in range(100)], [RAW[i] for i in range(100, 120)])   # test: validation
    assert (meta["source"], meta["revision"]) == ("hf:hub:raw", None)
    prepare(f"{hub}:raw:test", out, "byte", Options(val_share=0.2))     # a split that is asked for: by hash
    train, val = both(out)
    assert sorted([*train, *val]) == sorted(RAW[i] for i in range(100, 120)) and train and val
    prepare(f"{hub}:more", out, "byte", Options(text_column="content", val_share=0.2))
    by_hash = both(out)
    prepare(str(tmp_path / "hub" / "more" / "part.parquet"), out, "byte",
            Options(text_column="content", val_share=0.2))
    assert both(out) == by_hash                                         # the file by itself
    write_table(tmp_path / "hub" / "raw" / "validation.parquet", TEXTS[7:9])
    readme = tmp_path / "hub" / "README.md"
    readme.write_text(readme.read_text().replace(
        "  - split: test", "  - split: validation\n    path: raw/validation*\n  - split: test"))
    prepare(f"{hub}:raw", out, "byte")
    assert both(out)[1] == [RAW[7], RAW[8]]                             # it comes before test


def test_a_dataset_without_a_card_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    write_json(tmp_path / "hub" / "data" / "train-00000-of-00001.jsonl", TEXTS[:90])
    write_json(tmp_path / "hub" / "data" / "validation-00000-of-00001.jsonl", TEXTS[90:])
    prepare(f"hf:{tmp_path / 'hub'}", tmp_path / "out", "byte")
    assert both(tmp_path / "out") == ([RAW[i] for i in range(90)], [RAW[i] for i in range(90, 120)])
    prepare(f"hf:{tmp_path / 'hub'}:validation", tmp_path / "out", "byte", Options(val_share=0.3))
    assert sum(map(len, both(tmp_path / "out"))) == 30


def test_a_text_file_of_a_dataset_is_a_document_with_its_lines(tmp_path: Path) -> None:
    articles_of = [b" = A = \n\n one\n", b" = B = \n\n two\n"]
    for name, text in (("train", b"\n".join(articles_of)), ("test", b"one\n\n two \n")):
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / f"{name}.txt").write_bytes(text)
    prepare(f"hf:{tmp_path / 'hub'}", tmp_path / "out", "byte")
    assert both(tmp_path / "out") == ([b"\n".join(articles_of)], [b"one\n\n two \n"])
    prepare(f"hf:{tmp_path / 'hub'}", tmp_path / "out", "byte", Options(articles=True))     # WikiText's form
    assert both(tmp_path / "out")[0] == [articles_of[0] + b"\n", articles_of[1]]


def test_the_commit_of_a_dataset_is_resolved_first_and_recorded(tmp_path: Path, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    hub, asked, commit = str(write_hub(tmp_path / "hub")), [], "c0ffee" * 6 + "beef"

    def local(function):
        def call(name, *arguments, revision=None, **options):
            assert name == "some/books" and revision == commit          # pinned in every call
            return function(hub, *arguments, **options)
        return call

    def dataset_info(self, name, revision):
        asked.append(revision)
        return SimpleNamespace(sha=commit)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    for name in ("load_dataset", "load_dataset_builder", "get_dataset_config_names"):
        monkeypatch.setattr(datasets, name, local(getattr(datasets, name)))
    for revision in (None, "v1.0"):
        meta = prepare("hf:some/books:raw", tmp_path / "out", "byte", Options(revision=revision))
        assert (meta["source"], meta["revision"]) == ("hf:some/books:raw", commit)
    assert asked == ["main", "v1.0"] and len(both(tmp_path / "out")[0]) == 100


def test_headings_open_the_articles_of_wikitext(tmp_path: Path) -> None:
    lines = ["", " = One = \n", "", " Text . \n", "", " = = Part = = \n", " where x \n", " = 3 y = \n", "",
             " = Two = \n", "", " More . \n"]
    expected = [b"\n = One = \n\n Text . \n\n = = Part = = \n where x \n = 3 y = \n\n",
                b" = Two = \n\n More . \n"]
    assert [text for _, text in articles(iter([("", line.encode()) for line in lines]))] == expected
    write_table(tmp_path / "hub" / "train-0.parquet", lines[:5])        # the first goes on in the next file
    write_table(tmp_path / "hub" / "train-1.parquet", lines[5:])
    write_table(tmp_path / "hub" / "validation.parquet", lines)
    prepare(f"hf:{tmp_path / 'hub'}", tmp_path / "out", "byte", Options(articles=True))
    assert both(tmp_path / "out") == (expected, expected)


@pytest.mark.parametrize("name", ["valid.txt", "test.txt"])
def test_wikitext_has_its_published_number_of_articles(name: str) -> None:
    lines = needs("wikitext-2", name).read_bytes().splitlines(keepends=True)
    found = [text for _, text in articles((str(i), line) for i, line in enumerate(lines))]
    assert len(found) == 60 and b"".join(found) == b"".join(lines)


def test_a_url_is_downloaded_once(tmp_path: Path, capsys) -> None:
    text, out = tmp_path / "far" / "poem.txt", tmp_path / "near" / "out"
    text.parent.mkdir()
    text.write_bytes(RAW[0] * 9)
    prepare(str(text), tmp_path / "local", "byte")
    meta = prepare(text.as_uri(), out, "byte")
    assert both(out) == both(tmp_path / "local") and "downloaded before" not in capsys.readouterr().out
    assert meta["revision"].startswith("sha256 ") and meta["source"] == text.as_uri()
    text.unlink()
    assert prepare(text.as_uri(), out, "byte") == meta and "downloaded before" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "far" / "wiki.zip", "w") as archive:
        archive.writestr("folder/enwik", RAW[0] * 9)
    prepare((tmp_path / "far" / "wiki.zip").as_uri(), out, "byte")
    assert both(out) == both(tmp_path / "local")
    assert not list(out.parent.rglob("*.part"))


@pytest.mark.parametrize(("source", "name"), [
    ("hf:Org/Name:config:train", "Name"), ("hf:./folder/", "folder"), ("dir/a.b.txt", "a.b"),
    ("x.jsonl.zst", "x"), ("stdlib", "stdlib"), ("https://host.org/deep/input.txt?raw=1", "input"),
    ("http://host.org/enwik8.zip", "enwik8")])
def test_a_corpus_is_named_after_its_source(source: str, name: str) -> None:
    assert default_out(source) == Path("data") / name


def interrupt(*arguments) -> None:
    raise KeyboardInterrupt


def test_what_is_in_a_url_besides_the_address_is_not_recorded(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_bytes(RAW[0] * 9)
    monkeypatch.setattr(remote, "fetch", lambda *arguments: tmp_path / "a.txt")
    url = "https://me:secret@host.org/a.txt?key=secret"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.prepare.about_split", interrupt)
        prepare(url, tmp_path / "out", "byte")
    assert (tmp_path / ".out.partial" / "progress.json").exists()
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    meta = prepare(url, tmp_path / "out", "byte")
    assert meta["source"] == "https://host.org/a.txt" and "secret" not in json.dumps(meta)
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


# -----------------------------------------------------------------------------------------------------------
# How much of it


@pytest.mark.parametrize("limit", [2, 500, 3017, "a separator", 10**9])
def test_a_limit_of_tokens_is_exact(limit: int | str, tmp_path: Path) -> None:
    write_table(tmp_path / "s" / "train" / "a.parquet", TEXTS)
    write_table(tmp_path / "s" / "val" / "a.parquet", TEXTS[:5])
    prepare(str(tmp_path / "s"), tmp_path / "all", "byte")
    whole = Corpus(tmp_path / "all")
    limit = int(whole.offsets["train"][9]) + 1 if isinstance(limit, str) else limit
    meta = prepare(str(tmp_path / "s"), tmp_path / "out", "byte", Options(limit_tokens=limit))
    part, n = Corpus(tmp_path / "out"), min(limit, len(whole.tokens["train"]))
    n -= whole.tokens["train"][n - 1] == 256                            # no document of a separator alone
    assert np.array_equal(part.tokens["train"], whole.tokens["train"][:n])
    assert np.array_equal(part.tokens["val"], whole.tokens["val"])
    bounds = whole.offsets["train"]
    assert part.offsets["train"].tolist() == [*bounds[bounds < n].tolist(), n]
    assert meta["splits"]["train"]["bytes"] == sum(map(len, documents_of(tmp_path / "out", "train")))


@pytest.mark.slow
def test_large_rows_and_files_are_cut_for_encoding_only(tmp_path: Path, monkeypatch) -> None:
    """Pieces of 50 bytes, chunks of few of them: the same corpus."""
    write_table(tmp_path / "s" / "train" / "a.parquet", TEXTS)
    write_json(tmp_path / "s" / "train" / "b.jsonl", TEXTS)
    for split, text in (("train", "".join(TEXTS)), ("val", "".join(TEXTS[:9]))):
        (tmp_path / "s" / split).mkdir(exist_ok=True)
        (tmp_path / "s" / split / "c.txt").write_text(text)
    for tokenizer in ("byte", "bpe:300"):
        prepare(str(tmp_path / "s"), tmp_path / "out", tokenizer)
        before = contents(tmp_path / "out")
        with monkeypatch.context() as patch:
            patch.setattr("data.pieces.MAX_PIECE", 50)
            patch.setattr(sources, "BLOCK", 23)
            prepare(str(tmp_path / "s"), tmp_path / "out", tokenizer, workers=3)
        assert before == contents(tmp_path / "out")


# -----------------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.parametrize(("name", "line", "expected"), [
    ("a.jsonl", b'{"text": ', r"a.jsonl:2: not JSON"),
    ("a.jsonl.gz", b"\xff\xfe", r"a.jsonl.gz:2: not JSON"),
    ("a.jsonl.zst", b"[" * 100_000, r"a.jsonl.zst:2: not JSON"),
    ("a.jsonl", b"[1, 2]", r"a.jsonl:2: must be a JSON object, got list"),
    ("a.jsonl", b'{"body": "x", "url": 3}', r"a.jsonl:2: no column 'text'.*: body, url"),
    ("a.jsonl", b'{"text": 3}', r"a.jsonl:2: 'text' must be a string, got int"),
    ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl:2: 'text' has half of a surrogate pair"),
])
def test_a_bad_line_is_named(name: str, line: bytes, expected: str, tmp_path: Path) -> None:
    write_lines(tmp_path / name, [b'{"text": "fine"}', line, b'{"text": "fine"}'])
    with pytest.raises(UserError, match=expected) as caught:
        prepare(str(tmp_path / name), tmp_path / "out", "byte")
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_one_line(name: str, damage: str, tmp_path: Path) -> None:
    path = (write_table if name.endswith(".parquet") else write_json)(tmp_path / name, TEXTS)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 255
    path.write_bytes({"cut": content[:len(content) // 2], "flipped": content, "empty": b"",
                      "other": b"this is no such file\n" * 9}[damage])
    if damage == "flipped" and name != "a.jsonl.gz":
        return      # the others need not have a checksum: what comes out is checked as text alone
    with pytest.raises(UserError, match=rf"{name}|no text for train") as caught:
        prepare(str(path), tmp_path / "out", "byte")
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE", 1000)
    write_lines(tmp_path / "a.jsonl.gz", [b'{"text": "fine"}', b'{"text": "' + b"x" * 2000])
    with pytest.raises(UserError, match=r"a.jsonl.gz:2: a line of more than 1,000 bytes"):
        prepare(str(tmp_path / "a.jsonl.gz"), tmp_path / "out", "byte")
    asked: list[int] = []
    endless = SimpleNamespace(readline=lambda size=-1: asked.append(size) or b"x" * size)
    monkeypatch.setattr(sources.JsonLines, "_unpacked", lambda *arguments: endless)
    with pytest.raises(UserError, match=r"a.jsonl.gz:1: a line of more than"):
        prepare(str(tmp_path / "a.jsonl.gz"), tmp_path / "out", "byte")
    assert asked == [1001]


def test_a_bad_dataset_is_one_line(tmp_path: Path, monkeypatch) -> None:
    hub = f"hf:{write_hub(tmp_path / 'hub')}"
    write_table(tmp_path / "few" / "train.parquet", TEXTS[:3])
    write_table(tmp_path / "other" / "dev_a.parquet", TEXTS[:3])
    (tmp_path / "other" / "README.md").write_text(
        "---\nconfigs:\n- config_name: x\n  data_files:\n  - split: a\n    path: dev_a*\n"
        "  - split: b\n    path: dev_a*\n---\n")
    for source, options, expected in (
            (hub, {}, "raw.*more"),                                     # which configuration?
            (f"{hub}:rwa", {}, "raw.*more"), (f"{hub}:raw:dev", {}, "no configuration or split 'dev'"),
            (f"{hub}:raw:a:b", {}, "must be hf:NAME"), ("hf:", {}, "must be hf:NAME"),
            ("hf:../no/such/place", {}, "neither a folder nor"),
            (f"hf:{tmp_path / 'few'}", {}, "no document's hash"),
            (f"{hub}:raw", {"text_column": "body"}, "no column 'body'.* id, text"),
            (f"{hub}:raw", {"text_column": "id"}, "'id' must be text, but is int64"),
            (f"{hub}:raw", {"revision": "main"}, "local folder"),
            (f"hf:{tmp_path / 'other'}", {}, "name one of a, b"),
            (str(tmp_path / "hub"), {"articles": True}, "are for hf:NAME")):
        with pytest.raises(UserError, match=expected) as caught:
            prepare(source, tmp_path / "out", "byte", Options(**options))
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_a_hub_out_of_reach_and_a_dataset_that_is_code(tmp_path: Path, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    def offline(*arguments, **options):
        raise ConnectionError("Name or service\nnot known")

    def script(*arguments, **options):
        raise RuntimeError("Dataset scripts are no longer supported, but found pg19.py")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(UserError, match="hf:org/name: cannot be opened .*not known.* the network"):
        prepare("hf:org/name", tmp_path / "out", "byte")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **o: SimpleNamespace(sha="c"))
    monkeypatch.setattr(datasets, "get_dataset_config_names", script)
    with pytest.raises(UserError, match="--revision refs/convert/parquet"):
        prepare("hf:org/name", tmp_path / "out", "byte")


def test_a_bad_url_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"x")
    (tmp_path / "bad.zip").write_bytes(b"x")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "x")
        archive.writestr("b", "y")
    with zipfile.ZipFile(tmp_path / "cut.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", words(1, 900))
    content = bytearray((tmp_path / "cut.zip").read_bytes())
    content[40:90] = b"\xff" * 50                                       # inside the compressed text
    (tmp_path / "flipped.zip").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "cut.zip", "w") as archive:
        archive.writestr("a.txt", words(1, 900))
    content = bytearray((tmp_path / "cut.zip").read_bytes())
    content[6] |= 1                                                     # says that it is encrypted
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(content)
    for url, expected in (("flipped.zip", "damaged.*error: Error.*delete it"),
                          ("locked.zip", "encrypted.*delete it"),
                          ("https://", "cannot be downloaded"), ("no.txt", "cannot be downloaded"),
                          ("a.pdf", "must end in"), ("bad.zip", "damaged"),
                          ("two.zip", "must hold one file, but has 2")):
        with pytest.raises(UserError, match=expected) as caught:
            prepare(url if ":" in url else (tmp_path / url).as_uri(), tmp_path / "near" / "out", "byte")
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.part"))


def test_text_that_is_not_utf8_is_kept_and_said(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes("naïve café\n".encode("latin-1") * 40 + RAW[0])
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", "bpe:270")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a.txt: not UTF-8" in said
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", "byte")
    assert not capsys.readouterr().err
