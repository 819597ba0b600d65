"""The record table of the study, and the checks of a row."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from toys import slow_except

from base.errors import UserError
from config import flatten, load_config
from docs import rows
from evaluation.extension import METHODS
from evaluation.results import make_table
from evaluation.runs import Run, load, write_runs
from model import GPT
from positions import ENCODINGS

BITS = 2.5


def make_run(seed: int, nll: float, overrides: tuple[str, ...] = ()) -> Run:
    """A run of the recipe that was not trained: what a row has of it."""
    name = f"runs/study/mine-lr-8e-3-seed{seed}"
    config = load_config(rows.RECIPE, ["model.vocab_size=64", f"train.seed={seed}", f"run.dir={name}",
                                       *overrides])
    L = config.train.seq_len
    windows = {"run": name, "seed": seed, "extend": "none", "document": np.arange(8.0), "tokens": 32,
               "bytes": 96.0}
    table = pd.concat([
        make_table(**windows, protocol="fixed", length=L, nll=nll),
        make_table(**windows, protocol="fixed", length=16 * L, nll=nll),
        make_table(**windows, protocol="trigram", length=L, nll=nll + 9.0),
        make_table(**windows, protocol="repeat", length=L, place=str(L // 2), nll=nll,
                   control_nll=nll + 32.0)])
    training = pd.DataFrame({"step": [10.0, 20.0], "tokens": 0.0, "loss": [7.5, 7.25], "val_loss": math.nan})
    return Run(name, "mine", flatten(config), {"seq_len": L}, None, {"git_revision": "0" * 40}, training,
               table.reset_index(drop=True))


@pytest.fixture
def row(tmp_path: Path) -> Path:
    """A row of four seeds, one of which is worse than the others on code."""
    folder = tmp_path / "mine"
    for text in rows.TEXTS:
        nll = BITS * math.log(2) * 96
        runs = [make_run(seed, nll * (1.2 if (seed, text) == (3, "code") else 1.0)) for seed in range(4)]
        write_runs(folder / text, runs)
    trials = {"trial": ["train.lr=5e-3", "train.lr=8e-3"], "mean": [3.5, 3.4],
              "run": ["mine-lr-5e-3-seed0", "mine-lr-8e-3-seed0"]}
    pd.DataFrame(trials).to_csv(folder / "trials.csv")
    (folder / "row.toml").write_text('date = "2026-11-27"\nauthor = "A"\nnote = "new"\n')
    return folder


def test_the_readme_counts_encodings_and_quotes_the_row_of_rope() -> None:
    rope = rows.read_row(rows.REFERENCE)
    readme = " ".join((rows.ROOT / "README.md").read_text().split())
    counts = f"{len(ENCODINGS)} position encodings and {len(METHODS)} methods that extend the context"
    assert counts in readme, "update the counts in README.md"
    assert (f"is {rope.bits.mean():.3f} bits per byte with 16 L of context, "
            f"and {rope.truncated:.3f} with the last L tokens alone.") in readme


def test_a_row_s_number_is_bits_per_byte_over_both_texts(row: Path) -> None:
    found = rows.read_row(row)
    assert found.bits.tolist() == pytest.approx([BITS, BITS, BITS, BITS * 1.1])
    assert found.name == "mine" and found.is_counted


def test_a_row_beats_another_in_the_seeds_where_it_is_lower(row: Path) -> None:
    found = rows.read_row(row)
    other = found._replace(bits=found.bits + pd.Series([0.1, 0.1, -0.1], index=[0, 1, 3]))
    assert found.seeds_better_than(other) == "2 of 3"


def test_the_best_row_that_counts_is_first_in_the_table(row: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = rows.read_row(row)
    lower = good._replace(name="lower", bits=good.bits - 1, states=("passed", "failed"))
    better = good._replace(name="better", bits=good.bits - 0.5)
    monkeypatch.setattr(rows, "ROWS", [good, lower, better])
    monkeypatch.setattr(rows, "read_row", lambda row: row)
    names = [line.split(" | ")[0] for line in rows.record_table().splitlines()[2:]]
    assert names == ["| better", "| mine", "| *lower*"]


def test_a_row_of_another_recipe_is_refused() -> None:
    assert "position.encoding=\"alibi\"" in rows.settings_of(make_run(0, 1.0, ("position.encoding=alibi",)))
    with pytest.raises(UserError, match=r"train.steps = 700 is not that of study.toml"):
        rows.settings_of(make_run(0, 1.0, ("train.steps=700",)))


def test_a_row_may_have_a_scaling_and_lack_keys_that_are_newer() -> None:
    run = make_run(0, 1.0, ('position.scaling={method="yarn",factor=2.0}',))
    del run.config["model.gate"]
    config = load_config(rows.RECIPE, [*rows.settings_of(run), "model.vocab_size=64"])
    assert config.position.scaling.factor == 2.0
    del run.config["train.steps"]                       # which the recipe sets
    with pytest.raises(UserError, match="train.steps = 1000 is not that of study.toml"):
        rows.settings_of(run)


def test_a_model_that_sees_the_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(GPT):
        def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(tokens, *args, **kwargs) + tokens[:, -1, None, None]

    config = load_config(rows.RECIPE, ["model.vocab_size=64", "model.n_layer=1", "train.seq_len=16"])
    assert rows.check_model(config)
    monkeypatch.setattr(rows, "GPT", Leaky)
    with pytest.raises(UserError, match="a later token changes logits"):
        rows.check_model(config)


@pytest.mark.parametrize(("loss", "is_right"), [(7.25, True), (7.2501, False)])
def test_a_run_that_trains_otherwise_is_refused(loss: float, is_right: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def train(program: str, *arguments: object) -> None:
        run_dir = Path(str(arguments[-1]).removeprefix("run.dir="))
        run_dir.mkdir()
        lines = [{"step": 10, "loss": 7.5}, {"step": 20, "loss": loss}]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(rows, "run_program", train)
    if is_right:
        assert "differ by 0 nats" in rows.check_training(make_run(0, 1.0), [])
    else:
        with pytest.raises(UserError, match="trained again"):
            rows.check_training(make_run(0, 1.0), [])


RIGHT = ((3.5, 3.4), (0, 1, 2, 3), "docs", "")
OTHER_TRIAL = ((3.3, 3.4), (0, 1, 2, 3), "docs",
               "has runs/study/mine-lr-8e-3-seed0 instead of mine-lr-5e-3-seed0")


@pytest.mark.parametrize(("losses", "seeds", "data", "problem"), slow_except([
    RIGHT, OTHER_TRIAL,
    ((3.5, 3.4), (0, 2, 3), "docs", "has runs/study/mine-lr-8e-3-seed2 instead of mine-lr-8e-3-seed1"),
    ((3.5, 3.4), (1,), "code-far", "has runs/study/mine-lr-8e-3-seed1 instead of mine-lr-8e-3-seed0"),
    ((3.5, 3.4), (0,), "needles", "has other-seed0 instead of mine-lr-8e-3-seed0")], RIGHT, OTHER_TRIAL))
def test_a_row_has_the_first_seeds_of_the_best_trial(losses: tuple[float, ...], seeds: tuple[int, ...],
                                                     data: str, problem: str, row: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    trials = pd.read_csv(row / "trials.csv").assign(mean=losses)
    trials.to_csv(row / "trials.csv")
    whole = rows.read_row(row)
    overrides = ("train.init_from=other-seed0",) if data == "needles" else ()
    write_runs(row / data, [make_run(seed, 1.0, overrides) for seed in seeds])
    monkeypatch.setattr(rows, "REFERENCE", row)
    if problem:
        with pytest.raises(UserError, match=problem):
            rows.check_runs(row, whole)
    else:
        rows.check_runs(row, whole)


@pytest.mark.parametrize("key", ["train.seed", "train.lr"])
def test_a_run_that_is_not_what_its_name_says_is_refused(key: str, row: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "REFERENCE", row)
    runs = load(row / "code")
    for run in runs:
        run.config[key] += 5
    write_runs(row / "code", runs)
    with pytest.raises(UserError, match=f"mine-lr-8e-3-seed0 has {key} = 5"):
        rows.check_runs(row, rows.read_row(row))


def test_row_sh_finds_the_run_of_a_trial_with_any_keys(tmp_path: Path) -> None:
    trial = "position.lr_scale=2 train.lr=8e-3"
    (tmp_path / "chosen.toml").write_text(f'"t5" = ["{trial}"]\n')
    (tmp_path / "trials.csv").write_text(f"config,trial,run,val_loss,mean\nt5,train.lr=8e-3,a,3.5,3.5\n"
                                         f"t5,{trial},b,3.4,3.4\n")
    text = (rows.ROOT / "configs" / "study" / "row.sh").read_text()
    functions = "\n".join(line for line in text.splitlines() if line.startswith(("trial_of()", "run_of()")))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{functions}\nrun_of {tmp_path}"],
                          capture_output=True, text=True)
    assert done.stdout == "b\n"


@pytest.mark.slow
def test_a_row_on_other_windows_is_refused(row: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "REFERENCE", row)
    rows.verify(row, has_text=False)
    other = row.with_name("other")
    for text in rows.TEXTS:
        runs = load(row / text)
        write_runs(other / text, [run._replace(table=run.table.assign(document=0.0)) for run in runs])
    monkeypatch.setattr(rows, "REFERENCE", other)
    with pytest.raises(UserError, match="different targets"):
        rows.verify(row, has_text=False)


def test_a_row_is_compared_with_the_others_that_pass(capsys: pytest.CaptureFixture[str]) -> None:
    folder = rows.REFERENCE.with_name("alibi")
    others = [rows.REFERENCE.with_name(name) for name in ("alibi", "rope", "sinusoidal")]
    rows.verify(folder, has_text=False, others=others)
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("better than")]
    assert len(found) == 1 and re.fullmatch(r"better than rope \(2\.7\d+\) in 4 of 4 seeds", found[0])


def test_needles_that_were_tuned_in_16_bits_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "alibi"
    shutil.copytree(rows.REFERENCE.with_name("alibi"), folder)
    (run,) = load(folder / "needles")
    write_runs(folder / "needles", [run._replace(head={**run.head, "train_dtype": "bfloat16"})])
    with pytest.raises(UserError, match="tuned in bfloat16 instead of float32"):
        rows.verify(folder, has_text=False)


def test_a_row_that_is_not_there_is_made_by_a_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row there; run `make row CONFIG=configs/rows/mine.toml`"):
        rows.verify(tmp_path / "mine", has_text=False)


def test_a_seed_that_lacks_a_text_is_refused(row: Path) -> None:
    write_runs(row / "code", load(row / "code")[:3])
    with pytest.raises(UserError, match="its seeds differ between docs and code"):
        rows.read_row(row)


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_weights_that_score_otherwise_are_refused(gap: float, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(0, 100.0)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert "not checked" in rows.check_weights(run, "docs")
    (tmp_path / run.name / "checkpoints").mkdir(parents=True)
    run.head["settings"] = {"fixed": {"longest": 4096, "windows": 8}}

    def evaluate(program: str, *arguments: object) -> None:
        fixed = run.table[run.table["protocol"] == "fixed"]
        fixed.assign(nll=fixed["nll"] + gap).to_parquet(Path(str(arguments[-1])).with_suffix(".parquet"))

    monkeypatch.setattr(rows, "run_program", evaluate)
    if gap:
        with pytest.raises(UserError, match="evaluated again, differs by 0.00031 nats"):
            rows.check_weights(run, "docs")
    else:
        assert "16 windows" in rows.check_weights(run, "docs")


@pytest.mark.slow
@pytest.mark.parametrize("folder", rows.ROWS, ids=lambda folder: folder.name)
def test_each_published_row_is_verified_without_its_text(folder: Path) -> None:
    rows.verify(folder, has_text=False)
