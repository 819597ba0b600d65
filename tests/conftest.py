"""The fixtures of all tests. What they import, they import late: the process that hands out the tests to
the workers loads this file too, and torch takes it seconds."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("toys")

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):   # nohup and & ignore some; commands inherit it
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Numbers below 1.2e-38 exist again after a test whose bench flushed them: hypothesis draws some."""
    import torch
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    import torch
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared byte corpus: documents of 1,500 bytes and more."""
    from toys import words

    from data.prepare import prepare
    source = tmp_path_factory.mktemp("source")
    for i in range(24):
        (source / f"doc{i:02}.txt").write_bytes(words(i, 1500 + 100 * i))
    out = tmp_path_factory.mktemp("corpora") / "words"
    prepare(str(source), out, "byte")
    return out


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second byte corpus, of other bytes: few documents, most of them short."""
    from toys import words

    from data.prepare import prepare
    source = tmp_path_factory.mktemp("other")
    for i in range(12):
        text = words(i, 200 if i % 4 == 0 else 20 + i).upper()
        (source / f"{i:02}.txt").write_bytes(text)
    out = tmp_path_factory.mktemp("corpora") / "other"
    prepare(str(source), out, "byte")
    return out


@pytest.fixture
def tiny(tmp_path: Path, corpus_dir: Path) -> Callable[..., Any]:
    """tiny("rope", "train.lr=1e-2", ...) -> a small config on the small corpus, its run in tmp_path/run."""
    from toys import TINY

    from config import load_config

    def make(encoding: str = "rope", *overrides: str) -> Any:
        path = tmp_path / f"{encoding}.toml"
        path.write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "{encoding}"\n')
        return load_config(path, [*TINY, "model.vocab_size=257", f"run.dir={tmp_path / 'run'}", *overrides])
    return make
