"""Sweeps: finished work is kept, and an interrupted or failing run affects only itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, python

from evaluation import sweeping as sweep
from evaluation import trials
from evaluation.trials import grid_points
from runtime.command import SIGNALS, run_command
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
    stamp, result = job(*short).stamp, Path("runs/rope/eval/words.json")
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


def test_a_damaged_checkpoint_of_a_finished_run_does_not_end_the_sweep(configs) -> None:
    folder = job().run_dir / "checkpoints" / "00000012"
    folder.mkdir(parents=True)
    for content in ('{"check": "a"', "[]", "{}", '{"check": "a"}'):
        (folder / "state.json").write_text(content)
        assert sweep.state(job())["checkpoint"] == ("a" if content.endswith('"a"}') else None)


def test_an_evaluation_depends_on_the_content_of_the_files_that_its_arguments_name(configs) -> None:
    Path("text.txt").write_text("a")
    Path("corpus").mkdir()
    Path("corpus/meta.json").write_text("{}")
    for arguments, file in ((["--data", "text.txt"], "text.txt"), (["--data=text.txt"], "text.txt"),
                            (["--data", "corpus"], "corpus/meta.json")):
        before = sweep.state(job(*arguments))
        assert before == sweep.state(job(*arguments))
        Path(file).write_text(Path(file).read_text() + " ")
        assert before != sweep.state(job(*arguments)), arguments
    assert set(sweep.state(job("--windows", "3"))) == {"checkpoint", "arguments"}


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


def test_workers_run_at_a_time_and_a_failure_of_one_does_not_stop_the_others(configs, monkeypatch,
                                                                             capsys) -> None:
    both = threading.Barrier(2, timeout=60)     # passed only if two runs are at work at the same time

    def work(job, show) -> str:
        show(f"at work on {job.name}")
        both.wait()
        if job.name.endswith("0"):
            raise OSError(28, "No space left on device", "runs/x.log")
        return "train.py ended with 2" if job.name.endswith("1") else ""

    monkeypatch.setattr(sweep, "work", work)
    monkeypatch.setenv("OMP_NUM_THREADS", "")       # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    jobs = sweep.make_jobs([configs["rope"]], TINY, [0, 1, 2, 3], Path("runs"), [])
    progress = sweep.Progress(4, n_workers=2)
    sweep.run_here(jobs, progress)
    assert progress.done == 4 and progress.failed == {
        "rope-seed0": "runs/x.log: No space left on device", "rope-seed1": "train.py ended with 2"}
    assert "4/4 done, 2 failed | rope-seed" in capsys.readouterr().out
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_an_interrupt_stops_every_worker_and_starts_no_other_run(configs, monkeypatch) -> None:
    began, saved = [], []

    def work(job, show) -> str:
        began.append(job.name)
        try:
            for _ in range(200):
                time.sleep(0.05)
                show("step")
        except KeyboardInterrupt:
            saved.append(job.name)
            raise
        return ""

    def show(progress, name, what, stays=False) -> None:
        if len(began) == 2:
            raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr(sweep, "work", work)
    monkeypatch.setattr(sweep.Progress, "show", show)
    jobs = sweep.make_jobs([configs["rope"]], TINY, [0, 1, 2, 3], Path("runs"), [])
    with pytest.raises(KeyboardInterrupt):
        sweep.run_here(jobs, sweep.Progress(4, n_workers=2))
    assert sorted(saved) == sorted(began) == ["rope-seed0", "rope-seed1"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of all signals back after a test that runs the command in this process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
def test_further_signals_do_not_cut_the_save(first: int, configs, monkeypatch, capsys, handlers) -> None:
    saved = []

    def interrupted_again(*_: Any) -> int:
        try:
            os.kill(os.getpid(), first)
            time.sleep(60)
        except KeyboardInterrupt:
            for number in SIGNALS:
                os.kill(os.getpid(), number)
            saved.append(1)
            raise
        return 0

    monkeypatch.setattr("sweep.sweep", interrupted_again)
    monkeypatch.setattr(sys, "argv", command(configs["rope"])[1:])
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == 128 + first and saved
    assert "the same command resumes from there" in capsys.readouterr().out


def test_a_sweep_under_nohup_outlives_its_terminal(configs, monkeypatch, handlers) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("sweep.sweep", lambda *_: os.kill(os.getpid(), signal.SIGHUP) or 0)
    monkeypatch.setattr(sys, "argv", command(configs["rope"])[1:])
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == 0


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_orphans(configs) -> None:
    """SIGKILL gives the sweep no chance: its commands notice that it has ended, save and end."""
    more = ["train.steps=30000", "run.save_every=30000", "run.eval_every=30000", "--workers", "2"]
    process = subprocess.Popen(command(configs["rope"], configs["alibi"], *more), stdout=subprocess.PIPE)
    logs = [Path("runs/rope.log"), Path("runs/alibi.log")]
    deadline = time.monotonic() + 300
    while not all(log.exists() and log.read_text().count("loss") > 5 for log in logs):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.communicate()
    while not all("stopped by SIGTERM, saved at step" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text()[-500:] for log in logs]
        time.sleep(0.1)


def test_a_command_whose_sweep_has_already_ended_does_not_start(tiny) -> None:
    config = tiny("rope")
    done = python("train.py", Path(config.run.dir).parent / "rope.toml", *TINY, f"run.dir={config.run.dir}",
                  NANOROPE_PARENT="1")
    assert done.returncode == 143 and done.stderr == "stopped by SIGTERM\n" and not done.stdout
    assert not Path(config.run.dir).exists()


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
    for name in ("config", "data", "evaluation", "model"):      # jobs start here, beside modules of the user
        Path(f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
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
    (["rope.toml", "--grid", "train.lr=1e-3,0.001"], "rope-lr-1e-3 and rope-lr-0.001 are the same training"),
    (["rope.toml", "--grid", "train.lr=1", "--grid", "train.lr=2"], "--grid train.lr: given twice"),
    (["rope.toml", "--grid", "train.sed=1,2"], "did you mean seed?"),
    (["rope.toml", "--eval", "'"], "--eval: \"'\" has no closing quotation; close the quotes"),
    (["rope.toml", "--workers", "0"], "--workers 0: must be at least 1"),
    (["rope.toml", "--choose", "loss"], "argument --choose: invalid choice: 'loss'"),
    (["rope.toml", "--choose", "val_loss"], "there is nothing to choose from"),
    (["rope.toml", "--choose", "val_loss", "--grid", "train.steps=1,2"], "must not differ in train.steps"),
    (["rope.toml", "--choose", "val_loss", "--grid", "position.lr_scale=1,2"], "has no effect on rope.toml"),
    (["rope.toml", "--trials", "no.toml"], "no.toml: no such file"),
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
    grid = grid_points(["train.lr=1e-3,2e-3", "position.layers=first,[0,1]"])
    jobs = sweep.make_jobs(["rope.toml"], TINY, [0, 1], Path("runs"), [], {"rope.toml": grid})
    assert [j.name for j in jobs] == [
        f"rope-lr-{lr}-layers-{layers}-seed{seed}" for lr in ("1e-3", "2e-3")
        for layers in ("first", "_0_1_") for seed in (0, 1)]
    assert jobs[-1].overrides[len(TINY):-2] == ["train.lr=2e-3", "position.layers=[0,1]"]
    assert len({j.run_dir for j in jobs}) == 8
    (one,) = sweep.make_jobs(["rope.toml"], TINY, [], Path("runs"), [], {"rope.toml": [["model.n_head=2"]]})
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


# -----------------------------------------------------------------------------------------------------------
# --choose


def choosing(losses: dict[str, dict[int, float] | int], monkeypatch) -> list[list[str]]:
    """Replace the commands of a sweep: a run's losses at each length, the first being L; or its exit code.
    A name without its seed stands for all seeds that are not named.

    Returns the commands as they come.
    """
    calls = []

    def call(arguments, log, show) -> int:
        calls.append(list(arguments))
        log.write_text("log\n")
        folder = next((Path(json.loads(a.partition("=")[2])) for a in arguments if a.startswith("run.dir=")),
                      Path(arguments[1]))
        found = losses.get(folder.name, losses.get(folder.name.partition("-seed")[0], {32: 9.0}))
        if isinstance(found, int):
            return found
        (folder / "eval").mkdir(parents=True, exist_ok=True)
        if arguments[0] == "train.py":
            (folder / "summary.json").write_text(json.dumps({"val_loss": found[32]}))
        elif len(found) == 1:
            return 2
        elif "--json" in arguments:
            records = [{"length": n, "nll_sum": 10 * loss, "tokens": 10} for n, loss in found.items()]
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"records": records}))
        else:
            (folder / "eval" / "words.json").write_text("{}")
        return 0

    monkeypatch.setattr(sweep, "call", call)
    monkeypatch.setattr("sweep.report", lambda jobs, out, labels: print([j.name for j in jobs], labels) or 0)
    return calls


def sweep_here(*arguments: str, monkeypatch) -> int:
    """main() of sweep.py in this process; its exit code."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "argv", ["sweep.py", *TINY, *arguments])
    try:
        return main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


CHOOSE = ("--choose", "val_loss", "--grid", "train.lr=1e-3,2e-3,4e-3")


def test_the_choice_is_by_validation_loss_at_L_alone(configs, monkeypatch, capsys) -> None:
    """A trial that is better at 8 L but worse at L is not chosen; only the chosen one gets all seeds."""
    calls = choosing({"rope-lr-1e-3": {32: 2.0, 256: 1.0}, "rope-lr-2e-3": {32: 1.9, 256: 5.0},
                      "rope-lr-4e-3": {32: 3.0, 256: 0.5}}, monkeypatch)
    code = sweep_here("rope.toml", *CHOOSE, "--seeds", "3,4,5", "--eval=--extend yarn --windows 5",
                      monkeypatch=monkeypatch)
    assert code == 0
    trained = [Path(json.loads(c[-2].partition("=")[2])).name for c in calls if c[0] == "train.py"]
    assert trained[:3] == [f"rope-lr-{lr}-seed3" for lr in ("1e-3", "2e-3", "4e-3")]
    assert trained[3:5] == ["rope-lr-2e-3-seed4", "rope-lr-1e-3-seed4"]     # the better half, rounded up
    assert trained[5:] == ["rope-lr-2e-3-seed3", "rope-lr-2e-3-seed4", "rope-lr-2e-3-seed5"]
    evaluated = [c[4:] for c in calls if c[0] == "eval.py"]
    short = ["--windows", "5", "--protocol", "fixed", "--lengths", "32,256"]
    assert all(c[:6] == short for c in evaluated[:3])
    assert evaluated[3:] == [["--extend", "yarn", "--windows", "5"]] * 3   # the second seed needs none
    out = capsys.readouterr().out
    assert "chosen for rope: train.lr=2e-3, validation loss 1.9000" in out
    chosen = [f"rope-lr-2e-3-seed{seed}" for seed in (3, 4, 5)]
    assert f"{chosen} {['rope'] * 3}" in out
    assert "| rope | train.lr=2e-3 | chosen | 1.9000 | 1.9000 | 5.0000 | 1.9000 |" in Path(
        "runs/report/sensitivity.md").read_text()


def test_the_mean_over_two_seeds_decides_among_the_better_half(configs, monkeypatch, capsys) -> None:
    """One lucky seed does not decide, the worse half does not come back, and of two trials both go on."""
    losses: dict[str, dict[int, float] | int] = {
        "rope-lr-1e-3": {32: 1.0, 256: 1.0}, "rope-lr-2e-3": {32: 1.2, 256: 1.0},
        "rope-lr-4e-3": {32: 1.3, 256: 1.0}, "rope-lr-8e-3": {32: 1.4, 256: 1.0},
        "rope-lr-1e-3-seed1": {32: 1.5, 256: 1.0}, "rope-lr-4e-3-seed1": {32: 0.1, 256: 1.0}}
    choosing(losses, monkeypatch)
    arguments = ("rope.toml", "--choose", "val_loss", "--seeds", "0,1,2", "--grid")
    four = "train.lr=1e-3,2e-3,4e-3,8e-3"
    assert sweep_here(*arguments, four, monkeypatch=monkeypatch) == 0
    assert "chosen for rope: train.lr=2e-3, validation loss 1.2000" in capsys.readouterr().out
    page = Path("runs/report/sensitivity.md").read_text()
    assert "| rope | train.lr=1e-3 | default | 1.0000 | 1.0000 | 1.0000 | 1.5000 |" in page
    assert "| rope | train.lr=4e-3 |  | 1.3000 | 1.3000 | 1.0000 | - |" in page
    assert "4 trials with the first seed, and the better half of them with the second" in page
    losses["rope-lr-2e-3-seed1"] = 3                                        # diverged there: it loses
    assert sweep_here(*arguments, four, monkeypatch=monkeypatch) == 0
    assert "chosen for rope: train.lr=1e-3, validation loss 1.2500" in capsys.readouterr().out
    losses["rope-lr-2e-3-seed1"] = 2                                        # failed: nothing is chosen
    assert sweep_here(*arguments, four, monkeypatch=monkeypatch) == 1
    assert "nothing is chosen, because 1 of its 4 trials failed" in capsys.readouterr().err
    assert sweep_here(*arguments, "train.lr=1e-3,8e-3", monkeypatch=monkeypatch) == 0
    assert "chosen for rope: train.lr=1e-3, validation loss 1.2500" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "7", "{}", '{"records": [{"length": 32}]}', '{"val_loss": '])
@pytest.mark.parametrize("name", ["summary.json", "trial.json"])
def test_a_trial_whose_result_is_damaged_is_one_line(name: str, text: str, configs, monkeypatch) -> None:
    """Between its evaluation and the choice."""
    choosing({f"rope-lr-{lr}": {32: 2.0, 256: 1.0} for lr in ("1e-3", "2e-3", "4e-3")}, monkeypatch)
    run = sys.modules["sweep"].run

    def run_and_damage(*given):
        failed = run(*given)
        next(Path("runs").glob(f"**/{name}")).write_text(text)
        return failed

    monkeypatch.setattr("sweep.run", run_and_damage)
    with pytest.raises(UserError, match=f"{name}: damaged .*delete this file") as caught:
        sweep_here("rope.toml", *CHOOSE, monkeypatch=monkeypatch)
    assert str(caught.value).count("\n") == 0


def test_a_diverged_trial_loses_a_failed_one_stops_the_choice_and_the_first_of_equals_wins(
        configs, monkeypatch, capsys) -> None:
    losses = {"rope-lr-1e-3": 3, "rope-lr-2e-3": {32: 2.0, 256: 1.0}, "rope-lr-4e-3": {32: 2.0, 256: 0.5},
              "alibi-lr-1e-3": 2, "alibi-lr-2e-3": {32: 2.0, 256: 1.0}, "alibi-lr-4e-3": {32: 1.0}}
    choosing(losses, monkeypatch)
    code = sweep_here("rope.toml", "alibi.toml", *CHOOSE, monkeypatch=monkeypatch)
    out, error = capsys.readouterr()
    assert code == 1 and "chosen for rope: train.lr=2e-3" in out and "chosen for alibi" not in out
    assert "run rope-lr-1e-3" not in error                                  # a result, not a failure
    assert "config alibi.toml: nothing is chosen, because 1 of its 3 trials failed (train.lr=1e-3)" in error
    assert "run alibi-lr-4e-3: eval.py ended with 2" in error
    page = Path("runs/report/sensitivity.md").read_text()
    assert "| rope | train.lr=1e-3 | default, training diverged | - | - | - |" in page
    assert "| alibi | train.lr=4e-3 |  | 1.0000 | - | - |" in page          # trained, but not evaluated
    losses["alibi-lr-1e-3"] = {32: 4.0, 256: 1.0}                           # mended: the same command goes on
    assert sweep_here("rope.toml", "alibi.toml", *CHOOSE, monkeypatch=monkeypatch) == 1
    out, error = capsys.readouterr()
    assert "chosen for alibi: train.lr=4e-3" in out and error.count("\n") == 1
    for lr in ("1e-3", "2e-3", "4e-3"):
        losses[f"rope-lr-{lr}"] = 3
    sweep_here("rope.toml", *CHOOSE, monkeypatch=monkeypatch)
    assert "config rope.toml: all of its 3 trials diverged; give lower rates" in capsys.readouterr().err


def test_the_sensitivity_compares_default_and_chosen_orders(configs) -> None:
    def trial(config: str, lr: str, val: float, far: float, is_default: bool) -> trials.Trial:
        losses = {"validation loss": val, "loss at 32": val + 0.1, "loss at 256": far}
        return trials.Trial(config, [f"train.lr={lr}"], is_default, "", losses)

    found = [trial("rope.toml", "1e-3", 1.5, 9.0, True), trial("rope.toml", "2e-3", 1.4, 7.0, False),
             trial("t5.toml", "1e-3", 1.6, 2.0, True), trial("t5.toml", "2e-3", 1.25, 1.5, False)]
    halves, problems = trials.better_halves(found)
    chosen = {name: half[0] for name, half in halves.items()}
    assert not problems and {name: t.values for name, t in chosen.items()} == {
        "rope": "train.lr=2e-3", "t5": "train.lr=2e-3"}
    page = trials.sensitivity(found, chosen, 32, [])
    assert "| rope | train.lr=1e-3 | train.lr=2e-3 | 0.1000 | 0.1000 | 2.0000 | 0 |" in page
    assert "- Order by validation loss, the lowest first: t5, rope at the chosen trials (0.1500 from" in page
    assert "last); rope, t5 at the default ones." in page
    assert "Order by loss at 256, the lowest first: t5, rope at the chosen trials (5.5000 from" in page
    assert "last); the same at the default ones." in page and "the configs are equal" in page
    assert "- At the edge of its grid, so that a better value may lie beyond: t5, train.lr=2e-3." in page
    inside = trials.Trial("t5.toml", ["train.lr=3e-3"], False, "", {})
    assert "t5, train.lr=2e-3." not in trials.sensitivity([*found, inside], chosen, 32, [])
    trials.write_sensitivity(Path("out"), found, chosen, 32, ["t5: train.steps: 1 -> 2"])
    assert "the configs differ: t5: train.steps: 1 -&#62; 2." in Path("out/sensitivity.md").read_text()
    rows = Path("out/sensitivity.csv").read_text().splitlines()
    assert rows[0] == "config,trial,is_default,is_chosen,problem,validation loss,loss at 32,loss at 256"
    assert rows[4] == "t5,train.lr=2e-3,0,1,,1.25,1.35,1.5"


def test_each_config_may_have_its_own_trials_but_as_many_as_the_others(configs) -> None:
    Path("trials.toml").write_text(
        'others = ["train.lr=1e-3,2e-3,3e-3"]\n'
        'alibi = ["train.lr=1e-3,2e-3 position.slopes=learned", "train.lr=5e-3"]\n')
    points = trials.read_points(Path("trials.toml"), ["rope.toml", "alibi.toml"])
    assert points == {"rope.toml": [["train.lr=1e-3"], ["train.lr=2e-3"], ["train.lr=3e-3"]],
                      "alibi.toml": [["train.lr=1e-3", "position.slopes=learned"],
                                     ["train.lr=2e-3", "position.slopes=learned"], ["train.lr=5e-3"]]}
    assert trials.check_fair(points, TINY) == []
    with pytest.raises(UserError, match="the same number of trials, got 3 for rope, 2 for alibi"):
        trials.check_fair({**points, "alibi.toml": points["alibi.toml"][:2]}, TINY)


@pytest.mark.parametrize(("text", "expected"), [
    ("others = [", "not valid TOML"),
    ("rop = ['train.lr=1,2']", "rop is none of the configs; did you mean rope?"),
    ("alibi = ['train.lr=1,2']", "alibi is none of the configs; remove it"),
    ("", "rope must be a list of grids such as .* got nothing"),
    ("rope = 'train.lr=1,2'", "rope must be a list of grids"),
    ("rope = ['train.lr']", "train.lr: must read section.key=value,value"),
    ('rope = ["train.lr=\'1"]', "has no closing quotation"),
])
def test_a_wrong_file_of_trials_is_refused(text: str, expected: str, configs) -> None:
    Path("trials.toml").write_text(text)
    with pytest.raises(UserError, match=expected):
        trials.read_points(Path("trials.toml"), ["rope.toml"])


def test_configs_that_differ_are_named_and_other_lengths_are_refused(configs) -> None:
    Path("long.toml").write_text('extends = "rope.toml"\ntrain.seq_len = 64\n')
    Path("slow.toml").write_text('extends = "rope.toml"\ntrain = { lr = 1e-4, beta1 = 0.8 }\n')
    points = grid_points(["train.lr=1e-3,2e-3"])
    unequal = trials.check_fair({"rope.toml": points, "slow.toml": points}, [])
    assert unequal == ["slow: train.beta1: 0.9 -> 0.8"]
    with pytest.raises(UserError, match="long.toml has another train.seq_len than rope.toml"):
        trials.check_fair({"rope.toml": points, "long.toml": points}, [])


@pytest.mark.slow
def test_a_sweep_that_chooses_trains_nothing_twice(configs) -> None:
    """With real commands: the trials, the choice, the other seed and the report, and again."""
    arguments = (configs["rope"], "--seeds", "0,1", "--choose", "val_loss", "--grid", "train.lr=1e-3,1e-2",
                 "--workers", "2")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "chosen for rope: train.lr=1e-2" in done.stdout
    logs = {path.name for path in Path("runs").glob("*.log")}
    assert logs == {f"rope-lr-{lr}-seed{seed}.log" for lr in ("1e-3", "1e-2") for seed in (0, 1)}
    assert not Path("runs/rope-lr-1e-3-seed0/eval").exists()                # measured at L and 8 L alone
    assert "| rope | rope |  | 0, 1 |" in Path("runs/report/report.md").read_text()
    page = Path("runs/report/sensitivity.md").read_text()
    assert page.count("| rope | train.lr=") == 3 and "loss at 256" in page
    files = [path for path in Path("runs").rglob("*") if path.is_file() and path.suffix != ".log"
             and path.parent.name != "report"]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert run(*arguments).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in files}
