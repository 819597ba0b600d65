"""The bench: it runs at toy size, and figures are those of processes that take turns."""

from multiprocessing import Pipe
from unittest.mock import MagicMock

import pytest
import torch
from toys import python

from bench import steps
from model import GPT


@pytest.mark.slow
def test_it_measures_encodings_and_changes(tmp_path) -> None:
    """A contender that fails leaves a reason, and the others are measured."""
    broken = tmp_path / "model.py"
    broken.write_text("raise SystemExit(7)")
    names = ["rope", "t5+model.n_layer=2", str(broken)]
    done = python("-m", "bench.steps", *names, "train.dtype=float32", "--shapes", "16,1", "--sizes", "1x64",
                  "--rounds", "2", "--out", tmp_path / "out.md")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "out.md").read_text() and "float32" in done.stdout
    head, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line[:1] == "|"]
    assert [cell.split(":")[0] for cell in head[1::2]] == ["1x64, T 16, batch 1"]
    assert [row[0] for row in rows] == names
    assert rows[0][1].startswith("1.00 (") and rows[0][2].startswith("1.00 (")
    for row in rows[:-1]:
        fastest, median = (float(x) for x in row[1].split("(")[1].strip(")").split(", "))
        assert 0 < fastest <= median
    assert rows[-1][1] == "ended with code 7"


def test_a_contender_that_ends_between_two_steps_leaves_a_reason() -> None:
    contender = object.__new__(steps.ContenderProcess)
    contender.pipe, other_end = Pipe()
    other_end.close()
    contender.problem, contender.process = "", MagicMock(exitcode=7)
    contender.step()
    assert contender.problem == "ended with code 7"


@pytest.mark.slow
def test_contenders_have_one_size() -> None:
    config = steps.config_of("rope", ["model.n_layer=6", "model.n_embd=384", "model.n_head=6"])
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in model.parameters())
                 for model in (GPT(config), *(make(config) for make in steps.PEERS.values()))]
    assert max(sizes[:2]) < 1.01 * min(sizes[:2])       # x-transformers' MLP has no gate
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.slow
def test_peak_memory_rises_with_an_allocation() -> None:
    """In a fresh process: this one may have held more before."""
    code = ("import torch; from bench.steps import peak_bytes; cpu = torch.device('cpu'); "
            "before = peak_bytes(cpu); torch.ones(2**26); print(peak_bytes(cpu) - before)")
    assert int(python("-c", code).stdout) > 0.9 * 4 * 2**26
