"""Protocols: each target is scored once, the same at every length, with sums that anyone can recompute."""

import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from toys import TINY, lively, measured, slow_except

import compare
from base.errors import UserError
from config import load_config
from data.tokenizer import ByteTokenizer
from eval import main, open_evaluation, parse_arguments
from evaluation import extension, protocols, results, scoring
from evaluation.extension import METHODS, Combination, parse
from evaluation.protocols import PROTOCOLS, position_buckets
from evaluation.scoring import (
    Evaluation,
    Settings,
    Text,
    Window,
    choose_lengths,
    fixed_ends,
    losses_at,
    open_text,
)
from evaluation.show import ALL, advice
from model import GPT
from positions import ENCODINGS
from runtime.checkpoint import open_run
from train import train

LENGTHS = [16, 32, 50, 64, 128, 256]
TEXTUAL = ("nonoverlap", "rolling", "sliding", "fixed", "position")


def text_of(corpus_dir: Path) -> Text:
    return open_text(None, str(corpus_dir), ByteTokenizer())


def evaluate(model: GPT, config, text: Text, chosen=TEXTUAL, lengths=LENGTHS,
             targets: int = 8, tokens: int = 1024, stride: int | None = None) -> Evaluation:
    settings = Settings(chosen, lengths, max(*lengths, config.train.seq_len), targets, 6, tokens, stride)
    return Evaluation(model, config, ByteTokenizer(), text, settings)


@pytest.mark.slow
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tiny, corpus_dir: Path) -> None:
    model = lively(tiny())
    torch.nn.init.zeros_(model.head.weight)
    records = measured(evaluate(model, tiny(), text_of(corpus_dir)))
    assert {r["protocol"] for r in records} == set(TEXTUAL)
    for r in records:
        assert r["ppl"] == pytest.approx(257, rel=1e-5)
        assert r["nll_sum"] == pytest.approx(r["tokens"] * math.log(257), rel=1e-6)
        assert r["bytes"] == r["tokens"] and r["bpb"] == pytest.approx(math.log2(257), rel=1e-5)


def scored(windows) -> list[tuple[int, int]]:
    """(document, index) of every scored target."""
    return [(w.document, i) for w in windows for i in range(w.end + 1 - w.n_scored, w.end + 1)]


def windows_of(protocol: str, text: Text, longest: int, length: int, tokens: int = 10**9,
               stride: int | None = None) -> list[Window]:
    settings = Settings([protocol], [length], longest, 8, tokens=tokens, stride=stride)
    return PROTOCOLS[protocol].windows(text, settings, length)


@pytest.mark.parametrize("longest", [100, 256])
def test_each_target_is_scored_once_and_the_same_at_every_length(longest: int, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    ends = fixed_ends(text, longest, 8, 40, 0)
    cases = {"fixed": [[Window(d, end - length, end, 8) for d, end in ends] for length in (16, longest)],
             "nonoverlap": [windows_of("nonoverlap", text, longest, n, 1024) for n in (7, 16, longest)]}
    for stride in (None, 1, 5, 999):
        cases[f"sliding {stride}"] = []
        for length in (8, 50, longest):
            windows = windows_of("sliding", text, longest, length, 512, stride)
            assert max(w.n_scored for w in windows) == min(stride or length // 4, length)
            assert all(w.end - w.start == length for w in windows)
            cases[f"sliding {stride}"].append(windows)
    for name, of_lengths in cases.items():
        targets = sorted(scored(of_lengths[0]))
        assert len(set(targets)) == len(targets) > 256, name
        for windows in of_lengths:
            assert sorted(scored(windows)) == targets, name
            # inside one document, first token never scored
            assert all(w.start >= 0 and w.end < len(text.documents[w.document]) for w in windows)


def test_places_are_drawn_from_all_documents_that_are_long_enough(corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    ends = fixed_ends(text, 100, 8, 40, 0)
    assert {d for d, _ in ends} == set(range(len(text.documents)))      # documents take turns
    assert ends == fixed_ends(text, 100, 8, 40, 0) != fixed_ends(text, 100, 8, 40, 1)
    assert len({fixed_ends(text, 100, 8, 1, seed)[0][0] for seed in range(9)}) > 1      # not only the first
    most = max(map(len, text.documents)) - 1
    assert all(fixed_ends(text, most, 8, 1, seed) for seed in range(9))     # one that is long enough


@pytest.mark.parametrize("n_tokens", [65, 66, 128, 129, 130, 160, 161, 192, 193])
def test_documents_are_used_to_their_last_token_and_no_further(n_tokens: int) -> None:
    text = Text("x", [np.arange(n_tokens)])
    tiles = windows_of("nonoverlap", text, 64, 64)
    assert len(tiles) == (n_tokens - 1) // 64 and max(w.end for w in tiles) <= n_tokens - 1
    ends = [end for _, end in fixed_ends(text, 64, 32, 10**9, seed=0)]
    assert len(ends) == (n_tokens - 1 - 64) // 32 + 1 and max(ends) <= n_tokens - 1


@pytest.mark.parametrize("length", [1, 7, 64, 1500, 99_999])
def test_rolling_scores_every_token_once_in_whole_windows(length: int, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    windows = windows_of("rolling", text, length, length)
    assert scored(windows) == [(d, i) for d, document in enumerate(text.documents)
                               for i in range(1, len(document))]
    for w in windows:
        assert w.end - w.start == min(length, len(text.documents[w.document]) - 1) and w.start >= 0


def loss_of(model: GPT, text: Text, windows: list[Window], first: int | None = None) -> float:
    """Sum over the targets of windows, each in a forward of its own; `first` replaces their first tokens."""
    total = 0.0
    for w in windows:
        ids = torch.from_numpy(text.documents[w.document][w.start:w.end + 1].astype(np.int64))
        ids[0] = ids[0] if first is None else first
        logits = model(ids[None, :-1])[0, -w.n_scored:]
        total += torch.nn.functional.cross_entropy(logits, ids[-w.n_scored:], reduction="sum").item()
    return total


def truncated(e: Evaluation) -> list[Window]:
    """Each target of fixed after its own last L tokens."""
    return [Window(d, max(0, target - e.L), target, 1)
            for d, end in e.ends for target in range(end - e.settings.targets + 1, end + 1)]


@pytest.mark.parametrize("name", ["none", "t5"])
def test_context_beyond_L_gains_nothing_for_a_model_that_does_not_see_it(name: str, tiny, corpus_dir) -> None:
    """One layer with a window of L: each target of `truncated` has all that the model can see."""
    config = tiny(name, "model.n_layer=1", "model.window=32")
    model = lively(config).double()
    evaluation = evaluate(model, config, text_of(corpus_dir), ["fixed"], [32, 64, 128])
    at_L, *beyond = measured(evaluation)
    assert [r["gain"] for r in beyond] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert abs(at_L["gain"]) > 1e-3             # early targets of a window of L have fewer tokens before them
    assert protocols.target_settings(evaluation)["fixed"]["truncated"] == "per target"


def test_lengths_below_L_are_also_compared_with_truncation_to_L(tiny) -> None:
    """Documents too short for L are left out, even where every length is shorter than L."""
    rng = np.random.default_rng(0)
    text = Text("x", [rng.integers(256, size=n) for n in (20, 300)])
    model = lively(tiny())
    short = evaluate(model, tiny(), text, ["fixed"], [8, 16], targets=4)
    assert [len(short.text.documents[d]) for d, _ in short.ends] == [300] * 6
    expected = loss_of(model, short.text, truncated(short))
    assert [r["truncated_nll_sum"] for r in measured(short)] == pytest.approx([expected] * 2)


@pytest.mark.slow
def test_sliding_by_one_is_the_last_token_of_each_window(tiny, corpus_dir: Path) -> None:
    model, text = lively(tiny()), text_of(corpus_dir)
    evaluation = evaluate(model, tiny(), text, ["sliding"], [16, 64], tokens=64, stride=1)
    for r in measured(evaluation):
        rows = evaluation.table[evaluation.table.length == r["length"]]
        windows = [Window(d, end - r["length"], end, 1) for d, end in rows[["document", "end"]].to_numpy(int)]
        assert len(windows) == r["tokens"] == 64
        assert r["nll_sum"] == pytest.approx(loss_of(model, text, windows), rel=1e-4)


BOS = ("rope", True)


@pytest.mark.parametrize(("name", "bos"), slow_except(
    [*((name, False) for name in ENCODINGS), BOS], ("learned", False), BOS))
def test_fixed_is_slice_and_forward(name: str, bos: bool, tiny, corpus_dir: Path) -> None:
    """With data.bos each window, a truncated one too, begins with the separator; the targets are the same."""
    config, text = tiny(name, f"data.bos={str(bos).lower()}"), text_of(corpus_dir)
    model = lively(config)
    evaluation = evaluate(model, config, text, ["fixed"])
    first = ByteTokenizer.separator if bos else None
    control = loss_of(model, text, truncated(evaluation), first)
    records = measured(evaluation)
    assert [r["length"] for r in records] == [n for n in LENGTHS if n <= (model.encoding.max_length or 999)]
    for r in records:
        windows = [Window(d, end - r["length"], end, 8) for d, end in evaluation.ends]
        total = loss_of(model, text, windows, first)
        assert r["nll_sum"] == pytest.approx(total, rel=1e-4)
        assert r["truncated_nll_sum"] == pytest.approx(control, rel=1e-4)
        assert r["gain"] == pytest.approx((control - total) / r["tokens"], abs=1e-4)
        assert r["tokens"] == 8 * 6 and r["ppl"] == pytest.approx(math.exp(r["nll_sum"] / r["tokens"]))


def test_position_buckets_cover_each_position_once(tiny, corpus_dir: Path) -> None:
    for longest in (1, 2, 3, 100, 256, 16_384):
        buckets = position_buckets(longest)
        covered = [i for start, stop in buckets for i in range(start, stop)]
        assert covered == [*range(longest)] and all(start < stop for start, stop in buckets)
    model, text = lively(tiny("rope")), text_of(corpus_dir)
    evaluation = evaluate(model, tiny(), text, ["fixed", "position"])
    pieces = np.stack([text.documents[d][end - 256:end + 1] for d, end in evaluation.ends])
    losses, _ = losses_at(model, tiny().train, pieces, np.arange(1, 257))
    for r in measured(evaluation):
        if r["protocol"] == "position":
            start, stop = r["bucket"]
            assert r["nll_sum"] == pytest.approx(losses[:, start:stop].sum(), rel=1e-4)
            assert r["tokens"] == 6 * (stop - start) and r["length"] == 256


def test_chunked_losses_equal_full_logits_and_hold_few_of_them(tiny, monkeypatch) -> None:
    """No tensor of T x V elements is made, whatever T: the largest that the losses see is CHUNK x V."""
    monkeypatch.setattr(scoring, "CHUNK", 7)
    model, x, sizes = lively(tiny()), torch.randint(257, (3, 141)), []
    logits = model(x[:, :-1])
    x[:, -1] = logits[:, -1].argmax(-1)
    expected = torch.nn.functional.cross_entropy(logits.mT, x[:, 1:], reduction="none")
    of_hidden = model.logits
    monkeypatch.setattr(model, "logits", lambda x: sizes.append(x.shape[0]) or of_hidden(x))
    for places in (np.arange(1, 141), np.array([1, 5, 6, 140])):
        losses, is_top = losses_at(model, tiny().train, x.numpy(), places)
        assert losses == pytest.approx(expected[:, places - 1].detach().numpy(), abs=1e-4)
        assert is_top[:, -1].all() and not is_top.all()
    assert max(sizes) == 7


def test_lengths_default_to_the_multiples_that_eight_documents_have() -> None:
    text = Text("", [np.arange(n) for n in (10_000, *[601] * 7)])
    longest = 9_999
    assert choose_lengths(None, 32, text) == [16, 32, 64, 128, 256, 512]
    assert choose_lengths(None, 32, Text("", text.documents[:1]))[-1] == 2048
    assert choose_lengths([64, 16], 32, text) == [64, 16]
    for wanted, L in (([0], 32), ([longest + 1], 32), ([16], longest + 1), (None, longest + 1)):
        with pytest.raises(UserError):
            choose_lengths(wanted, L, text, [L])


def test_a_text_file_is_one_document_and_a_foreign_corpus_is_refused(tmp_path: Path,
                                                                     corpus_dir: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello")
    text = open_text(str(tmp_path / "a.txt"), "unused", ByteTokenizer())
    assert text.name == "a" and text.documents[0].tolist() == [256, *b"hello"]
    (tmp_path / "a.jsonl").write_bytes(b"hello")                        # its bytes are no text
    with pytest.raises(UserError, match="prepare it first"):
        open_text(str(tmp_path / "a.jsonl"), "unused", ByteTokenizer())
    other = ByteTokenizer()
    other.sha256 = "0" * 64                                             # the same name, another vocabulary
    with pytest.raises(UserError, match="trained with byte"):
        open_text(None, str(corpus_dir), other)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "rope.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "rope"\n')
    train(load_config(folder / "rope.toml", [*TINY, f"run.dir={folder / 'run'}", "train.steps=2"]), [])
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


SHORT = ("--windows", "4", "--tokens", "512")


@pytest.fixture
def evaluated(run_dir: Path, monkeypatch):
    """evaluated("--lengths", "16") -> the sums, without seconds, and the table of a run after eval.py."""
    monkeypatch.setattr("eval.draw", lambda *_: False)
    monkeypatch.setattr("eval.git_revision", lambda: ("this code", b""))

    def call(*arguments: str) -> tuple[dict, pd.DataFrame]:
        monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), *SHORT, *arguments])
        main()
        suffix = results.EXTENDED_SUFFIX if "all" in arguments else ""
        found = results.read(run_dir / "eval" / f"words{suffix}.json")
        return {tuple(r.get(key) for key in ("extend", "protocol", "length", "place")):
                {key: value for key, value in r.items() if key != "seconds"}
                for r in results.records(found.table)
                if r["protocol"] != "position"}, found.table.drop(columns="seconds")

    return call


def test_the_command_writes_table_sums_and_picture(run_dir: Path, monkeypatch, capsys) -> None:
    path = run_dir / "eval" / "words.json"
    monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), "--lengths", "16,32,64", *SHORT])
    main()
    out, err = capsys.readouterr()
    assert "32 = L" in out and "truncated ppl" in out
    assert [line.split(":")[0] for line in err.splitlines() if "fixed" in line] == [
        "none fixed 16", "none fixed 32", "none fixed 64"]              # a log shows how far it has come
    written = json.loads(path.read_text())
    head = {"encoding": "rope", "seq_len": 32, "tokenizer": "byte", "data": "words", "seed": 0,
            "train_dtype": "float32"}
    assert head.items() <= written.items() and "commit" in written
    assert {r["length"] for r in written["records"] if r["protocol"] != "position"} == {16, 32, 64}
    keys = {"extend", "protocol", "length", "nll_sum", "tokens", "bytes", "documents", "ppl", "bpb",
            "seconds"}
    assert all(keys <= set(r) for r in written["records"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in path.parent.iterdir()} == {".json", ".parquet", ".png", ".lock"}


def test_the_step_of_an_unfinished_run_is_said(evaluated, run_dir: Path, capsys) -> None:
    evaluated("--lengths", "16")
    assert "trained at L = 32, on" in capsys.readouterr().out
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace("steps = 2\n", "steps = 9\n"))
    evaluated("--lengths", "16", "--replace")
    assert "trained at L = 32 (step 2 of 9), on" in capsys.readouterr().out


def test_a_second_evaluation_on_the_same_targets_is_added(evaluated) -> None:
    """In parts or at once: the same sums in the same order, the same rows."""
    evaluated("--lengths", "16,64", "--protocol", "nonoverlap")
    evaluated("--lengths", "32,16", "--protocol", "fixed", "--longest", "64", "--extend", "pi")
    merged, rows = evaluated("--lengths", "32,64", "--protocol", "nonoverlap", "--extend", "pi")
    assert [key[:3] for key in merged] == [
        *((None, "nonoverlap", length) for length in (16, 32, 64)), (None, "fixed", 16), (None, "fixed", 32),
        ("pi", "nonoverlap", 32), ("pi", "nonoverlap", 64), ("pi", "fixed", 16), ("pi", "fixed", 32)]
    whole, at_once = evaluated("--lengths", "16,32,64", "--protocol", "nonoverlap,fixed", "--extend", "pi",
                               "--replace")
    assert len(whole) == len(merged) + 3 and merged.items() <= whole.items()
    assert len(rows) < len(at_once) and len(rows.merge(at_once)) == len(rows)


def test_an_interrupted_evaluation_goes_on_where_it_was(evaluated, monkeypatch) -> None:
    """Each length is in the file as soon as it is measured, and is not measured again."""
    forward, done = Evaluation.forward, []

    def interrupted(self: Evaluation, *arguments) -> list:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(self.title)
        return forward(self, *arguments)

    places = ("--lengths", "16,32", "--protocol", "nonoverlap,sliding", "--extend", "pi")
    whole, at_once = evaluated(*places)
    monkeypatch.setattr(Evaluation, "forward", interrupted)
    measured = []
    for more in (("--replace",), ()):
        with pytest.raises(KeyboardInterrupt):
            evaluated(*places, *more)
        measured += done
        done.clear()
    resumed, rows = evaluated(*places)
    expected = itertools.product(("none", "pi"), ("nonoverlap", "sliding"), ("16", "32"))
    assert measured + done == [*map(" ".join, expected)]
    assert resumed == whole and rows.equals(at_once)


@pytest.mark.parametrize("name", METHODS)
def test_extend_all_has_the_methods_that_need_no_option(name: str) -> None:
    if name in ALL:
        parse(name)
    else:
        with pytest.raises(UserError, match=f"{name}.* missing"):
            parse(name)


@pytest.mark.slow
def test_extend_all_ends_in_a_table_of_every_method_that_fits(evaluated, capsys) -> None:
    records, _ = evaluated("--extend", "all", "--lengths", "64")
    out = capsys.readouterr().out
    rows = [line.split() for line in out.split("seconds\n")[1].splitlines()]
    gains = {row[1]: float(row[2]) for row in rows if row[0] == "64"}
    assert {*gains} == {extend or "none" for extend, *_ in records} and len(gains) > 10
    for name, gain in gains.items():
        spec = None if name == "none" else name
        assert gain == pytest.approx(records[spec, "fixed", 64, None]["gain"], abs=6e-5)
        assert records[spec, "passkey", 64, 0.5]
    best = max(gains, key=gains.__getitem__)
    assert f"at 64 tokens {best} has the lowest loss" in out


@pytest.mark.parametrize(("n_methods", "n_lengths", "claim"), [
    (1, 1, "and beats"), (12, 1, "it is not shown that it beats"), (1, 12, "it is not shown that it beats")])
def test_the_best_of_many_must_beat_truncation_by_more(n_methods: int, n_lengths: int, claim: str) -> None:
    """The same differences, of a p-value near 0.02, from 12 documents."""
    names = [f"m{i}" for i in range(n_methods)]
    tables = [results.make_table(extend=name, protocol="fixed", length=64 + i, nll=[-2.2, 0.2] * 6,
                                 truncated_nll=0.0, tokens=1, document=range(12))
              for name in names for i in range(n_lengths)]
    e = SimpleNamespace(possible=[64], L=32, extends=[Combination(name, []) for name in names])
    assert claim in [*advice(results.join(*tables), e)][-1]


def test_each_method_has_its_own_gain_and_p() -> None:
    """In whatever order the methods were measured; the passkey may have been asked at other lengths too."""
    rng = np.random.default_rng(0)
    gain_of = {"yarn": 3.0, "alpha": 0.0, "none": 0.0, "beta": 0.5}
    tables = [results.make_table(extend=name, protocol="fixed", length=64, truncated_nll=0.0, tokens=1,
                                 nll=0.1 * rng.normal(size=12) - gain, document=range(12))
              for name, gain in gain_of.items()]
    tables.append(results.make_table(extend="beta", protocol="passkey", length=128, correct=[1, 0]))
    e = SimpleNamespace(possible=[64], L=32, extends=[Combination(name, []) for name in gain_of])
    rows = [line.split() for line in [*advice(results.join(*tables), e)][0].splitlines()[1:]]
    assert [row[1] for row in rows][:2] == ["yarn", "beta"] and len(rows) == 4
    assert {row[1] for row in rows if float(row[6]) < 0.05} == {"yarn", "beta"}


def test_many_targets_of_a_window_are_kept_in_blocks(tiny, corpus_dir: Path, monkeypatch) -> None:
    tables = []
    for size in (999, 10):
        monkeypatch.setattr(protocols, "BLOCK", size)
        evaluation = evaluate(lively(tiny()), tiny(), text_of(corpus_dir), ["fixed"], [64], targets=24)
        measured(evaluation)
        tables.append(evaluation.table)
    whole, blocks = tables
    assert blocks.tokens.tolist() == [10, 10, 4] * 6 and blocks.end[2::3].tolist() == whole.end.tolist()
    for name in ("tokens", "bytes", "nll", "truncated_nll"):
        assert blocks[name].to_numpy().reshape(6, 3).sum(axis=1) == pytest.approx(whole[name].to_numpy())


def test_L_is_needed_for_truncation_alone_and_can_be_overruled(evaluated, run_dir: Path,
                                                               tmp_path: Path) -> None:
    short = tmp_path / "words.txt"
    short.write_bytes(b"a text of thirty bytes or less")
    text = ("--data", str(short))
    with pytest.raises(UserError, match="--train-length"):
        evaluated(*text, "--lengths", "8", "--protocol", "fixed")
    evaluated(*text, "--lengths", "4,16", "--protocol", "rolling,nonoverlap,sliding")
    sums, _ = evaluated(*text, "--train-length", "16", "--protocol", "fixed", "--replace")
    assert results.read(run_dir / "eval" / "words.json").head["seq_len"] == 16
    first, second = sums.values()
    assert [key[2] for key in sums] == [8, 16]
    assert first["truncated_nll_sum"] == second["truncated_nll_sum"] > 0


def test_what_must_not_be_merged_is_refused_before_it_is_computed(evaluated, run_dir: Path, tmp_path: Path,
                                                                  monkeypatch) -> None:
    """Other targets, another model or other code, and a damaged file; --replace discards it."""
    fixed = ("--protocol", "fixed", "--lengths")
    before = evaluated(*fixed, "32,64")[0]
    other_text = tmp_path / "words.txt"
    other_text.write_bytes(b"another text " * 20)                       # of the same name
    path = run_dir / "eval" / "words.json"
    written = path.read_text()
    head = json.loads(written)
    cases = [([*fixed, "16,32"], {}, "holds fixed on other targets, by longest 64; give the same"),
             ([*fixed, "32,64", "--targets", "4", "--windows", "5"], {}, "by targets 8, windows 4; give"),
             ([*fixed, "32,64", "--seed", "1"], {}, "another seed"),
             ([*fixed, "32,64", "--data", str(other_text)], {}, "another data_sha256")]
    for key in ("checkpoint_sha256", "dtype", "train_dtype", "commit"):
        what = "by other code" if key == "commit" else f"with another {key}"
        cases.append(([*fixed, "32,64"], {key: "other"}, f"{what}; give --json FILE to keep both, or"))
    with monkeypatch.context() as patch:
        patch.setattr("eval.measure", lambda *_: pytest.fail("computed"))
        for arguments, change, expected in cases:
            path.write_text(json.dumps({**head, **change}))
            with pytest.raises(UserError, match=f"words.json.*{expected}"):
                evaluated(*arguments)
        path.write_text(written[:len(written) // 2])
        with pytest.raises(UserError, match="words.json.*damaged"):
            evaluated(*fixed, "32,64")
    assert evaluated(*fixed, "32,64", "--replace")[0] == before


def test_the_dtype_of_the_flag_is_used_and_recorded(evaluated, run_dir: Path) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        short = ("--lengths", "32", "--protocol", "fixed", "--dtype", dtype, "--replace")
        losses += [record["nll_sum"] for record in evaluated(*short)[0].values()]
        head = results.read(run_dir / "eval" / "words.json").head
        assert (head["dtype"], head["train_dtype"]) == (dtype, "float32")
    assert 0 < abs(losses[0] - losses[1]) < 1


def test_a_second_eval_on_the_same_file_is_refused(evaluated, run_dir: Path) -> None:
    with results.lock(run_dir / "eval" / "words.json"), pytest.raises(UserError, match="another eval.py"):
        evaluated("--lengths", "32", "--protocol", "fixed")


@pytest.mark.parametrize("protocol", slow_except(PROTOCOLS, "fixed", "sliding"))
def test_targets_depend_on_the_recorded_settings_alone(protocol: str, tiny, corpus_dir: Path) -> None:
    """A setting that a protocol does not record changes none of its counts and targets; the seed does."""
    config = tiny("rope", "model.n_layer=1")
    model, text = lively(config), text_of(corpus_dir)
    plain = Settings([protocol], [32, 64], longest=128, targets=8, windows=4, tokens=512)

    def measure(**change) -> tuple[list, list]:
        e = Evaluation(model, config, ByteTokenizer(), text, plain._replace(**change))
        losses = [record["nll_sum"] for record in measured(e)]
        columns = ["length", "place", "document", "end", "tokens", "bytes"]
        return e.table[columns].fillna(-1).to_numpy().tolist(), losses

    targets, losses = measure()
    for name, value in {"longest": 160, "targets": 4, "windows": 12, "tokens": 256, "stride": 4}.items():
        if name not in PROTOCOLS[protocol].target_settings:
            assert measure(**{name: value})[0] == targets, name
    # rolling takes all of the text, and two questions do not fit into 64 bytes
    assert (measure(seed=1)[1] != losses) == (protocol not in ("rolling", "multi_query"))


@pytest.mark.slow
def test_each_method_is_measured_at_each_length(tiny, corpus_dir: Path) -> None:
    """Not the plain model's losses, nor at another length's default factor."""
    settings = Settings(["fixed", "copy"], [64, 128], longest=128, targets=8, windows=4)
    found = measured(Evaluation(lively(tiny()), tiny(), ByteTokenizer(), text_of(corpus_dir), settings,
                                [parse("pi"), parse("window")]))
    assert len({r["nll_sum"] for r in found}) == len(found) == 12


def test_a_method_that_does_not_fit_is_an_error_or_skipped(tiny, capsys) -> None:
    config = tiny("alibi")
    arguments = (["yarn:beta_fast=2", "window"], lively(config), config, [16, 64])
    with pytest.raises(UserError, match="--extend yarn:beta_fast=2: needs a rotary encoding"):
        extension.open_extensions(*arguments)
    assert [extend.spec for extend in extension.open_extensions(*arguments, skip_unfit=True)] == ["window"]
    out = capsys.readouterr().out
    assert out.startswith("skipped --extend yarn:beta_fast=2: needs a rotary encoding; this run has alibi")


# -----------------------------------------------------------------------------------------------------------
# A protocol of a fork, and the command line


class LastToken(protocols.Protocol):
    """The last token of each document, after as many tokens as the length has."""

    title = "Perplexity of last tokens"
    target_settings = ("longest",)

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        ends = [len(document) - 1 for document in text.documents]
        return [Window(d, end - length, end, 1) for d, end in enumerate(ends)]

    def cells(self, record: dict) -> dict[str, str]:
        return {"nats": f"{record['nll_sum'] / record['tokens']:.3f}"}


def test_a_protocol_of_a_fork_is_in_table_json_help_and_report(evaluated, run_dir: Path, tmp_path: Path,
                                                               monkeypatch, capsys) -> None:
    """A class and a line in the registry."""
    monkeypatch.setitem(PROTOCOLS, "last_token", LastToken("last_token"))
    sums, table = evaluated("--lengths", "16,64", "--protocol", "last_token")
    printed = capsys.readouterr().out
    assert [key[1:3] for key in sums] == [("last_token", 16), ("last_token", 64)]
    for r in sums.values():
        assert r["tokens"] == r["documents"] == len(table[table.length == r["length"]])
        assert "nats" in printed and f"{r['nll_sum'] / r['tokens']:.3f}" in printed
    monkeypatch.setattr(sys, "argv", ["compare.py", str(run_dir), "--out", str(tmp_path / "report")])
    compare.main()
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Perplexity of last tokens</h2>" in page and "after as many tokens as the length has" in page
    monkeypatch.setattr(sys, "argv", ["eval.py", "--help", "last_token"])
    with pytest.raises(SystemExit):
        main()
    assert "last token of each document" in " ".join(capsys.readouterr().out.split())


def test_a_window_that_begins_before_its_document_is_an_error(evaluated, monkeypatch) -> None:
    class EarlyToken(LastToken):
        def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
            return [Window(d, 10 - length, 10, 1) for d in range(len(text.documents))]

    monkeypatch.setitem(PROTOCOLS, "early_token", EarlyToken("early_token"))
    with pytest.raises(UserError, match="early_token: a window of 16 tokens begins before its document"):
        evaluated("--lengths", "16", "--protocol", "early_token")


def test_help_fits_a_screen_and_explains_each_method_and_protocol(monkeypatch, capsys) -> None:
    def page(*topic: str) -> str:
        monkeypatch.setattr(sys, "argv", ["eval.py", "--help", *topic])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    lines = page().splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    for name in (*PROTOCOLS, *METHODS):
        assert name in " ".join(lines) and page(name).startswith(f"{name}: ")
    assert "beta_fast" in page("yarn")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--help", "yarm"])
    with pytest.raises(UserError, match="did you mean yarn"):
        main()


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--lengths", "0"], "--lengths 0: .*1 ..."), (["--extend", "yarn:beta_fast=x"], "with numbers or lists"),
    (["--protocol", "slidng"], "did you mean sliding"),
    (["--lenghts", "3"], "unrecognized arguments: --lenghts 3"),
    (["--lengths", "16", "32"], "unrecognized arguments: 32")])
def test_mistakes_of_the_command_name_what_to_type(arguments: list[str], expected: str, evaluated) -> None:
    with pytest.raises(UserError, match=expected):
        evaluated(*arguments)


def test_a_protocol_that_measures_nothing_says_what_it_needs(evaluated, tmp_path: Path, capsys) -> None:
    short = tmp_path / "words.txt"
    short.write_bytes(b"a text of thirty bytes or less")
    evaluated("--data", str(short), "--lengths", "28", "--protocol", "rolling,sliding,repeat")
    out = capsys.readouterr().out
    assert "sliding: nothing was measured; it needs documents longer than the longest" in out
    assert "repeat: nothing was measured; it needs" in out and "rolling: nothing" not in out


def test_a_run_on_a_task_is_tested_by_it(run_dir: Path, monkeypatch) -> None:
    """By passkey too, whose windows may hold parts of several documents."""
    for source in ("passkey", "parity"):
        opened = open_run(run_dir)._replace(meta={"source": source})
        monkeypatch.setattr("eval.open_text", lambda *_: Text("x", []))
        monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir)])
        assert open_evaluation(parse_arguments(), opened).settings.protocols == [source]
