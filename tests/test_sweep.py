"""Sweeps: finished work is kept, and an interrupted or failing run affects only itself."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from toys import ROOT, TINY

import sweep
from base.errors import UserError
from evaluation import sweeping, trials

EVAL = "--eval=--lengths 32,64 --windows 4 --protocol fixed"


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, corpus_dir: Path, monkeypatch) -> None:
    """Config files in tmp_path, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("rope", "alibi"):
        Path(f"{name}.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "{name}"\n')
    Path("broken.toml").write_text('[data]\ndir = "nowhere"\n[position]\nencoding = "rope"\n')


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweep.py"), *TINY, EVAL, *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True)


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_resumes() -> None:
    metrics, log = Path("runs/rope/metrics.jsonl"), Path("runs/rope.log")
    more = ["train.steps=30000", "run.save_every=30000", "run.eval_every=30000"]

    def stop_when(number: int, is_there) -> str:
        process = subprocess.Popen(command("rope.toml", *more), stdout=subprocess.PIPE, text=True)
        while process.poll() is None and not is_there():
            time.sleep(0.05)
        process.send_signal(number)
        out = process.communicate()[0]
        assert process.returncode == 128 + number
        return out

    out = stop_when(signal.SIGINT, lambda: metrics.exists() and metrics.read_text().count("\n") > 5)
    assert "the same command resumes from there" in out
    (saved,) = Path("runs/rope/checkpoints").glob("[0-9]*")
    assert 5 < int(saved.name) < 30000
    stop_when(signal.SIGTERM, lambda: "resuming" in log.read_text())
    assert f"resuming runs/rope at step {int(saved.name)}\n" in log.read_text()


@pytest.mark.slow
def test_submitit_trains_evaluates_and_compares() -> None:
    """A method that does not fit a config is skipped there; a run that fails is named, the others go on."""
    pytest.importorskip("submitit")
    done = run("alibi.toml", "broken.toml", "--submitit", "jobs", "--slurm", "timeout_min=5",
               f"{EVAL} --extend yarn")
    assert done.returncode == 1, done.stderr
    assert "alibi: done" in done.stdout and "broken: train.py ended with 2" in done.stdout
    assert "skipped --extend yarn" in Path("runs/alibi.log").read_text()
    assert "<i>alibi</i>" in Path("runs/report/report.html").read_text()
    assert done.stderr.startswith("error: run broken: train.py ended with 2: error: nowhere: no")
    assert done.stderr.endswith("see runs/broken.log\n") and done.stderr.count("\n") == 1
    assert len(list(Path("jobs").glob("*_submitted.pkl"))) == 2


def test_a_run_of_other_code_is_named(monkeypatch, capsys) -> None:
    (job,) = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [], Path("runs"), [])
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "summary.json").write_text('{"git_revision": "abc"}')
    for revision, expected in (("abc", "rope: done\n"), ("def", "rope: done by other code than today's; ")):
        monkeypatch.setattr("runtime.run.git_revision", lambda revision=revision: (revision, b""))
        sweeping.finish(job, "", {})
        assert capsys.readouterr().out.startswith(expected)


def test_an_evaluation_is_repeated_when_its_arguments_changed_or_it_failed(monkeypatch) -> None:
    calls, problem = list[str](), ""

    def call(arguments, log) -> str:
        calls.append(arguments[0])
        Path("runs/rope/eval").mkdir(parents=True, exist_ok=True)
        return problem if arguments[0] == "eval.py" else ""

    def work(*arguments: str) -> str:
        (job,) = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [], Path("runs"), list(arguments))
        calls.clear()
        return sweeping.work(job)

    monkeypatch.setattr(sweeping, "call", call)
    both = ["train.py", "eval.py"]
    for windows, expected in (("2", both), ("2", ["train.py"]), ("3", both)):
        assert work("--windows", windows) == "" and calls == expected
    problem = "eval.py ended with 2: error: another commit"
    for _ in range(2):
        assert work("--windows", "4") == problem and calls == both


def test_an_interrupted_evaluation_is_continued(monkeypatch) -> None:
    """It is not replaced, unless its arguments changed or it failed. Ctrl-C ends eval.py, in a job us too."""
    stopped, mistake = "eval.py ended with 130: stopped", "eval.py ended with 2: error: another commit"
    replaced, problems = list[bool](), iter(("", stopped, stopped, mistake, KeyboardInterrupt, ""))

    def call(arguments, log) -> str:
        Path("runs/rope/eval").mkdir(parents=True, exist_ok=True)
        if arguments[0] != "eval.py":
            return ""
        replaced.append("--replace" in arguments)
        problem = next(problems)
        if problem is KeyboardInterrupt:
            raise problem
        return problem

    monkeypatch.setattr(sweeping, "call", call)
    for windows in ("2", "3", "3", "3", "3", "3", "3"):
        (job,) = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [], Path("runs"), ["--windows", windows])
        with contextlib.suppress(KeyboardInterrupt):
            sweeping.work(job)
    assert replaced == [True, True, False, False, True, False]


def test_the_report_is_on_a_text_that_all_runs_were_evaluated_on(monkeypatch) -> None:
    """Though one run was evaluated on another text later, or again on the same one."""
    jobs = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [0, 1], Path("runs"), [])
    for job, names in zip(jobs, (("earlier", "ours", "later"), ("earlier", "ours")), strict=True):
        folder = job.run_dir / "eval"
        folder.mkdir(parents=True)
        for second, name in enumerate(names):
            (folder / f"{name}.json").touch()
            os.utime(folder / f"{name}.json", (second, second))
    commands = []
    monkeypatch.setattr(sweeping.subprocess, "run",
                        lambda command: commands.append(command) or SimpleNamespace(returncode=0))
    assert sweeping.report(jobs, Path("out")) == 0
    assert commands[0][commands[0].index("--data") + 1] == "ours"


def test_workers_run_at_a_time_with_their_share_of_the_cores(monkeypatch, capsys) -> None:
    both = threading.Barrier(2, timeout=60)     # passed only if two runs are at work at the same time

    def work(job) -> str:
        both.wait()
        return "train.py ended with 2" if job.name.endswith("1") else ""

    monkeypatch.setattr(sweeping, "work", work)
    monkeypatch.setattr(sweeping, "is_by_other_code", lambda _: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "")       # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    jobs = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [0, 1, 2, 3], Path("runs"), [])
    assert sweeping.run_here(jobs, 2) == {"rope-seed1": "train.py ended with 2"}
    assert "rope-seed1: train.py ended with 2\n" in capsys.readouterr().out
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_jobs_are_configs_times_points_times_seeds_and_all_problems_come_at_once() -> None:
    points = trials.grid_points(["train.lr=1e-3,2e-3", "position.layers=first,[0,1]"])
    assert len(trials.grid_points(['data.mixture={a=0.1,b=0.2},{a=0.3}'])) == 2
    jobs = sweeping.make_jobs({"rope.toml": points}, TINY, [0, 1], Path("a b"), [])
    assert [j.name for j in jobs] == [f"rope-lr-{lr}-layers-{layers}-seed{seed}" for lr in ("1e-3", "2e-3")
                                      for layers in ("first", "_0_1_") for seed in (0, 1)]
    assert jobs[-1].overrides[len(TINY):] == ["train.lr=2e-3", "position.layers=[0,1]",
                                              "train.seed=1", f'run.dir="a b/{jobs[-1].name}"']
    wrong = {"x.toml": [[]], "y.toml": [[]], "rope.toml": [["train.lr=-1"]]}
    with pytest.raises(UserError) as error:
        sweeping.make_jobs(wrong, [], [0, 1], Path("runs"), [])
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(("arguments", "expected"), [
    (["a.toml"], "config a.toml: no such file"),
    (["rope.toml", "./rope.toml"], "rope.toml has the same name"),
    (["rope.toml", "--grid", "train.lr=1,1"], "run rope-lr-1: a seed, value or config is given twice"),
    (["rope.toml", "--choose", "val_loss"], "at least two, got 1 for rope"),
    (["rope.toml", "--choose", "val_loss", "--grid", "train.steps=1,2"], "must not differ in train.steps"),
    (["rope.toml", "--trials", "wrong.toml"], "rop is none of the configs; did you mean rope?"),
    (["alibi.toml", "--trials", "short.toml"], "must read section.key=value"),
    (["rope.toml", "--trials", "empty.toml"], "no trials for rope; add them"),
    (["rope.toml", "alibi.toml", "--trials", "unequal.toml", "--choose", "val_loss"], "got 2 for rope"),
    (["rope.toml", "--submitit", "jobs", "--slurm", "tiemout_min=3"], "tiemout_min"),
])
def test_mistakes_are_errors_and_nothing_starts(arguments: list[str], expected: str, monkeypatch) -> None:
    Path("wrong.toml").write_text('rop = ["train.lr=1,2"]')
    Path("empty.toml").write_text("")
    Path("short.toml").write_text('alibi = "train.lr=1,2"')
    Path("unequal.toml").write_text('rope = ["train.lr=1,2"]\nothers = ["train.lr=1"]')
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    with pytest.raises(UserError, match=expected.replace("?", r"\?")):
        sweep.main()
    assert not os.path.exists("runs")


# -----------------------------------------------------------------------------------------------------------
# --choose


def test_the_lowest_mean_over_all_seeds_is_chosen_and_nothing_else_is_run(monkeypatch, capsys) -> None:
    """One lucky seed does not decide, a trial that diverges loses, and the choice is a file for --trials."""
    losses: dict[str, float | str] = {"rope-lr-1e-3-seed8": 1.0, "rope-lr-1e-3-seed9": 1.5,
                                      "rope-lr-2e-3-seed8": 1.2, "rope-lr-2e-3-seed9": 1.1,
                                      "rope-lr-4e-3-seed8": 0.1, "rope-lr-4e-3-seed9": sweeping.DIVERGED}
    calls = list[str]()

    def call(arguments, log) -> str:
        """Write a run's validation loss, or return the problem of its training."""
        calls.append(f"{arguments[0]} {log.stem}")
        found = losses[log.stem]
        if isinstance(found, str):
            return found
        (Path("runs") / log.stem).mkdir(parents=True, exist_ok=True)
        (Path("runs") / log.stem / "summary.json").write_text(json.dumps({"val_loss": found}))
        return ""

    def choose() -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *TINY, "rope.toml", "--choose", "val_loss", "--seeds",
                                          "8,9", "--grid", "train.lr=1e-3,2e-3,4e-3"])
        code = sweep.main()
        return code, "".join(capsys.readouterr())

    monkeypatch.setattr(sweeping, "call", call)
    assert choose()[0] == 0
    assert calls == [f"train.py {name}" for name in losses]
    chosen = trials.read_points(Path("runs/report/chosen.toml"), ["rope.toml"])
    assert chosen == {"rope.toml": [["train.lr=2e-3"]]}
    rows = Path("runs/report/trials.csv").read_text().splitlines()
    assert rows[:2] == ["config,trial,run,val_loss,mean", "rope,train.lr=1e-3,rope-lr-1e-3-seed8,1.0,1.25"]
    assert rows[-1] == "rope,train.lr=4e-3,rope-lr-4e-3-seed9,inf,inf"
    Path("runs/report/chosen.toml").unlink()
    losses["rope-lr-2e-3-seed9"] = "train.py ended with 2"
    code, printed = choose()
    assert code == 1 and "error: run rope-lr-2e-3-seed9: train.py ended with 2\n" in printed
    assert "nothing is chosen" in printed and not Path("runs/report/chosen.toml").exists()


def test_each_config_may_have_its_own_trials() -> None:
    Path("trials.toml").write_text(
        'others = ["train.lr=1e-3,2e-3,3e-3"]\n'
        'alibi = ["train.lr=1e-3,2e-3 position.learned=true", "train.lr=5e-3"]\n')
    points = trials.read_points(Path("trials.toml"), ["rope.toml", "alibi.toml"])
    assert points == {"rope.toml": [["train.lr=1e-3"], ["train.lr=2e-3"], ["train.lr=3e-3"]],
                      "alibi.toml": [["train.lr=1e-3", "position.learned=true"],
                                     ["train.lr=2e-3", "position.learned=true"], ["train.lr=5e-3"]]}
    trials.check_fair(points)


def test_a_run_that_another_sweep_trains_is_named_so(monkeypatch) -> None:
    """Both write into the same log."""
    Path("runs").mkdir()
    log = Path("runs/rope.log")
    log.write_text("error: of an earlier call\n")
    script = Path("train.py")
    script.write_text("print('error: runs/rope: another process trains it; stop it', 'step 3', sep='\\n', "
                      "flush=True)\nraise SystemExit(2)")
    monkeypatch.setattr(sweeping, "ROOT", Path.cwd())
    assert sweeping.call(["train.py"], log) == (
        "train.py ended with 2: error: runs/rope: another process trains it; stop it; see runs/rope.log")


def test_arguments_of_eval_need_an_equals_sign(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", "rope.toml", "--eval", "--windows", "8"])
    with pytest.raises(UserError, match='write --eval="VALUE"'):
        sweep.parse_arguments()
