"""Reports: intervals cover at their rate, figures come from sums, labels are never markup."""

import csv
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, slow_except

import compare as command
from evaluation import comparison as compare
from evaluation import pictures, report
from evaluation.measures import MEASURES
from evaluation.runs import check_comparable, other_targets, read_run
from runtime.command import run_command
from runtime.errors import UserError
from train import train

SPLIT = {"tokens": 9, "bytes": 9, "documents": 1, "sha256": {"val.bin": "a"}}
CORPUS = {"format_version": 1, "dtype": "uint16", "vocab_size": 257, "eot": 256,
          "tokenizer": {"name": "byte", "sha256": "c"}, "splits": {"train": SPLIT, "val": SPLIT}}
OTHER = {**CORPUS, "splits": {"train": SPLIT, "val": {**SPLIT, "sha256": {"val.bin": "b"}}}}
LENGTHS = (64, 128, 256)


PROTOCOLS = ("nonoverlap", "sliding", "fixed", "position", "repeat", "passkey")


def fabricate(folder: Path, encoding: str = "rope", seed: int = 0, extends=(None,), better: float = 0.0,
              lengths=LENGTHS, protocols=PROTOCOLS, L: int = 128, documents: int = 12, config: str = "",
              corpus=CORPUS, is_probed: bool = False, **head: Any) -> Path:
    """A run's folder as train.py and eval.py leave it; loss is `better` nats a token lower.

    With is_probed, repeat has a length of L too, and the probes have sums of each window or trial.
    """
    (folder / "eval").mkdir(parents=True)
    (folder / "corpus.json").write_text(json.dumps(corpus))
    (folder / "config.toml").write_text(f'[data]\ndir = "x"\n[position]\nencoding = "{encoding}"\n[train]\n'
                                        f"seed = {seed}\nseq_len = {L}\n{config}\n")
    records: list[dict] = []
    arrays = {}
    document = np.repeat(np.arange(documents), 2)
    tokens = np.where(np.arange(len(document)) % 3, 32, 8)       # windows of unequal size
    for extend in extends:
        def record(protocol: str, length: int, nll: float, n: int, extend=extend, **more: Any) -> None:
            records.append({"extend": extend, "protocol": protocol, "length": length, "nll_sum": nll,
                            "tokens": n, "bytes": n, "documents": documents, "ppl": math.exp(nll / n),
                            "bpb": 0.0, "seconds": 1.0, **more})

        for protocol in (p for p in ("nonoverlap", "sliding", "fixed") if p in protocols):
            for length in lengths:
                base = np.random.default_rng(length).normal(2.0, 0.5, len(document)) * tokens
                nll = base - (better - 0.1 * seed) * tokens
                columns = {"nll": nll, "tokens": tokens, "bytes": tokens, "document": document,
                           "end": np.arange(len(document)) + length}
                more = {}
                if protocol == "fixed":
                    columns["truncated_nll"] = nll + 0.25 * tokens
                    more = {"truncated_nll_sum": float(columns["truncated_nll"].sum()), "gain": 0.25}
                arrays |= {f"{extend or 'plain'}/{protocol}/{length}/{k}": v for k, v in columns.items()}
                record(protocol, length, float(nll.sum()), int(tokens.sum()), **more)
        if "position" in protocols:
            record("position", 256, 300.0, 100, bucket=[0, 4])
            record("position", 256, 200.0, 100, bucket=[64, 128])
        def keep(place: str, extend=extend, **columns: Any) -> None:
            arrays.update({f"{extend or 'plain'}/{place}/{k}": np.array(v) for k, v in columns.items()})

        if "repeat" in protocols and is_probed:
            noise = np.random.default_rng(seed).normal(0, 0.1, 24)      # 24 windows of 8 tokens
            for length, distance in ((L, L // 2), (256, 192)):
                nll = 8 * (1 - better + noise)
                record("repeat", length, nll.sum(), 192, distance=distance, first_nll_sum=8 * 24.0, gain=0.0)
                keep(f"repeat/{length}", nll=nll, first_nll=np.full(24, 8.0), tokens=np.full(24, 8),
                     document=np.arange(24) // 2)
        elif "repeat" in protocols:
            record("repeat", 256, 50.0, 100, distance=96, first_nll_sum=150.0, gain=1.0)
        if "passkey" in protocols and is_probed:
            correct = np.random.default_rng(seed).random((2, 20)) < 0.2 + better        # depths, trials
            for depth in (0, 1):
                record("passkey", 256, 1.0, 10, depth=float(depth), correct=int(correct[depth].sum()),
                       trials=20)
            keep("passkey/256", correct=correct.flatten().astype(int), trials=np.ones(40, int),
                 document=np.arange(40) % 20, nll=np.ones(40), tokens=np.ones(40))
        elif "passkey" in protocols:
            record("passkey", 256, 1.0, 10, depth=0.0, correct=1, trials=10)
            record("passkey", 256, 1.0, 10, depth=1.0, correct=8, trials=20)
    content = {"run": str(folder), "encoding": encoding, "seq_len": L, "tokenizer": "byte", "data": "words",
               "data_sha256": "0" * 64, "seed": 0, "step": 1000, "checkpoint_sha256": "0" * 64,
               "dtype": "float32", **head, "records": records}
    (folder / "eval" / "words.json").write_text(json.dumps(content))
    np.savez(folder / "eval" / "words.npz", **arrays)
    return folder


def call(monkeypatch, *arguments: Any, draws: bool = False) -> None:
    """Run compare.py, without pictures unless the test is about them: they take seconds."""
    if not draws:
        monkeypatch.setattr(command, "draw", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    command.main()


def rows_of(folder: Path, title: str) -> dict[str, list[str]]:
    """First cell -> the others, of the table under a heading of report.md."""
    section = (folder / "report.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


# -----------------------------------------------------------------------------------------------------------
# Figures and intervals


def test_figures_come_from_sums_and_std_is_over_seeds(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / f"a-seed{seed}", seed=seed) for seed in range(3)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    per_seed = []
    for run in runs:
        records = json.loads((run / "eval" / "words.json").read_text())["records"]
        per_seed += [math.exp(r["nll_sum"] / r["tokens"]) for r in records
                     if (r["protocol"], r["length"]) == ("nonoverlap", 256)]
    mean, std = np.mean(per_seed), np.std(per_seed, ddof=1)
    assert rows_of(tmp_path / "out", "Perplexity, nonoverlap")["rope"][2] == f"{mean:.3f} ± {std:.3f}"
    assert rows_of(tmp_path / "out", "Passkey")["rope"] == ["30% ± 0%"]     # 9 of 30, not mean(10, 40)
    assert rows_of(tmp_path / "out", "Repeated text")["rope"] == ["1.000 ± 0.000"]


@pytest.mark.parametrize(("mean", "std", "expected"), [
    (193.94, 3.68, "193.9 ± 3.7"), (1014.2, 117.4, "1014 ± 117"), (4.7139, 0.0123, "4.714 ± 0.012"),
    (12345.0, 678.0, "1.234e+04 ± 6.8e+02"), (math.inf, math.nan, "inf ± nan")])
def test_a_standard_deviation_ends_at_the_last_digit_of_its_mean(mean: float, std: float,
                                                                 expected: str) -> None:
    table = report.Table("fixed", "", "", "", "", "log", "#.4g", 128, [], {})
    assert table.text(report.Cell(mean, std)) == expected


def test_paired_gains_are_exact_and_signed(tmp_path: Path, monkeypatch) -> None:
    """Every window of b is 0.5 nats a token better than a's; seed 1 of both is 0.1 worse."""
    runs = [fabricate(tmp_path / f"{name}-seed{seed}", name, seed, better=better)
            for name, better in (("rope", 0.0), ("alibi", 0.5)) for seed in (0, 1)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    for protocol in ("nonoverlap", "sliding", "fixed"):
        rows = rows_of(tmp_path / "out", f"Gain over rope, {protocol}")
        assert rows["alibi"] == ["**+0.5000 [+0.5000, +0.5000]**"] * 3 and "rope" not in rows
    gains = rows_of(tmp_path / "out", "Gain over truncation, fixed targets")
    assert gains["rope"] == gains["alibi"] == ["**+0.2500 ± 0.0000 [+0.2500, +0.2500]**"] * 3
    assert "95 % intervals over 12 documents, and 2 seeds." in (tmp_path / "out" / "report.md").read_text()
    call(monkeypatch, *runs, "--baseline", "alibi", "--out", tmp_path / "out")
    assert rows_of(tmp_path / "out", "Gain over alibi, fixed")["rope"] == ["-0.5000 [-0.5000, -0.5000]"] * 3


def test_seeds_are_paired_where_equal_and_else_in_order(tmp_path: Path) -> None:
    def curve(name: str, *seeds: int) -> compare.Curve:
        runs = [read_run(fabricate(tmp_path / f"{name}{seed}", name, seed), None) for seed in seeds]
        return compare.make_curves(runs)[0]

    a, b, c = curve("rope", 0, 1, 2), curve("alibi", 2, 0), curve("t5", 7, 1)
    for pair, expected in (((a, b), {(0, 0), (2, 2)}), ((b, a), {(0, 0), (2, 2)}), ((c, a), {(7, 0), (1, 1)}),
                           ((c, b), {(7, 2), (1, 0)}), ((a, a), {(0, 0), (1, 1), (2, 2)})):
        found = [(x.config.train.seed, y.config.train.seed) for x, y in compare.paired(*pair)]
        assert set(found) == expected and len(found) == len(expected)


def test_runs_tuned_from_runs_of_several_seeds_are_seeds_of_one_curve(tmp_path: Path, monkeypatch) -> None:
    """The seed of a tuned run is its own and that of its base; bases of other settings are other curves."""
    rates = {"slow": 1e-3, "fast": 2e-3}

    def tuned(name: str, base: int, seed: int = 0, **about: Any) -> Path:
        folder = tmp_path / f"{name}-{seed}-{base}"
        origin = tmp_path / f"base-{name}-{base}"
        if not origin.is_dir():
            fabricate(origin, "rope", base, config=f"lr = {rates[name]}")
        return fabricate(folder, seed=seed, config=f'init_from = "{origin}"', **about)

    def curves(*runs: Path) -> dict[str, list[str]]:
        found = compare.make_curves([read_run(run, None) for run in runs])
        return {curve.label: [run.seed for run in curve.runs] for curve in found}

    slow = [tuned("slow", base, init_sha256=str(base)) for base in (0, 1)]
    fast = [tuned("fast", base, init_sha256=str(base + 2)) for base in (1, 0)]
    assert curves(*slow, *fast) == {"rope lr=0.001": ["0 from 0", "0 from 1"],
                                    "rope lr=0.002": ["0 from 1", "0 from 0"]}
    a, b = compare.make_curves([read_run(run, None) for run in (*slow, *fast)])
    assert [(x.seeds, y.seeds) for x, y in compare.paired(a, b)] == [((0, 0), (0, 0)), ((0, 1), (0, 1))]
    call(monkeypatch, *slow, *fast, "--out", tmp_path / "out")
    assert "12 documents, and 2 seeds" in (tmp_path / "out" / "report.md").read_text()
    again = tuned("slow", 0, 1, init_sha256="0")
    assert curves(slow[0], again) == {"rope": ["0 from 0", "1 from 0"]}     # two tunings of one run
    with pytest.raises(UserError, match="not independent samples"):
        curves(*slow, again)
    other = {**CORPUS, "splits": {"train": {**SPLIT, "sha256": {"train.bin": "b"}}, "val": SPLIT}}
    (tmp_path / "base-fast-0" / "corpus.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="trained on different text"):
        check_comparable([read_run(run, None) for run in (*slow, *fast)])


def test_intervals_widen_with_the_variance_of_the_seeds(tmp_path: Path, monkeypatch) -> None:
    """The windows differ alike; only the seeds of t5 do not move together with the baseline's."""
    runs = [fabricate(tmp_path / f"{name}-{seed}", name, seed, better=better) for seed in range(3)
            for name, better in (("rope", 0.0), ("alibi", 0.5), ("t5", 0.5 + 0.1 * (seed == 2)))]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over rope, fixed")
    assert rows["alibi"] == ["**+0.5000 [+0.5000, +0.5000]**"] * 3
    half = 4.302653 * np.std([0, 0, 0.1], ddof=1) / 3**0.5              # t with 2 degrees of freedom
    low, high = (float(x) for x in re.findall(r"[+-][\d.]+", rows["t5"][0])[1:])
    assert low == pytest.approx(0.5333 - half, abs=1e-3) and high == pytest.approx(0.5333 + half, abs=1e-3)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Shares of the variance, median over the table: seeds 100%, text 0%, both together 0%." in text


def test_bold_survives_holms_correction_over_the_curves_of_a_column(tmp_path: Path, monkeypatch) -> None:
    """The same curve beats the baseline alone, but not as one of eleven. Its interval stays."""
    def folder(name: str, seed: int, better: float) -> Path:
        vary = 0.07 * seed if name != "rope" else 0.0
        return fabricate(tmp_path / f"{name}{seed}", name, seed, better=better + vary, protocols=("fixed",))

    runs = [folder(name, seed, better) for name, better in (("rope", 0.0), ("alibi", 0.4))
            for seed in range(3)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    alone = rows_of(tmp_path / "out", "Gain over rope, fixed")["alibi"]
    assert all(cell.startswith("**+0.47") for cell in alone)
    names = ("t5", "fire", "none", "cope", "xpos", "binary", "p_rope", "integer", "sandwich", "sinusoidal")
    others = [folder(name, seed, 0.0) for name in names for seed in range(3)]
    call(monkeypatch, *runs, *others, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over rope, fixed")
    assert rows["alibi"] == [cell.strip("*") for cell in alone]
    assert not rows_of(tmp_path / "out", "Perplexity, fixed targets")["alibi"][0].startswith("**")


def test_probes_have_intervals_and_gains_over_the_baseline(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / f"{name}{seed}", name, seed, better=better, is_probed=True)
            for name, better in (("rope", 0.0), ("alibi", 0.7)) for seed in range(3)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    repeat = rows_of(tmp_path / "out", "Repeated text")
    assert repeat["distance (tokens)"] == ["64", "192"]
    assert re.fullmatch(r"\*\*0\.[67]\d+ ± 0\.0\d+ \[0\.\d+, 0\.\d+\]\*\*", repeat["alibi"][0])
    assert rows_of(tmp_path / "out", "Gain over rope, repeat")["alibi"][0] == "**+0.700 [+0.700, +0.700]**"
    share = rows_of(tmp_path / "out", "Passkey")["alibi"][0]
    assert re.fullmatch(r"\*\*\d+% ± \d+% \[\d+%, \d+%\]\*\*", share)
    gain = rows_of(tmp_path / "out", "Gain over rope, passkey")["alibi"][0]
    assert re.fullmatch(r"\*\*\+\d+% \[\+\d+%, \+\d+%\]\*\*", gain)
    assert "95 % intervals over 20 trials, and 3 seeds." in (tmp_path / "out" / "report.md").read_text()
    old = [fabricate(tmp_path / f"old-{name}", name) for name in ("rope", "alibi")]     # no sums of trials
    call(monkeypatch, *old, "--out", tmp_path / "out")
    assert rows_of(tmp_path / "out", "Passkey")["alibi"] == ["30%"]
    assert "Gain over rope, passkey" not in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(("n", "depths", "expected"), [
    (8, 5, "8 trials"), (1, 5, "none, there are only 5 trials"),
    (4, 5, "20 trials, since documents are too few: other documents are not covered")])
def test_a_report_says_where_the_trials_share_few_documents(n: int, depths: int, expected: str,
                                                            tmp_path: Path) -> None:
    """Trials of one document, at several depths, ask for the same facts."""
    (curve,) = compare.make_curves([read_run(fabricate(tmp_path / "rope"), None)])
    columns = {"correct": np.arange(n * depths) % 2, "trials": np.ones(n * depths),
               "document": np.arange(n * depths) % n}
    curve.runs[0].windows.update({f"plain/passkey/256/{name}": column for name, column in columns.items()})
    measure = next(measure for measure in MEASURES if measure.protocol == "passkey")
    assert compare.estimated(measure, 256, curve, None)[2] == expected


@pytest.mark.parametrize(("better", "is_probed", "protocols", "expected"), [
    (0.5, True, ("fixed", "repeat"), r"at least 0\.3 nats per token: 0\.[45]\d\d, met\."),
    (0.2, True, ("fixed", "repeat"), r"not met: nothing about the use of far context follows\."),
    (0.5, False, ("fixed", "repeat"), r"not measured; run eval\.py --protocol repeat --lengths 128\."),
    (0.5, False, ("fixed",), None)])
def test_the_entry_criterion_is_printed_if_repeat_was_measured(
        better: float, is_probed: bool, protocols: tuple[str, ...], expected: str | None, tmp_path: Path,
        monkeypatch, capsys) -> None:
    run = fabricate(tmp_path / "a", better=better, is_probed=is_probed, protocols=protocols)
    call(monkeypatch, run, "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("Entry criterion: gain of rope")]
    assert len(lines) == (expected is not None)
    if expected:
        assert re.search(f"{expected}$", lines[0]) and lines[0] in capsys.readouterr().out


def test_unequal_numbers_of_seeds_are_named_in_every_table(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / f"{name}{seed}", name, seed, is_probed=True)
            for name, seeds in (("rope", (0, 1)), ("alibi", (0,)), ("t5", (0, 1))) for seed in seeds]
    call(monkeypatch, *runs, "--baseline", "rope", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    labels = {"rope (2 seeds)", "alibi (1 seed)", "t5 (2 seeds)"}
    for title in ("Perplexity, fixed targets", "Passkey", "Gain over truncation, fixed targets"):
        assert set(rows_of(tmp_path / "out", title)) >= labels, title
    assert "The curves have different numbers of seeds." in text
    assert "over 12 documents, and 1 seed (alibi (1 seed)); 2 seeds (t5 (2 seeds))." in text
    assert "With 1 seed, an interval covers the text alone" in text
    call(monkeypatch, runs[0], runs[2], "--out", tmp_path / "out")
    assert "Each curve has 1 seed." in (tmp_path / "out" / "report.md").read_text()


# -----------------------------------------------------------------------------------------------------------
# Curves, tables, files


def test_curves_are_configs_and_extensions_with_seeds_together(tmp_path: Path) -> None:
    folders = [fabricate(tmp_path / "x" / "rope-seed0", extends=(None, "yarn:beta_fast=8")),
               fabricate(tmp_path / "x" / "rope-seed1", seed=1, extends=(None, "yarn:beta_fast=8"),
                         config="[run]\nlog_every = 7"),
               fabricate(tmp_path / "y" / "rope-seed0", config="lr = 1e-4"),
               fabricate(tmp_path / "y" / "alibi", "alibi")]
    curves = compare.make_curves([read_run(folder, None) for folder in folders])
    assert [(c.label, len(c.runs)) for c in curves] == [
        ("rope lr=0.001", 2), ("rope lr=0.001 + yarn:beta_fast=8", 2), ("rope lr=0.0001", 1), ("alibi", 1)]


@pytest.mark.parametrize(("configs", "expected"), [
    (["", "window = 8"], ["rope", "rope window=8"]),                    # a key that one leaves out
    (["n_embd = 64", "n_embd = 32"], ["rope n_embd=64", "rope n_embd=32"]),
    (["n_embd = 64\nn_head = 4", "n_embd = 64\nn_head = 2", "n_embd = 32\nn_head = 4"],
     ["rope n_head=4, n_embd=64", "rope n_head=2, n_embd=64", "rope n_head=4, n_embd=32"]),
    (["", "n_embd = 32\nn_head = 1\nn_layer = 1\nwindow = 8"], ["rope (x/r)", "rope (y/r)"]),
])
def test_curves_of_one_encoding_are_named_after_what_differs(configs: list[str], expected: list[str],
                                                             tmp_path: Path) -> None:
    """Config keys if they are few, else the folder; and another encoding needs neither."""
    folders = [fabricate(tmp_path / folder / "r", config=f"[model]\n{config}")
               for folder, config in zip("xyz", configs, strict=False)]
    folders.append(fabricate(tmp_path / "other", "alibi"))
    curves = compare.make_curves([read_run(folder, None) for folder in folders])
    assert [curve.label for curve in curves] == [*expected, "alibi"]


def test_labels_can_be_given_and_seeds_share_theirs(tmp_path: Path, monkeypatch, capsys) -> None:
    runs = [fabricate(tmp_path / "a"), fabricate(tmp_path / "b", seed=1), fabricate(tmp_path / "c", "alibi")]
    names = ["--label", "turning", "--label", "turning", "--label", "sloping"]
    call(monkeypatch, *runs, *names, "--baseline", "sloping", "--out", tmp_path / "out")
    assert list(rows_of(tmp_path / "out", "Gain over sloping (1 seed), fixed"))[1:] == ["turning (2 seeds)"]
    for wrong, expected in ((names[:4], "--label: given 2 times for 3 runs"),
                            (["--label", "x", *names[2:]], "need the same label"),
                            ([*names[:4], "--label", "turning"], "all others need different ones")):
        assert expected in failure(monkeypatch, capsys, *map(str, runs), *wrong)


def test_the_training_length_is_marked_and_gaps_stay(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / "a"), fabricate(tmp_path / "b", "alibi", better=0.1),
            fabricate(tmp_path / "c", "learned", better=0.2, lengths=(64, 128))]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Perplexity, fixed targets")
    assert rows["context (tokens)"] == ["64", "**128 = L**", "256"]
    assert rows["learned"][2] == "-"
    assert rows_of(tmp_path / "out", "Loss by position")["position (tokens of context)"][1] == "**64-127, L**"


def test_only_what_beats_the_baseline_with_its_interval_is_bold(tmp_path: Path, monkeypatch) -> None:
    """Not the best of those that lose, nor one without an interval, nor the baseline."""
    runs = [fabricate(tmp_path / "a"), fabricate(tmp_path / "b", "alibi", better=0.1),
            fabricate(tmp_path / "c", "t5", better=0.2), fabricate(tmp_path / "d", "none", better=-0.1)]
    for baseline, better in (("rope", {"alibi", "t5"}), ("alibi", {"t5"}), ("t5", set())):
        call(monkeypatch, *runs, "--baseline", baseline, "--out", tmp_path / "out")
        for title in ("Perplexity, fixed targets", "Perplexity, nonoverlap", f"Gain over {baseline}, fixed"):
            rows = rows_of(tmp_path / "out", title)
            rows.pop("context (tokens)")
            assert {label for label, cells in rows.items() if cells[0].startswith("**")} == better, title
        text = (tmp_path / "out" / "report.md").read_text()
        assert f"A number is bold where it beats {baseline}" in text
        assert "**" not in text.split("## Loss by position\n")[1].split("alibi |")[1].split("\n## ")[0]
    few = [fabricate(tmp_path / f"few-{name}", name, better=better, documents=3)
           for name, better in (("rope", 0.0), ("alibi", 0.5))]
    call(monkeypatch, *few, "--out", tmp_path / "out")
    assert not rows_of(tmp_path / "out", "Perplexity, fixed targets")["alibi"][0].startswith("**")


def test_an_edited_report_or_one_of_others_is_not_overwritten(tmp_path: Path, monkeypatch, capsys) -> None:
    run, out = fabricate(tmp_path / "a", protocols=("fixed",)), tmp_path / "out"
    for name in ("report.md", "report.html", "report.csv", "fixed.png"):
        out.mkdir()
        (out / name).write_text("mine")
        assert f"{name} is there" in failure(monkeypatch, capsys, str(run), "--out", str(out))
        assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == "mine"
        shutil.rmtree(out)
    call(monkeypatch, run, "--out", out)
    call(monkeypatch, run, "--out", out)                                # its own: written anew
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("compare.write_csv", lambda *_: 1 / 0)            # stands for a kill
        call(monkeypatch, run, "--out", tmp_path / "new")
    assert "has not finished" in (tmp_path / "new" / "report.md").read_text()
    call(monkeypatch, run, "--out", tmp_path / "new")                   # replaces what it left
    text = (out / "report.md").read_text()
    assert (tmp_path / "new" / "report.md").read_text() == text
    (out / "report.md").write_text(text.replace("Perplexity", "My perplexity", 1))
    assert "edited since" in failure(monkeypatch, capsys, str(run), "--out", str(out))
    assert "My perplexity" in (out / "report.md").read_text()


def test_no_cell_of_the_csv_is_a_formula(tmp_path: Path, monkeypatch) -> None:
    folder = "=HYPERLINK(1)"
    monkeypatch.chdir(tmp_path)
    runs = [fabricate(Path(folder), data="+words"), fabricate(Path("b"), "alibi", data="+words")]
    path = Path("b", "eval", "words.json")
    content = json.loads(path.read_text())
    content["records"][0]["@SUM(1)"] = 1.0
    path.write_text(json.dumps(content))
    call(monkeypatch, *runs, "--label", "=1+1", "--label=-x", "--out", tmp_path / "out")
    with (tmp_path / "out" / "report.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    texts = {cell for line in lines for cell in line}
    assert {f"'{folder}", "'=1+1", "'-x", "'+words", "'@SUM(1)"} <= texts
    assert not [cell for cell in texts if cell.startswith(("=", "+", "@"))]
    assert all(float(cell) < 0 for cell in texts if cell.startswith("-"))       # numbers stay numbers


def test_csv_has_every_record_and_field(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / "a", extends=(None, "yarn")),
            fabricate(tmp_path / "b", seed=5, config="lr=1")]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    with (tmp_path / "out" / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    records = [r for run in runs for r in json.loads((run / "eval" / "words.json").read_text())["records"]]
    assert len(lines) == len(records)
    assert sum(float(line["nll_sum"]) for line in lines) == pytest.approx(sum(r["nll_sum"] for r in records))
    assert {key for r in records for key in r} | {"label", "run", "train_seed", "encoding"} <= set(lines[0])
    assert {(line["label"], line["train_seed"], line["extend"]) for line in lines} == {
        ("rope lr=0.001", "0", ""), ("rope lr=0.001 + yarn", "0", "yarn"), ("rope lr=1", "5", "")}


def test_infinite_figures_are_shown_and_are_no_json_numbers(tmp_path: Path, monkeypatch) -> None:
    a, b = fabricate(tmp_path / "a"), fabricate(tmp_path / "b", "alibi")
    path = b / "eval" / "words.json"
    content = json.loads(path.read_text())
    for r in content["records"]:
        r["nll_sum"] *= 1e6 if r["protocol"] == "nonoverlap" and r["length"] == 256 else 1
    path.write_text(json.dumps(content))
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        np.savez(path.with_suffix(".npz"), **{
            key: array * (1e6 if key == "plain/nonoverlap/256/nll" else 1) for key, array in arrays.items()})
    call(monkeypatch, a, b, "--out", tmp_path / "out")
    assert rows_of(tmp_path / "out", "Perplexity, nonoverlap")["alibi"][2] == "inf"
    assert "Infinity" not in (tmp_path / "out" / "report.html").read_text()


def test_training_curves_are_means_over_equal_parts_and_seeds(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / "a"), fabricate(tmp_path / "b", seed=1), fabricate(tmp_path / "c", "alibi")]
    for i, run in enumerate(runs[:2]):
        lines = [{"step": step, "loss": 5.0 + i + step % 2} for step in range(1, 121)]
        lines += [{"step": step, "val_loss": 4.0 + i} for step in (60, 120)]
        text = "\n".join(json.dumps(line) for line in lines)
        (run / "metrics.jsonl").write_text(f'{text}\n{{"step": 121, "loss": null}}\n{{"step": 1')
    curves = compare.make_curves([read_run(run, None) for run in runs])
    rows = compare.training_curves("loss", curves)
    assert len(rows["rope"]) == 60 and rows["alibi"] == {}
    assert list(rows["rope"])[0] == (2, "2") and list(rows["rope"])[-1] == (120, "120")
    assert all(cell.value == 6.0 and cell.spread == pytest.approx(0.5**0.5) for cell in rows["rope"].values())
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Validation loss during training")
    assert rows == {"step": ["60", "120"], "rope (2 seeds)": ["4.500 ± 0.707"] * 2}
    text = (tmp_path / "out" / "report.md").read_text()
    section = text.split("## Training loss\n")[1].split("\n## ")[0]
    assert "\n|" not in section                                         # 60 columns: the picture alone


@pytest.mark.parametrize(("scale", "low", "high"), [
    ("log", 3.69, 3.76), ("log", 2.1, 8.0), ("log", 2.0, 900.0), ("linear", 1.0, 1.004),
    ("asinh", -0.004, 0.003), ("asinh", -2.0, 0.3)])
def test_the_y_axis_has_ticks_however_narrow_its_range(scale: str, low: float, high: float) -> None:
    plt = pictures.pyplot()
    figure, axis = plt.subplots()
    axis.set_ylim(low, high)
    pictures.set_y_scale(axis, scale)
    axis.set_ylim(low, high)
    ticks = [tick for tick in axis.yaxis.get_major_locator()() if low <= tick <= high]
    plt.close(figure)
    assert 3 <= len(ticks) <= 12, ticks


def test_a_picture_never_has_more_curves_than_can_be_told_apart() -> None:
    labels = [f"c{i}" for i in range(23)]
    groups = pictures.together(labels)
    assert all(len(group) <= pictures.MOST_CURVES and group[0] == "c0" for group in groups)
    assert [label for group in groups for label in group[1:]] == labels[1:]
    assert max(map(len, groups)) - min(map(len, groups)) <= 2
    assert pictures.together(["c0"]) == [["c0"]]


def test_a_picture_is_drawn_of_each_table_and_probe(tmp_path: Path, monkeypatch) -> None:
    run = fabricate(tmp_path / "a", protocols=("fixed", "passkey"), lengths=(128,))
    call(monkeypatch, run, "--out", tmp_path / "out", draws=True)
    linked = re.findall(r"\]\((.+?)\)", (tmp_path / "out" / "report.md").read_text())
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == set(linked)
    assert set(linked) == {"fixed.png", "gain.png", "passkey.png", "passkey-map.png"}


@pytest.mark.slow
def test_every_table_and_probe_has_its_picture(tmp_path: Path, monkeypatch) -> None:
    runs = [fabricate(tmp_path / f"r{i}", config=f"lr = {i + 1}e-4") for i in range(10)]
    call(monkeypatch, *runs, "--out", tmp_path / "out", draws=True)
    text = (tmp_path / "out" / "report.md").read_text()
    linked = re.findall(r"\]\((.+?)\)", text)
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == set(linked) and len(linked) > 20
    assert {"fixed-1.png", "fixed-2.png", "gain-1.png", "position-2.png", "passkey-map-1.png"} <= set(linked)
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in linked)


# -----------------------------------------------------------------------------------------------------------
# The page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`$_&amp;"


class Page(html.parser.HTMLParser):
    """Elements of a page, and what the one with id="data" holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data, self.inside = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        self.inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self.inside else ""


def hostile_report(tmp_path: Path) -> str:
    cells = [report.Cell(2.0, 0.1), report.Cell(3.0)]
    table = report.Table("fixed", "Perplexity", "note </script>", "context", "perplexity", "log", "#.4g", 64,
                         [(64, "64"), (128, "128")], {"base": cells, HOSTILE: cells[::-1]})
    about = {label: [label, "", "0", label] for label in table.rows}
    drawn = pictures.draw([table], [], list(about), tmp_path)
    assert "<script" not in report.markdown(HOSTILE, [HOSTILE], about, [table], drawn).replace("\\", "")
    return report.html(HOSTILE, [HOSTILE], about, [table], drawn)


def test_labels_are_never_markup(tmp_path: Path) -> None:
    page = Page(hostile_report(tmp_path))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    data = json.loads(page.data)
    assert [label for label, _ in data["about"]["rows"]] == ["base", HOSTILE]
    source = (ROOT / "evaluation" / "report-template.html").read_text()
    assert "innerHTML" not in source and "document.write" not in source
    # a name, not a request
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}


def dom(page: Path, address: str = "") -> str:
    """The page's elements after its script ran in a real browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium: what the page's script does is not checked")
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu",
                           "--virtual-time-budget=3000", f"--user-data-dir={page.parent / 'browser'}",
                           "--dump-dom", f"file://{page}{address}"], capture_output=True, text=True)
    return done.stdout


def test_the_page_draws_switches_and_reads_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(hostile_report(tmp_path))
    everything, one, read = dom(page), dom(page, "#fixed;1"), dom(page, "#fixed;;1")
    assert Page(everything).tags.count("img") == 0
    for shown, n_curves in ((everything, 2), (one, 1)):
        chart = shown.split('<svg class="chart"')[1].split("</svg>")[0]
        assert chart.count('fill="none"') == n_curves and "L = 64" in chart
        assert shown.split('id="values"')[1].split("</table>")[0].count('scope="row"') == n_curves
    assert "2.000 ± 0.100" in everything.split('id="values"')[1]
    assert "context 128: base 3.000; " not in everything and "context 128: " in read
    sentence = read.split('aria-live="polite">')[1].split("</p>")[0]
    assert sentence.endswith("2.000 ± 0.100; base 3.000")        # sorted: the hostile one is better at 128


# -----------------------------------------------------------------------------------------------------------
# The command


@pytest.mark.parametrize(("other", "arguments", "expected"), [
    ({"tokenizer": "gpt2"}, [], "tokenizer differs, 'byte' and 'gpt2'"),
    ({"data": "books"}, [], "evaluation data differs"),
    ({"data_sha256": "1" * 64}, [], "evaluated on different texts that are both called words"),
    ({"corpus": {**CORPUS, "mixture": {"data/more": CORPUS}}}, [], "trained on different text"),
    ({"seed": 0, "seq_len": 64}, [], "training length differs, 128 and 64"),
    ({"documents": 5}, [], "nonoverlap at 64: different targets"),
    ({"corpus": OTHER}, [], "trained on different text"),
    ({"encoding": "rope"}, [], "same config, same train.seed = 0"),
    ({"encoding": "rope", "seed": 1, "lengths": (64, 128)}, [], "seeds of one config, evaluated differently"),
    ({}, ["--baseline", "x"], "--baseline x: no such curve; choose from rope, alibi"),
    ({}, ["--data", "books"], "--data books: run"),
    ({}, ["nowhere"], "run nowhere: no run there"),
    ({}, ["--out", "FILE/out"], "FILE/out"),
])
def test_mistakes_are_one_line_and_exit_2(other: dict, arguments: list[str], expected: str, tmp_path: Path,
                                          monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    fabricate(Path("a"))
    fabricate(Path("b"), **{"encoding": "alibi", **other})
    error = failure(monkeypatch, capsys, "a", "b", *arguments)
    assert expected in error


def failure(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as end:
        run_command(command.main)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_an_evaluation_seed_that_differs_is_refused(tmp_path: Path) -> None:
    runs = [read_run(fabricate(tmp_path / "a"), None)]
    other = read_run(fabricate(tmp_path / "b", "alibi"), None)
    runs.append(other._replace(head={**other.head, "seed": 1}))
    with pytest.raises(UserError, match="evaluation seed differs, 0 and 1"):
        check_comparable(runs)


@pytest.mark.parametrize("protocol", ["position", "repeat", "passkey"])
def test_probes_and_positions_need_equal_counts_too(protocol: str, tmp_path: Path) -> None:
    runs = [read_run(fabricate(tmp_path / name, name, protocols=(protocol,)), None)
            for name in ("rope", "alibi")]
    check_comparable(runs)
    runs[1].records[0]["tokens"] += 1
    with pytest.raises(UserError, match="different targets"):
        check_comparable(runs)


def test_runs_without_checkpoint_or_evaluation_and_damaged_ones(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = fabricate(Path("a"))
    damages = [
        ("words.npz", lambda p: p.unlink(), "words.json or its .npz"),
        ("words.npz", lambda p: np.savez(p, x=1), "another version of eval.py"),
        ("words.npz", lambda p: p.write_bytes(p.read_bytes()[:100]), "or its .npz"),
        ("words.npz", lambda p: p.write_bytes(b""), "or its .npz"),
        ("words.npz", lambda p: p.write_bytes(re.sub(rb"(?s)(?<=PK\x01\x02.{4})\0", b"\1", p.read_bytes())),
         "or its .npz"),        # a bit says that its members are encrypted
        ("words.json", lambda p: p.write_text('{"records": ['), "damaged"),
        ("words.json", lambda p: p.write_text('{"records": [1]}'), "damaged"),
        ("words.json", lambda p: p.write_text("7"), "damaged"),
        ("words.json", lambda p: p.write_text("[]"), "damaged"),
        ("words.json", lambda p: p.write_text('{"records": [], "seed": 0}'), "no records"),
        ("other.json", lambda p: p.write_text("{}"), "evaluated on other, words; choose one with --data")]
    for name, change, expected in damages:
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree(run, "copy")
        change(Path("copy") / "eval" / name)
        assert expected in failure(monkeypatch, capsys, "copy"), name
    shutil.rmtree(Path("copy") / "eval")
    assert "no checkpoint yet" in failure(monkeypatch, capsys, "copy")
    (Path("copy") / "checkpoints" / "00000010").mkdir(parents=True)
    assert "run `python eval.py copy` first" in failure(monkeypatch, capsys, "copy")


def edited(value: Any, rng: np.random.Generator) -> Any:
    """The same document with a key deleted, or a value of another type, somewhere in it."""
    place = value
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else int(rng.integers(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.05:
            break
        place = place[key]
    others = [None, True, -1, 0, 1.5, 10**18, 1e308, math.inf, math.nan, "", "=x\n/", [], [1, "a"], {"a": 1}]
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = others[rng.integers(len(others))]
    return value


@pytest.mark.parametrize("n", slow_except([20, 600], 20))
def test_an_edited_evaluation_gives_a_report_or_one_line(n: int, tmp_path: Path, monkeypatch, capsys) -> None:
    """Beside a sound one, from which it mostly differs, and alone. The last slow cases draw pictures."""
    runs = [fabricate(tmp_path / name, name, is_probed=True) for name in ("rope", "alibi")]
    path = runs[1] / "eval" / "words.json"
    text, rng, reports = path.read_text(), np.random.default_rng(n), 0
    for case in range(n):
        content = json.loads(text)
        for _ in range(rng.integers(1, 3)):
            content = edited(content, rng)
        path.write_text(json.dumps(content))
        try:
            call(monkeypatch, *runs[case % 2:], "--out", tmp_path / "out", draws=case >= 590)
            reports += 1
        except UserError as error:
            assert len(error.problems) == 1, content
        except BaseException as error:
            raise AssertionError(json.dumps(content)) from error
    assert 0 < reports < n


def test_columns_of_windows_that_are_no_numbers_are_damage(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "a", is_probed=True)
    path = run / "eval" / "words.npz"
    with np.load(path, allow_pickle=False) as arrays:
        good = dict(arrays)
    key = "plain/fixed/64/tokens"
    for bad in (good[key][:3], good[key] * 0, np.full(24, "x"), good[key].reshape(4, 6), np.zeros(0)):
        np.savez(path, **{**good, key: bad})
        with pytest.raises(UserError, match="damaged"):
            read_run(run, None)


@pytest.mark.slow
def test_a_trained_and_evaluated_run_as_typed(tiny, tmp_path: Path) -> None:
    runs = []
    for encoding, seed in (("rope", 0), ("rope", 1), ("alibi", 0)):
        runs.append(str(tmp_path / f"{encoding}-seed{seed}"))
        train(tiny(encoding, f"run.dir={runs[-1]}", f"train.seed={seed}", "train.steps=4"), [])
        subprocess.run([sys.executable, str(ROOT / "eval.py"), runs[-1], "--lengths", "16,32,64", "--windows",
                        "12", "--tokens", "256"], check=True, capture_output=True)
    done = subprocess.run([sys.executable, str(ROOT / "compare.py"), *runs, "--out", str(tmp_path / "out")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 runs, trained at L = 32, evaluated on words: 2 curves, compared with rope" in done.stdout
    rows = rows_of(tmp_path / "out", "Gain over truncation, fixed targets")
    assert rows["rope (2 seeds)"][1] == "+0.0000 ± 0.0000 [+0.0000, +0.0000]"
    assert "[" in rows["alibi (1 seed)"][2]
    assert json.loads(Page((tmp_path / "out" / "report.html").read_text()).data)["tables"]


@pytest.mark.slow
def test_wandb_gets_tables_and_pictures_and_may_fail(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("wandb").teardown()     # else it keeps the mode of an earlier test in this process
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, out = fabricate(tmp_path / "a"), tmp_path / "out"
    call(monkeypatch, run, "--out", out, "--wandb", draws=True)
    (folder,) = (out / "wandb").glob("offline-run-*")
    media = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert {".png", ".json", ".wandb"} <= media and "warning" not in capsys.readouterr().out
    tables = list((folder / "files" / "media" / "table").rglob("*.json"))
    assert any(json.loads(path.read_text())["columns"] == ["curve", "64", "128 = L", "256"]
               for path in tables)
    monkeypatch.setitem(sys.modules, "wandb", None)
    call(monkeypatch, run, "--out", out, "--wandb", draws=True)
    assert capsys.readouterr().out.count("warning: W&B") == 1


def test_different_targets_are_named_by_the_flags_that_eval_takes() -> None:
    a, b = (SimpleNamespace(path=Path(name), settings={"position": {"longest": n, "length": n}})
            for name, n in (("a", 256), ("b", 128)))
    assert ("--longest 256 and --longest 128, --lengths up to 256 and --lengths up to 128"
            in str(other_targets(a, b, "position", 256)))


def test_methods_on_a_pretrained_model_have_paired_intervals(tmp_path: Path, monkeypatch) -> None:
    """Of Hugging Face folders that eval.py wrote into. Two of one config are two curves, not two seeds."""
    fields = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads":
              2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 257, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": False, "max_position_embeddings": 128}
    folders = []
    for name, better in (("base", 0.0), ("tuned", 0.5)):
        folder = fabricate(tmp_path / name, extends=(None, "yarn"), better=better, lengths=(128, 256),
                           protocols=("fixed",), documents=12)
        for file in ("config.toml", "corpus.json"):
            (folder / file).unlink()
        (folder / "config.json").write_text(json.dumps(fields))
        folders.append(folder)
    run = fabricate(tmp_path / "run", lengths=(128, 256), protocols=("fixed",), L=128)
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, (*folders, run)), "--out",
                                      str(tmp_path / "out")])
    command.main()
    report_csv = (tmp_path / "out" / "report.csv").read_text()
    assert {row["label"] for row in csv.DictReader(report_csv.splitlines())} >= {
        "rope (base)", "rope (base) + yarn", "rope (tuned)", "rope (tuned) + yarn"}
    curves = compare.make_curves([read_run(folder, None) for folder in folders])
    tables = {table.key: table for table in compare.make_tables(curves, curves[0], 128)}
    cell = tables["fixed-gain"].rows["rope (tuned)"][0]
    assert cell.value == pytest.approx(0.5) and cell.low <= 0.5 <= cell.high and cell.beats
