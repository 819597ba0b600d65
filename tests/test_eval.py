"""Protocols: each target is scored once, the same at every length, with sums that anyone can recompute."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, every_encoding_slowly, lively, needs, python, slow_except

from config import load_config
from data.loader import Corpus
from data.tokenizer import ByteTokenizer
from eval import main
from evaluation import protocols, results
from evaluation.progress import Progress
from evaluation.protocols import Evaluation, Settings, token_losses
from evaluation.windows import (
    Text,
    choose_lengths,
    ended_windows,
    fixed_ends,
    nonoverlap_windows,
    open_text,
    position_buckets,
    rolling_windows,
    sliding_windows,
)
from model import GPT
from runtime.command import run_command
from runtime.errors import UserError
from train import train

LENGTHS = [16, 32, 50, 64, 128, 256]


def text_of(corpus_dir: Path) -> Text:
    return open_text(None, str(corpus_dir), ByteTokenizer())


def evaluate(model: GPT, config, text: Text, chosen=protocols.PROTOCOLS, lengths=LENGTHS, targets: int = 8,
             tokens: int = 1024, stride: int | None = None) -> Evaluation:
    settings = Settings(chosen, lengths, max(*lengths, config.train.seq_len), targets, 6, tokens, stride)
    return Evaluation(model, config, ByteTokenizer(), text, settings)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tiny, corpus_dir: Path) -> None:
    model = lively(tiny())
    torch.nn.init.zeros_(model.head.weight)
    records = evaluate(model, tiny(), text_of(corpus_dir)).run()
    assert {r["protocol"] for r in records} == set(protocols.PROTOCOLS)
    for r in records:
        assert r["ppl"] == pytest.approx(257, rel=1e-5)
        assert r["nll_sum"] == pytest.approx(r["tokens"] * math.log(257), rel=1e-6)
        assert r["bytes"] == r["tokens"] and r["bpb"] == pytest.approx(math.log2(257), rel=1e-5)


def scored(windows) -> list[tuple[int, int]]:
    """(document, index) of every scored target."""
    return [(w.document, i) for w in windows for i in range(w.end + 1 - w.n_scored, w.end + 1)]


@pytest.mark.parametrize("longest", [64, 100, 256])
def test_each_target_is_scored_once_and_the_same_at_every_length(longest: int, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    windows = nonoverlap_windows(text, longest, [7, 16, longest], 1024, 0)
    targets = [scored(w) for w in windows.values()]
    assert all(len(set(t)) == len(t) >= 1024 - longest for t in targets)
    assert set(targets[0]) == set(targets[1]) == set(targets[2])
    ends = fixed_ends(text, longest, 8, 40, 0)
    targets = [scored(ended_windows(ends, length, 8)) for length in (16, longest)]
    assert targets[0] == targets[1] and len(set(targets[0])) == len(targets[0]) == 40 * 8
    for w in (*sum(windows.values(), []), *ended_windows(ends, longest, 8)):
        # inside one document, first token never scored
        assert w.start >= 0 and w.end < len(text.documents[w.document])


@pytest.mark.parametrize("n_tokens", [65, 66, 128, 129, 130, 160, 161, 192, 193])
def test_documents_are_used_to_their_last_token_and_no_further(n_tokens: int) -> None:
    text = Text("x", [np.arange(n_tokens)])
    tiles = nonoverlap_windows(text, 64, [64], 10**9, seed=0)[64]
    assert len(tiles) == (n_tokens - 1) // 64 and max(w.end for w in tiles) <= n_tokens - 1
    ends = [end for _, end in fixed_ends(text, 64, 32, 10**9, seed=0)]
    assert len(ends) == (n_tokens - 1 - 64) // 32 + 1 and max(ends) <= n_tokens - 1


def test_lengths_below_L_are_also_compared_with_truncation_to_L(tiny) -> None:
    """Documents too short for L are left out, even where every length is shorter than L."""
    rng = np.random.default_rng(0)
    text = Text("x", [rng.integers(256, size=n) for n in (20, 300)])
    evaluation = evaluate(lively(tiny()), tiny(), text, lengths=[8, 16], targets=4)
    assert {d for d, _ in evaluation.ends} == {0} and len(evaluation.ends) == 6
    assert all(len(evaluation.text.documents[d]) == 300 for d, _ in evaluation.ends)
    records = [r for r in evaluation.run() if r["protocol"] == "fixed"]
    whole = evaluate(lively(tiny()), tiny(), text, lengths=[8, 16, 32], targets=4).run()
    at_L = next(r["nll_sum"] for r in whole if (r["protocol"], r["length"]) == ("fixed", 32))
    assert [r["length"] for r in records] == [8, 16]
    assert all(r["truncated_nll_sum"] == pytest.approx(at_L) for r in records)


@pytest.mark.parametrize("length", [1, 7, 64, 1500, 99_999])
def test_rolling_scores_every_token_once_in_whole_windows(length: int, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    windows = rolling_windows(text, length)
    everything = [(d, i) for d, document in enumerate(text.documents) for i in range(1, len(document))]
    assert scored(windows) == everything
    for w in windows:
        assert w.end - w.start == min(length, len(text.documents[w.document]) - 1) and w.start >= 0


@pytest.mark.slow
def test_windows_depend_on_the_seed_and_the_text_alone(tiny, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    assert fixed_ends(text, 64, 8, 9, 1) == fixed_ends(text, 64, 8, 9, 1) != fixed_ends(text, 64, 8, 9, 2)
    a = evaluate(lively(tiny("rope"), 1), tiny(), text)
    b = evaluate(lively(tiny("alibi"), 2), tiny(), text)
    a.run(), b.run()
    for key in a.per_window:
        if not key.endswith("nll"):
            assert np.array_equal(a.per_window[key], b.per_window[key])


@pytest.mark.parametrize("stride", [None, 1, 5, 999])
def test_sliding_scores_the_same_targets_once_with_context(stride: int | None, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    windows = sliding_windows(text, 256, [8, 50, 256], stride, 512, 0)
    targets = [scored(w) for w in windows.values()]
    assert len(set(targets[0])) == len(targets[0]) == 512
    assert sorted(targets[0]) == sorted(targets[1]) == sorted(targets[2])
    for length, found in windows.items():
        step = min(stride or length // 4, length)
        assert all(w.n_scored <= step and w.end - w.start == length and w.start >= 0 for w in found)


def test_sliding_by_one_is_the_last_token_of_each_window(tiny, corpus_dir: Path) -> None:
    model, text = lively(tiny()), text_of(corpus_dir)
    evaluation = evaluate(model, tiny(), text, ["sliding"], [16, 64], tokens=64, stride=1)
    for r in evaluation.run():
        ends = evaluation.per_window[f"plain/sliding/{r['length']}/end"]
        documents = evaluation.per_window[f"plain/sliding/{r['length']}/document"]
        total = 0.0
        for d, end in zip(documents, ends, strict=True):
            piece = torch.tensor(text.documents[d][end - r["length"]:end + 1].astype(np.int64))[None]
            total += torch.nn.functional.cross_entropy(model(piece[:, :-1])[0, -1], piece[0, -1]).item()
        assert r["nll_sum"] == pytest.approx(total, rel=1e-4) and r["stride"] == 1 and r["tokens"] == 64


def test_sliding_refuses_lengths_for_which_no_document_is_long_enough(tiny, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    longest = max(map(len, text.documents)) - 1
    with pytest.raises(UserError, match="sliding needs"):
        sliding_windows(text, longest, [longest], None, 64, 0)


def test_fixed_targets_visit_every_document(corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    assert len(text.documents) > 1
    ends = fixed_ends(text, 64, 8, len(text.documents), 0)
    assert {d for d, _ in ends} == set(range(len(text.documents)))


@pytest.mark.parametrize("bos", slow_except([False, True], True))
@every_encoding_slowly
def test_fixed_is_slice_and_forward(name: str, bos: bool, tiny, corpus_dir: Path) -> None:
    """With data.bos each window, a truncated one too, begins with the separator; the targets are the same."""
    config, text = tiny(name, f"data.bos={str(bos).lower()}"), text_of(corpus_dir)
    model = lively(config)
    lengths = [16, 32] if model.encoding.max_length else LENGTHS
    evaluation = evaluate(model, config, text, lengths=lengths)
    records = {(r["protocol"], r["length"]): r for r in evaluation.run() if "bucket" not in r}
    expected = {}
    for length in {*evaluation.lengths, 32}:
        total = 0.0
        for document, end in evaluation.ends:
            piece = torch.tensor(text.documents[document][end - length:end + 1].astype(np.int64))[None]
            piece[:, 0] = ByteTokenizer.eot if bos else piece[:, 0]
            logits = model(piece[:, :-1])[0, -8:]
            total += torch.nn.functional.cross_entropy(logits, piece[0, -8:], reduction="sum").item()
        expected[length] = total
    for length in evaluation.lengths:
        r = records["fixed", length]
        assert r["nll_sum"] == pytest.approx(expected[length], rel=1e-4)
        assert r["truncated_nll_sum"] == pytest.approx(expected[32], rel=1e-4)
        assert r["gain"] == pytest.approx((expected[32] - expected[length]) / r["tokens"], abs=1e-4)
        assert r["tokens"] == 8 * 6 and r["ppl"] == pytest.approx(math.exp(r["nll_sum"] / r["tokens"]))
    assert records["fixed", 32]["gain"] == 0


def test_a_model_that_sees_one_token_gains_nothing_from_context(tiny, corpus_dir: Path) -> None:
    model = lively(tiny("rope"))
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.o.weight)
    records = evaluate(model, tiny(), text_of(corpus_dir), ["fixed"]).run()
    assert all(abs(r["gain"]) < 1e-6 for r in records) and len(records) == len(LENGTHS)


def test_a_bounded_receptive_field_gains_exactly_nothing(tiny, corpus_dir: Path) -> None:
    """Window 8 in 2 layers sees 15 tokens: 8 targets at the end of 32 inputs see 22 of them, and no more."""
    model = lively(tiny("rope", "model.window=8"))
    records = evaluate(model, tiny(), text_of(corpus_dir), ["fixed"]).run()
    gains = {r["length"]: r["gain"] for r in records}
    assert abs(gains.pop(16)) > 1e-3 and all(abs(gain) < 1e-6 for gain in gains.values())


def test_position_buckets_cover_each_position_once(tiny, corpus_dir: Path) -> None:
    for longest in (1, 2, 3, 100, 256, 16_384):
        buckets = position_buckets(longest)
        assert buckets[0][0] == 0 and buckets[-1][1] == longest and all(a < b for a, b in buckets)
        assert all(left[1] == right[0] for left, right in zip(buckets, buckets[1:], strict=False))
    model, text = lively(tiny("rope")), text_of(corpus_dir)
    evaluation = evaluate(model, tiny(), text)
    records = [r for r in evaluation.run() if r["protocol"] == "position"]
    losses = []
    for document, end in evaluation.ends:
        piece = torch.tensor(text.documents[document][end - 256:end + 1].astype(np.int64))[None]
        losses.append(token_losses(model, piece[:, :-1], piece[:, 1:])[0])
    losses = torch.stack(losses)
    for r in records:
        start, end = r["bucket"]
        assert r["nll_sum"] == pytest.approx(losses[:, start:end].sum().item(), rel=1e-4)
        assert r["tokens"] == 6 * (end - start) and r["length"] == 256
    assert sum(r["tokens"] for r in records) == 6 * 256


def test_sharing_a_forward_changes_no_figure(tiny, corpus_dir: Path) -> None:
    model, text = lively(tiny()), text_of(corpus_dir)
    together = [r["nll_sum"] for r in evaluate(model, tiny(), text).run() if r["protocol"] == "fixed"]
    alone = [r["nll_sum"] for r in evaluate(model, tiny(), text, ["fixed"]).run()]
    assert together == pytest.approx(alone, rel=1e-5)


def test_sums_are_per_window_and_add_up(tiny, corpus_dir: Path) -> None:
    evaluation = evaluate(lively(tiny()), tiny(), text_of(corpus_dir))
    for r in evaluation.run():
        if r["protocol"] != "position":
            columns = {c: evaluation.per_window[f"plain/{r['protocol']}/{r['length']}/{c}"]
                       for c in ("nll", "tokens", "bytes", "document")}
            assert columns["nll"].sum() == pytest.approx(r["nll_sum"])
            assert columns["tokens"].sum() == r["tokens"]
            assert len(set(columns["document"])) == r["documents"] and columns["bytes"].sum() == r["bytes"]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_losses_equal_full_logits(chunk: int, tiny, monkeypatch) -> None:
    monkeypatch.setattr(protocols, "CHUNK", chunk)
    model, x = lively(tiny()), torch.randint(257, (3, 41))
    expected = torch.nn.functional.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(model, x[:, :-1], x[:, 1:]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(token_losses(model, x[:, :-1], x[:, -5:]), expected[:, -5:],
                               atol=1e-4, rtol=1e-4)


def test_only_documents_long_enough_take_part(tiny, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    sizes = sorted(len(d) - 1 for d in text.documents)
    evaluation = evaluate(lively(tiny()), tiny(), text, protocols.DEFAULT_PROTOCOLS, [32, sizes[-1]])
    assert len(evaluation.text.documents) == 1 and all(r["documents"] == 1 for r in evaluation.run())


def test_lengths_default_to_the_multiples_that_fit(corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    longest = max(map(len, text.documents)) - 1
    assert choose_lengths(None, 32, text) == [n for n in (16, 32, 64, 128, 256, 512, 1024, 2048)
                                              if n <= longest]
    assert choose_lengths("64,16", 32, text) == [64, 16]
    for wanted, L in (("16,x", 32), ("0", 32), (str(longest + 1), 32), ("16", longest + 1),
                      (None, longest + 1)):
        with pytest.raises(UserError):
            choose_lengths(wanted, L, text)


def test_a_text_file_is_one_document_and_a_foreign_corpus_is_refused(tmp_path: Path,
                                                                     corpus_dir: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello")
    text = open_text(str(tmp_path / "a.txt"), "unused", ByteTokenizer())
    assert text.name == "a" and text.documents[0].tolist() == [256, *b"hello"]
    for name in ("a.parquet", "a.JSONL", "a.jsonl.zst", "a.txt.gz"):    # their bytes are no text
        (tmp_path / name).write_bytes(b"hello")
        with pytest.raises(UserError, match="prepare it first"):
            open_text(str(tmp_path / name), "unused", ByteTokenizer())
    other = ByteTokenizer()
    other.name, other.sha256 = "other", "of another vocabulary"
    with pytest.raises(UserError, match="trained with other"):
        open_text(None, str(corpus_dir), other)
    other.name, other.sha256 = "byte", "0" * 64                         # the same name, another vocabulary
    with pytest.raises(UserError, match="trained with byte"):
        open_text(None, str(corpus_dir), other)


def test_the_fingerprint_of_a_text_is_of_its_ids_and_bounds() -> None:
    ids = np.arange(10)
    texts = [Text("x", [ids]), Text("y", [ids.astype(np.uint16)]), Text("x", [ids[:5], ids[5:]]),
             Text("x", [ids + 1])]
    prints = [text.sha256() for text in texts]
    assert prints[0] == prints[1] and len(set(prints)) == 3


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


def run_eval(*arguments: str) -> subprocess.CompletedProcess:
    return python(ROOT / "eval.py", *arguments)


def test_the_command_writes_table_json_npz_and_picture(tiny, tmp_path: Path, corpus_dir: Path) -> None:
    train(tiny("learned"), [])
    done = run_eval(str(tmp_path / "run"), "--lengths", "16,32,64", "--windows", "3", "--tokens", "256")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()
            if line.strip()[:2] in ("16", "32", "64")}
    assert "<- training length" in rows["32"] and rows["64"].split("|")[1].split() == ["-", "-"]
    assert "learned is not defined beyond position 31" in done.stdout
    written = json.loads((tmp_path / "run" / "eval" / "words.json").read_text())
    assert {k: written[k] for k in ("encoding", "seq_len", "tokenizer", "data", "seed")} == {
        "encoding": "learned", "seq_len": 32, "tokenizer": "byte", "data": "words", "seed": 0}
    assert {r["length"] for r in written["records"] if r["protocol"] != "position"} == {16, 32}
    keys = {"extend", "protocol", "length", "nll_sum", "tokens", "bytes", "documents", "ppl", "bpb",
            "seconds"}
    assert all(keys <= set(r) for r in written["records"])
    picture = (tmp_path / "run" / "eval" / "words.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert "plain/fixed/16/nll" in np.load(tmp_path / "run" / "eval" / "words.npz", allow_pickle=False)


# -----------------------------------------------------------------------------------------------------------
# A second evaluation of the same run

PLACE = ("extend", "protocol", "length", "bucket")


@pytest.fixture
def evaluated(run_dir: Path, monkeypatch):
    """evaluated("--lengths", "16") -> the records and arrays in a run's JSON after eval.py with these."""
    monkeypatch.setattr("eval.draw_evaluation", lambda *_: None)

    def call(*arguments: str) -> tuple[dict, dict]:
        monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), *SHORT, *arguments])
        main()
        found = results.read(run_dir / "eval" / "words.json")
        return {tuple(str(r.get(key)) for key in PLACE): r for r in found.records}, found.windows

    return call


SHORT = ("--windows", "4", "--tokens", "512")


def without_seconds(records: dict, places: list) -> list[dict]:
    return [{key: value for key, value in records[place].items() if key != "seconds"} for place in places]


def test_a_second_evaluation_on_the_same_targets_is_added(evaluated) -> None:
    """In parts or at once: the same records in the same order, the same arrays."""
    evaluated("--lengths", "16,128", "--protocol", "nonoverlap,fixed")
    evaluated("--lengths", "64,32", "--protocol", "fixed", "--longest", "128", "--extend", "pi")
    merged, arrays = evaluated("--lengths", "32,64,128", "--protocol", "nonoverlap,sliding", "--extend",
                               "pi", "--stride", "8")
    assert [key[:3] for key in merged][:5] == [("None", "nonoverlap", "16"), ("None", "nonoverlap", "32"),
                                               ("None", "nonoverlap", "64"), ("None", "nonoverlap", "128"),
                                               ("None", "fixed", "16")]
    whole, at_once = evaluated("--lengths", "16,32,64,128", "--protocol", "nonoverlap,fixed,sliding",
                               "--extend", "pi", "--stride", "8", "--replace")
    assert {key for key in whole if key not in merged} == {
        ("pi", "nonoverlap", "16", "None"), ("pi", "fixed", "16", "None"), ("pi", "fixed", "128", "None"),
        ("None", "sliding", "16", "None"), ("pi", "sliding", "16", "None")}
    both = [key for key in whole if key in merged]
    assert without_seconds(whole, both) == without_seconds(merged, both)
    assert set(arrays) < set(at_once)
    assert all(np.array_equal(array, at_once[key]) for key, array in arrays.items())


PLACES = ("--lengths", "16,32,64", "--protocol", "fixed,position", "--extend", "pi")


def test_an_interrupted_evaluation_goes_on_where_it_was(evaluated, run_dir: Path, monkeypatch,
                                                        capsys) -> None:
    """Each length is in the file as soon as it is measured, and is not measured again."""
    measure, done = Evaluation._measure, []

    def interrupted(self: Evaluation, protocol: str, length: int) -> list:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((self.extend.spec, protocol, length))
        return measure(self, protocol, length)

    monkeypatch.setattr(Evaluation, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(*PLACES)
    kept = results.read(run_dir / "eval" / "words.json").records
    assert [(r["protocol"], r["length"]) for r in kept] == [("fixed", 16), ("fixed", 32), ("fixed", 64)]
    done.clear()
    with pytest.raises(KeyboardInterrupt):          # at 16 and 32, pi is as without
        evaluated(*PLACES, "--extend", "ntk")
    assert done == [("plain", "position", 64), ("pi", "fixed", 64), ("pi", "position", 64)]
    done.clear()
    resumed, arrays = evaluated(*PLACES)
    assert done == [] and "holds all of this already" in capsys.readouterr().out
    monkeypatch.setattr(Evaluation, "_measure", measure)
    whole, at_once = evaluated(*PLACES, "--extend", "ntk", "--replace")
    ours = [place for place in whole if place[0] != "ntk"]
    for place in ours:                              # a shared forward pass rounds otherwise
        assert resumed[place]["nll_sum"] == pytest.approx(whole[place]["nll_sum"], rel=1e-5)
    assert set(arrays) <= set(at_once) and len(resumed) > len(ours)


def test_where_a_method_changes_nothing_the_figures_are_reused(evaluated, capsys) -> None:
    records, arrays = evaluated("--lengths", "16,32,64", "--protocol", "fixed", "--extend", "dynamic_ntk",
                                "--extend", "yarn:beta_fast=2", "--extend", "yarn:beta_fast=2,factor=4",
                                "--extend", "dual_chunk")
    out = capsys.readouterr().out
    for spec in ("yarn:beta_fast=2", "dynamic_ntk", "dual_chunk"):
        assert f"--extend {spec}: as without it at 16, 32\n" in out
        for length in ("16", "32"):
            one = records[spec, "fixed", length, "None"]
            assert one == {**records["None", "fixed", length, "None"], "extend": spec}
            assert np.array_equal(arrays[f"{spec}/fixed/{length}/nll"], arrays[f"plain/fixed/{length}/nll"])
        beyond = [records[name, "fixed", "64", "None"]["nll_sum"] for name in (spec, "None")]
        assert beyond[0] != beyond[1]
    assert "factor=4: as without" not in out
    assert records["yarn:beta_fast=2,factor=4", "fixed", "32", "None"]["gain"] != 0
    evaluated("--lengths", "16", "--longest", "64", "--protocol", "fixed", "--extend", "pi")
    assert "as without it at 16; give lengths beyond L, such as --lengths 32,64,128" in \
        capsys.readouterr().out


def test_many_targets_of_a_window_are_kept_in_blocks(tiny, corpus_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(protocols, "BLOCK", 10)
    whole, blocks = [], []
    for found, size in ((whole, 999), (blocks, 10)):
        monkeypatch.setattr(protocols, "BLOCK", size)
        evaluation = evaluate(lively(tiny()), tiny(), text_of(corpus_dir), ["fixed"], [32, 64], targets=24)
        found += [evaluation.run(), evaluation.per_window]
    keys = [{key: r[key] for key in ("length", "tokens", "bytes", "documents")} for r in whole[0]]
    assert keys == [{key: r[key] for key in keys[0]} for r in blocks[0]]
    for a, b in zip(whole[0], blocks[0], strict=True):
        assert a["nll_sum"] == pytest.approx(b["nll_sum"]) and a["gain"] == pytest.approx(b["gain"], abs=1e-7)
    for length in (32, 64):
        place = f"plain/fixed/{length}/"
        assert blocks[1][place + "tokens"].tolist() == [10, 10, 4] * 6
        for name in ("nll", "bytes", "truncated_nll"):
            summed = np.add.reduceat(blocks[1][place + name], range(0, 18, 3))
            assert summed == pytest.approx(whole[1][place + name])
        assert blocks[1][place + "end"][2::3].tolist() == whole[1][place + "end"].tolist()


def test_L_is_needed_for_truncation_alone_and_can_be_overruled(evaluated, run_dir: Path, tmp_path: Path,
                                                               capsys) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"a text of thirty bytes or less")
    for arguments in ((), ("--train-length", "31")):
        with pytest.raises(UserError, match="--train-length"):
            evaluated("--data", str(short), "--lengths", "8", "--protocol", "fixed", *arguments)
    evaluated("--lengths", "16")                    # so that words.json exists
    evaluated("--data", str(short), "--lengths", "8,16", "--protocol", "rolling,nonoverlap,sliding")
    evaluated("--data", str(short), "--train-length", "16", "--protocol", "fixed", "--json",
              str(tmp_path / "L.json"))
    found = results.read(tmp_path / "L.json")
    assert found.head["seq_len"] == 16 and [r["length"] for r in found.records] == [8, 16]
    assert found.records[1]["gain"] == 0 != found.records[0]["gain"]
    assert "trained at L = 16, on short" in capsys.readouterr().out


def test_the_dtype_can_be_chosen_is_printed_and_recorded(evaluated, run_dir: Path, capsys) -> None:
    evaluated("--lengths", "32", "--protocol", "fixed", "--dtype", "float32")
    assert ", in float32\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds an evaluation of another --dtype"):
        evaluated("--lengths", "32", "--protocol", "fixed", "--dtype", "bfloat16")
    exact = results.read(run_dir / "eval" / "words.json").records[0]["nll_sum"]
    evaluated("--lengths", "32", "--protocol", "fixed", "--dtype", "bfloat16", "--replace")
    rounded = results.read(run_dir / "eval" / "words.json")
    assert ", in bfloat16\n" in capsys.readouterr().out and rounded.head["dtype"] == "bfloat16"
    assert exact != rounded.records[0]["nll_sum"] == pytest.approx(exact, rel=1e-2)


def test_a_fine_tuned_model_shows_the_length_before_its_extension_too(tiny, tmp_path: Path, capsys,
                                                                      monkeypatch) -> None:
    scaling = "position.scaling={method='yarn',factor=4.0,original_length=%d,beta_fast=2.0}"
    for original, expected in ((64, "trained at L = 32 after L = 64 before its extension, on words"),
                               (32, "trained at L = 32, on words")):
        run_dir = tmp_path / f"run-{original}"
        train(tiny("rope", "train.steps=1", scaling % original, f"run.dir={run_dir}"), [])
        monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), *SHORT, "--lengths", "64", "--protocol",
                                          "rolling"])
        main()
        assert expected in capsys.readouterr().out


def test_probes_alone_have_no_picture(run_dir: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), "--lengths", "64", "--protocol", "copy"])
    main()
    assert not (run_dir / "eval" / "words.png").exists()
    assert "words.json and .npz\n" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--lengths", "16,32"], "holds fixed on other targets; give --longest 64 to measure"),
    (["--windows", "5"], "holds fixed on other targets; give --windows 4 to measure"),
    (["--targets", "4", "--windows", "5"], "give --targets 8 --windows 4 to measure"),
    (["--seed", "1"], "holds an evaluation of another --seed"),
    (["--lengths", "16", "--longest", "64", "--protocol", "position"],
     "holds position on other targets; give --lengths up to 64"),
    (["--data", "TEXT"], "holds an evaluation of another text"),
])
def test_an_evaluation_on_other_targets_is_refused_before_it_is_computed(
        arguments: list[str], expected: str, evaluated, run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    before = evaluated("--lengths", "32,64", "--protocol", "fixed,position")[0]
    text = tmp_path / "words.txt"
    text.write_bytes(b"another text " * 20)                             # of the same name
    monkeypatch.setattr(Evaluation, "measure", lambda *_: pytest.fail("computed"))
    with pytest.raises(UserError, match="--json FILE to keep both, or --replace to discard") as error:
        evaluated("--lengths", "32,64", "--protocol", "fixed",
                  *(str(text) if argument == "TEXT" else argument for argument in arguments))
    assert expected in str(error.value) and len(error.value.problems) == 1
    assert len(results.read(run_dir / "eval" / "words.json").records) == len(before)


def test_another_checkpoint_an_older_file_and_a_damaged_one_are_refused_and_can_be_replaced(
        evaluated, run_dir: Path) -> None:
    short = ("--lengths", "32", "--protocol", "fixed")
    evaluated(*short)
    path = run_dir / "eval" / "words.json"
    good = json.loads(path.read_text())
    older = {key: value for key, value in good.items() if key != "settings"}
    for content, expected in (({**good, "weights_sha256": "0" * 64}, "another checkpoint"),
                              (older, "by an older eval.py, without its settings"),
                              ({**good, "settings": [1]}, "damaged or no evaluation"),
                              ({**good, "records": [{"extend": 1, "protocol": "x", "length": 2}]}, "damaged"),
                              ("no evaluation", "damaged or no evaluation")):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=expected):
            evaluated(*short)
    path.with_suffix(".npz").unlink()
    path.write_text(json.dumps(good)[:99])
    with pytest.raises(UserError, match="damaged or no evaluation"):
        evaluated(*short)
    assert len(evaluated(*short, "--replace")[0]) == 1


def slow_but(fast: tuple[str, ...], names: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("protocol", slow_but(("fixed", "sliding"),
                                              (*protocols.PROTOCOLS, *protocols.PROBES)))
def test_targets_depend_on_the_recorded_settings_alone(protocol: str, tiny, corpus_dir: Path) -> None:
    """A setting that a protocol does not record changes none of its counts and targets."""
    config = tiny("rope", "model.n_layer=1")
    model, text = lively(config), text_of(corpus_dir)
    plain = {"protocols": [protocol], "lengths": [32, 64], "longest": 128, "targets": 8, "windows": 4,
             "tokens": 512}

    def targets(**change) -> tuple[list, dict]:
        found = Evaluation(model, config, ByteTokenizer(), text, Settings(**{**plain, **change}))
        counts = [[r.get(key) for key in ("length", "tokens", "bytes", "documents", "trials")]
                  for r in found.run()]
        return counts, {key: array.tolist() for key, array in found.per_window.items()
                        if not key.endswith("nll")}

    others = {"longest": 160, "targets": 4, "windows": 12, "tokens": 256, "stride": 4}
    before = targets()
    for name, value in others.items():
        if name not in protocols.DECIDING[protocol]:
            assert targets(**{name: value}) == before, name


@pytest.mark.parametrize("skip", [False, True])
def test_a_method_that_does_not_fit_is_an_error_or_skipped(skip: bool, tiny, capsys) -> None:
    config = tiny("alibi")
    arguments = (["yarn:beta_fast=2", "window"], lively(config), config, [16, 64])
    if not skip:
        with pytest.raises(UserError, match="--extend yarn:beta_fast=2: needs a rotary encoding"):
            protocols.open_extensions(*arguments)
        return
    assert [extend.spec for extend in protocols.open_extensions(*arguments, skip_unfit=True)] == ["window"]
    out = capsys.readouterr().out
    assert out.startswith("skipped --extend yarn:beta_fast=2: needs a rotary encoding; this run has alibi")
    assert out.count("\n") == 1


def test_a_long_evaluation_without_a_terminal_shows_a_line_now_and_then(monkeypatch, capsys) -> None:
    clock = iter([0, 1, 2, *range(30, 10_000, 10)])                     # 10 s pass at each later look
    monkeypatch.setattr("evaluation.progress.time.monotonic", lambda: next(clock))
    shown = Progress(True)
    shown.left = 12 + 3000                                              # of work: 3,000 of it later
    things = shown(range(12), "pi fixed 64", [1] * 12)
    assert [next(things) for _ in range(3)] == [0, 1, 2]
    assert capsys.readouterr().err == ""                                # nobody knows the rest after 2 s
    assert list(things) == list(range(3, 12))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("this will take about 8.4 h on this machine; for less give --lengths")
    assert len(lines) == 4 and lines[0].endswith(", pi fixed 64: 3 of 12") and " h left" in lines[0]
    assert list(Progress(False)(range(99), "x", [1] * 99)) == list(range(99))
    assert capsys.readouterr().err == ""                                # only one process shows it


@pytest.mark.parametrize(("arguments", "expected"), [
    (["RUN", "--lengths", "16,99999"], "--lengths 16,99999"),
    (["RUN", "--protocol", "sliding,x"], "--protocol"),
    (["RUN", "--stride", "0"], "--stride"),
    (["RUN", "--windows", "1000000000", "--protocol", "passkey"], "--windows 1000000000: must be at most"),
    (["RUN", "--lengths", "64", "--longest", "63"], "--longest 63: must be in 64 ... "),
    (["RUN", "--seed", "-1"], "--seed -1"),
    (["RUN", "--train-length", "-5"], "--train-length -5: must be at least 1"),
    (["RUN", "--train-length", "0"], "--train-length 0: must be at least 1"),
    (["RUN", "--extend", "ntk:factor=1e308"], "ntk.factor"),
    (["RUN", "--extend", "dynamic_ntk:factor=1e308"], "dynamic_ntk.factor"),
    (["RUN", "--targets", "0"], "--targets 0"),
    (["RUN", "--extend", "yarm"], "unknown method 'yarm'; did you mean yarn?"),
    (["RUN", "--extend", "yarn:beta_fsat=2"], "did you mean beta_fast?"),
    (["RUN", "--extend", "pi:factor=0.5"], "pi.factor"),
    (["RUN", "--extend", "pi:factor"], "must be key=value"),
    (["RUN", "--extend", "pi+ntk"], "two methods change the same thing"),
    (["RUN", "--extend", "longrope:long_factor=[1.5],short_factor=[1.0]"], "--extend longrope"),
    (["RUN", "--targets", "999"], "--targets"),
    (["nowhere"], "run nowhere: no run there"),
    (["nobody/model"], "eval.py and sample.py download a model of the hub as hf:nobody/model"),
    (["GGUF"], "GGUF files are not read; convert the model by transformers"),
    (["RUN", "--extend", "longrope"], "needs short_factor and long_factor; write --extend 'longrope:short_f"),
    (["RUN", "--extend", "base"], "--extend base: needs base; write --extend 'base:base=...'"),
    (["RUN", "--dtype", "fp16"], "argument --dtype: invalid choice: 'fp16'"),
    (["RUN", "--data", "nowhere"], "--data nowhere: neither"),
    (["RUN", "--lenghts", "16"], "unrecognized arguments"),
    (["RUN", "--windows", "x"], "invalid int value"),
    (["EMPTY"], "no checkpoint yet"),
    ([], "RUN"),
])
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], expected: str, run_dir: Path, tmp_path: Path,
                                          monkeypatch, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("config.toml", "corpus.json"):
        (empty / name).write_bytes((run_dir / name).read_bytes())
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    places = {"RUN": str(run_dir), "EMPTY": str(empty), "GGUF": str(tmp_path / "gguf")}
    monkeypatch.setattr(sys, "argv", ["eval.py", *(places.get(a, a) for a in arguments)])
    with pytest.raises(SystemExit) as end:
        run_command(main)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ")
    assert error.count("\n") == 1 and expected in error


def test_books_are_long_enough_for_64_times_a_thousand() -> None:
    """Frankenstein as one document: 64 L at L = 1024 fits."""
    text = open_text(str(needs("books", "val", "frankenstein.txt")), "unused", ByteTokenizer())
    assert choose_lengths(None, 1024, text)[-1] == 65_536


def test_memory_of_a_long_window_does_not_hold_its_logits(tiny, monkeypatch) -> None:
    """No tensor of T x V elements is made, whatever T: the largest the losses see is CHUNK x V."""
    model, largest = lively(tiny()), 0
    logits = model.logits

    def spy(x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        made = logits(x)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(model, "logits", spy)
    x = torch.randint(257, (1, 5000))
    assert token_losses(model, x, x).shape == (1, 5000)
    assert largest == protocols.CHUNK * 257


def test_the_run_evaluates_on_its_own_validation_documents(tiny, tmp_path: Path, corpus_dir: Path) -> None:
    corpus, text = Corpus(corpus_dir), text_of(corpus_dir)
    assert len(text.documents) == corpus.meta["splits"]["val"]["documents"]
    assert all(document[0] == 256 for document in text.documents)
