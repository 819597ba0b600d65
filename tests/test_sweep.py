"""Sweeps: finished work is kept, and an interrupted or failing run affects only itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY

import sweep
from evaluation import sweeping, trials
from runtime.errors import UserError

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
    done = run("rope.toml", "alibi.toml", "broken.toml", "--submitit", "jobs", "--slurm", "timeout_min=5",
               f"{EVAL} --extend yarn")
    assert done.returncode == 1, done.stderr
    assert "rope: done" in done.stdout and "broken: train.py ended with 2" in done.stdout
    assert "skipped --extend yarn" in Path("runs/alibi.log").read_text()
    assert "rope + yarn" in Path("runs/report/report.html").read_text()
    assert done.stderr.startswith("error: run broken: train.py ended with 2: error: nowhere: no")
    assert done.stderr.endswith("see runs/broken.log\n") and done.stderr.count("\n") == 1
    assert len(list(Path("jobs").glob("*_submitted.pkl"))) == 3


def test_an_evaluation_is_repeated_when_its_arguments_changed_or_it_failed(monkeypatch) -> None:
    calls, code = list[str](), 0

    def call(arguments, log) -> int:
        calls.append(arguments[0])
        log.write_text("why\n")
        Path("runs/rope/eval").mkdir(parents=True, exist_ok=True)
        return code if arguments[0] == "eval.py" else 0

    def work(*arguments: str) -> str:
        (job,) = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [], Path("runs"), list(arguments))
        calls.clear()
        return sweeping.work(job)

    monkeypatch.setattr(sweeping, "call", call)
    both = ["train.py", "eval.py"]
    for windows, expected in (("2", both), ("2", ["train.py"]), ("3", both)):
        assert work("--windows", windows) == "" and calls == expected
    code = 2
    for _ in range(2):
        assert work("--windows", "4") == "eval.py ended with 2: why; see runs/rope.log" and calls == both


def test_workers_run_at_a_time_with_their_share_of_the_cores(monkeypatch, capsys) -> None:
    both = threading.Barrier(2, timeout=60)     # passed only if two runs are at work at the same time

    def work(job) -> str:
        both.wait()
        return "train.py ended with 2" if job.name.endswith("1") else ""

    monkeypatch.setattr(sweeping, "work", work)
    monkeypatch.setenv("OMP_NUM_THREADS", "")       # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    jobs = sweeping.make_jobs({"rope.toml": [[]]}, TINY, [0, 1, 2, 3], Path("runs"), [])
    assert sweeping.run_here(jobs, 2) == {"rope-seed1": "train.py ended with 2"}
    assert "rope-seed1: train.py ended with 2\n" in capsys.readouterr().out
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_jobs_are_configs_times_points_times_seeds_and_all_problems_come_at_once() -> None:
    points = trials.grid_points(["train.lr=1e-3,2e-3", "position.layers=first,[0,1]"])
    jobs = sweeping.make_jobs({"rope.toml": points}, TINY, [0, 1], Path("a b"), [])
    assert [j.name for j in jobs] == [f"rope-lr-{lr}-layers-{layers}-seed{seed}" for lr in ("1e-3", "2e-3")
                                      for layers in ("first", "_0_1_") for seed in (0, 1)]
    assert jobs[-1].overrides[len(TINY):] == ["train.lr=2e-3", "position.layers=[0,1]",
                                              f'run.dir="a b/{jobs[-1].name}"', "train.seed=1"]
    wrong = {"x.toml": [[]], "y.toml": [[]], "rope.toml": [["train.lr=-1"]]}
    with pytest.raises(UserError) as error:
        sweeping.make_jobs(wrong, [], [0, 1], Path("runs"), [])
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(("arguments", "expected"), [
    (["a.toml"], "config a.toml: no such file"),
    (["rope.toml", "./rope.toml"], "rope.toml has the same name"),
    (["rope.toml", "--grid", "train.lr=1,1"], "rope.toml has the same name"),
    (["rope.toml", "--choose", "val_loss"], "at least two, got 1 for rope"),
    (["rope.toml", "--choose", "val_loss", "--grid", "train.steps=1,2"], "must not differ in train.steps"),
    (["rope.toml", "--choose", "val_loss", "--grid", "position.lr_scale=1,2"], "has no effect on rope.toml"),
    (["rope.toml", "--trials", "wrong.toml"], "rop is none of the configs; did you mean rope?"),
    (["alibi.toml", "--trials", "short.toml"], "must read section.key=value"),
    (["rope.toml", "--trials", "empty.toml"], "no trials for rope; add them"),
    (["rope.toml", "alibi.toml", "--trials", "unequal.toml", "--choose", "val_loss"], "got 2 for rope"),
    (["rope.toml", "long.toml", "--grid", "train.lr=1,2", "--choose", "val_loss"], "another train.seq_len"),
    (["rope.toml", "--submitit", "jobs", "--slurm", "tiemout_min=3"], "tiemout_min"),
])
def test_mistakes_are_errors_and_nothing_starts(arguments: list[str], expected: str, monkeypatch) -> None:
    Path("wrong.toml").write_text('rop = ["train.lr=1,2"]')
    Path("empty.toml").write_text("")
    Path("short.toml").write_text('alibi = "train.lr=1,2"')
    Path("unequal.toml").write_text('rope = ["train.lr=1,2"]\nothers = ["train.lr=1"]')
    Path("long.toml").write_text('extends = "rope.toml"\ntrain.seq_len = 64\n')
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    with pytest.raises(UserError, match=expected.replace("?", r"\?")):
        sweep.main()
    assert not os.path.exists("runs")


# -----------------------------------------------------------------------------------------------------------
# --choose


def test_the_mean_over_two_seeds_decides_among_the_better_half(monkeypatch, capsys) -> None:
    """One lucky seed does not decide, the worse half does not come back, and a trial that diverges loses."""
    losses: dict[str, float | int] = {
        "rope-lr-1e-3": 1.0, "rope-lr-2e-3": 1.2, "rope-lr-4e-3": 1.3, "rope-lr-8e-3": 1.4,
        "rope-lr-1e-3-seed1": 1.5, "rope-lr-4e-3-seed1": 0.1}
    calls, reports = list[list[str]](), list[list[str]]()

    def call(arguments, log) -> int:
        """A run's validation loss, or the exit code of its training; without its seed, of all seeds."""
        calls.append(list(arguments))
        log.write_text("log\n")
        name = log.stem
        found = losses.get(name, losses.get(name.partition("-seed")[0], 9.0))
        if isinstance(found, float):
            (Path("runs") / name / "eval").mkdir(parents=True, exist_ok=True)
            (Path("runs") / name / "summary.json").write_text(json.dumps({"val_loss": found}))
        return 0 if isinstance(found, float) else found

    def chosen(seeds: str, rates: str) -> str:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *TINY, "rope.toml", "--choose", "val_loss",
                                          "--seeds", seeds, "--grid", f"train.lr={rates}"])
        sweep.main()
        out, error = capsys.readouterr()
        return out + error

    monkeypatch.setattr(sweeping, "call", call)
    monkeypatch.setattr(sweeping, "report", lambda jobs, *_: reports.append([j.name for j in jobs]) or 0)
    four = "1e-3,2e-3,4e-3,8e-3"
    assert "chosen for rope.toml: train.lr=2e-3, validation loss 1.2000" in chosen("0,1,2", four)
    trained = [next(text for text in c if text.startswith("run.dir")).split("/")[1][:-1]
               for c in calls if c[0] == "train.py"]
    assert trained[:4] == [f"rope-lr-{lr}-seed0" for lr in four.split(",")]
    assert trained[4:6] == ["rope-lr-1e-3-seed1", "rope-lr-2e-3-seed1"]     # the better half
    assert trained[6:] == reports[0] == [f"rope-lr-2e-3-seed{seed}" for seed in (0, 1, 2)]
    rows = Path("runs/report/trials.csv").read_text().splitlines()
    assert rows[0] == "config,trial,remarks,validation loss,\"validation loss, second seed\""
    assert rows[1:4] == ["rope,train.lr=1e-3,,1.0,1.5", "rope,train.lr=2e-3,chosen,1.2,1.2",
                         "rope,train.lr=4e-3,,1.3,"]
    losses["rope-lr-2e-3-seed1"] = 3                                        # diverged there: it loses
    out = chosen("0,1,2", four)
    assert "chosen for rope.toml: train.lr=1e-3, validation loss 1.2500" in out
    assert "train.lr=2e-3,training diverged," in Path("runs/report/trials.csv").read_text()
    losses["rope-lr-2e-3-seed1"] = 2                                        # failed: nothing is chosen
    assert "nothing is chosen, because 1 of its 4 trials failed" in chosen("0,1,2", four)
    assert "train.lr=1e-3, validation loss 1.2500" in chosen("0,1", "1e-3,8e-3")    # of two trials both go on
    losses.update({"rope-lr-1e-3": 3, "rope-lr-8e-3": 3})
    assert "all of its 2 trials diverged; give lower rates" in chosen("0", "1e-3,8e-3")


def test_each_config_may_have_its_own_trials_and_differences_are_named() -> None:
    Path("trials.toml").write_text(
        'others = ["train.lr=1e-3,2e-3,3e-3"]\n'
        'alibi = ["train.lr=1e-3,2e-3 position.slopes=learned", "train.lr=5e-3"]\n')
    points = trials.read_points(Path("trials.toml"), ["rope.toml", "alibi.toml"])
    assert points == {"rope.toml": [["train.lr=1e-3"], ["train.lr=2e-3"], ["train.lr=3e-3"]],
                      "alibi.toml": [["train.lr=1e-3", "position.slopes=learned"],
                                     ["train.lr=2e-3", "position.slopes=learned"], ["train.lr=5e-3"]]}
    assert trials.check_fair(points, TINY) == []
    Path("slow.toml").write_text('extends = "rope.toml"\ntrain = { lr = 1e-4, beta1 = 0.8 }\n')
    points = {"rope.toml": points["rope.toml"], "slow.toml": points["rope.toml"]}
    assert trials.check_fair(points, []) == ["slow: train.beta1: 0.9 -> 0.8"]
