"""Tasks: a solver that reads the document finds the answer, the mask covers it, and the loss is its mean."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import lively
from test_probes import evaluation
from test_train import assert_equal_runs, metrics, stop_after

from config import Config, load_config
from data import tasks
from data.loader import SPLITS, Corpus, number_documents
from data.prepare import Options, check, prepare
from data.tasks import ALGORITHMS, NEEDLES, RETRIEVAL, TASKS, Made
from data.tokenizer import ByteTokenizer, CorpusTokenizer, decode, load_tokenizer
from eval import choose_protocols
from eval import main as evaluate
from evaluation import probes
from evaluation.protocols import Evaluation, Settings
from evaluation.results import Results, read, write
from evaluation.windows import Text
from hf.pretrained import pretrained_tables
from model import GPT
from runtime.errors import UserError
from runtime.parallel import Process
from train import micro_batches, train, validate

BYTES = ByteTokenizer()
MASKED = [name for name, task in TASKS.items() if task.has_mask]
every_kind = pytest.mark.parametrize("kind", RETRIEVAL)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> CorpusTokenizer:
    """A tokenizer that merges letters of the words of the tasks, and digits."""
    folder = tmp_path_factory.mktemp("bpe")
    text = " ".join([*tasks.WORDS, *tasks.FILLER, *["482"] * 50])
    (folder / "text.txt").write_text(text * 20)
    prepare(str(folder / "text.txt"), folder / "corpus", "bpe:320")
    return load_tokenizer("bpe:320", folder / "corpus")


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.sources.TASK_DOCUMENTS", {"train": range(20, 80), "val": range(20)})


def text_of(made: Made, tokenizer: CorpusTokenizer = BYTES) -> str:
    assert made.ids[0] == tokenizer.eot and not made.is_answer[0]
    return decode(tokenizer, made.ids.tolist())


def answer_of(made: Made, tokenizer: CorpusTokenizer = BYTES) -> str:
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


# -----------------------------------------------------------------------------------------------------------
# Documents


@pytest.mark.parametrize("is_bpe", [False, True])
@every_kind
def test_the_facts_of_a_document_tell_its_answer(kind: str, is_bpe: bool, bpe: CorpusTokenizer) -> None:
    tokenizer: CorpusTokenizer = bpe if is_bpe else BYTES
    for seed in range(20):
        for length, depth in ((130, 0.0), (130, 1.0), (300, 0.4)):
            made = tasks.retrieval(kind, tokenizer, length, depth, np.random.default_rng(seed))
            text = text_of(made, tokenizer)
            assert len(made.ids) == len(made.is_answer) == length
            assert answer_of(made, tokenizer) == solve_retrieval(kind, text)
            assert text.endswith(answer_of(made, tokenizer)[-4:])


@every_kind
def test_facts_are_the_same_at_every_length_and_depth(kind: str) -> None:
    def facts(length: int, depth: float, seed: int) -> list[str]:
        text = text_of(tasks.retrieval(kind, BYTES, length, depth, np.random.default_rng(seed)))
        return sorted(re.findall(r" [A-Za-z]+= ?\w+\.| \d+:.*$", text))

    found = [facts(length, depth, 3) for length in (130, 700) for depth in (0.0, 0.4, 1.0)]
    assert all(some == found[0] for some in found) and found[0] != facts(130, 0.0, 4)
    documents = [tasks.retrieval(kind, BYTES, 200, 0.4, np.random.default_rng(3)).ids for _ in range(2)]
    assert np.array_equal(*documents)


@every_kind
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_first_fact_that_is_asked_for_is_at_its_depth(kind: str, depth: float) -> None:
    for seed in range(10):
        made = tasks.retrieval(kind, BYTES, 400, depth, np.random.default_rng(seed))
        text, first = text_of(made), RETRIEVAL[kind](np.random.default_rng(seed)).groups[0][0]
        before = text[:text.index("".join(first))]
        facts = re.findall(r" [A-Za-z]+= ?\w+\.", before)               # of other groups
        n_filler = 400 - tasks.shortest(kind, BYTES, np.random.default_rng(seed))
        assert len(before) - len("".join(facts)) == round(depth * n_filler)


@every_kind
def test_a_document_has_no_room_below_its_shortest_length(kind: str) -> None:
    least = tasks.shortest(kind, BYTES, np.random.default_rng(1))
    made = tasks.retrieval(kind, BYTES, least, 0.5, np.random.default_rng(1))
    assert answer_of(made) == solve_retrieval(kind, text_of(made))
    assert not any(sentence in text_of(made) for sentence in tasks.FILLER)
    with pytest.raises(ValueError, match=f"at least {least} tokens, got {least - 1}"):
        tasks.retrieval(kind, BYTES, least - 1, 0.5, np.random.default_rng(1))


def test_numbers_take_as_many_tokens_of_bpe(bpe: CorpusTokenizer) -> None:
    assert len(bpe.encode(b" 482")) < len(bpe.encode(b" 911"))
    made = [tasks.retrieval("passkey", bpe, 80, 0.5, np.random.default_rng(i)) for i in range(20)]
    assert {(len(ids), int(is_answer.sum())) for ids, is_answer in made} == {(80, 6)}


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


class Numbers(ByteTokenizer):
    """Ids 0 ... 39, with the separator among them."""

    vocab_size, eot = 40, 17


def copies_in(string: list[int], most: int) -> list[int]:
    """The n in 3 ... most for which this is a string of n ids, two to three times in a row."""
    return [n for n in range(3, most + 1) if 2 * n <= len(string) <= 3 * n and string[n:] == string[:-n]]


def test_a_document_of_repeats_is_a_window_of_strings_two_to_three_times() -> None:
    tokenizer = Numbers()
    lengths, shares, seen = list[int](), set[float](), set[int]()
    for number in range(100):
        ids = TASKS["repeats"].make(tokenizer, 128, number).ids
        assert len(ids) == 129 and np.array_equal(ids, tasks.train_repeats(tokenizer, 128, number).ids)
        assert not np.array_equal(ids, tasks.train_repeats(tokenizer, 128, number + 1).ids)
        assert ids[0] == tokenizer.eot
        *strings, last = [part.tolist() for part in np.split(ids, np.flatnonzero(ids == 17))[1:]]
        for separator, *string in strings:      # a separator within a string would divide it into others
            possible = copies_in(string, 32)
            assert separator == 17 and possible, string
            lengths.append(possible[-1])
            shares.add(len(string) / possible[-1])
        assert len(last) <= 1 + 3 * 32                                  # the window's end cuts it
        seen |= set(ids.tolist())
    assert seen == set(range(40))                                       # also those around the separator
    assert min(lengths) == 3 and 30 < max(lengths) <= 32 and np.median(lengths) < 12
    assert min(shares) == 2 and max(shares) == 3 and len(shares) > 10


def test_a_window_of_repeats_is_a_document_without_a_mask(tmp_path: Path) -> None:
    """Its strings are separate documents to attention, data.cross_documents = "mask"."""
    assert prepare("repeats", tmp_path / "out", "byte")["task"] == {"name": "repeats", "length": 128}
    corpus = Corpus(tmp_path / "out", "mask")
    assert corpus.masks == {"train": None, "val": None}
    x, y = corpus.batch(128, 40, 0, 0)
    assert (x[:, 0] == 256).all() and (y != -100).all() and torch.equal(x[:, 1:], y[:, :-1])
    documents = number_documents(x, 256)
    assert (documents[:, 0] == 1).all() and documents[:, -1].min() >= 2
    assert torch.equal(documents, (x == 256).cumsum(dim=1))


# -----------------------------------------------------------------------------------------------------------
# Corpora


@pytest.mark.parametrize("name", MASKED)
def test_a_corpus_has_a_document_a_window_whose_answers_alone_are_targets(name: str, tmp_path: Path) -> None:
    meta = prepare(name, tmp_path / name, "byte")
    L = TASKS[name].length
    assert meta["task"] == {"name": name, "length": L}
    corpus = Corpus(tmp_path / name, "never")
    corpus.require_windows(L)
    assert corpus.windows("train", L) == 60 and corpus.n_in_epoch(L) == 60
    for split in SPLITS:
        assert set(np.diff(corpus.offsets[split])) == {L + 1}
    assert choose_protocols(None, str(tmp_path)) == ["nonoverlap", "fixed", "position"]
    (tmp_path / "corpus.json").write_text((tmp_path / name / "meta.json").read_text())
    assert choose_protocols(None, str(tmp_path)) == list(TASKS[name].protocols)
    seen = set()
    for x, y in zip(*corpus.batch(L, 60, 0, 0), strict=True):
        made = Made(np.append(x[:1], np.where(y == -100, x.roll(-1), y)), np.append(False, y != -100))
        text = text_of(made)
        kind = next(k for k in TASKS[name].protocols if name != "needles" or answer_fits(k, text, made))
        solved = solve_retrieval(kind, text) if kind in RETRIEVAL else solve_algorithm(name, text)
        assert answer_of(made) == solved
        seen.add(len(text))
    assert len(seen) > 5                                                # of many lengths
    check(tmp_path / name)


def answer_fits(kind: str, text: str, made: Made) -> bool:
    try:
        return solve_retrieval(kind, text) == answer_of(made)
    except (KeyError, IndexError):
        return False


@pytest.mark.parametrize("name", ["needles", "parity"])
def test_a_damaged_mask_is_found(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path / "out", "byte")
    path = tmp_path / "out" / "val.mask.bin"
    content = path.read_bytes()
    assert set(content) == {0, 1}
    for damaged, expected in ((content[:-1], "bytes, but meta.json names"),
                              (bytes([1 - content[0]]) + content[1:], "not what was written")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=expected):
            Corpus(tmp_path / "out")
    with pytest.raises(UserError, match="val.mask.bin is not what was written"):
        check(tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match="val.mask.bin is missing"):
        Corpus(tmp_path / "out")


def test_a_mask_that_is_overwritten_in_use_is_noticed(tmp_path: Path) -> None:
    prepare("parity", tmp_path / "out", "byte")
    corpus = Corpus(tmp_path / "out", "never")
    corpus.require_unchanged()
    with (tmp_path / "out" / "train.mask.bin").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(UserError, match="train.mask.bin was overwritten while it was in use"):
        corpus.require_unchanged()


def test_windows_that_are_not_the_documents_are_refused(tmp_path: Path) -> None:
    prepare("needles", tmp_path / "out", "byte")
    with pytest.raises(UserError, match="windows of 128 tokens, but train.seq_len is 64"):
        Corpus(tmp_path / "out", "never").require_windows(64)
    starts = {int(start) for _, start in Corpus(tmp_path / "out").places(128, 40, 0, 0)}
    assert starts <= {*range(0, 10**7, 129)}                            # whatever data.cross_documents is
    with pytest.raises(UserError, match="give a longer --length"):
        prepare("needles", tmp_path / "short", "byte", Options(length=20))


def test_an_interrupted_preparation_of_a_task_resumes(tmp_path: Path, monkeypatch) -> None:
    prepare("parity", tmp_path / "whole", "byte")
    monkeypatch.setattr("data.pieces.MAX_PIECE", 500)                   # a few documents at a time
    monkeypatch.setattr("data.journal.SAVE_EVERY_S", 0)
    make, n_made = tasks.train_algorithm, [0]

    def failing(*arguments) -> Made:
        n_made[0] += 1
        if n_made[0] == 40:
            raise OSError("the disk is full")
        return make(*arguments)

    task = TASKS["parity"]
    monkeypatch.setitem(TASKS, "parity", task._replace(make=lambda *a: failing("parity", *a)))
    with pytest.raises(OSError, match="the disk is full"):
        prepare("parity", tmp_path / "out", "byte", workers=1)
    assert not (tmp_path / "out").exists()
    prepare("parity", tmp_path / "out", "byte", workers=1)
    assert n_made[0] < 40 + 80                                          # not again from the start
    for path in (tmp_path / "whole").glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


# -----------------------------------------------------------------------------------------------------------
# Training on answers alone


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


@pytest.mark.parametrize(("accumulate", "world_size"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_the_loss_of_a_batch_is_the_mean_over_its_answers(accumulate: int, world_size: int, masked) -> None:
    """Over all parts and processes, although these have different numbers of answers, some of them none."""
    config = masked(f"train.accumulate={accumulate}", "train.batch_size=12")
    corpus, model = Corpus(config.data.dir, "never"), lively(config)
    rng = np.random.default_rng(0)
    mask = rng.random(len(corpus.tokens["train"])) < 0.1
    places = corpus.places(64, 12, 0, 0)
    n_first = 12 // accumulate // world_size                            # windows of the first part of rank 0:
    for _, start in places[:n_first * world_size:world_size] if n_first < 12 else ():
        mask[start:start + 65] = False                                  # it has none
    corpus.masks["train"] = mask
    expected = answer_loss(model, *corpus.batch(64, 12, 0, 0))
    expected.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    losses = []
    for rank in range(world_size):
        process = Process(torch.device("cpu"), rank, world_size)
        for x, y, _, _, n_parts in micro_batches(corpus, config, process, 0):
            loss = model(x, y) / n_parts / world_size                   # as DDP averages over processes
            loss.backward()
            losses.append(loss.item())
    assert len(losses) == accumulate * world_size and sum(losses) == pytest.approx(expected.item(), rel=1e-5)
    assert accumulate * world_size == 1 or losses[0] == 0
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("accumulate", "world_size"), [(1, 1), (3, 1), (7, 1), (3, 7)])
def test_without_a_mask_each_part_counts_the_same_exactly(accumulate: int, world_size: int, tiny) -> None:
    config = tiny("rope", f"train.accumulate={accumulate}", "train.batch_size=21")
    process = Process(torch.device("cpu"), 0, world_size)
    if 21 % (accumulate * world_size):
        pytest.skip("not a batch")
    parts = list(micro_batches(Corpus(config.data.dir), config, process, 0))
    assert [n_parts for *_, n_parts in parts] == [accumulate] * accumulate      # exact, not approximate


def test_validation_is_the_mean_over_answers(masked) -> None:
    config = masked("train.val_windows=0", "train.batch_size=3")
    corpus, model = Corpus(config.data.dir, "never"), lively(config)
    mask = np.random.default_rng(0).random(len(corpus.tokens["val"])) < 0.1
    mask[:3 * 65] = False                                               # the first batch has no answers
    corpus.masks["val"] = mask
    x, y = (torch.cat(parts) for parts in zip(*corpus.val_batches(64, 3, 0), strict=True))
    assert len(x) == 20 and (y != -100).sum() == mask.sum() - mask[::65].sum()
    n_bytes = torch.full((257,), 2)
    found = validate(model, corpus, n_bytes, config, Process(torch.device("cpu")))
    expected = answer_loss(model, x, y).item()
    assert found["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["val_bpb"] == pytest.approx(expected / np.log(2) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_run_on_a_task_learns_its_answers(masked, tmp_path: Path) -> None:
    """And resumes; its default evaluation is that of the task."""
    assert train(masked("train.steps=40", "train.lr=1e-2"), []) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] < 0.5 < lines[0]["loss"]               # full stops, and a coin's ln 2 / 2
    assert choose_protocols(None, str(tmp_path / "run")) == ["parity"]
    assert choose_protocols("fixed,needles", str(tmp_path / "run")) == ["fixed", *NEEDLES]


def test_tuning_takes_model_and_encoding_from_the_run(masked, tiny, tmp_path: Path) -> None:
    first = tiny("rope", "position.fraction=0.5", "train.seq_len=64", "train.steps=1",
                 f"run.dir={tmp_path / 'first'}")
    train(first, [])
    masked()
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{tmp_path / "parity"}"\ncross_documents = "never"\n'
                    f'[train]\ninit_from = "{tmp_path / "first"}"\nsteps = 1\n')
    config = load_config(path, [f"run.dir={tmp_path / 'tuned'}", "train.batch_size=4"], pretrained_tables)
    assert (config.model, config.position) == (first.model, first.position)
    assert (config.train.seq_len, config.train.lr) == (64, 1e-3)
    assert train(config, []) == 0
    other = load_config(path, ["position.encoding=alibi"], pretrained_tables)
    assert other.position.encoding == "alibi"


@pytest.mark.parametrize("looks", [5, 19])       # before the step where the mixture is no longer alone; after
def test_a_run_resumes_across_the_end_of_mixture_only(looks: int, tiny, corpus_dir: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with data.bos and position.lr_scale; until then it does not see a token of data.dir."""
    prepare("repeats", tmp_path / "repeats", "byte", Options(length=32))
    seen = list[tuple[Path, ...]]()

    def places(corpus: Corpus, *arguments: int) -> list[tuple[Corpus, int]]:
        found = choose(corpus, *arguments)
        seen.append(tuple({owner.folder for owner, _ in found}))
        return found

    choose = Corpus.places
    monkeypatch.setattr(Corpus, "places", places)

    def config(name: str) -> Config:
        return tiny("t5", f'data.mixture={{"{tmp_path / "repeats"}" = 0.4}}', "data.mixture_only=6",
                    "data.cross_documents=mask", "data.bos=true", "position.lr_scale=7.0",
                    f"run.dir={tmp_path / name}", "run.save_every=100")

    assert train(config("straight"), []) == 0
    assert seen[:6] == [(tmp_path / "repeats",)] * 6 and {corpus_dir} <= set().union(*seen[6:])
    assert train(config("stopped"), stop_after(looks)) == 130
    step = metrics(tmp_path / "stopped")[-1]["step"]
    assert (step < 6) == (looks == 5)
    assert train(config("stopped"), []) == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "stopped", 12)


def test_a_run_that_would_never_train_on_its_corpus_is_refused(tiny) -> None:
    config = tiny("rope", 'data.mixture={"other" = 0.4}', "data.mixture_only=12")
    with pytest.raises(UserError, match="must be below train.steps = 12, got 12: no step would train on"):
        train(config, [])


# -----------------------------------------------------------------------------------------------------------
# Evaluation


class Oracle(torch.nn.Module):
    """A model that knows the documents it is shown: it puts the answers first, or (wrong) all but them."""

    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.encoding = self.no_encoding = self.temperature = type("E", (), {"max_length": None})()
        self.active, self.flops_per_token = lambda: self.encoding, lambda T: T
        self.blocks: list = []
        self.is_wrong = is_wrong
        self.known: dict[bytes, Made] = {}

    def hidden(self, ids: torch.Tensor, last: int) -> torch.Tensor:
        made = [self.known[row.tobytes()] for row in ids.numpy()]
        rows = np.stack([np.where(m.is_answer != self.is_wrong, m.ids, (m.ids + 1) % 256)[1:] for m in made])
        return 9.0 * F.one_hot(torch.from_numpy(rows), 257).float()[:, -last:]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_an_evaluation_that_measures_nothing_is_refused(tiny, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file would have no records, which every reader takes for damage."""
    train(tiny("rope", "train.steps=1"), [])
    monkeypatch.setattr("sys.argv", ["eval.py", str(tmp_path / "run"), "--protocol", "multi_key",
                                     "--lengths", "32"])
    with pytest.raises(UserError, match="--lengths 32: too short for multi_key; nothing was measured"):
        evaluate()
    assert not list((tmp_path / "run" / "eval").glob("*.json"))


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("protocol", [*RETRIEVAL, *ALGORITHMS])
def test_an_oracle_answers_everything_and_its_opposite_nothing(protocol: str, is_wrong: bool, tiny,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = probes.stacked

    def remembered(documents: list[Made]) -> tuple[np.ndarray, np.ndarray]:
        model.known |= {made.ids[:-1].tobytes(): made for made in documents}
        return stacked(documents)

    monkeypatch.setattr(probes, "stacked", remembered)
    settings = Settings([protocol], [64, 150, 256], 256, 8, windows=12)
    model = Oracle(is_wrong)
    found = Evaluation(model, tiny(), BYTES, Text("none", []), settings)  # type: ignore[arg-type]
    records = found.run()
    depths = probes.DEPTHS if protocol in RETRIEVAL else [None]
    lengths = [64, 150, 256] if protocol in ALGORITHMS or protocol in ("passkey", "needle") else [150, 256]
    assert [(r["length"], r.get("depth")) for r in records if r["length"] in lengths] == [
        (length, depth) for length in lengths for depth in depths]
    for r in records:
        assert r["trials"] == (3 if protocol in RETRIEVAL else 12)
        assert r["correct"] == (0 if is_wrong else r["trials"])
        assert r["bytes"] is None and ("symbols" in r) == (protocol in ALGORITHMS)
    for length in lengths:
        here = [r for r in records if r["length"] == length]
        columns = {name: found.per_window[f"plain/{protocol}/{length}/{name}"]
                   for name in ("correct", "trials", "nll", "tokens", "document")}
        assert columns["correct"].sum() == sum(r["correct"] for r in here)
        assert columns["trials"].tolist() == [1] * sum(r["trials"] for r in here)
        assert columns["nll"].sum() == pytest.approx(sum(r["nll_sum"] for r in here))
        assert columns["tokens"].sum() == sum(r["tokens"] for r in here)
        assert columns["document"].tolist() == [*range(here[0]["trials"])] * len(here)


def test_one_wrong_token_makes_an_answer_wrong(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()

    def losses_at(model, train, ids, at):
        is_top = np.ones((len(ids), len(at)), dtype=bool)
        is_top[0, -2] = False                                           # one digit of one trial
        return np.ones(is_top.shape), is_top

    monkeypatch.setattr(probes, "losses_at", losses_at)
    settings = Settings(["multi_query"], [256], 256, 8, windows=8)
    records = Evaluation(lively(config), config, BYTES, Text("none", []), settings).run()
    assert [(r["correct"], r["trials"]) for r in records] == [(1, 2)] * len(probes.DEPTHS)
    assert all(r["nll_sum"] == r["tokens"] == 2 * 8 for r in records)


def test_repeat_and_copy_keep_the_sums_of_each_window(tiny, corpus_dir: Path) -> None:
    found = evaluation(lively(tiny()), tiny(), corpus_dir, ["repeat", "copy"])
    for r in found.run():
        column = {name: found.per_window[f"plain/{r['protocol']}/{r['length']}/{name}"]
                  for name in ("nll", "first_nll", "tokens", "document")}
        assert column["nll"].sum() == pytest.approx(r["nll_sum"])
        assert column["first_nll"].sum() == pytest.approx(r["first_nll_sum"])
        assert column["tokens"].sum() == r["tokens"] and len(column["nll"]) == len(found.ends)
        assert column["document"].tolist() == [d for d, _ in found.ends]


def test_sums_of_trials_survive_the_files(tmp_path: Path) -> None:
    r = {"extend": None, "protocol": "needle", "length": 64, "depth": 0.5, "correct": 1, "trials": 2}
    windows = {f"plain/needle/64/{name}": np.arange(1, 3)
               for name in ("correct", "trials", "nll", "tokens", "document")}
    write(tmp_path / "a.json", Results({"settings": {}}, [r], windows))
    assert read(tmp_path / "a.json").windows.keys() == windows.keys()
    write(tmp_path / "b.json", Results({"settings": {}}, [r], {}))      # as older versions did
    assert read(tmp_path / "b.json").windows == {}


def test_losses_and_ranks_of_a_real_model_are_those_of_an_explicit_forward(tiny) -> None:
    config = tiny()
    model = lively(config)
    settings = Settings(["copying"], [32], 32, 8, windows=5)
    found = Evaluation(model, config, BYTES, Text("none", []), settings)
    [r] = found.run()
    nll, correct = 0.0, 0
    for trial in range(5):
        made = tasks.algorithm("copying", BYTES, 8, np.random.default_rng([0, trial, 8]))
        ids = torch.from_numpy(made.ids)
        logits = model(ids[None, :-1])[0]
        at = torch.from_numpy(np.flatnonzero(made.is_answer))
        nll += F.cross_entropy(logits[at - 1], ids[at], reduction="sum").item()
        correct += bool((logits[at - 1].argmax(dim=-1) == ids[at]).all())
    assert (r["symbols"], r["correct"]) == (8, correct) and r["nll_sum"] == pytest.approx(nll, rel=1e-4)
