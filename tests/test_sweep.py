"""Sweeps: finished work is kept, and an interrupted or failing run affects only itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from evaluation import sweeping as sweep
from runtime.command import run_command
from runtime.errors import UserError
from sweep import main

EVAL = "--eval=--lengths 16,32,64 --windows 4 --tokens 256 --protocol fixed"


@pytest.fixture
def configs(tmp_path: Path, corpus_dir: Path, monkeypatch) -> dict[str, str]:
    """Config files in tmp_path, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("rope", "alibi"):
        Path(f"{name}.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "{name}"\n')
    Path("broken.toml").write_text('[data]\ndir = "nowhere"\n[position]\nencoding = "rope"\n')
    return {name: f"{name}.toml" for name in ("rope", "alibi", "broken")}


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweep.py"), *TINY, EVAL, *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True)


@pytest.mark.slow
def test_a_sweep_trains_evaluates_reports_and_does_nothing_twice(configs) -> None:
    done = run(configs["rope"], "--seeds", "0,1")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1/2 done, 0 failed, ETA 0h0") and lines[1].startswith("2/2 done, 0 failed | ")
    names = {"rope-seed0", "rope-seed1"}
    assert {p.parent.name for p in Path("runs").glob("*/summary.json")} == names
    report = Path("runs/report/report.md").read_text()
    assert "| rope | rope |  | 0, 1 |" in report
    files = [p for name in names for p in (Path("runs") / name).rglob("*") if p.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = run(configs["rope"], "--seeds", "0,1")
    assert again.returncode == 0 and ", ETA" not in again.stdout        # nothing to learn the time from
    assert before == {path: path.stat().st_mtime_ns for path in files}


def job(*arguments: str, config: str = "rope.toml") -> sweep.Job:
    return sweep.make_jobs([config], TINY, [], Path("runs"), arguments)[0]


@pytest.mark.slow
def test_an_evaluation_is_repeated_when_anything_it_depends_on_changed(configs) -> None:
    short = ("--lengths", "16,32", "--windows", "2", "--protocol", "fixed")
    assert not sweep.is_evaluated(job(*short))
    assert sweep.work(job(*short)) == "" and sweep.is_evaluated(job(*short))
    assert not sweep.is_evaluated(job(*short, "--seed", "1"))
    stamp, result = Path("runs/rope") / sweep.STAMP, Path("runs/rope/eval/words.json")
    for path, change in ((stamp, lambda text: text[:-9]), (result, lambda text: text + " "),
                         (sorted(Path("runs/rope/checkpoints").glob("*/state.json"))[-1],
                          lambda text: json.dumps({**json.loads(text), "check": "0"}))):
        text = path.read_text()
        path.write_text(change(text))
        assert not sweep.is_evaluated(job(*short)), path
        path.write_text(text)
        assert sweep.is_evaluated(job(*short))
    Path("runs/rope/eval/other.json").write_text("{}")      # evaluated on another text by hand: no matter
    assert sweep.is_evaluated(job(*short))
    result.unlink()
    assert not sweep.is_evaluated(job(*short))


def stop_when(process: subprocess.Popen, file: Path, has: Callable[[str], bool], number: int) -> str:
    """Send the signal once the file has it; what the process printed."""
    while process.poll() is None and not (file.exists() and has(file.read_text())):
        time.sleep(0.05)
    process.send_signal(number)
    return process.communicate()[0]


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_resumes(configs) -> None:
    more = ["train.steps=30000", "run.save_every=30000", "run.eval_every=30000"]
    metrics, log = Path("runs/rope/metrics.jsonl"), Path("runs/rope.log")
    process = subprocess.Popen(command(configs["rope"], *more), stdout=subprocess.PIPE, text=True)
    out = stop_when(process, metrics, lambda text: text.count("\n") > 5, signal.SIGINT)
    assert process.returncode == 130 and "the same command resumes from there" in out
    (saved,) = Path("runs/rope/checkpoints").glob("[0-9]*")
    assert 5 < int(saved.name) < 30000
    process = subprocess.Popen(command(configs["rope"], *more), stdout=subprocess.PIPE, text=True)
    stop_when(process, log, lambda text: "resuming" in text, signal.SIGTERM)
    assert process.returncode == 143
    assert f"resuming runs/rope at step {int(saved.name)}\n" in log.read_text()


def test_a_failure_does_not_stop_the_runs_after_it(configs, monkeypatch, capsys) -> None:
    jobs = sweep.make_jobs([configs["rope"], configs["alibi"]], TINY, [], Path("runs"), [])
    monkeypatch.setattr(sweep, "work", lambda job, show: "train.py ended with 2" if job is jobs[0] else "")
    progress = sweep.Progress(2)
    sweep.run_here(jobs, progress)
    assert progress.done == 2 and progress.failed == {"rope": "train.py ended with 2"}
    assert "2/2 done, 1 failed | alibi | done" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(configs) -> None:
    done = run(configs["broken"], configs["alibi"])
    assert done.returncode == 1
    assert "FAILED: train.py ended with 2" in done.stdout and "2/2 done, 1 failed" in done.stdout
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: run broken: train.py ended with 2: error: data.dir nowhere")
    assert "runs/broken.log" in done.stderr
    assert Path("runs/alibi/summary.json").exists() and Path("runs/report/report.html").exists()


@pytest.mark.slow
def test_submitit_runs_each_as_a_job(configs) -> None:
    pytest.importorskip("submitit")
    done = run(configs["rope"], configs["broken"], "--submitit", "jobs", "--slurm",
               "timeout_min=5", "slurm_partition=none")
    assert done.returncode == 1, done.stderr
    assert "2/2 done, 1 failed" in done.stdout and "run broken: train.py ended with 2" in done.stderr
    assert len(list(Path("jobs").glob("*_submitted.pkl"))) == 2
    assert "1 run, trained at L = 32" in done.stdout


@pytest.mark.parametrize(("arguments", "expected"), [
    (["a.toml"], "config a.toml: no such file"),
    (["rope.toml", "train.sed=1"], "did you mean seed?"),
    (["rope.toml", "--seeds", "0,x"], "--seeds 0,x: must be integers"),
    (["train.lr=1"], "no config given"),
    (["rope.toml", "other/rope.toml"], "rope.toml has the same name"),
    (["rope.toml", "--grid", "train.lr"], "--grid train.lr: must read section.key=value,value"),
    (["rope.toml", "--grid", "train.lr=1,1"], "with different values"),
    (["rope.toml", "--grid", "train.lr=1", "--grid", "train.lr=2"], "--grid train.lr: given twice"),
    (["rope.toml", "--grid", "train.sed=1,2"], "did you mean seed?"),
    (["rope.toml", "--submitit", "jobs", "--slurm", "timeout_min"], "--slurm timeout_min: must read key"),
    (["rope.toml", "--submitit", "jobs", "--slurm", "tiemout_min=3"], "--slurm tiemout_min"),
    (["rope.toml", "--submitit", "jobs", "--slurm", "gpus_per_node=1", "train.lr=1"], "go before --slurm"),
])
def test_mistakes_are_one_line_and_nothing_starts(arguments: list[str], expected: str, configs, monkeypatch,
                                                  capsys) -> None:
    Path("other").mkdir()
    Path("other/rope.toml").write_text(Path("rope.toml").read_text())
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    with pytest.raises(SystemExit) as end:
        run_command(main)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert expected in error and not os.path.exists("runs")


@pytest.mark.slow
def test_a_method_that_does_not_fit_a_config_is_skipped_there(configs) -> None:
    """The run stays in the report with its plain curve, and the skipped method is named in one line."""
    done = subprocess.run([*command(configs["rope"], configs["alibi"]), f"{EVAL} --extend yarn:beta_fast=2"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("skipped") == 1
    assert "alibi: skipped --extend yarn:beta_fast=2: needs a rotary encoding" in done.stdout
    report = Path("runs/report/report.md").read_text()
    rows = report.split("## Perplexity, fixed targets\n")[1].split("\n## ")[0]
    labels = [line.split(" | ")[0] for line in rows.splitlines() if line.startswith("| ")]
    assert labels[1:] == ["| rope", "| alibi", "| rope + yarn:beta_fast=2"]


def test_every_evaluation_of_a_sweep_may_skip_methods(configs, monkeypatch) -> None:
    calls = []

    def call(arguments, log, show) -> int:
        calls.append(list(arguments))
        log.write_text("\n$ python eval.py old\nskipped --extend ntk: old\n$ python eval.py runs/rope\n"
                       "skipped --extend yarn: needs a rotary encoding\n$ python train.py\nfinished\n")
        if arguments[0] == "eval.py":
            Path("runs/rope/eval").mkdir(parents=True)
            Path("runs/rope/eval/words.json").write_text("{}")
        return 0

    monkeypatch.setattr(sweep, "call", call)
    one = job("--extend", "yarn")
    assert sweep.work(one) == "" and calls[1][:4] == ["eval.py", "runs/rope", "--skip-unfit", "--replace"]
    assert sweep.skipped(one) == ["skipped --extend yarn: needs a rotary encoding"]


def test_a_grid_is_every_combination_and_names_carry_the_values(configs) -> None:
    jobs = sweep.make_jobs([configs["rope"]], TINY, [0, 1], Path("runs"), [],
                           ["train.lr=1e-3,2e-3", "position.layers=first,[0,1]"])
    assert [j.name for j in jobs] == [
        f"rope-lr-{lr}-layers-{layers}-seed{seed}" for lr in ("1e-3", "2e-3")
        for layers in ("first", "_0_1_") for seed in (0, 1)]
    assert jobs[-1].overrides[len(TINY):-2] == ["train.lr=2e-3", "position.layers=[0,1]"]
    assert len({j.run_dir for j in jobs}) == 8
    (one,) = sweep.make_jobs([configs["rope"]], TINY, [], Path("runs"), [], ["model.n_head=2"])
    assert one.run_dir == Path("runs/rope-n_head-2")
    point = ["train.window=8", "model.window=9"]                        # the same key in two sections
    assert [sweep.in_name(override, point) for override in point] == ["train.window-8", "model.window-9"]


def test_jobs_are_configs_times_seeds_and_all_problems_come_at_once(configs) -> None:
    jobs = sweep.make_jobs([configs["rope"], configs["alibi"]], ["train.lr=0.5"], [0, 7], Path("a b"), [])
    assert [j.name for j in jobs] == ["rope-seed0", "rope-seed7", "alibi-seed0", "alibi-seed7"]
    assert jobs[1].overrides == ["train.lr=0.5", 'run.dir="a b/rope-seed7"', "train.seed=7"]
    (job,) = sweep.make_jobs([configs["rope"]], [], [], Path("runs"), [])
    assert job.overrides == ['run.dir="runs/rope"']
    with pytest.raises(UserError) as error:
        sweep.make_jobs(["x.toml", "y.toml"], ["train.lr=-1"], [0, 1], Path("runs"), [])
    assert len(error.value.problems) == 3
