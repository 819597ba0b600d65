"""Reports: figures come from sums, gains are exact, labels are never markup, what differs is refused."""

import json
import math
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import compare as command
from base.command import run_command
from base.errors import UserError
from evaluation import comparison as compare
from evaluation import pictures, report, results
from evaluation.measures import ANSWERS, GAIN, PERPLEXITY
from evaluation.results import make_table
from evaluation.runs import check_comparable, read_run

SPLIT = {"tokens": 9, "bytes": 9, "documents": 1, "sha256": {"val.bin": "a"}}
CORPUS = {"format_version": 1, "dtype": "uint16", "vocab_size": 257, "eot": 256,
          "tokenizer": {"name": "byte", "sha256": "c"}, "splits": {"train": SPLIT, "val": SPLIT}}
OTHER = {**CORPUS, "splits": {"train": SPLIT, "val": {**SPLIT, "sha256": {"val.bin": "b"}}}}
LENGTHS = (64, 128, 256)
PROTOCOLS = ("nonoverlap", "sliding", "fixed", "position", "repeat", "passkey")


def fabricate(folder: Path, encoding: str = "rope", seed: int = 0, extends=("none",), better: float = 0.0,
              lengths=LENGTHS, protocols=PROTOCOLS, L: int = 128, documents: int = 12, config: str = "",
              corpus=CORPUS, **head: Any) -> Path:
    """A run's folder as train.py and eval.py leave it; loss is `better` nats a token lower."""
    (folder / "eval").mkdir(parents=True)
    (folder / "corpus.json").write_text(json.dumps(corpus))
    (folder / "config.toml").write_text(f'[data]\ndir = "x"\n[position]\nencoding = "{encoding}"\n[train]\n'
                                        f"seed = {seed}\nseq_len = {L}\n{config}\n")
    parts: list[pd.DataFrame] = []

    def add(extend: str, protocol: str, length: int, **columns: Any) -> None:
        parts.append(make_table(seed=seed, encoding=encoding, extend=extend, protocol=protocol, length=length,
                                **columns))

    document = np.repeat(np.arange(documents), 2)
    tokens = np.where(np.arange(len(document)) % 3, 32, 8)       # windows of unequal size
    for extend in extends:
        for protocol in (p for p in ("nonoverlap", "sliding", "fixed") if p in protocols):
            for length in lengths:
                nll = (np.random.default_rng(length).normal(2.0, 0.5, len(document)) - better) * tokens
                more = {"truncated_nll": nll + 0.25 * tokens} if protocol == "fixed" else {}
                add(extend, protocol, length, nll=nll, tokens=tokens, bytes=tokens, document=document,
                    end=np.arange(len(document)) + length, **more)
        if "position" in protocols:
            for place, nll in (("0-3", 300.0), ("64-127", 200.0)):
                add(extend, "position", 256, place=place, nll=[nll], tokens=100, bytes=100)
        noise = np.random.default_rng(seed).normal(0, 0.1, 24)          # 24 windows of 8 tokens
        for length, distance in ((L, L // 2), (256, 192)) if "repeat" in protocols else ():
            add(extend, "repeat", length, place=str(distance), nll=8 * (1 - better + noise), first_nll=8.0,
                control_nll=9.0, tokens=8, document=np.arange(24) // 2)
        is_right = np.random.default_rng(seed).random((2, 20)) < 0.2 + better           # depths, trials
        for depth in (0, 1) if "passkey" in protocols else ():
            add(extend, "passkey", 256, place=str(depth), correct=is_right[depth], nll=1.0, tokens=1,
                document=np.arange(20))
    content = {"run": str(folder), "encoding": encoding, "seq_len": L, "tokenizer": "byte", "data": "words",
               "data_sha256": "0" * 64, "seed": 0, "step": 1000, "checkpoint_sha256": "0" * 64,
               "dtype": "float32", **head}
    results.write(folder / "eval" / "words.json", results.Results(content, results.join(*parts)))
    return folder


def call(monkeypatch, *arguments: Any, draws: bool = False) -> None:
    """Run compare.py, without pictures unless the test is about them: they take seconds."""
    if not draws:
        monkeypatch.setattr(command, "draw", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    command.main()


def rows_of(out: Path, title: str) -> dict[str, dict[str, str]]:
    """Label -> heading -> text of the cells, bold ones in stars, of the table under a heading of the page."""
    page = (out / "report.html").read_text().replace("<b>", "**").replace("</b>", "**")
    section = page.split(f">{title}</h2>")[1].split("<h2")[0]
    rows = [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd]>.*?</t[hd]>", row)]
            for row in section.split("<tr")[1:]]
    return {label: dict(zip(rows[0][1:], cells, strict=True)) for label, *cells in rows[1:]}


def runs_of(folder: Path, seeds: int = 1, **better: float) -> list[Path]:
    """A run for each encoding and seed, in folders named after them."""
    return [fabricate(folder / f"{name}-seed{seed}", name, seed, better=much)
            for name, much in better.items() for seed in range(seeds)]


# -----------------------------------------------------------------------------------------------------------
# Figures and intervals


def test_figures_come_from_sums_and_std_is_over_seeds(tmp_path: Path, monkeypatch) -> None:
    runs = runs_of(tmp_path, 3, rope=0.0)
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    per_run = [json.loads((run / "eval" / "words.json").read_text())["records"] for run in runs]

    def cell(protocol: str, *keys: str, form: str = "", figure=lambda x: x) -> str:
        sums = [[sum(r[key] for r in records if (r["protocol"], r["length"]) == (protocol, 256))
                 for key in keys] for records in per_run]
        values = [figure(above / below) for above, below in sums]
        return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}} ["

    expected = cell("nonoverlap", "nll_sum", "tokens", form=".3f", figure=math.exp)
    assert rows_of(tmp_path / "out", "Perplexity, nonoverlap")["rope"]["256"].startswith(expected)
    assert rows_of(tmp_path / "out", "Retrieval, passkey")["rope"]["256"].startswith(
        cell("passkey", "correct", "trials", form=".0%"))       # over both depths
    table = results.read_table(tmp_path / "out" / "table.parquet")
    assert [*table.run.unique()] == [str(run) for run in runs]
    assert table.nll.sum() == pytest.approx(sum(r["nll_sum"] for records in per_run for r in records))


@pytest.mark.parametrize(("mean", "std", "expected"), [
    (193.94, 3.68, "193.9 ± 3.7"), (1014.2, 117.4, "1014 ± 117"), (4.7139, 0.0123, "4.714 ± 0.012"),
    (12345.0, 678.0, "1.234e+04 ± 6.8e+02"), (math.inf, math.nan, "inf ± nan")])
def test_a_standard_deviation_ends_at_the_last_digit_of_its_mean(mean: float, std: float,
                                                                 expected: str) -> None:
    assert report.Table("", "", "", PERPLEXITY, 128, pd.Series(), {}).text(report.Cell(mean, std)) == expected


def test_gains_are_exact_signed_and_bold_where_they_beat(tmp_path: Path, monkeypatch, capsys) -> None:
    """Every window of alibi is 0.5 nats a token better than rope's."""
    runs, out = runs_of(tmp_path, 2, rope=0.0, alibi=0.5), tmp_path / "out"
    call(monkeypatch, *runs, "--out", out)
    for protocol in ("nonoverlap", "sliding", "fixed"):
        rows = rows_of(out, f"Gain over rope, {protocol}")
        assert {*rows["alibi"].values()} == {"**+0.5000 [+0.5000, +0.5000]**"} and "rope" not in rows
    fixed = rows_of(out, "Perplexity, fixed targets")
    assert [*fixed["rope"]] == ["64", "128 = L", "256"]
    assert fixed["alibi"]["64"].startswith("**") and "**" not in "".join(fixed["rope"].values())
    gains = rows_of(out, "Gain over truncation, fixed targets")
    assert {*gains["rope"].values(), *gains["alibi"].values()} == {"**+0.2500 ± 0.0000 [+0.2500, +0.2500]**"}
    assert [*rows_of(out, "Loss by position")["rope"]] == ["0-3", "64-127, L"]
    assert "95 % intervals over 12 documents; number of seeds: 2." in (out / "report.html").read_text()
    call(monkeypatch, *runs, "--baseline", "alibi", "--out", out)
    assert {*rows_of(out, "Gain over alibi, fixed")["rope"].values()} == {"-0.5000 [-0.5000, -0.5000]"}
    assert "Perplexity, fixed targets, means over seeds" in (shown := capsys.readouterr().out)
    assert re.search(r"alibi +4\.\d+ +4\.\d+ +4\.\d+ +2\.\d\d\d\n", shown)    # 64, L, 256, bits per byte
    call(monkeypatch, *runs[::2], "--out", out)                         # one seed
    assert "**" not in "".join(rows_of(out, "Gain over rope, fixed")["alibi"].values())
    few = [fabricate(tmp_path / f"few-{name}", name, better=better, documents=3)
           for name, better in (("rope", 0.0), ("alibi", 0.5))]         # too few windows for an interval
    call(monkeypatch, *few, "--out", out)
    assert not rows_of(out, "Perplexity, fixed targets")["few-alibi"]["64"].startswith("**")


def test_a_difference_is_of_all_seeds_of_both_curves(tmp_path: Path, monkeypatch) -> None:
    """3 of rope and 2 of alibi; the variances of both add up. Methods on the same runs are paired."""
    runs = [fabricate(tmp_path / f"{name}-seed{seed}", name, seed, ("none", "log_n"), x, protocols=("fixed",))
            for name, better in (("rope", (0.0, 0.1, 0.2)), ("alibi", (0.5, 0.7)))
            for seed, x in enumerate(better)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over rope, fixed")
    value, low, high = (float(x) for x in re.findall(r"[+-][\d.]+", rows["alibi"]["64"]))
    assert value == 0.5 and "number of seeds: 2, 3." in (tmp_path / "out" / "report.html").read_text()
    draws = np.random.default_rng(0).standard_t([2, 1], (1_000_000, 2)) @ [0.1 / 3**0.5, 0.1]
    half = np.quantile(abs(draws), 0.95)
    assert high - value == pytest.approx(half, rel=0.05) and value - low == pytest.approx(half, rel=0.05)
    assert rows["rope + log_n"]["64"] == "+0.0000 [+0.0000, +0.0000]"


def test_intervals_widen_with_the_variance_of_the_seeds(tmp_path: Path, monkeypatch) -> None:
    """The windows differ alike; only the seeds of t5 vary."""
    runs = runs_of(tmp_path, 3, rope=0.0, alibi=0.5)
    runs += [fabricate(tmp_path / f"t5-seed{seed}", "t5", seed, better=0.5 + 0.1 * (seed == 2))
             for seed in range(3)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over rope, fixed")
    assert {*rows["alibi"].values()} == {"**+0.5000 [+0.5000, +0.5000]**"}
    half = 4.302653 * np.std([0, 0, 0.1], ddof=1) / 3**0.5              # t with 2 degrees of freedom
    low, high = (float(x) for x in re.findall(r"[+-][\d.]+", rows["t5"]["64"])[1:])
    assert low == pytest.approx(0.5333 - half, abs=1e-3) and high == pytest.approx(0.5333 + half, abs=1e-3)


def test_bold_survives_holms_correction_over_the_curves_of_a_column(tmp_path: Path, monkeypatch) -> None:
    """The same curve beats the baseline alone, but not as one of five. Its interval stays."""
    def folder(name: str, seed: int, better: float) -> Path:
        vary = 0.07 * seed if name != "rope" else 0.0
        return fabricate(tmp_path / f"{name}-seed{seed}", name, seed, better=better + vary,
                         protocols=("fixed",))

    runs = [folder(name, seed, better) for name, better in (("rope", 0.0), ("alibi", 0.25))
            for seed in range(3)]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    alone = rows_of(tmp_path / "out", "Gain over rope, fixed")["alibi"]
    assert all(cell.startswith("**+0.32") for cell in alone.values())
    others = [folder(name, seed, 0.0) for name in ("t5", "fire", "none", "cope") for seed in range(3)]
    call(monkeypatch, *runs, *others, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over rope, fixed")
    assert rows["alibi"] == {heading: cell.strip("*") for heading, cell in alone.items()}


def test_probes_have_intervals_and_gains(tmp_path: Path, monkeypatch) -> None:
    runs, out = runs_of(tmp_path, 3, rope=0.0, alibi=0.7), tmp_path / "out"
    call(monkeypatch, *runs, "--out", out)
    repeat = rows_of(out, "Repeated text")["alibi"]
    assert [*repeat] == ["64", "192"]
    assert re.fullmatch(r"\*\*0\.[67]\d+ ± 0\.0\d+ \[0\.\d+, 0\.\d+\]\*\*", repeat["64"])
    used = float(rows_of(out, "Repeated text, over the control")["alibi"]["64"].strip("*").split()[0])
    assert used == pytest.approx(float(repeat["64"].strip("*").split()[0]) + 1 / 8, abs=2e-3)
    gain = rows_of(out, "Gain over rope, repeat")["alibi"]["64"]
    assert re.fullmatch(r"\*\*\+0\.700 \[\+0\.6\d+, \+0\.7\d+\]\*\*", gain)
    share = rows_of(out, "Retrieval, passkey")["alibi"]["256"]
    assert re.fullmatch(r"\*\*\d+% ± \d+% \[\d+%, \d+%\]\*\*", share)
    gain = rows_of(out, "Gain over rope, passkey")["alibi"]["256"]
    assert re.fullmatch(r"\*\*\+\d+% \[\+\d+%, \+\d+%\]\*\*", gain)
    assert "95 % intervals over 20 trials; number of seeds: 3." in (out / "report.html").read_text()


def test_a_gate_is_failed_by_a_model_that_has_not_learned(tmp_path: Path, monkeypatch) -> None:
    """Worse than a trigram, or without gain on a repeated passage: named, and grey in every table."""
    runs = runs_of(tmp_path, 2, rope=0.7, alibi=0.5, t5=0.1)
    for run in runs:
        path = run / "eval" / "words.json"
        evaluation = results.read(path)
        table = evaluation.table
        fixed = table[(table.protocol == "fixed") & (table.length == 128)]
        gap = 0.01 if "alibi" in run.name else -0.01
        trigram = fixed.assign(protocol="trigram", nll=fixed.nll - gap * fixed.tokens)
        results.write(path, evaluation._replace(table=results.join(table, trigram)))
    curves = compare.make_curves([read_run(run, None) for run in runs])
    gates = {curve.label: compare.gate_of(curve, 128) for curve in curves}
    assert [label for label, gate in gates.items() if gate.is_failed] == ["alibi", "t5"]
    assert gates["alibi"].loss - gates["alibi"].trigram == pytest.approx(0.01) and gates["t5"].gain < 0.3
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "passed: loss" in page and page.count("failed: loss") == 2
    for title in ("Perplexity, fixed targets", "Gain over rope, fixed"):
        section = page.split(f">{title}</h2>")[1].split("<h2")[0]
        assert re.findall("<i>(.*?)</i>", section) == ["alibi", "t5"]


def test_a_report_says_where_the_trials_share_few_documents(tmp_path: Path) -> None:
    """Trials of one document, at several depths, ask for the same facts."""
    for n, expected in ((8, "8 trials"), (1, "none, there are only 5 trials"),
                        (4, "20 trials, since documents are too few: other documents are not covered")):
        rows = make_table(correct=np.arange(5 * n) % 2, document=np.arange(5 * n) % n).assign(trials=1)
        assert compare.estimate_one(compare.scores_of(rows, ANSWERS.score))[1] == expected


# -----------------------------------------------------------------------------------------------------------
# Curves, training, pictures


def test_curves_are_folders_and_extensions_with_seeds_together(tmp_path: Path) -> None:
    def tuned(name: str, seed: int, base: str) -> Path:
        return fabricate(tmp_path / name, seed=seed, config=f'init_from = "{tmp_path}/{base}"')

    def curves(*folders: Path) -> dict[str, list[str]]:
        found = compare.make_curves([read_run(folder, None) for folder in folders])
        return {curve.label: [run.seed for run in curve.runs] for curve in found}

    plain = [fabricate(tmp_path / f"rope-seed{seed}", seed=seed, extends=("none", "yarn:beta_fast=8"),
                       config=f"[run]\nlog_every = {7 + seed}") for seed in (0, 1)]
    assert curves(*plain, fabricate(tmp_path / "slow", config="lr = 1e-4")) == {
        "rope": ["0", "1"], "rope + yarn:beta_fast=8": ["0", "1"], "slow": ["0"]}
    both = tuned("long-seed0", 0, "rope-seed0"), tuned("long-seed1", 0, "rope-seed1")
    assert curves(*both) == {"long": ["0 from 0", "0 from 1"]}
    for second, expected in ((tuned("a/long-seed2", 1, "rope-seed0"), "not independent samples"),
                             (tuned("b/long-seed2", 0, "rope-seed0"), "same seed"),
                             (tuned("c/long-seed2", 0, "other-seed2"), "differ in train.init_from"),
                             (fabricate(tmp_path / "d" / "long-seed2", "t5"), "differ in position.encoding")):
        with pytest.raises(UserError, match=expected):
            curves(*both, second)
    names = [read_run(run, None) for run in (*plain, *both)]
    assert {curve.label for curve in compare.make_curves(names, ["a", "a", "b", "b"])} == {
        "a", "a + yarn:beta_fast=8", "b"}


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`$_&amp;"


def test_the_page_has_every_curve_in_pictures_and_its_labels_are_never_markup(tmp_path: Path,
                                                                              monkeypatch) -> None:
    """More curves than can be told apart are in several panels; the baseline is in all of them."""
    runs = [fabricate(tmp_path / f"r{i}", config=f"lr = {i + 1}e-4", protocols=("passkey",))
            for i in range(9)]
    labels = ["base", HOSTILE, *(f"curve {i}" for i in range(7))]
    named = [f"--label={label}" for label in labels]
    call(monkeypatch, *runs, *named, "--out", tmp_path / "out", draws=True)
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search("<(script|img)", page)
    pdfs = {path.name for path in (tmp_path / "out").glob("*.pdf")}
    assert pdfs == {"passkey.pdf", "passkey-gain.pdf"}
    assert len([*(tmp_path / "out").glob("*.svg")]) == 2 and "bars: 95 % intervals" in page
    sections = dict(re.findall(r"<h2 id='([^']+)'>(.*?)(?=<h2|</html>)", page, re.DOTALL))
    assert all(section.count("<svg") == 1 for section in sections.values()) and len(sections) == len(pdfs)
    panels = sections["passkey"].split("L = 128</text>")
    assert len(panels) == 3 and sections["passkey"].count("base</text>") == 2
    for i in range(7):
        assert f"curve {i}</text>" in sections["passkey"]


def test_a_failing_curve_stretches_no_axis_and_truncation_is_a_line(tmp_path: Path) -> None:
    from matplotlib import pyplot as plt

    rows = {"good": {"128": report.Cell(4.0, None, 3.9, 4.1)}, "bad": {"128": report.Cell(4000.0)}}
    table = report.Table("fixed", "", "", PERPLEXITY, 128, pd.Series({"128": 128}), rows, ["bad"], 4.05)
    axis = plt.subplots()[1]
    pictures.draw_curves(axis, table, ["good", "bad"])
    assert 3 < axis.get_ylim()[0] < 3.9 and 4.1 < axis.get_ylim()[1] < 6
    assert "truncated to L" in axis.get_legend_handles_labels()[1]
    assert report.Table("", "", "", GAIN, 128, pd.Series(), {}).text(report.Cell(-1e-9)) == "+0.0000"
    plt.close("all")


def test_a_curve_that_sees_nothing_beyond_L_is_named(tmp_path: Path) -> None:
    (curve,) = compare.make_curves([read_run(fabricate(tmp_path / "window"), None)])
    assert not any("does not see it" in note for note in compare.remarks([curve]))
    curve.runs[0].table["truncated_nll"] = curve.runs[0].table.nll
    assert any(note.startswith("window predicts the same") for note in compare.remarks([curve]))


# -----------------------------------------------------------------------------------------------------------
# What is refused or named


@pytest.mark.parametrize(("other", "arguments", "expected"), [
    ({"tokenizer": "gpt2"}, [], "tokenizer of their evaluations differs, 'byte' and 'gpt2'"),
    ({"data": "books"}, [], "data of their evaluations differs"),
    ({"data_sha256": "1" * 64}, [], "data_sha256 of their evaluations differs"),
    ({"corpus": {**CORPUS, "mixture": {"data/more": CORPUS}}}, [], "trained on different text"),
    ({"corpus": OTHER}, [], "trained on different text"),
    ({"seq_len": 64}, [], "seq_len of their evaluations differs, 128 and 64"),
    ({"documents": 5}, [], "nonoverlap at 64: different targets"),
    ({"lengths": (64, 128), "path": "rope-seed1", "encoding": "rope", "seed": 1}, [],
     "evaluated differently"),
    ({}, ["--baseline", "x"], "--baseline x: no such curve; choose from rope, alibi"),
    ({}, ["--label", "x"], "--label: given 1 times for 2 runs"),
    ({}, ["--data", "books"], "--data books: run")])
def test_mistakes_are_one_line_and_exit_2(other: dict, arguments: list[str], expected: str, tmp_path: Path,
                                          monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    fabricate(Path("rope-seed0"))
    about = {"encoding": "alibi", "path": "alibi", **other}
    path = about.pop("path")
    fabricate(Path(path), **about)
    assert expected in failure(monkeypatch, capsys, "rope-seed0", path, *arguments)


def failure(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as end:
        run_command(command.main)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_a_text_is_named_where_a_run_has_extended_evaluations_of_two(tmp_path: Path, monkeypatch,
                                                                     capsys) -> None:
    """eval.py --extend all writes them."""
    monkeypatch.chdir(tmp_path)
    for path in (fabricate(Path("rope")) / "eval").glob("words.*"):
        for name in ("a-extended", "b-extended"):
            shutil.copy(path, path.with_stem(name))
        path.unlink()
    error = failure(monkeypatch, capsys, "rope")
    assert "evaluated on a-extended, b-extended; choose one with --data" in error


def test_other_targets_are_refused_by_their_settings(tmp_path: Path) -> None:
    runs = [read_run(fabricate(tmp_path / name, name, settings={"sliding": {"longest": longest}}), None)
            for name, longest in (("rope", 256), ("alibi", 128))]
    table = runs[1].table
    for (protocol, length), rows in table.groupby(["protocol", "length"]):
        check_comparable(runs)
        table.loc[rows.index[0], "tokens"] += 1
        with pytest.raises(UserError, match=f"{protocol} at {length}: ") as error:
            check_comparable(runs)
        assert protocol != "sliding" or "by {'longest': 256} and {'longest': 128}" in str(error)
        table.loc[rows.index[0], "tokens"] -= 1


def test_numbers_that_an_older_evaluation_lacks_are_not_compared(tmp_path: Path) -> None:
    runs = [read_run(fabricate(tmp_path / name, name), None) for name in ("rope", "alibi")]
    runs[0].table["bytes"] = np.nan
    check_comparable(runs)
    runs[1].table["end"] += 1
    with pytest.raises(UserError, match="different targets"):
        check_comparable(runs)


def test_other_code_and_dtypes_are_named_in_one_line_each(tmp_path: Path, monkeypatch, capsys) -> None:
    runs = [fabricate(tmp_path / "a-seed0", commit="1" * 40, train_dtype="float32"),
            fabricate(tmp_path / "a-seed1", seed=1, commit="2" * 40, train_dtype="bfloat16", step=5),
            fabricate(tmp_path / "old", "alibi", dtype="bfloat16")]
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    out = capsys.readouterr().out
    a, b, old = map(str, runs)
    for line in (f"evaluated by different code: {'1' * 12} ({a}); {'2' * 12} ({b}); unknown ({old})",
                 f"trained in different dtypes: float32 ({a}); bfloat16 ({b}); unknown ({old})",
                 f"evaluated in different dtypes: float32 ({a}, {b}); bfloat16 ({old})"):
        assert f"Warning: {line}\n" in out
    assert "a-seed1 (unfinished: step 5 of " in out
    call(monkeypatch, runs[0], "--out", tmp_path / "out")
    assert "Warning" not in capsys.readouterr().out


def test_damaged_and_stale_files_are_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for i, (name, content, expected) in enumerate((
            ("eval/words.parquet", None, "or its .parquet: damaged"),
            ("eval/words.parquet", b"PAR1", "damaged"),
            ("eval/words.json", b'{"records": [', "eval/words.json or its .parquet: damaged"),
            ("eval/other.json", b"{}", "evaluated on other, words; choose one with --data"),
            ("corpus.json", None, "no corpus.json"))):
        run = fabricate(Path(f"run{i}"))
        (run / name).unlink() if content is None else (run / name).write_bytes(content)
        assert expected in failure(monkeypatch, capsys, str(run)), name
    stale = fabricate(Path("stale"))
    monkeypatch.setattr("evaluation.runs.is_current", lambda *_: False)
    assert "the run has another checkpoint now; run `python eval.py stale --replace`" in failure(
        monkeypatch, capsys, str(stale))


def test_methods_on_a_pretrained_model_have_paired_intervals(tmp_path: Path, monkeypatch) -> None:
    """Of Hugging Face folders that eval.py wrote into."""
    fields = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads":
              2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 257, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": False, "max_position_embeddings": 128}
    folders = []
    for name, better in (("base", 0.0), ("tuned", 0.5)):
        folders.append(fabricate(tmp_path / name, extends=("none", "yarn"), better=better, lengths=(128, 256),
                                 protocols=("fixed",), checkpoint_sha256=None))
        for file in ("config.toml", "corpus.json"):
            (folders[-1] / file).unlink()
        (folders[-1] / "config.json").write_text(json.dumps(fields))
    run = fabricate(tmp_path / "run", lengths=(128, 256), protocols=("fixed",))
    call(monkeypatch, *folders, run, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Gain over base, fixed")
    assert [*rows] == ["tuned", "run", "base + yarn", "tuned + yarn"]
    assert rows["tuned"]["256"] == "**+0.5000 [+0.5000, +0.5000]**"


# -----------------------------------------------------------------------------------------------------------
# Folders of runs, and those that compare.py wrote


def test_a_report_is_compared_again_with_the_same_figures(tmp_path: Path, monkeypatch) -> None:
    """Without its runs, and with another run; labels and training curves are kept."""
    runs, out = runs_of(tmp_path, 2, rope=0.0, alibi=0.5), tmp_path / "out"
    for run in runs:
        (run / "metrics.jsonl").write_text('{"step": 2, "tokens": 64, "loss": 3.5}\n')
    call(monkeypatch, *runs, "--label=a", "--label=a", "--label=b", "--label=b", "--out", out)
    first = (out / "report.html").read_text()
    shutil.move(runs[0].parent / "out", tmp_path / "kept")
    for run in runs:
        shutil.rmtree(run)
    call(monkeypatch, tmp_path / "kept", "--out", out)
    assert (out / "report.html").read_text() == first
    for name in ("table.parquet", "training.parquet", "runs.json"):
        assert (out / name).read_bytes() == (tmp_path / "kept" / name).read_bytes()
    assert pd.read_parquet(out / "training.parquet").loss.tolist() == [3.5] * 4
    call(monkeypatch, tmp_path / "kept", fabricate(tmp_path / "t5", "t5", better=0.2), "--out", out)
    assert [*rows_of(out, "Gain over a, fixed")] == ["b", "t5"]


def test_logs_reports_and_runs_without_evaluation_are_passed_over(tmp_path: Path, monkeypatch,
                                                                  capsys) -> None:
    """In a folder of runs, and among the arguments that a shell makes of `runs/*`."""
    runs, out = runs_of(tmp_path / "runs", 2, rope=0.0, alibi=0.5), tmp_path / "runs" / "report"
    (tmp_path / "runs" / "rope-seed0.log").write_text("")
    shutil.rmtree(fabricate(tmp_path / "runs" / "new") / "eval")
    call(monkeypatch, *runs, "--out", out)
    first = results.read_table(out / "table.parquet")
    call(monkeypatch, tmp_path / "runs", "--out", tmp_path / "out")
    assert "new: not evaluated, left out" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "runs" / "new")
    call(monkeypatch, *sorted((tmp_path / "runs").iterdir()), "--out", out)
    for folder in (tmp_path / "out", out):
        assert results.read_table(folder / "table.parquet").nll.sum() == first.nll.sum()
    with pytest.raises(UserError, match="run .*missing: no such folder"):
        call(monkeypatch, runs[0], tmp_path / "missing", "--out", out)


def test_a_label_with_signs_of_tex_is_drawn(tmp_path: Path, monkeypatch) -> None:
    run = fabricate(tmp_path / "rope", protocols=("passkey",))
    call(monkeypatch, run, "--label=$\\frac{1$", "--out", tmp_path / "out", draws=True)
    assert "$\\frac{1$" in (tmp_path / "out" / "passkey.svg").read_text()


@pytest.mark.parametrize("n_bytes", [0, 2000, 20_000])
def test_a_full_disk_is_one_line(n_bytes: int, tmp_path: Path, monkeypatch, capsys) -> None:
    run = fabricate(tmp_path / "rope", protocols=("fixed", "passkey"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(run), "--out", str(tmp_path / "out")])
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limit[1]))
    try:
        with pytest.raises(SystemExit) as end:
            run_command(command.main)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and "too large" in error
