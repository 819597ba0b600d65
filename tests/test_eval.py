"""Protocols: each target once, the same at every length, sums that anyone can recompute."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, every_encoding, lively, needs

from data.loader import Corpus
from data.tokenizer import ByteTokenizer
from evaluation import protocols as eval_module
from evaluation.protocols import Evaluation, choose_lengths, is_of_another_text, open_text, token_losses
from evaluation.windows import (
    Text,
    ended_windows,
    fixed_ends,
    nonoverlap_windows,
    position_buckets,
    rolling_windows,
    sliding_windows,
)
from model import GPT
from runtime.errors import UserError
from train import train

LENGTHS = [16, 32, 50, 64, 128, 256]


def text_of(corpus_dir: Path) -> Text:
    return open_text(None, str(corpus_dir), ByteTokenizer())


def evaluate(model: GPT, config, text: Text, protocols=eval_module.PROTOCOLS, lengths=LENGTHS, seed: int = 0,
             n_scored: int = 8) -> Evaluation:
    return Evaluation(model, text, ByteTokenizer(), config, protocols, lengths, n_scored, 6, 1024, seed)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tiny, corpus_dir: Path) -> None:
    model = lively(tiny())
    torch.nn.init.zeros_(model.head.weight)
    records = evaluate(model, tiny(), text_of(corpus_dir)).run()
    assert {r["protocol"] for r in records} == set(eval_module.PROTOCOLS)
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


def test_short_lengths_are_compared_with_truncation_to_L_all_the_same(tiny) -> None:
    """Documents too short for L take no part even where no length asks for as much."""
    rng = np.random.default_rng(0)
    text = Text("x", [rng.integers(256, size=n) for n in (20, 300)])
    evaluation = evaluate(lively(tiny()), tiny(), text, lengths=[8, 16], n_scored=4)
    assert evaluation.longest == 32 and {d for d, _ in evaluation.ends} == {0} and len(evaluation.ends) == 6
    assert all(len(evaluation.text.documents[d]) == 300 for d, _ in evaluation.ends)
    records = [r for r in evaluation.run() if r["protocol"] == "fixed"]
    whole = evaluate(lively(tiny()), tiny(), text, lengths=[8, 16, 32], n_scored=4).run()
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
    evaluation = Evaluation(model, text, ByteTokenizer(), tiny(), ["sliding"], [16, 64], 8, 6, 64, 0,
                            stride=1)
    for r in evaluation.run():
        ends = evaluation.per_window[f"plain/sliding/{r['length']}/end"]
        documents = evaluation.per_window[f"plain/sliding/{r['length']}/document"]
        total = 0.0
        for d, end in zip(documents, ends, strict=True):
            piece = torch.tensor(text.documents[d][end - r["length"]:end + 1].astype(np.int64))[None]
            total += torch.nn.functional.cross_entropy(model(piece[:, :-1])[0, -1], piece[0, -1]).item()
        assert r["nll_sum"] == pytest.approx(total, rel=1e-4) and r["stride"] == 1 and r["tokens"] == 64


def test_sliding_says_what_it_needs(tiny, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    longest = max(map(len, text.documents)) - 1
    with pytest.raises(UserError, match="sliding needs"):
        sliding_windows(text, longest, [longest], None, 64, 0)


def test_fixed_targets_visit_every_document(corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    assert len(text.documents) > 1
    ends = fixed_ends(text, 64, 8, len(text.documents), 0)
    assert {d for d, _ in ends} == set(range(len(text.documents)))


@every_encoding
def test_fixed_is_slice_and_forward(name: str, tiny, corpus_dir: Path) -> None:
    model, text = lively(tiny(name)), text_of(corpus_dir)
    lengths = [16, 32] if GPT(tiny(name)).encoding.max_length else LENGTHS
    evaluation = evaluate(model, tiny(name), text, lengths=lengths)
    records = {(r["protocol"], r["length"]): r for r in evaluation.run() if "bucket" not in r}
    expected = {}
    for length in {*evaluation.lengths, 32}:
        total = 0.0
        for document, end in evaluation.ends:
            piece = torch.tensor(text.documents[document][end - length:end + 1].astype(np.int64))[None]
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
    monkeypatch.setattr(eval_module, "CHUNK", chunk)
    model, x = lively(tiny()), torch.randint(257, (3, 41))
    expected = torch.nn.functional.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(model, x[:, :-1], x[:, 1:]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(token_losses(model, x[:, :-1], x[:, -5:]), expected[:, -5:],
                               atol=1e-4, rtol=1e-4)


def test_only_documents_long_enough_take_part(tiny, corpus_dir: Path) -> None:
    text = text_of(corpus_dir)
    sizes = sorted(len(d) - 1 for d in text.documents)
    evaluation = evaluate(lively(tiny()), tiny(), text, eval_module.DEFAULT_PROTOCOLS, [32, sizes[-1]])
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


def run_eval(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "eval.py"), *arguments], capture_output=True, text=True)


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
    place = tmp_path / "run" / "eval" / "words.json"
    text = text_of(corpus_dir)
    assert not is_of_another_text(place, text) and not is_of_another_text(tmp_path / "none.json", text)
    (tmp_path / "words.txt").write_bytes(b"another text " * 20)         # of the same name
    done = run_eval(str(tmp_path / "run"), "--lengths", "16", "--windows", "3", "--tokens", "64",
                    "--data", str(tmp_path / "words.txt"))
    assert done.returncode == 0 and f"warning: {place}: is of another text" in done.stdout


@pytest.mark.parametrize(("arguments", "expected"), [
    (["RUN", "--lengths", "16,99999"], "--lengths 16,99999"),
    (["RUN", "--protocol", "sliding,x"], "--protocol"),
    (["RUN", "--stride", "0"], "--stride"),
    (["RUN", "--seed", "-1"], "--seed -1"),
    (["RUN", "--targets", "0"], "--targets 0"),
    (["RUN", "--extend", "yarm"], "unknown method 'yarm'; did you mean yarn?"),
    (["RUN", "--extend", "yarn:beta_fsat=2"], "did you mean beta_fast?"),
    (["RUN", "--extend", "pi:factor=0.5"], "pi.factor"),
    (["RUN", "--extend", "pi:factor"], "must read key=value"),
    (["RUN", "--extend", "pi+ntk"], "two methods change the same thing"),
    (["RUN", "--extend", "longrope:long_factor=[1.5],short_factor=[1.0]"], "--extend longrope"),
    (["RUN", "--targets", "999"], "--targets"),
    (["nowhere"], "run nowhere: no run there"),
    (["RUN", "--data", "nowhere"], "data.dir nowhere"),
    (["RUN", "--lenghts", "16"], "unrecognized arguments"),
    (["RUN", "--windows", "x"], "invalid int value"),
    (["EMPTY"], "no checkpoint yet"),
    ([], "RUN"),
])
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], expected: str, tiny, tmp_path: Path,
                                          monkeypatch, capsys) -> None:
    from runtime.command import run_command

    train(tiny(), [])
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("config.toml", "corpus.json"):
        (empty / name).write_bytes((tmp_path / "run" / name).read_bytes())
    places = {"RUN": str(tmp_path / "run"), "EMPTY": str(empty)}
    monkeypatch.setattr(sys, "argv", ["eval.py", *(places.get(a, a) for a in arguments)])
    with pytest.raises(SystemExit) as end:
        run_command(eval_module.main)
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
    assert largest == eval_module.CHUNK * 257


def test_the_run_evaluates_on_its_own_validation_documents(tiny, tmp_path: Path, corpus_dir: Path) -> None:
    corpus, text = Corpus(corpus_dir), text_of(corpus_dir)
    assert len(text.documents) == corpus.meta["splits"]["val"]["documents"]
    assert all(document[0] == 256 for document in text.documents)
