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
from evaluation import results
from evaluation.results import make_table, read_table
from evaluation.runs import check_comparable, read_run, write_runs

SPLIT = {"tokens": 9, "bytes": 9, "documents": 1, "sha256": {"val.bin": "a"}}
CORPUS = {"format_version": 1, "dtype": "uint16", "vocab_size": 257, "eot": 256,
          "tokenizer": {"name": "byte", "sha256": "c"}, "splits": {"train": SPLIT, "val": SPLIT}}
OTHER = {**CORPUS, "splits": {"train": SPLIT, "val": {**SPLIT, "sha256": {"val.bin": "b"}}}}
LENGTHS = (64, 128, 256)
PROTOCOLS = ("nonoverlap", "sliding", "fixed", "trigram", "position", "repeat", "passkey")


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
        if "trigram" in protocols and extend == "none":
            nll = (np.random.default_rng(L).normal(2.0, 0.5, len(document)) + 0.1) * tokens
            add(extend, "trigram", L, nll=nll, tokens=tokens, bytes=tokens, document=document,
                end=np.arange(len(document)) + L)
        if "position" in protocols:
            for place, nll in (("0-3", 300.0), ("64-127", 200.0)):
                add(extend, "position", 256, place=place, nll=[nll], tokens=100, bytes=100)
        noise = np.random.default_rng(seed).normal(0, 0.1, 24)          # 24 windows of 8 tokens
        for length, distance in ((L, L // 2), (256, 192)) if "repeat" in protocols else ():
            add(extend, "repeat", length, place=str(distance), nll=8 * (1 - better + noise), first_nll=8.0,
                control_nll=12.0, tokens=8, document=np.arange(24) // 2)
        is_right = np.random.default_rng(seed).random((2, 20)) < 0.2 + better           # depths, examples
        for depth in (0, 1) if "passkey" in protocols else ():
            add(extend, "passkey", 256, place=str(depth), correct=is_right[depth], nll=1.0, tokens=1,
                document=np.arange(20))
    content = {"run": str(folder), "encoding": encoding, "seq_len": L, "tokenizer": "byte", "data": "words",
               "data_sha256": "0" * 64, "seed": 0, "step": 1000, "checkpoint_sha256": "0" * 64,
               "dtype": "float32", **head}
    results.write(folder / "eval" / "words.json", results.Results(content, results.join(*parts)))
    return folder


def call(monkeypatch, *arguments: Any, draws: bool = False) -> None:
    """Run compare.py, without figures unless the test is about them: they take seconds."""
    if not draws:
        monkeypatch.setattr(command, "draw_sections", lambda sections, *_: sections)
        monkeypatch.setattr(command, "training_section", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    command.main()


def rows_of(out: Path, title: str) -> dict[str, dict[str, str]]:
    """Label -> heading -> text of the cells, bold ones in stars, of the table under a heading of the page."""
    page = (out / "report.html").read_text().replace("<b>", "**").replace("</b>", "**")
    section = page.split(f">{title}</h2>")[1].split("<h2")[0]
    section = section.replace("<br>", " ")
    rows = [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd]>.*?</t[hd]>", row)]
            for row in section.split("<tr")[1:]]
    return {label: dict(zip(rows[0][1:], cells, strict=True)) for label, *cells in rows[1:]}


GATED = ("fixed", "trigram", "repeat")


def runs_of(folder: Path, seeds: int = 1, protocols=GATED, **better: float) -> list[Path]:
    """A run for each encoding and seed, in folders named after them."""
    return [fabricate(folder / f"{name}-seed{seed}", name, seed, better=much, protocols=protocols)
            for name, much in better.items() for seed in range(seeds)]


# -----------------------------------------------------------------------------------------------------------
# Figures and intervals


def test_figures_come_from_sums(tmp_path: Path, monkeypatch) -> None:
    runs = runs_of(tmp_path, 3, PROTOCOLS, rope=0.0)
    call(monkeypatch, *runs, "--out", tmp_path / "out")
    records = [json.loads((run / "eval" / "words.json").read_text())["records"] for run in runs]

    def mean(protocol: str, above: str, below: str) -> float:
        sums = pd.DataFrame([{**record, "run": i} for i, of_run in enumerate(records) for record in of_run
                             if (record["protocol"], record["length"]) == (protocol, 256)])
        totals = sums.groupby("run")[[above, below]].sum()
        return float((totals[above] / totals[below]).mean())

    nonoverlap = rows_of(tmp_path / "out", "Perplexity, nonoverlap")["rope"]["256 = 2 L"]
    assert nonoverlap.startswith(f"{math.exp(mean('nonoverlap', 'nll_sum', 'tokens')):.3f} [")
    written = pd.read_csv(tmp_path / "out" / "estimates.csv").query("key == 'nonoverlap' and length == 256")
    assert written["value"].item() == pytest.approx(-mean("nonoverlap", "nll_sum", "tokens"))
    share = rows_of(tmp_path / "out", "Retrieval, passkey")["rope"]["256 = 2 L"]
    assert f"{mean('passkey', 'correct', 'examples'):.0%}" in share                   # over both depths


@pytest.mark.slow
def test_gains_are_exact_signed_and_bold_where_they_beat(tmp_path: Path, monkeypatch, capsys) -> None:
    """Every window of alibi is 0.5 nats a token better than rope's; both pass the gate."""
    runs, out = runs_of(tmp_path, 2, PROTOCOLS, rope=0.0, alibi=0.5), tmp_path / "out"
    call(monkeypatch, *runs, "--out", out)
    better, beyond = "**+0.500** [+0.500, +0.500]", " +0.500 ... +0.500"
    for protocol in ("nonoverlap", "sliding", "fixed"):
        rows = rows_of(out, f"Lead over rope, {protocol}")
        assert rows == {"alibi": {"64": better, "128 = L": better, "256 = 2 L": better + beyond}}
    gains = rows_of(out, "Gain over truncation, fixed targets")
    assert gains["rope"]["256 = 2 L"].startswith("**+0.250** [+0.250, +0.250]")
    for length in ("64", "128 = L"):        # at L near 0, below it truncation to L sees more: never marked
        assert gains["rope"][length] == gains["alibi"][length] == "+0.250 [+0.250, +0.250]"
    fixed = rows_of(out, "Perplexity, fixed targets")
    assert [*fixed["rope"]] == ["64", "128 = L", "256 = 2 L"] and "**" not in str(fixed)
    assert [*rows_of(out, "Loss by position")["rope"]] == ["0-3", "64-127"]
    repeat = rows_of(out, "Lead over rope, repeat")["alibi"]
    assert [*repeat] == ["64", "192"] and re.fullmatch(r"\+0\.500 \[\+0\.\d+, \+0\.\d+\]", repeat["64"])
    assert re.match(r"\W*\+\d\d%\W* \[", rows_of(out, "Lead over rope, passkey")["alibi"]["256 = 2 L"])
    assert "how seeds and text vary: 12 documents" in (out / "report.html").read_text()
    call(monkeypatch, *runs, "--baseline", "alibi", "--out", out)
    assert rows_of(out, "Lead over alibi, fixed")["rope"]["64"] == "-0.500 [-0.500, -0.500]"
    assert re.search(r"alibi +4\.\d+ +4\.\d+ +4\.\d+\n", capsys.readouterr().out)       # 64, L, 256
    call(monkeypatch, *runs[::2], "--out", out)                         # one seed
    assert "<b>" not in (out / "report.html").read_text()


def test_a_model_that_has_not_learned_is_grey_and_not_ranked(tmp_path: Path, monkeypatch) -> None:
    """Worse than a trigram, or without gain on a repeated passage; and where nobody measured it."""
    runs, out = runs_of(tmp_path, 2, rope=0.0, alibi=-0.3, t5=0.5, fire=0.7), tmp_path / "out"
    for run in runs:
        path = run / "eval" / "words.json"
        evaluation = results.read(path)
        table = evaluation.table
        if "t5" in run.name:
            table.loc[table.protocol == "repeat", "control_nll"] = table.nll
        if "fire" in run.name:
            table = table[table.protocol != "trigram"]
        results.write(path, evaluation._replace(table=table))
    call(monkeypatch, *runs, "--out", out)
    page = (out / "report.html").read_text()
    assert "passed: rope; failed: alibi and t5; not gated: fire." in page
    assert re.findall("<h2 id='(.*?)'", page)[0] == "gain"
    assert "rope has the lowest loss with 128 tokens" in page
    for title in ("Perplexity, fixed targets", "Lead over rope, fixed"):
        section = page.split(f">{title}</h2>")[1].split("<h2")[0]
        assert re.findall("<i>(.*?)</i>", section) == ["alibi", "t5", "fire"]
    assert all("**" not in cell for cell in rows_of(out, "Lead over rope, fixed")["t5"].values())


# -----------------------------------------------------------------------------------------------------------
# Curves, training, figures


@pytest.mark.slow
def test_curves_are_folders_and_extensions_with_seeds_together(tmp_path: Path) -> None:
    def tuned(name: str, seed: int, base: str) -> Path:
        return fabricate(tmp_path / name, seed=seed, config=f'init_from = "{tmp_path}/{base}"')

    def curves(*folders: Path) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for run in compare.label_runs([read_run(folder, None) for folder in folders], []):
            found.setdefault(run.label, []).append(run.seed)
        return found

    plain = [fabricate(tmp_path / f"rope-seed{seed}", seed=seed, extends=("none", "yarn:beta_fast=8"),
                       config=f"[run]\nlog_every = {7 + seed}") for seed in (0, 1)]
    assert curves(*plain, fabricate(tmp_path / "slow", config="lr = 1e-4")) == {
        "rope": ["0", "1"], "slow": ["0"]}
    both = tuned("long-seed0", 0, "rope-seed0"), tuned("long-seed1", 0, "rope-seed1")
    assert curves(*both) == {"long": ["0 from rope-seed0", "0 from rope-seed1"]}
    for second, expected in ((tuned("a/long-seed2", 1, "rope-seed0"), "not independent samples"),
                             (tuned("b/long-seed2", 0, "rope-seed0"), "same seed"),
                             (tuned("c/long-seed2", 0, "other-seed2"), "differ in train.init_from"),
                             (fabricate(tmp_path / "d" / "long-seed2", "t5"), "differ in position.encoding")):
        with pytest.raises(UserError, match=expected):
            curves(*both, second)
    runs = [read_run(run, None) for run in (*plain, *both)]
    assert [run.label for run in compare.label_runs(runs, ["a", "a", "b", "b"])] == ["a", "a", "b", "b"]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`$_&amp;"


@pytest.mark.slow
def test_the_page_has_every_curve_in_figures_and_its_labels_are_never_markup(tmp_path: Path,
                                                                             monkeypatch) -> None:
    runs = [fabricate(tmp_path / f"r{i}", config=f"lr = {i + 1}e-4", protocols=("passkey",))
            for i in range(4)]
    for run in runs:
        lines = [json.dumps({"step": i, "tokens": 64 * i, "loss": 4 - i / 20}) for i in range(1, 20)]
        (run / "metrics.jsonl").write_text("\n".join(lines))
    labels = ["base", HOSTILE, "curve", "$\\frac{1$"]
    named = [f"--label={label}" for label in labels]
    out = tmp_path / "out"
    call(monkeypatch, *runs, *named, "--out", out, draws=True)
    page = (out / "report.html").read_text()
    assert not re.search("<(script|img)", page)
    sections = dict(re.findall(r"<h2 id='([^']+)'>(.*?)(?=<h2|</html>)", page, re.DOTALL))
    assert [*sections] == ["passkey", "passkey-lead", "training"]
    for key in ("passkey", "training"):
        assert all((out / f"{key}.{form}").exists() for form in ("svg", "pdf", "png"))
        assert sections[key].count("<svg") == 1
        assert all(f"{label}</text>" in sections[key] for label in ("base", *labels[2:]))


def test_a_damaged_line_of_a_log_is_left_out_with_a_line(tmp_path: Path, capsys) -> None:
    run = fabricate(tmp_path / "rope")
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 64, "loss": 3.5}\n{"step": 2, "lo\n\n')
    assert read_run(run, None).training["loss"].tolist() == [3.5]
    assert capsys.readouterr().out.count("has a damaged line") == 2


# -----------------------------------------------------------------------------------------------------------
# What is refused or named


@pytest.mark.slow
@pytest.mark.parametrize(("other", "arguments", "expected"), [
    ({"tokenizer": "gpt2"}, [], "tokenizer differs"),
    ({"data": "books"}, [], "data differs"),
    ({"data_sha256": "1" * 64}, [], "data_sha256 differs"),
    ({"corpus": {**CORPUS, "mixture": {"data/more": CORPUS}}}, [], "the text they were trained on differs"),
    ({"corpus": OTHER}, [], "the text they were trained on differs"),
    ({"seq_len": 64}, [], "seq_len differs"),
    ({"documents": 5}, [], "nonoverlap at 64: different targets"),
    ({"lengths": (64, 128), "path": "rope-seed1", "encoding": "rope", "seed": 1}, [],
     "evaluated differently"),
    ({}, ["--baseline", "x"], "--baseline x: no such curve; choose from rope, alibi"),
    ({}, ["--label", "x"], "--label: given 1 times for 2 runs"),
    ({}, ["--data", "books"], "not evaluated on books, but on words; run `python eval.py rope-seed0`"),
    ({}, ["--data", "word"], "but on words; did you mean words?")])
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
        assert protocol != "sliding" or "by --longest 256 and by --longest 128" in str(error)
        table.loc[rows.index[0], "tokens"] -= 1


def test_a_trigram_on_other_targets_than_fixed_is_refused(tmp_path: Path) -> None:
    run = read_run(fabricate(tmp_path / "rope"), None)
    check_comparable([run])
    run.table.loc[run.table["protocol"] == "trigram", "end"] += 1
    with pytest.raises(UserError, match="trigram at 128: different targets"):
        check_comparable([run])


def test_what_differs_or_was_not_tuned_is_said(tmp_path: Path) -> None:
    commits = [f"{'1' * 40}-dirty-{changes}" for changes in ("abc", "def")]
    folders = [fabricate(tmp_path / "a-seed0", commit=commits[0], train_dtype="float32",
                         protocols=("fixed",)),
               fabricate(tmp_path / "a-seed1", seed=1, commit=commits[1], train_dtype="bfloat16", step=5,
                         protocols=("fixed",)),
               fabricate(tmp_path / "old", "alibi", dtype="bfloat16", protocols=("fixed",))]
    runs = [read_run(folder, None) for folder in folders]
    rate, *warnings, unfinished = compare.remarks(runs)
    assert rate.startswith("One learning rate for all")
    a, b, old = (f"(such as {folder})" for folder in folders)
    assert warnings == [
        f"Warning: evaluated by different code: 1111111-dirty-abc {a}, 1111111-dirty-def {b}, unknown {old}",
        f"Warning: evaluated in different dtypes: float32 {a}, bfloat16 {old}",
        f"Warning: trained in different dtypes: float32 {a}, bfloat16 {b}, unknown {old}"]
    assert "a-seed1 (evaluated at step 5 of " in unfinished
    assert compare.remarks(runs[:1]) == []
    tuned = runs[2]._replace(config=runs[2].config | {"train.lr": 1e-4})
    assert not any("learning rate" in remark for remark in compare.remarks([runs[0], tuned]))
    longer = runs[2]._replace(config=runs[2].config | {"train.batch_size": 77})
    assert compare.remarks([runs[0], longer])[-1].startswith(
        f"Warning: {runs[0].label} and {longer.label} differ besides [position]: train.batch_size: ")


@pytest.mark.slow
def test_damaged_and_stale_files_are_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for i, (name, content, expected) in enumerate((
            ("eval/words.parquet", None, "or its .parquet: damaged"),
            ("eval/words.parquet", b"PAR1", "damaged"),
            ("eval/words.json", b'{"records": [', "eval/words.json or its .parquet: damaged"),
            ("eval/other.json", b"{}", "evaluated on other, words; choose one with --data"),
            ("corpus.json", None, "corpus.json: is missing"))):
        run = fabricate(Path(f"run{i}"))
        (run / name).unlink() if content is None else (run / name).write_bytes(content)
        assert expected in failure(monkeypatch, capsys, str(run)), name
    stale = fabricate(Path("stale"))
    monkeypatch.setattr("evaluation.runs.is_current", lambda *_: False)
    assert "neither the newest nor the best of stale; run `python eval.py stale --replace`" in failure(
        monkeypatch, capsys, str(stale))


@pytest.mark.slow
def test_methods_on_a_pretrained_model_have_paired_intervals(tmp_path: Path, monkeypatch) -> None:
    """Of Hugging Face folders that eval.py wrote into."""
    fields = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads":
              2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 257, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": False, "max_position_embeddings": 128}
    monkeypatch.setattr("evaluation.runs.files_sha256", lambda folder: "0" * 64)
    folders = []
    for name, better in (("base", 0.0), ("tuned", 0.5)):
        folders.append(fabricate(tmp_path / name, extends=("none", "yarn"), better=better, lengths=(128, 256),
                                 protocols=("fixed",)))
        for file in ("config.toml", "corpus.json"):
            (folders[-1] / file).unlink()
        (folders[-1] / "config.json").write_text(json.dumps(fields))
    run = fabricate(tmp_path / "run", lengths=(128, 256), protocols=("fixed",))
    call(monkeypatch, *folders, run, "--out", tmp_path / "out")
    rows = rows_of(tmp_path / "out", "Lead over base, fixed")
    assert [*rows] == ["base + yarn", "tuned", "tuned + yarn", "run"]
    assert rows["tuned"]["256 = 2 L"] == "+0.500 [+0.500, +0.500]"


# -----------------------------------------------------------------------------------------------------------
# Folders of runs, and those that compare.py wrote


@pytest.mark.slow
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
    assert [*rows_of(out, "Lead over a, fixed")] == ["b", "t5"]


@pytest.mark.slow
def test_a_record_by_an_older_version_says_what_it_lacks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, fabricate(Path("rope")), "--out", Path("record"))
    about = json.loads(Path("record/runs.json").read_text())
    del about["rope"]["config"]["model.n_layer"], about["rope"]["head"]["data"]
    Path("record/runs.json").write_text(json.dumps(about))
    error = failure(monkeypatch, capsys, "record")
    assert "rope: an older compare.py wrote its record, without data, model.n_layer" in error


def test_a_row_of_the_benchmark_is_named_by_its_texts(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(Path("row/docs"), [read_run(fabricate(Path("rope")), None)])
    assert "row: no evaluated run there; give one of row/docs" in failure(monkeypatch, capsys, "row")


def test_a_trigram_alone_is_nothing_to_compare(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    fabricate(Path("rope"), protocols=("trigram",))
    assert "--protocol fixed,trigram,repeat" in failure(monkeypatch, capsys, "rope")


def test_numbers_that_an_older_table_lacks_are_nan_and_names_are_not_made_up(tmp_path: Path) -> None:
    table = pd.read_parquet(fabricate(tmp_path / "rope") / "eval/words.parquet")
    older = tmp_path / "older.parquet"
    table.drop(columns="truncated_nll").to_parquet(older)
    assert read_table(older)["truncated_nll"].isna().all()
    assert read_table(older)["nll"].tolist() == table["nll"].tolist()
    table.drop(columns="protocol").to_parquet(older)
    with pytest.raises(KeyError, match="protocol"):
        read_table(older)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("n_bytes", [2000, 20_000])
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
