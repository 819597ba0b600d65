"""What bench/gpu.sh and bench/gpu_study.sh decide: parity, time limits, goals, order.

Their --smoke, which runs all of it, takes minutes and is run by hand.
"""

import json
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import attention
from bench import gpu, gpu_parity, gpu_study
from bench.gpu_parity import CASES, TOLERANCES, errors, is_within
from bench.gpu_speed import (
    CONTENDERS,
    FULL,
    OURS,
    SMOKE,
    WAYS,
    changes_logits,
    encodings,
    evaluation,
    flops_per_token,
    gpt2,
    gpt2_config,
    matmul_rate,
)
from bench.gpu_table import markdown
from evaluation.sweeping import STAMP, is_evaluated, state
from evaluation.sweeping import evaluations as evaluations_of
from positions import ENCODINGS
from positions.distance import ALiBi
from runtime.command import run_command

# -----------------------------------------------------------------------------------------------------------
# Parity


def test_errors_are_relative_to_each_gradient_and_none_is_lost() -> None:
    exact = (2.0, {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 100.0])})
    assert errors(exact, exact)[:2] == (0, 0)
    loss, gradient, worst = errors((2.5, {**exact[1], "a": torch.tensor([3.0, 9.0])}), exact)
    assert (loss, worst) == (0.25, "a") and gradient == pytest.approx(5 / (5 + 0.1), rel=1e-2)
    none_of_a = errors((2.0, {"b": exact[1]["b"]}), exact)
    assert none_of_a[1:] == (pytest.approx(1, rel=0.05), "a")
    nan = (float("nan"), {"a": exact[1]["a"], "b": torch.tensor([0.0, float("nan")])})
    for found in (nan, (2.0, nan[1]), (nan[0], exact[1])):
        assert not is_within(*errors(found, exact)[:2], TOLERANCES[torch.bfloat16])
    with_c = [(2.0, {**exact[1], "c": c}) for c in (exact[1]["a"], torch.zeros(2))]     # ought to be zero
    assert errors(*with_c)[1] > 1 and errors(*with_c)[2] == "c"


@pytest.mark.parametrize("case", ["rope, window 50", "alibi", "t5"])
def test_parity_holds_on_this_cpu(case: str) -> None:
    rows = list(gpu_parity.check(case, "cpu", False))
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"] and all(row["ok"] for row in rows), rows


def test_the_reference_is_explicit_and_in_fp64(monkeypatch) -> None:
    monkeypatch.setattr(attention, "attend_fused", lambda *args: pytest.fail("a kernel"))
    loss, gradients = gpu_parity.exact("rope")
    assert 4 < loss < 8 and {g.dtype for g in gradients.values()} == {torch.float64}
    rounded = {name: g.float().double() for name, g in gradients.items()}
    assert 0 < errors((loss, rounded), (loss, gradients))[1] < 1e-6


def test_parity_sees_a_wrong_bias_and_a_crash(monkeypatch) -> None:
    expected = gpu_parity.exact("alibi")
    monkeypatch.setattr(gpu_parity, "exact", lambda case: expected)
    slopes = ALiBi.slopes
    monkeypatch.setattr(ALiBi, "slopes", staticmethod(lambda H: [1.01 * slope for slope in slopes(H)]))
    wrong = next(gpu_parity.check("alibi", "cpu", False))
    assert not wrong["ok"] and wrong["gradient"] > 5 * TOLERANCES[torch.float32].gradient
    monkeypatch.setattr(ALiBi, "slopes", staticmethod(lambda H: 1 / 0))
    assert "ZeroDivisionError" in next(gpu_parity.check("alibi", "cpu", False))["problem"]


def test_every_encoding_is_a_case_and_one_that_was_not_reached_fails() -> None:
    assert set(ENCODINGS) < set(CASES)
    rows = [{"section": "parity", "case": case, "dtype": "float32", "ok": True} for case in list(CASES)[1:]]
    (missing,) = gpu.not_checked(rows)
    assert missing["case"] == next(iter(CASES)) and missing["ok"] is False


# -----------------------------------------------------------------------------------------------------------
# Time


def test_later_parts_keep_their_time() -> None:
    sections = list(gpu.RESERVED)
    assert gpu.reserved_after("parity") == sum(gpu.RESERVED.values()) < 9 * 60
    assert gpu.reserved_after(sections[-1]) == 0
    for earlier, later in zip(sections, sections[1:], strict=False):
        assert gpu.reserved_after(earlier) - gpu.reserved_after(later) == gpu.RESERVED[later]
    clock = gpu.Clock(100)
    assert 99 < clock.left() <= 100 and 39 < clock.left(60) <= 40 and clock.left(1000) == 0


def script(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def hanging(tmp_path: Path) -> str:
    """A script with a child of its own, whose number it prints."""
    return script(tmp_path / "hangs.py", (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('{\"section\": \"x\", \"child\": %d}' % child.pid, flush=True)\ntime.sleep(60)\n"))


def has_ended(pid: int) -> bool:
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_part_that_hangs_is_ended_with_its_children_and_its_rows_are_kept(tmp_path: Path) -> None:
    began = time.monotonic()
    row, problem = gpu.rows_of([hanging(tmp_path), "x"], 2, tmp_path / "log")
    assert "cut short after 2 s" in problem["problem"] and problem["is_late"]
    assert time.monotonic() - began < 30 and has_ended(row["child"]) and not gpu.RUNNING


def test_no_part_outlives_the_command(tmp_path: Path) -> None:
    rows = gpu.rows_of([hanging(tmp_path)], 60, tmp_path / "log")
    child = next(rows)["child"]
    rows.close()                                # as an exception, a signal's among them, does
    assert has_ended(child) and not gpu.RUNNING


def test_a_part_that_crashes_is_named_with_its_last_line(tmp_path: Path) -> None:
    crashes = script(tmp_path / "crashes.py",
                     "print('{no row}')\nprint('{\"section\": \"x\"}')\nprint('{\"section\": ', end='')\n"
                     "raise SystemExit('went wrong')\n")
    row, problem = gpu.rows_of([crashes], 60, tmp_path / "log")
    assert row == {"section": "x"} and problem["problem"] == "ended with code 1: went wrong"
    assert not problem["is_late"]
    (late,) = gpu.rows_of([crashes], 0.5, tmp_path / "log")
    assert "no time was left" in late["problem"]


def test_what_takes_too_long_to_compile_is_timed_eager_and_biases_come_first() -> None:
    rope, t5 = (next(command for command in gpu.checks(FULL) if command[1:3] == ["encodings", name])
                for name in ("rope", "t5"))
    rows = [{"section": "problem", "command": command, "is_late": is_late, "problem": "..."}
            for command, is_late in ((rope, True), (t5, False))]
    names, eager = gpu.order(rows)
    assert sorted(names) == sorted(WAYS) and set(ENCODINGS) <= set(WAYS) and eager == ["rope"]
    changes = [changes_logits(name) for name in names]
    assert changes == sorted(changes, reverse=True)


# -----------------------------------------------------------------------------------------------------------
# Speed, and the table


def test_both_conventions_of_flops() -> None:
    config = gpt2_config("gpt2-124m", FULL)
    causal, full = flops_per_token(config, 1024)
    assert causal == 798_087_168 and full - causal == 6 * 12 * 768 * 1023       # README's figure
    assert matmul_rate(64, torch.device("cpu")) > 0


def test_speed_sections_measure_at_toy_size() -> None:
    names = ["alibi", "learned"]
    rows = list(encodings(names, SMOKE, eager=names))
    assert [(row["name"], row["way"], row["changes_logits"]) for row in rows] == [
        ("alibi", "eager", True), ("learned", "eager", False)]
    assert all(0 < row["least"] <= row["ratio"] <= row["most"] for row in rows)
    (row,) = evaluation(["t5"], SMOKE)
    assert row["T"] == 512 and row["seconds"] > 0


def test_an_encoding_that_breaks_costs_its_row_alone(monkeypatch) -> None:
    monkeypatch.setattr(ALiBi, "scores", lambda *args: 1 / 0)
    broken, whole = encodings(["alibi", "t5"], SMOKE, eager=["alibi", "t5"])
    assert "ZeroDivisionError" in broken["problem"] and broken["changes_logits"] and whole["ms"] > 0


def encoding_row(name: str, ratio: float) -> dict:
    return {"section": "encodings", "name": name, "way": "compiled", "ms": 1.0, "ratio": ratio,
            "least": ratio, "most": ratio, "peak": 1, "peak_ratio": 1.0,
            "changes_logits": ENCODINGS[name].has_scores()}


def gpt2_row(name: str, mfu: float, speed: float) -> dict:
    return {"section": "gpt2", "name": name, "batch_size": 8, "ms": 1.0, "tokens_per_s": 1.0, "mfu": mfu,
            "mfu_full": mfu, "speed": speed, "peak": 1, "parameters": 1}


def goals_of(rows: list[dict]) -> list[str]:
    text = markdown(rows, {"command": "x"}, FULL, False)
    return [line.split(" | ")[-1].strip(" |") for line in text.splitlines() if line.startswith("|")][2:6]


def test_the_table_says_which_goals_hold() -> None:
    ok = {"section": "parity", "case": "rope", "dtype": "float32", "way": "eager", "ok": True, "loss": 0.0,
          "gradient": 0.0}
    assert goals_of([]) == ["not measured"] * 4
    good = [ok, gpt2_row(OURS, 0.56, 1.0), gpt2_row("transformers GPT-2", 0.4, 0.9), encoding_row("t5", 1.14),
            encoding_row("learned", 1.9)]
    assert goals_of(good) == ["holds"] * 4
    bad = [{**ok, "ok": False}, gpt2_row(OURS, 0.54, 1.0), gpt2_row("transformers GPT-2", 0.4, 1.1),
           encoding_row("t5", 1.16)]
    assert goals_of(bad) == ["**missed**"] * 4
    not_measured = {"section": "encodings", "name": "fire", "changes_logits": True, "problem": "no memory"}
    assert goals_of([*good, not_measured])[3] == "**missed**"
    other_way = {**encoding_row("t5", 1.9), "name": "t5, flex"}
    for both in ([*good, other_way], [other_way, *good]):               # the better one counts
        assert goals_of(both)[3] == "holds"
    toy = markdown(good, {"command": "x"}, SMOKE, True)
    assert toy.count("| toy size |") == 4       # three goals, and t5's row
    cut = {"section": "problem", "command": ["gpu_speed.py", "x", "y", "z"], "is_late": True,
           "problem": "cut short after 9 s"}
    text = markdown([*bad, cut], {"command": "x"}, FULL, True)
    for part in ("**FAIL**", "Above 1.15 x RoPE, or not measured: t5.", "smoke test",
                 "`gpu_speed.py x y ...`: cut short"):
        assert part in text


def test_a_peer_that_is_missing_costs_its_row_alone(monkeypatch) -> None:
    def missing(config) -> None:
        raise ImportError("no such package")

    monkeypatch.setitem(CONTENDERS, "peer", ("gpt2-124m", missing))
    rows = list(gpt2([OURS, "peer"], SMOKE._replace(backend="")))
    assert [row["section"] for row in rows] == ["gpt2", "matmul", "gpt2"]
    assert "no such package" in rows[0]["problem"] and rows[2]["tokens_per_s"] > 0
    assert rows[2]["mfu_full"] > rows[2]["mfu"] > 0


# -----------------------------------------------------------------------------------------------------------
# The study


def test_the_study_does_all_encodings_before_a_second_seed(tmp_path: Path) -> None:
    jobs = gpu_study.plan(["rope", "t5", "learned"], 2, tmp_path, gpu_study.SMOKE, [])
    assert [job.name for job in jobs] == ["rope-seed0", "learned-seed0", "t5-seed0",
                                          "rope-seed1", "learned-seed1", "t5-seed1"]
    assert f"run.dir={tmp_path}/t5-seed1" in jobs[-1].overrides and "train.seed=1" in jobs[-1].overrides


def test_the_study_begins_nothing_that_would_not_end(tmp_path: Path, monkeypatch, capsys) -> None:
    study = gpu_study.Study(50)
    assert study.has_time()
    study.seconds = [10, 60, 70]
    assert not study.has_time()
    monkeypatch.setattr(gpu_study, "work", lambda job, watch: pytest.fail("begun"))
    (job,) = gpu_study.plan(["rope"], 1, tmp_path, gpu_study.SMOKE, [])
    study.do(job)
    study.end, study.seconds = time.monotonic() + 0.2, []

    def runs_on(job, watch) -> str:
        while True:
            watch("")
            time.sleep(0.05)

    monkeypatch.setattr(gpu_study, "work", runs_on)
    study.do_all([job, job], 2)
    assert capsys.readouterr().out.count("rope-seed0: stopped, time is up; saved") == 2
    assert not study.failed and not study.seconds


def test_an_archive_of_the_study_counts_as_finished_elsewhere(tmp_path: Path) -> None:
    (job,) = gpu_study.plan(["rope"], 1, tmp_path / "gpu-study", gpu_study.SMOKE, [])
    checkpoint = job.run_dir / "checkpoints" / "00000006"
    for path, text in ((checkpoint / "state.json", '{"check": "c"}'), (job.run_dir / "summary.json", "{}"),
                       (checkpoint / "model.safetensors", "large"), (job.run_dir / "eval" / "a.json", "{}")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (job.run_dir / STAMP).write_text(json.dumps({**state(job), "written": evaluations_of(job)}))
    assert is_evaluated(job)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.md").write_text("report")
    gpu_study.archive([job], tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "study.tar.gz") as tar:
        tar.extractall(tmp_path / "elsewhere", filter="data")
    (other,) = gpu_study.plan(["rope"], 1, tmp_path / "elsewhere" / "gpu-study", gpu_study.SMOKE, [])
    assert is_evaluated(other) and (other.run_dir / "summary.json").exists()
    assert not list(other.run_dir.rglob("*.safetensors"))
    assert (tmp_path / "elsewhere" / "gpu-study" / "report" / "report.md").read_text() == "report"


# -----------------------------------------------------------------------------------------------------------
# The commands


@pytest.mark.parametrize("command", ["gpu.sh", "gpu_study.sh"])
def test_a_python_that_cannot_be_used_is_one_line(command: str, tmp_path: Path) -> None:
    for python, is_bad in (("/nowhere/python", True), ("/bin/true", False)):
        done = subprocess.run([ROOT / "bench" / command, "--smoke"], capture_output=True, text=True,
                              cwd=tmp_path, env={**os.environ, "PYTHON": python})
        if is_bad:
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1].startswith("error: PYTHON=/nowhere/python: cannot be run")
        else:
            assert done.returncode == 0         # nothing is missing, the script itself is what it runs


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for main in (gpu.main, gpu_study.main):
        monkeypatch.setattr("sys.argv", ["x"])
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("error: no CUDA device") and error.count("\n") == 1
