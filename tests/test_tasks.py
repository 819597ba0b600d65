"""Tasks: a solver that reads the document finds the answer, the mask covers it, and the loss is its mean."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import call, draw, lively, measured, places_of

from base.errors import UserError
from data import tasks
from data.loader import SPLITS, Corpus
from data.prepare import prepare
from data.tasks import ALGORITHMS, RETRIEVAL, TASKS, TaskDocument
from data.tokenizer import ByteTokenizer, Tokenizer, decode, load_tokenizer
from evaluation.scoring import Evaluation, Settings, Text
from model import GPT
from runtime.parallel import Process
from train import validate

BYTES = ByteTokenizer()
MASKED = [name for name, task in TASKS.items() if task.has_mask]
every_kind = pytest.mark.parametrize("kind", RETRIEVAL)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that merges letters of the words of the tasks, and digits."""
    folder = tmp_path_factory.mktemp("bpe")
    text = " ".join([*tasks.WORDS, *tasks.FILLER, *["482"] * 50])
    (folder / "text.txt").write_text(text * 20)
    prepare(str(folder / "text.txt"), folder / "corpus", "bpe:320")
    return load_tokenizer("bpe:320", folder / "corpus")


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources.TASK_DOCUMENTS", {"train": range(20, 80), "val": range(20)})


def text_of(made: TaskDocument, tokenizer: Tokenizer = BYTES) -> str:
    assert made.ids[0] == tokenizer.separator and not made.is_answer[0]
    return decode(tokenizer, made.ids.tolist())


def answer_of(made: TaskDocument, tokenizer: Tokenizer = BYTES) -> str:
    return decode(tokenizer, made.ids[made.is_answer].tolist())


def solve_retrieval(kind: str, text: str) -> str:
    """The answer, from the text before the last fact alone."""
    if kind == "passkey":
        return re.findall(r" key=(\d+\.)", text)[0]
    if kind == "variables":
        value, asked = re.findall(r" (\d+): (.*)$", text)[0]
        names = [re.findall(rf" (\w)={value}\.", text)[0]]
        while found := re.findall(rf" (\w)= {names[-1]}\.", text):
            names += found
        assert asked.startswith(names[0])
        return "".join(f" {name}" for name in names) + "."
    facts = re.findall(r" ([a-z]+)=(\d{3})\.", text)
    if kind == "multi_value":
        word = re.findall(r" ([a-z]+)=[\d,]+\.$", text)[0]
        return ",".join(number for key, number in facts if key == word) + "."
    n_asked = 2 if kind == "multi_query" else 1
    hidden, asked = facts[:-n_asked], [key for key, _ in facts[-n_asked:]]
    return "".join(dict(hidden)[key] + "." for key in asked)


SOLVE = {
    "copying": lambda x: x + ".",
    "reversal": lambda x: x[::-1] + ".",
    "sorting": lambda x: "".join(sorted(x)) + ".",
    "addition": lambda x: f"{sum(int(part[::-1]) for part in x.split('+')):0{len(x) // 2 + 1}}"[::-1] + ".",
    "parity": lambda x: f"{x.count('1') % 2}.",
}


def solve_algorithm(name: str, text: str) -> str:
    if name != "flip_flop":
        return SOLVE[name](text.split("=")[0])
    bit, answer = "", ""
    for kind, value in re.findall("([wri])([01])", text):
        bit = value if kind == "w" else bit
        answer += bit if kind == "r" else ""
    return answer


@pytest.mark.parametrize("is_bpe", [False, True])
@every_kind
def test_the_facts_of_a_document_tell_its_answer(kind: str, is_bpe: bool, bpe: Tokenizer) -> None:
    tokenizer: Tokenizer = bpe if is_bpe else BYTES
    for seed in range(20):
        for length, depth in ((130, 0.0), (130, 1.0), (300, 0.4)):
            made = tasks.retrieval(kind, tokenizer, length, depth, np.random.default_rng(seed))
            text = text_of(made, tokenizer)
            assert len(made.ids) == len(made.is_answer) == length
            assert answer_of(made, tokenizer) == solve_retrieval(kind, text)
            assert text.endswith(answer_of(made, tokenizer)[-4:])


@every_kind
def test_the_first_fact_that_is_asked_for_is_at_its_depth(kind: str) -> None:
    for seed, depth in itertools.product(range(5), (0.0, 0.3, 1.0)):
        made = tasks.retrieval(kind, BYTES, 400, depth, np.random.default_rng(seed))
        text, first = text_of(made), RETRIEVAL[kind](np.random.default_rng(seed)).groups[0][0]
        before = text[:text.index("".join(first))]
        facts = re.findall(r" [A-Za-z]+= ?\w+\.", before)               # of other groups
        n_filler = 400 - tasks.shortest(kind, BYTES, np.random.default_rng(seed))
        assert len(before) - len("".join(facts)) == round(depth * n_filler)


@every_algorithm
def test_the_answer_of_an_algorithm_is_right(name: str) -> None:
    answers = set()
    for n in (1, 2, 4, 9, 64):
        for seed in range(20):
            made = tasks.algorithm(name, BYTES, n, np.random.default_rng(seed))
            text, answer = text_of(made), answer_of(made)
            assert answer == solve_algorithm(name, text) and text.endswith(answer[-1])
            assert n < 4 or len(made.ids) <= 4 * n + 1                  # fits a window of 4 n inputs
            symbols = len(text) // 2 if name == "flip_flop" else len(re.split("[=+]", text)[0])
            assert symbols == (max(n, 2) if name == "flip_flop" else n)
            answers.add(answer)
    assert len(answers) > 1


def test_one_document_in_four_asks_for_a_key() -> None:
    made = [decode(BYTES, tasks.train_passkey(BYTES, 128, n).ids.tolist()) for n in range(40)]
    assert [" key=" in text for text in made] == [n % 4 == 0 for n in range(40)]


@pytest.mark.parametrize("length", [128, 512])
def test_a_document_of_repeats_is_a_window_of_strings_two_to_three_times(length: int) -> None:
    for number in range(20):
        ids = tasks.train_repeats(BYTES, length, number).ids
        assert len(ids) == length + 1 and ids[0] == BYTES.separator
        assert not np.array_equal(ids, tasks.train_repeats(BYTES, length, number + 1).ids)
        starts = np.flatnonzero(ids == BYTES.separator)
        for _, *string in np.split(ids, starts)[1:-1]:                  # the last one is cut
            assert any(2 * n <= len(string) <= 3 * n and string[n:] == string[:-n] for n in range(3, 33))


@pytest.mark.parametrize("name", MASKED)
def test_a_corpus_has_a_document_a_window_whose_answers_alone_are_targets(name: str, tmp_path: Path) -> None:
    meta = prepare(name, tmp_path / name, "byte")
    L = TASKS[name].length
    assert meta["task"] == {"name": name, "length": L}
    corpus = Corpus(tmp_path / name, "never")
    corpus.require_windows(L)
    assert corpus.n_windows("train", L) == 60
    for split in SPLITS:
        assert set(np.diff(corpus.offsets[split])) == {L + 1}
    seen = set()
    depths = []
    for x, y in zip(*draw(corpus, L, 60, 0, 0), strict=True):
        is_scored = y != -100
        made = TaskDocument(np.append(x[:1], np.where(is_scored, y, x.roll(-1))), np.append(False, is_scored))
        text = text_of(made)
        kind = next(k for k in TASKS[name].protocols if name != "needles" or answer_fits(k, text, made))
        solved = solve_retrieval(kind, text) if kind in RETRIEVAL else solve_algorithm(name, text)
        assert answer_of(made) == solved
        seen.add(len(text))
        if kind == "needle":
            asked = text[text.rindex(" "):text.rindex("=") + 1]         # such as " apple="
            depths.append(text.index(asked) / text.rindex(asked))
    assert len(seen) > 5                                                # of many lengths
    if name == "needles":
        assert min(depths) < 0.3 and max(depths) > 0.7                  # facts at any depth


def answer_fits(kind: str, text: str, made: TaskDocument) -> bool:
    try:
        return solve_retrieval(kind, text) == answer_of(made)
    except (KeyError, IndexError):
        return False


def test_windows_that_are_not_the_documents_are_refused(tmp_path: Path) -> None:
    prepare("needles", tmp_path / "out", "byte")
    corpus = Corpus(tmp_path / "out")                                   # whatever data.cross_documents is
    with pytest.raises(UserError, match="windows of 128 tokens, but train.seq_len is 64"):
        corpus.require_windows(64)
    assert all(start % 129 == 0 for _, start in places_of(corpus, 128, 40, 0, 0))


@pytest.mark.parametrize(("name", "length"), [
    ("needles", 20), ("passkey", 23), ("sorting", 15), ("parity", 0)])
def test_a_length_that_is_too_small_is_named(name: str, length: int, tmp_path: Path) -> None:
    ended = call("data.prepare", name, "--length", length, "--out", tmp_path / "out")
    assert ended.code == 2 and ended.err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert f"--length {length}: too short for" in ended.err or "must be at least 1, got 0" in ended.err


@pytest.fixture
def masked(tiny, tmp_path: Path):
    """masked("key=value", ...) -> a small config on a corpus of parity."""
    prepare("parity", tmp_path / "parity", "byte")

    def make(*overrides: str):
        return tiny("rope", f"data.dir={tmp_path / 'parity'}", "data.cross_documents=never",
                    "train.seq_len=64", *overrides)
    return make


def answer_loss(model: GPT, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss over the scored targets, written out."""
    losses = F.cross_entropy(model(x).flatten(0, 1), y.clamp(min=0).flatten(), reduction="none")
    is_scored = (y != -100).flatten()
    return losses[is_scored].sum() / is_scored.sum()


@pytest.mark.parametrize(("accumulate", "world_size"), [(1, 1), (3, 2)])
def test_the_loss_of_a_batch_is_the_mean_over_its_answers(accumulate: int, world_size: int, masked) -> None:
    """Over all parts and processes, although these have different numbers of answers, the first one none."""
    config = masked(f"train.accumulate={accumulate}", "train.batch_size=12")
    corpus, model = Corpus(config.data.dir), lively(config)
    mask = np.random.default_rng(0).random(len(corpus.tokens["train"])) < 0.1
    if accumulate > 1:
        for _, start in places_of(corpus, 64, 12, 0, 0)[:12 // accumulate:world_size]:
            mask[start:start + 65] = False
    corpus.is_scored["train"] = mask
    expected = answer_loss(model, *draw(corpus, 64, 12, 0, 0))
    expected.backward()
    expected_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses = []
    for rank in range(world_size):
        batch = corpus.batch(config.train, 0, rank, world_size)
        for part in batch.split(accumulate):
            loss = model(part.inputs, part.targets, reduction="sum") / batch.loss_divisor
            loss = loss / world_size                                    # as DDP averages over processes
            loss.backward()
            losses.append(loss.item())
    assert sum(losses) == pytest.approx(expected.item(), rel=1e-5)
    assert len(losses) == accumulate * world_size and (losses[0] == 0) == (accumulate > 1)
    for p, grad in zip(model.parameters(), expected_grads, strict=True):
        assert torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-6)


def test_validation_is_the_mean_over_answers(masked, monkeypatch) -> None:
    config = masked("train.val_windows=0", "train.batch_size=3")
    corpus, model = Corpus(config.data.dir), lively(config)
    mask = np.random.default_rng(0).random(len(corpus.tokens["val"])) < 0.1
    mask[:3 * 65] = False                                               # the first batch has no answers
    corpus.is_scored["val"] = mask
    batches = corpus.val_batches(64, 3, 0)
    x, y = torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches])
    assert len(x) == 20 and (y != -100).sum() == mask.sum() - mask[::65].sum()
    monkeypatch.setattr("train.byte_lengths", lambda _: np.full(257, 2))
    expected = answer_loss(model, x, y).item()
    losses = validate(model, corpus, BYTES, config, Process(torch.device("cpu")))
    assert losses["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert losses["val_bpb"] == pytest.approx(expected / np.log(2) / 2, rel=1e-5)
    mask[:] = False                     # a mean over none: not a loss of 0, which would be kept as the best
    losses = validate(model, corpus, BYTES, config, Process(torch.device("cpu")))
    assert losses == {"val_loss": None, "val_bpb": None}


@pytest.mark.parametrize("name", ["copying", "flip_flop"])
def test_answers_are_scored_as_by_an_explicit_forward(name: str, tiny) -> None:
    config = tiny()
    model = lively(config)
    settings = Settings([name], [32], 32, 8, windows=5)
    [r] = measured(Evaluation(model, config, BYTES, Text("none", []), settings))
    nll, correct = 0.0, 0
    for trial in range(5):
        made = tasks.algorithm(name, BYTES, 8, np.random.default_rng([0, trial, 8]))
        ids, at = torch.from_numpy(made.ids), made.is_answer.nonzero()[0]
        logits = model(ids[None, :-1])[0, at - 1]
        nll += F.cross_entropy(logits, ids[at], reduction="sum").item()
        correct += torch.equal(logits.argmax(dim=-1), ids[at])
    assert (r["place"], r["correct"]) == (8, correct) and r["nll_sum"] == pytest.approx(nll, rel=1e-4)
