"""Whatever bytes lie in a file that we open: success, or our own error of one line, in bounded memory.

`make soak` tries 2,000 cases of each in place of a few dozen (NANOROPE_FUZZ_CASES).
"""

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_compare import fabricate
from test_security import rehash_checkpoint, rehash_corpus

from config import SECTIONS, Config, load_config, to_toml
from data.loader import SPLITS, Corpus, read_meta
from data.tokenizer import byte_lengths, tokenizer_of
from evaluation.runs import read_run
from hf.tokenizer import byte_level_json, read_tokenizer
from model import GPT
from positions import ENCODINGS
from positions.scaling import SCALINGS
from runtime import checkpoint
from runtime.errors import UserError
from runtime.optimizer import make_optimizer
from train import train

CASES = int(os.environ.get("NANOROPE_FUZZ_CASES", "40"))
MEMORY = 2**29          # bytes that reading a file of a few kilobytes may take at most
fuzz = settings(max_examples=CASES, deadline=None, derandomize=CASES <= 40, database=None,
                suppress_health_check=list(HealthCheck))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Allocations beyond what there is and MEMORY more fail, and with them the test. Linux; else no bound."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns; None after a UserError, whose lines must be lines."""
    with bounded_memory():
        try:
            return function()
        except UserError as error:
            assert error.problems and all(p.isprintable() and len(p) < 3000 for p in error.problems)
            return None


# -----------------------------------------------------------------------------------------------------------
# What a file may hold


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
                    st.sampled_from([2**31, 2**53, 2**63, 2**64, -2**63, 10**400, 1e308, -0.0, "", "../..",
                                     "\0"]))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4)
                      | st.dictionaries(st.text(max_size=9), inner, max_size=4), max_leaves=8)


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A change of a file's bytes: other bytes at a place, a cut, something more, or all of it anew."""
    kind = draw(st.sampled_from(["bytes", "bit", "cut", "end", "all", "repeat"]))
    place, new = draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(max_size=24))
    bit = draw(st.integers(0, 7))

    def edit(content: bytes) -> bytes:
        at = int(place * len(content))
        if kind == "bit" and content:
            return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1:]
        return {"bytes": content[:at] + new + content[at + len(new):], "cut": content[:at], "bit": content,
                "end": content + new, "all": new, "repeat": content[:at] + content}[kind]
    return edit


@st.composite
def json_edits(draw: st.DrawFn) -> Callable[[Any], Any]:
    """A change of a value somewhere in a JSON document: another one, or none at all."""
    places, value = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), draw(values)
    is_removed = draw(st.booleans())

    def edit(document: Any) -> Any:
        place = document
        for step, number in enumerate(places):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = keys[number % len(keys)]
            if step == len(places) - 1 or not isinstance(place[key], dict | list):
                if is_removed:
                    del place[key]
                else:
                    place[key] = value
                break
            place = place[key]
        return document
    return edit


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


# -----------------------------------------------------------------------------------------------------------
# Configs


SCHEMAS = [*SECTIONS.values(), *(encoding.Options for encoding in ENCODINGS.values()), *SCALINGS.values()]
KEYS = sorted({key for schema in SCHEMAS for key in schema.model_fields}
              | {"extends", "method", "lr.x", '"a\\nb"', "typo"})
WORDS = ["rope", "yarn", "auto", "all", "first", "true", "-1", "0", "1", "2.5", "1e400", "nan", "[0, 9]",
         "{}", '"x"', '"../x"', "9" * 30, '{ method = "yarn", factor = 2.0 }', *ENCODINGS]
lines = st.one_of(
    st.builds("[{}]".format, st.sampled_from([*SECTIONS, "modle", "train.lr", ""])),
    st.builds("{} = {}".format, st.sampled_from(KEYS), st.sampled_from(WORDS)),
    st.builds("{} = {}".format, st.sampled_from(KEYS), values.map(lambda v: json.dumps(v))),
    st.text(max_size=30))
overrides = st.lists(st.one_of(
    st.builds("{}.{}={}".format, st.sampled_from([*SECTIONS, "x"]), st.sampled_from(KEYS),
              st.sampled_from(WORDS)),
    st.text(max_size=20)), max_size=3)


@fuzz
@given(st.lists(lines, max_size=12), overrides, st.booleans())
def test_any_config(text: list[str], more: list[str], is_whole: bool) -> None:
    head = 'data.dir = "x"\nposition.encoding = "rope"\n' if is_whole else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_bytes((head + "\n".join(text)).encode("utf-8", "surrogatepass"))
        config = outcome(lambda: load_config(path, more))
        if config is not None:
            path.write_text(to_toml(config))
            assert load_config(path) == config


@fuzz
@given(edits())
def test_any_bytes_in_a_config(edit: Callable[[bytes], bytes]) -> None:
    shipped = Path(__file__).parent.parent / "configs" / "passkey.toml"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_bytes(edit(shipped.read_bytes()))
        outcome(lambda: load_config(path))


# -----------------------------------------------------------------------------------------------------------
# Corpora


def use(corpus: Corpus) -> Corpus:
    """What is done with a corpus that loaded: it holds what its meta.json says, and gives batches."""
    tokenizer_of(corpus.meta, corpus.folder)
    for split in SPLITS:
        offsets, tokens = corpus.offsets[split], corpus.tokens[split]
        assert offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) > 0).all()
        assert int(tokens.max()) < corpus.meta["vocab_size"]
    x, y = corpus.batch(32, 4, 0, 3)
    assert x.shape == y.shape == (4, 32) and corpus.val_batches(32, 4, 8)
    return corpus


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data.prepare import prepare

    folder = tmp_path_factory.mktemp("small")
    for i in range(12):
        (folder / f"{i}.txt").write_bytes(bytes(range(256)))
    prepare(str(folder), folder / "corpus", "byte")
    return folder / "corpus"


@fuzz
@given(edits())
def test_any_bytes_in_a_meta_json(small_corpus: Path, edit: Callable[[bytes], bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_corpus, Path(folder) / "copy")
        (copy / "meta.json").write_bytes(edit((copy / "meta.json").read_bytes()))
        outcome(lambda: read_meta(copy / "meta.json"))
        outcome(lambda: use(Corpus(copy)))


@fuzz
@given(st.lists(json_edits(), min_size=1, max_size=2))
def test_any_values_in_a_meta_json(small_corpus: Path, changes: list[Callable[[Any], Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_corpus, Path(folder) / "copy")
        for edit in changes:
            edit_json(copy / "meta.json", edit)
        outcome(lambda: use(Corpus(copy)))


@fuzz
@given(edits(), st.sampled_from(["train.bin", "val.bin", "train.idx.npy", "val.idx.npy"]), st.booleans(),
       st.booleans())
def test_any_bytes_in_a_shard(small_corpus: Path, edit: Callable[[bytes], bytes], name: str,
                              is_consistent: bool, is_counted: bool) -> None:
    """With the checksums made true, and the count of tokens too, as someone hostile would."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_corpus, Path(folder) / "copy")
        (copy / name).write_bytes(edit((copy / name).read_bytes()))
        if is_counted and name.endswith(".bin"):
            meta = json.loads((copy / "meta.json").read_text())
            meta["splits"][name.removesuffix(".bin")]["tokens"] = (copy / name).stat().st_size // 2
            (copy / "meta.json").write_text(json.dumps(meta))
        if is_consistent:
            rehash_corpus(copy)
        outcome(lambda: use(Corpus(copy)))


NPY_HEADERS = ["{'descr': '<u8', 'fortran_order': False, 'shape': (%s,), }",
               "{'descr': '|O', 'fortran_order': False, 'shape': (%s,), }",
               "{'descr': '<u8', 'fortran_order': True, 'shape': (%s, 2), }", "%s",
               "{'descr': [('a', '<u8')], 'fortran_order': False, 'shape': (%s,), }"]


@fuzz
@given(st.sampled_from(NPY_HEADERS), st.one_of(st.integers().map(str), st.text(max_size=20), st.sampled_from(
    ["2" * 40, "-" * 5000 + "1", "(" * 150 + ")" * 150, "1" + "+1" * 2000, "2**99", "9" * 5000])))
def test_any_header_of_the_offsets(small_corpus: Path, header: str, shape: str) -> None:
    text = (header % shape).encode()
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_corpus, Path(folder) / "copy")
        (copy / "val.idx.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text[:2**16 - 1]).to_bytes(2, "little")
                                           + text + bytes(16))
        rehash_corpus(copy)
        outcome(lambda: use(Corpus(copy)))


# -----------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> tuple[Path, Config]:
    folder = tmp_path_factory.mktemp("small-run")
    (folder / "c.toml").write_text(f'[data]\ndir = "{small_corpus}"\n[position]\nencoding = "rope"\n')
    config = load_config(folder / "c.toml", [
        *TINY, "model.n_layer=1", "model.n_embd=4", "model.n_hidden=4", "model.vocab_size=257",
        "train.steps=1", f"run.dir={folder / 'run'}"])
    assert train(config, []) == 0
    return folder / "run", config


def use_run(run_dir: Path, config: Config) -> dict[str, Any] | None:
    """What train.py does with a checkpoint: read it, and make a step from it."""
    model = GPT(config)
    optimizer = make_optimizer(model, config)
    state = checkpoint.load_newest(run_dir, model, optimizer)
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()
    optimizer.step()
    return state


@fuzz
@given(edits(), st.sampled_from(["model.safetensors", "optimizer.safetensors", "state.json"]), st.booleans())
def test_any_bytes_in_a_checkpoint(small_run: tuple[Path, Config], edit: Callable[[bytes], bytes], name: str,
                                   is_consistent: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_run[0], Path(folder) / "run")
        newest = checkpoint.newest(copy)
        assert newest
        before = (newest / name).read_bytes()
        (newest / name).write_bytes(edit(before))
        if is_consistent and name != "state.json":
            rehash_checkpoint(newest)
        state = outcome(lambda: use_run(copy, small_run[1]))
        is_changed = (newest / name).read_bytes() != before
        assert state is None or is_consistent or name == "state.json" or not is_changed


@fuzz
@given(st.lists(json_edits(), min_size=1, max_size=2), st.sampled_from(["model", "optimizer"]),
       st.binary(max_size=16))
def test_any_header_of_a_checkpoint(small_run: tuple[Path, Config], changes: list[Callable[[Any], Any]],
                                    name: str, more: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_run[0], Path(folder) / "run")
        newest = checkpoint.newest(copy)
        assert newest
        path = newest / f"{name}.safetensors"
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        for edit in changes:
            header = edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:] + more)
        rehash_checkpoint(newest)
        outcome(lambda: use_run(copy, small_run[1]))


@fuzz
@given(st.lists(json_edits(), min_size=1, max_size=2))
def test_any_values_in_a_state_json(small_run: tuple[Path, Config],
                                    changes: list[Callable[[Any], Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(small_run[0], Path(folder) / "run")
        newest = checkpoint.newest(copy)
        assert newest
        state = json.loads((newest / "state.json").read_text())
        state.pop("check")
        for edit in changes:
            state = edit(state)
        (newest / "state.json").write_text(json.dumps({**state, "check": checkpoint._check(state)}))
        (copy / "summary.json").unlink()
        config = small_run[1].model_copy(update={
            "run": small_run[1].run.model_copy(update={"dir": str(copy)})})
        code = outcome(lambda: train(config, []))
        assert code in (0, None)


NO_OBJECTS = ["7", "[]", "null", '"check"', "true"]


@pytest.mark.parametrize("text", NO_OBJECTS)
@pytest.mark.parametrize("name", ["meta.json", "verified.json"])
def test_a_json_file_of_a_corpus_that_holds_no_object(small_corpus: Path, tmp_path: Path, name: str,
                                                      text: str) -> None:
    copy = shutil.copytree(small_corpus, tmp_path / "copy")
    use(Corpus(copy))                                                   # writes verified.json
    (copy / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}.*damaged|damaged.*{name}"):
        use(Corpus(copy))


@pytest.mark.parametrize("text", NO_OBJECTS)
@pytest.mark.parametrize("name", ["state.json", "summary.json", "corpus.json"])
def test_a_json_file_of_a_run_that_holds_no_object(small_run: tuple[Path, Config], tmp_path: Path, name: str,
                                                   text: str) -> None:
    """Valid JSON of another kind is named as damaged, as other damage is."""
    copy, config = shutil.copytree(small_run[0], tmp_path / "run"), small_run[1]
    (path,) = copy.rglob(name)
    path.write_text(text)
    if name != "summary.json":
        (copy / "summary.json").unlink()                                # else the run counts as finished
    moved = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(copy)})})
    with pytest.raises(UserError, match=rf"every checkpoint is damaged|{name}: damaged"):
        train(moved, [])
    assert path.read_text() == text


# -----------------------------------------------------------------------------------------------------------
# Tokenizers


@pytest.fixture(scope="module")
def learned_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a tokenizer.json of its own, of few ids."""
    pytest.importorskip("tokenizers")
    from data.prepare import prepare

    folder = tmp_path_factory.mktemp("learned")
    (folder / "text.txt").write_bytes(b"the dog chased another dog and the cat\n" * 40)
    prepare(str(folder / "text.txt"), folder / "corpus", "bpe:270")
    return folder / "corpus"


@fuzz
@given(edits(), st.lists(json_edits(), max_size=2))
def test_any_tokenizer_of_a_corpus(learned_corpus: Path, edit: Callable[[bytes], bytes],
                                   changes: list[Callable[[Any], Any]]) -> None:
    """It is the one that was recorded, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(learned_corpus, Path(folder) / "copy")
        path = copy / "tokenizer.json"
        for change in changes:
            edit_json(path, change)
        if not changes:
            path.write_bytes(edit(path.read_bytes()))
        tokenizer = outcome(lambda: tokenizer_of(read_meta(copy / "meta.json"), copy))
        if tokenizer is not None:
            ids = tokenizer.encode(b"the dog \xff")
            assert b"".join(map(tokenizer.token_bytes, ids.tolist())) == b"the dog \xff"


# -----------------------------------------------------------------------------------------------------------
# Tokenizers of others


@pytest.fixture(scope="module")
def foreign_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json with merges, and one of SentencePiece's kind, in folders a and b."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257, b" a": 258}
    bytes_kind = byte_level_json(ranks, r"'s| ?\w+|\s+", 259)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
    pieces_kind = {**bytes_kind, "pre_tokenizer": metaspace,
                   "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}}
    for name, content in (("a", bytes_kind), ("b", pieces_kind)):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(json.dumps(content))
        (folder / name / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "more": null}')
    return folder


def use_tokenizer(folder: Path) -> None:
    tokenizer = read_tokenizer(folder, {"bos_token_id": 1})
    if tokenizer.vocab_size < 1000:     # else load_pretrained refuses it: the model has fewer
        assert byte_lengths(tokenizer).shape == (tokenizer.vocab_size,)
        assert (tokenizer.encode(b"abc a'sx") < tokenizer.vocab_size).all()


@fuzz
@given(st.sampled_from("ab"), st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), edits(),
       st.lists(json_edits(), max_size=2))
def test_any_tokenizer_of_others(foreign_tokenizer: Path, kind: str, name: str,
                                 edit: Callable[[bytes], bytes],
                                 changes: list[Callable[[Any], Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(foreign_tokenizer / kind, Path(folder) / "copy")
        for change in changes:
            edit_json(copy / name, change)
        if not changes:
            (copy / name).write_bytes(edit((copy / name).read_bytes()))
        outcome(lambda: use_tokenizer(copy))


# -----------------------------------------------------------------------------------------------------------
# Sums of an evaluation


@fuzz
@given(edits(), st.sampled_from(["words.json", "words.npz"]))
def test_any_bytes_in_an_evaluation(edit: Callable[[bytes], bytes], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = fabricate(Path(folder) / "a")
        (run_dir / "eval" / name).write_bytes(edit((run_dir / "eval" / name).read_bytes()))
        outcome(lambda: read_run(run_dir, None))
