"""What the tests share: a small corpus, small configs and models whose logits are far from zero."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from base.command import run_command
from config import Config, TrainConfig
from data.loader import Corpus
from evaluation.protocols import measure
from evaluation.results import records
from model import GPT
from positions import ENCODINGS

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("NANOROPE_TEST_DATA", ROOT.parent / "shared" / "data"))
TINY = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.seq_len=32", "train.batch_size=4",
        "train.steps=12", "train.warmup=2", "train.val_windows=8", "train.dtype=float32", "train.compile=off",
        "train.device=cpu", "run.log_every=1", "run.save_every=4", "run.eval_every=6",
        *os.environ.get("NANOROPE_TEST_OVERRIDES", "").split()]
SIGNALS = [getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "XCPU", "USR1", "USR2")]

class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str


def call(name: str, *arguments: object) -> Ended:
    """Run a command in this process, such as call("train", "a.toml") or call("data.prepare", "a.txt")."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = [f"{name}.py", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            run_command(import_module(name).main)
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def python(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python COMMAND` in a fresh process that has ended: a script, or "-m" and a module."""
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd,
                          errors="replace", env={**os.environ, "COLUMNS": "120", **environment})


def needs(*parts: str) -> Path:
    """A file of the optional test data; the test is skipped where it is absent."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {path}: set NANOROPE_TEST_DATA to a folder with {'/'.join(parts)}")
    return path


def words(seed: int, n_bytes: int) -> bytes:
    """Text with structure to learn: a few words in random order."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(8, (n_bytes // 3,), generator=generator)
    vocabulary = ["dog", "cat", "the ", "chased ", "another ", "\n", "a ", "b"]
    return "".join(vocabulary[i] for i in picks).encode()[:n_bytes]


def draw(corpus: Corpus, seq_len: int, batch_size: int, seed: int, step: int, rank: int = 0,
         world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a training step."""
    t = TrainConfig(seq_len=seq_len, batch_size=batch_size, seed=seed)
    batch = corpus.batch(t, step, rank, world_size)
    return batch.inputs, batch.targets


def places_of(corpus: Corpus, seq_len: int, batch_size: int, seed: int,
              step: int) -> list[tuple[Corpus, int]]:
    """Corpus and first token of the windows of a training step."""
    return corpus.window_starts(TrainConfig(seq_len=seq_len, batch_size=batch_size, seed=seed), step)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: x for key, x in line.items() if key not in ("wall_s", "tokens_per_s")} for line in lines]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    folder = run_dir / "checkpoints" / f"{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_equal_runs(a: Path, b: Path, step: int = 12) -> None:
    """The same log, weights and moments, to the bit."""
    assert metrics(a) == metrics(b)
    left, right = tensors(a, step), tensors(b, step)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lively(config: Config, seed: int = 0) -> GPT:
    """A model in evaluation mode whose parameters are large and random, so that what ought to matter does."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 1.0))
    model.encoding.clamp()
    return model


def tokens(shape: tuple[int, int], seed: int = 0, vocab_size: int = 257) -> torch.Tensor:
    """Random ids."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


every_encoding = pytest.mark.parametrize("name", ENCODINGS)


def slow_except(cases: Sequence[Any], *fast: Any) -> list[Any]:
    """Cases to parametrise with, of which `make test` runs the fast ones alone, and `make test-all` all."""
    assert set(fast) <= set(cases)
    return [case if case in fast else pytest.param(*(case if isinstance(case, tuple) and case else [case]),
                                                   marks=pytest.mark.slow) for case in cases]


# for laws that take a second an encoding
every_encoding_slowly = pytest.mark.parametrize("name", slow_except([*ENCODINGS], "rope", "t5", "learned"))


def measured(evaluation) -> list[dict]:
    """All sums of an Evaluation."""
    return [record for rows in measure(evaluation) for record in records(rows)]
