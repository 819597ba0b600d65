"""Text of source distributions, from an index of tiny ones on this machine."""

import hashlib
import io
import re
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from base.errors import UserError
from data import sdists
from data.loader import Corpus
from data.prepare import prepare

Files = dict[str, str | bytes]
LIST = "list.csv"


def pack(path: Path, files: Files) -> None:
    """A .tar.gz of files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


class Index:
    """An index of source distributions, and the list of them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.rows = folder, url, [",".join(sdists.Project._fields)]
        self.requests: list[str] = []

    def add(self, name: str, files: Files, split: str = "train") -> Path:
        page = self.folder / "index" / name
        page.mkdir(parents=True)
        archive = page / f"{name}-1.0.tar.gz"
        pack(archive, {f"{name}-1.0/{path}": content for path, content in files.items()})
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        (page / "index.html").write_text(f'<a href="{archive.name}#sha256={sha256}">{archive.name}</a>')
        self.rows.append(f"{name},1.0,{sha256},{split}")
        return archive

    def texts(self) -> dict[tuple[str, str], str]:
        return {(text.project, text.kind): text.content.decode()
                for text in sdists.read_texts(self.list(), self.folder / "cache")}

    def list(self) -> Path:
        path = self.folder / LIST
        path.write_text("\n".join(self.rows) + "\n")
        return path

    def error(self) -> str:
        with pytest.raises(UserError) as caught:
            self.texts()
        assert len(caught.value.problems) == 1
        return str(caught.value)


@pytest.fixture
def index(tmp_path: Path, monkeypatch):
    pytest.importorskip("pypi_simple")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            found.requests.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "index")))
    found = Index(tmp_path, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_INDEX_URL", found.url)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


PROSE = "".join(f"line {i} of prose that is longer than all the code\n" for i in range(50))


def test_documents_are_files_in_the_order_of_their_paths(index: Index) -> None:
    index.add("one", {"src/b.py": "b = 1\r\n", "docs/b.rst": PROSE, "docs/a/z.md": "first\n\n",
                      "src/a.py": "a = 1", "doc/x.txt": "zeroth"})
    index.add("two", {"two.py": "two = 2\n"})
    assert [*index.texts().items()] == [(("one", "docs"), "zeroth\nfirst\n" + PROSE),
                                        (("one", "code"), "a = 1\nb = 1\n"), (("two", "code"), "two = 2\n")]


@pytest.mark.parametrize(("path", "kind"), [
    *((path, None) for path in (
        "README.md", "src/notes.txt", "docs/CHANGELOG.md", "docs/releases/1.0.txt", "docs/LICENSE.txt",
        "docs/whatsnew/v1.rst", "docs/requirements.txt", "docs/locale/de/a.md", "src/pkg/test/a.py",
        "src/test_a.py", "conftest.py", "pip/_vendor/a.py", "pkg/third_party/a.py", "pkg/a.pyi")),
    ("docs/index.rst", "docs"), ("pkg/doc/Guide.MD", "docs"), ("docs/conf.py", "code"),
    ("pkg/history.py", "code"), ("pkg/testimony.py", "code"), ("docs/testing.rst", "docs")])
def test_kinds_of_files(path: str, kind: str | None) -> None:
    assert sdists.kind_of(path) == kind


def test_files_that_are_no_text_or_very_long_are_left_out(index: Index) -> None:
    index.add("one", {"docs/a.rst": PROSE, "latin.py": "é".encode("latin-1"), "null.py": b"a\0b",
                      "empty.py": "\n\n", "table.py": "x" * (sdists.FILE_BYTES + 1), "good.py": "good\n"})
    assert index.texts() == {("one", "docs"): PROSE, ("one", "code"): "good\n"}


def test_a_text_that_stands_elsewhere_is_kept_once(index: Index) -> None:
    index.add("one", {"docs/a.rst": PROSE, "a.py": "same\n", "b.py": "same\r\n"})
    index.add("two", {"c.py": "same\n\n", "d.py": "other\n"}, "val")
    index.add("three", {"docs/b.txt": PROSE, "docs/c.md": PROSE + PROSE}, "val")
    assert index.texts() == {("one", "docs"): PROSE, ("one", "code"): "same\n", ("two", "code"): "other\n",
                             ("three", "docs"): PROSE + PROSE}


def test_code_is_cut_to_the_size_of_the_documentation(index: Index) -> None:
    def code(name: str, n_lines: int) -> str:
        return "".join(f"{name} = {i:03}\n" for i in range(n_lines))     # lines of 8 bytes

    index.add("one", {"docs/a.rst": "d" * 1000, "a.py": code("a", 10)})
    index.add("two", {"b.py": code("b", 90)})
    index.add("three", {"c.py": code("c", 200)})
    index.add("four", {"docs/d.rst": PROSE, "d.py": code("d", 200)}, "val")
    texts = index.texts()
    assert texts["one", "code"] == code("a", 10)    # 80 bytes, so the others have 460
    assert texts["two", "code"] == code("b", 57) and texts["three", "code"] == code("c", 57)
    assert texts["four", "code"] == code("d", 200)                      # a split has its own limit


def test_an_archive_that_is_not_the_one_of_the_list_is_refused(index: Index) -> None:
    index.add("one", {"docs/a.rst": PROSE})
    index.rows[-1] = f"one,1.0,{'0' * 64},train"
    assert "one 1.0: cannot be downloaded (KeyError: '0000" in index.error()
    page = index.folder / "index" / "one" / "index.html"                # an index that promises it
    page.write_text(re.sub("sha256=[0-9a-f]+", f"sha256={'0' * 64}", page.read_text()))
    assert "one 1.0: cannot be downloaded (DigestMismatchError" in index.error()
    assert not [*(index.folder / "cache").glob("*[!k]")]                # and it is not kept, only a lock


def test_an_interrupted_download_continues(index: Index) -> None:
    index.add("one", {"docs/a.rst": PROSE})
    archive = index.add("two", {"docs/a.rst": PROSE + PROSE})
    content = archive.read_bytes()
    archive.unlink()
    assert "two 1.0: cannot be downloaded (HTTPError" in index.error()
    # as a process that was killed leaves it
    (index.folder / "cache" / f"two-1.0-{index.rows[-1].split(',')[2][:12]}.part").write_bytes(content[:9])
    archive.write_bytes(content)
    index.requests.clear()
    assert set(index.texts()) == {("one", "docs"), ("two", "docs")}
    assert not any("one" in request for request in index.requests)      # it is there already
    index.requests.clear()
    assert set(index.texts()) == {("one", "docs"), ("two", "docs")} and not index.requests


def test_names_and_links_in_an_archive_lead_nowhere(index: Index, tmp_path: Path) -> None:
    archive = index.add("one", {"docs/a.rst": PROSE, "a.py": "a\n", "../../up.py": "up\n"})
    with tarfile.open(archive.with_name("plain.tar"), "w") as tar:
        link = tarfile.TarInfo("one-1.0/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    index.texts()
    assert not [*tmp_path.parent.rglob("up.py")]                        # nothing is written
    archive.with_name("plain.tar").replace(next((tmp_path / "cache").glob("*[!k]")))
    assert not index.texts()                                            # a link has no text


@pytest.mark.parametrize("row", [f"one,1.0,{'0' * 64},test", f"../one,1.0,{'0' * 64},val", "one,1.0,123,val"])
def test_a_wrong_list_is_refused(row: str, tmp_path: Path) -> None:
    (tmp_path / LIST).write_text(f"name,version,sha256,split\n{row}\n")
    with pytest.raises(UserError, match="^sdists .*, line 2: ") as caught:
        sdists.read_texts(tmp_path / LIST, tmp_path / "cache")
    assert row in str(caught.value)
    (tmp_path / LIST).write_text(f"one,1.0,{'0' * 64},val\n")         # else its first project would be lost
    with pytest.raises(UserError, match="the first line must be name,version,sha256,split"):
        sdists.read_texts(tmp_path / LIST, tmp_path / "cache")


def test_an_archive_that_is_no_tar_file_is_refused(index: Index) -> None:
    archive = index.add("one", {"docs/a.rst": PROSE})
    archive.write_bytes(b"PK, as a .zip begins")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    archive.with_name("index.html").write_text(f'<a href="{archive.name}#sha256={sha256}">{archive.name}</a>')
    index.rows[-1] = f"one,1.0,{sha256},train"
    assert "one 1.0: its archive is no tar file" in index.error()


def test_passages_that_val_shares_with_train_are_counted() -> None:
    rng = np.random.default_rng(0)
    P = sdists.PASSAGE
    train, val = rng.integers(1, 2000, 500), rng.integers(1, 2000, 400)
    val[100:100 + P + 9] = train[50:50 + P + 9]
    short = np.arange(P)                                                # P - 1 tokens after the separator
    documents = {"train": [train], "val": [val, short]}
    shared = sdists.shared_passages(SimpleNamespace(documents=documents.get), ["a", "b"])
    assert shared == {"a": (10, 400 - P), "b": (0, 0)}


def test_a_list_becomes_a_corpus_or_one_kind_of_it(index: Index, capsys) -> None:
    copied = "".join(f"copied = {i}\n" for i in range(50))
    index.add("one", {"docs/a.rst": PROSE + PROSE, "a.py": "1\n" + copied})
    index.add("two", {"docs/b.rst": PROSE.upper(), "b.py": "2\n" + copied}, "val")
    source, out = f"sdists:{index.list()}", index.folder / "corpora"
    meta = prepare(source, out / "both", "byte")
    assert meta["source"] == source and meta["revision"].startswith("list sha256 ")
    assert list(meta["shared_passages"]) == ["two docs", "two code"]
    n_shared, n_all = meta["shared_passages"]["two code"]
    assert n_shared == n_all - 1                                        # all but the one that begins with "2"
    assert f"two code: {n_shared:,} of {n_all:,}" in capsys.readouterr().out
    for kind, place in (("docs", 0), ("code", 1)):
        prepare(f"{source}:{kind}", out / kind, "byte")
        for split in ("train", "val"):
            of_both = Corpus(out / "both").documents(split)[place]
            (of_kind,) = Corpus(out / kind).documents(split)
            assert np.array_equal(of_kind, of_both)
