"""The benches: every one runs at toy size, and what they have in common is right."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import ROOT, needs, python, words

from bench import growth, soak
from bench.measuring import Ended, check_names, fresh, matmul_flops, preset_config, table
from bench.training import (
    COMPILED,
    CONTENDERS,
    DEFAULT,
    GPT2_BLOCK,
    contender_config,
    contestants,
    step_of,
    take_turns,
)
from model import GPT
from runtime.command import interrupt
from runtime.errors import UserError

TOY = {
    "training": ["--shape", "16,1", "--rounds", "1", "--only",
                 "nanorope rope (eager),nanorope none (eager),transformers GPT-2 (fp32 eager)"],
    "each_encoding": ["--encodings", "alibi", "--rounds", "1", "--shape", "16,1", "model.n_layer=1",
                      "model.n_embd=24", "model.n_hidden=8"],
    "evaluation": ["--length", "64", "--rounds", "1"],
    "attention": ["--lengths", "16", "--rounds", "1"],
    "loss": ["--shape", "16,8,64"],
    "growth": ["--lengths", "64", "--sizes", "1x64", "--rounds", "1", "--seconds", "0.01", "--tokens", "64"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_every_bench_runs_at_toy_size(name: str) -> None:
    done = python("-m", f"bench.{name}", *TOY[name])
    assert done.returncode == 0, done.stderr
    assert "| " in done.stdout or "token_losses / plain forward" in done.stdout


@pytest.mark.slow
def test_preparing_runs_at_toy_size_and_both_ways_agree(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(words(0, 20_000))
    done = python("-m", "bench.prepare", tmp_path, "--megabytes", "1", "--rounds", "1",
                  TIKTOKEN_CACHE_DIR=str(needs("tiktoken")))
    assert done.returncode == 0 and "times as fast" in done.stdout, done.stderr


def test_a_name_that_is_not_known_is_refused() -> None:
    check_names("--only", ["a", "b"], ["a", "b", "c"])
    with pytest.raises(UserError, match="--only d: unknown; choose from a, b"):
        check_names("--only", ["a", "d"], ["a", "b"])


@pytest.mark.slow
def test_growth_leaves_out_what_takes_too_long(monkeypatch) -> None:
    """Also under the handlers of run_command, which a forked process inherits."""
    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(growth, "make_step", endless)
    before = signal.signal(signal.SIGXCPU, interrupt)
    try:
        point, limits = growth.Point(1, 64, 64, 1), growth.Limits("cpu", 1, 1.0, 1)
        assert growth.measured_by("nanorope rope (eager)", point, limits) == "over 1 s"
    finally:
        signal.signal(signal.SIGXCPU, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", "each_encoding", "evaluation", "growth", "attention"])
def test_without_a_gpu_the_error_says_so(name: str) -> None:
    done = python("-m", f"bench.{name}", "--device", "cuda")
    assert done.returncode == 2 and "no CUDA device" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_contenders_of_a_preset_have_one_size() -> None:
    """Each nanorope and its peers within a hundredth; biases and tables of positions are what differs."""
    for preset, names in DEFAULT.items():
        with torch.device("meta"):
            models = [CONTENDERS[name].make(contender_config(name, preset, 64, 1))
                      for name in names if name in COMPILED and not name.startswith("x-")]
        sizes = [sum(p.numel() for p in model.parameters()) for model in models]
        assert max(sizes) < 1.01 * min(sizes), (preset, sizes)


def names_of_tests(file: str, selection: str = "test") -> set[str]:
    """The tests in a file that `pytest -k selection` runs."""
    def is_in(term: str, name: str) -> bool:
        return (term.removeprefix("not ") in name) != term.startswith("not ")

    names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    parts = [part.split(" and ") for part in selection.split(" or ")]
    return {name for name in names if any(all(is_in(term, name) for term in part) for part in parts)}


@pytest.mark.parametrize("case", soak.TESTED)
def test_every_part_of_a_row_of_the_soak_selects_a_test(case: str) -> None:
    """Else a test that is renamed leaves its row without a word."""
    selection, *files = soak.TESTED[case]
    empty = [part for part in selection.split(" or ")
             if not any(names_of_tests(file, part) for file in files)]
    assert not empty and all(names_of_tests(file, selection) for file in files)


def test_every_test_of_a_fault_is_in_a_row_of_the_soak() -> None:
    """And docs/reliability.md has each row once. Some rows have functions of their own in bench/soak.py."""
    selected = {(file, name) for selection, *files in soak.TESTED.values()
                for file in files for name in names_of_tests(file, selection)}
    left_out = [name for file in (soak.LOST, soak.SILENT, soak.SECURITY, soak.RELIABILITY)
                for name in names_of_tests(file, "not wandb") if (file, name) not in selected]
    assert all(name.startswith(("test_ctrl_c", "test_a_signal_in_any_phase")) for name in left_out), left_out
    rows = re.findall(r"^\| `(\w+)` \|", soak.DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(soak.CASES)


def test_flops_of_gpt2_are_those_of_the_readme() -> None:
    with torch.device("meta"):
        model = GPT(preset_config("gpt2-124m", *GPT2_BLOCK))
    assert model.flops_per_token(1024) == 798_087_168


def kill_itself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_fresh_process_returns_its_result_or_how_it_ended() -> None:
    assert fresh(max, 3, 5, method="fork") == 5
    with pytest.raises(Ended) as ended:
        fresh(kill_itself, 0, method="fork")
    assert ended.value.exit_code == -signal.SIGKILL


@pytest.mark.slow
def test_a_contender_that_fails_leaves_a_reason_and_the_others_run() -> None:
    calls = {"dies": (kill_itself, 0), "lives": (step_of, "nanorope rope (eager)", "small", 16, 1, "cpu")}
    with contestants(calls, "cpu") as (dies, lives):
        rows = take_turns([lives], 2)
    assert dies.problem == "ended with code -9" and lives.problem == ""
    assert len(rows) == 2 and all(row["lives"] > 0 for row in rows) and lives.peak > 0


@pytest.mark.slow
def test_peak_memory_rises_with_an_allocation() -> None:
    """In a fresh process: this one may have held more before."""
    code = ("import torch; from bench.measuring import peak_bytes; before = peak_bytes(); "
            "torch.ones(2**26); print(peak_bytes() - before)")
    assert int(python("-c", code).stdout) > 0.9 * 4 * 2**26


def test_a_product_has_a_speed() -> None:
    assert matmul_flops(torch.float32, "cpu", 64) > 0


def test_a_table_is_markdown() -> None:
    assert table(("a", "b"), [("x", "1")]) == ["| a | b |", "|---|---:|", "| x | 1 |"]
