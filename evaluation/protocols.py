"""The protocols of eval.py: each is a class below, with the targets it scores, its records and its table.

`Evaluation` goes through the methods, protocols and lengths, and has the forward passes that protocols share.
windows.py chooses windows; the docstrings of the classes are shown by eval.py --help and in reports.

Legend: B batch, T time, C = n_embd, V vocabulary, L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from base.errors import UserError
from base.files import finite
from config import Config, TrainConfig
from data import tasks
from data.loader import Corpus
from data.tasks import ALGORITHMS, RETRIEVAL, TaskDocument
from data.tokenizer import Tokenizer, byte_lengths
from evaluation.extension import Extend, Rescaled, extended, parse
from evaluation.measures import ANSWERS, BY_POSITION, PERPLEXITY, REPETITION, Form
from evaluation.results import Record, Results, perplexity
from evaluation.trigram import Trigram
from evaluation.windows import (
    Text,
    Window,
    fixed_ends,
    position_buckets,
    repeat_distance,
    repeated,
)
from hf.tokenizer import prefix_ids
from model import GPT
from runtime.device import autocast

DEFAULT_PROTOCOLS = ("nonoverlap", "fixed", "position")
PLAIN = Extend("plain", [])
CHUNK = 128                                     # tokens whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward pass
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)            # share of the filler before the first fact that is asked for
BLOCK = 256                                     # most targets of fixed in a row of the .npz


class Settings(NamedTuple):
    """What to measure, and on how much of the text. eval.py --help explains each."""

    protocols: Sequence[str]
    lengths: Sequence[int]                      # contexts in tokens
    longest: int                                # at least L and every length: see eval.py
    targets: int                                # fixed: k, the tokens scored of each window
    windows: int = 32                           # fixed, position, repeat, copy, trials of algorithms; trials
                                                # of retrieval at each depth are a quarter of it
    tokens: int = 2**16                         # nonoverlap, sliding: tokens scored
    stride: int | None = None                   # sliding: S; None is a quarter of each length
    seed: int = 0                               # chooses windows


class Evaluation:
    """Measures one model on one text, without and with each extension."""

    def __init__(self, model: GPT, config: Config, tokenizer: Tokenizer, text: Text, settings: Settings,
                 extends: Sequence[Extend] = ()) -> None:
        self.model, self.config, self.tokenizer, self.settings = model, config, tokenizer, settings
        self.L = config.train.seq_len
        self.text = Text(text.name, [d for d in text.documents if len(d) > settings.longest])
        self.lengths = sorted(set(settings.lengths))
        limit = model.active().max_length
        self.possible = [length for length in self.lengths if not limit or length <= limit]
        self.byte_lengths = byte_lengths(tokenizer)
        self.ends = fixed_ends(self.text, settings.longest, settings.targets, settings.windows, settings.seed)
        self.extends = [PLAIN, *extends]
        self.extend = PLAIN                             # the one that is being measured
        self.records: list[Record] = []
        self.per_window: dict[str, np.ndarray] = {}     # as Results.windows
        self._ended: dict[tuple[str, int], tuple[list[np.ndarray], float]] = {}

    def measure(self, known: Results | None = None) -> Iterator[list[Record]]:
        """The records of each place, that is of a method, protocol and length, as soon as it is measured.

        `known` are results on the same targets. Their places are left out.
        """
        if known:
            self.records, self.per_window = list(known.records), dict(known.windows)
        done = {(r["extend"], r["protocol"], r["length"]) for r in self.records}
        for extend, name in itertools.product(self.extends, self.settings.protocols):
            self.extend, protocol = extend, PROTOCOLS[name]
            for length in self.possible[-1:] if protocol.is_at_longest else self.possible:
                if (spec_of(extend), name, length) not in done:
                    records = protocol.records(self, length)
                    self.records += records
                    yield records

    def target_settings(self) -> dict[str, dict[str, int | None]]:
        """Protocol -> the settings that decide its targets. Records with equal settings can be merged."""
        values = self.settings._asdict()
        settings = {name: {key: values[key] for key in PROTOCOLS[name].target_settings}
                    for name in self.settings.protocols}
        if "position" in settings:              # its buckets depend on the longest
            settings["position"]["length"] = max(self.possible, default=None)
        return settings

    def forward(self, protocol: str, length: int, batches: Sequence[Any],
                do: Callable[[Any], Any]) -> tuple[list[Any], float]:
        """do(batch) for each, under the current extension, and the seconds."""
        began = time.perf_counter()
        with extended(self.model, self.config, self.extend.methods, length):
            title = f"{self.extend.spec} {protocol} {length}"           # shown on a terminal alone:
            done = [do(batch) for batch in tqdm(batches, title, leave=False, disable=None)]
        return done, time.perf_counter() - began

    def score(self, protocol: str, length: int, windows: Sequence[Window]) -> tuple[list[np.ndarray], float]:
        """Losses of each window's targets (n_scored,), fp64, in order; and the seconds.

        Windows of one shape share a forward pass.
        """
        def losses_of(batch: Sequence[Window]) -> np.ndarray:           # (B, n_scored)
            rows = np.stack([self.text.documents[w.document][w.start:w.end + 1] for w in batch])
            rows = self.with_bos(rows)
            at = np.arange(rows.shape[1] - batch[0].n_scored, rows.shape[1])
            return losses_at(self.model, self.config.train, rows, at)[0]

        batches = []
        for (n, _), group in itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored)):
            same_shape = list(group)
            size = max(1, TOKENS_PER_FORWARD // n)
            batches += [same_shape[i:i + size] for i in range(0, len(same_shape), size)]
        losses, seconds = self.forward(protocol, length, batches, losses_of)
        return [row for batch in losses for row in batch], seconds

    def score_ended(self, length: int) -> tuple[list[np.ndarray], float]:
        """Losses of at least the last `targets` tokens of the windows that end at self.ends, and the seconds.

        If `position` is measured too, the longest windows score all of their tokens, because it shares these
        forward passes.
        """
        if (self.extend.spec, length) not in self._ended:
            is_shared = "position" in self.settings.protocols and length == max(self.possible)
            n_scored = length if is_shared else self.settings.targets
            windows = [Window(d, end - length, end, n_scored) for d, end in self.ends]
            self._ended[self.extend.spec, length] = self.score("fixed", length, windows)
        return self._ended[self.extend.spec, length]

    def probe(self, protocol: str, length: int, tokens: np.ndarray,
              at: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], float]:
        """Losses of tokens (n, length) at the places `at`, whether each ranks first, and the seconds."""
        tokens = self.with_bos(tokens)
        size = max(1, TOKENS_PER_FORWARD // length)
        batches = [tokens[i:i + size] for i in range(0, len(tokens), size)]
        pairs, seconds = self.forward(
            protocol, length, batches, lambda batch: losses_at(self.model, self.config.train, batch, at))
        losses, is_top = zip(*pairs, strict=True)
        return (np.concatenate(losses), np.concatenate(is_top)), seconds

    def with_bos(self, rows: np.ndarray) -> np.ndarray:
        """Windows of ids (B, T); with data.bos, as in training, the separator replaces the first of each."""
        if not self.config.data.bos:
            return rows
        return np.concatenate((np.full_like(rows[:, :1], self.tokenizer.separator), rows[:, 1:]), axis=1)

    def keep(self, protocol: str, length: int, columns: dict[str, Any]) -> None:
        """Add columns of numbers, one for each window or trial, to the .npz."""
        for name, column in columns.items():
            self.per_window[f"{self.extend.spec}/{protocol}/{length}/{name}"] = np.array(column)

    def record_windows(self, protocol: str, length: int, windows: Sequence[Window],
                       losses: Sequence[np.ndarray], seconds: float, **more: Any) -> Record:
        """The record of windows, whose sums are kept."""
        nll = np.array([x.sum() for x in losses])                       # (windows,)
        targets = [self.text.documents[w.document][w.end + 1 - w.n_scored:w.end + 1] for w in windows]
        n_bytes = np.array([self.byte_lengths[ids].sum() for ids in targets])
        columns = {"nll": nll, "tokens": [w.n_scored for w in windows], "bytes": n_bytes,
                   "document": [w.document for w in windows], "end": [w.end for w in windows]}
        self.keep(protocol, length, columns)
        n_documents = len({w.document for w in windows})
        return self.record(protocol, length, nll, sum(w.n_scored for w in windows), int(n_bytes.sum()),
                           n_documents, seconds, **more)

    def record(self, protocol: str, length: int, nll: np.ndarray, n_tokens: int, n_bytes: int | None,
               n_documents: int | None, seconds: float, **more: Any) -> Record:
        """One record of the JSON: perplexity = exp(nll / tokens), bits per byte = nll / ln 2 / bytes.

        Raises UserError if the loss is NaN or infinite.
        """
        nll_sum = float(nll.sum())
        if not math.isfinite(nll_sum):
            raise UserError(f"{protocol} at {length} tokens, --extend {self.extend.spec}: the loss is "
                            f"{nll_sum}; evaluate another checkpoint, method or length")
        return {"extend": spec_of(self.extend), "protocol": protocol, "length": length,
                "nll_sum": nll_sum, "tokens": n_tokens, "bytes": n_bytes, "documents": n_documents,
                "ppl": finite(perplexity(nll_sum / n_tokens)),
                "bpb": nll_sum / math.log(2) / n_bytes if n_bytes else None,
                "seconds": round(seconds, 3), **more}


# -----------------------------------------------------------------------------------------------------------
# The protocols


class Protocol:
    """A protocol under its name in --protocol. Its docstring is the note of --help and of reports."""

    title: str
    form: ClassVar[Form] = PERPLEXITY
    target_settings: ClassVar[tuple[str, ...]]  # what decides its targets, besides text and seed
    is_at_longest: ClassVar[bool] = False       # measured at the longest length alone
    needs_text: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name, self.note = name, " ".join((inspect.getdoc(self) or "").split())
        self.title = self.title.format(name.replace("_", " "))

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        """The windows of one length, which score the same targets at every length."""
        raise NotImplementedError

    def records(self, e: Evaluation, length: int) -> list[Record]:
        """The records at one length, under e.extend: by default one, of `windows` if there are any."""
        windows = self.windows(e.text, e.settings, length)
        if not windows:
            return []
        losses, seconds = e.score(self.name, length, windows)
        return [e.record_windows(self.name, length, windows, losses, seconds)]


class Nonoverlap(Protocol):
    """Blocks of this length; every token is scored, as in the ALiBi paper.

    Longer blocks have fewer tokens with little context, so perplexity falls with the length even for a model
    that ignores distant context.
    """

    title, target_settings = "Perplexity, nonoverlap", ("longest", "tokens")

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        stretches = [(d, start) for d, document in enumerate(text.documents)
                     for start in range(0, (len(document) - 1) // s.longest * s.longest, s.longest)]
        order = np.random.default_rng(s.seed).permutation(len(stretches))
        chosen = sorted(stretches[i] for i in order[:max(1, s.tokens // s.longest)])
        windows = []
        for d, start in chosen:
            stop = start + s.longest
            for block in range(start, stop, length):
                end = min(block + length, stop)                         # the last block may be shorter
                windows.append(Window(d, block, end, end - block))
        return windows


class Rolling(Protocol):
    """nonoverlap over every token, as loglikelihood_rolling of lm-evaluation-harness.

    The tokens left at the end of a document are scored at the end of a full window. If the tokenizer puts the
    separator before a text (Llama 3's), it is scored too, after another one.
    """

    title, target_settings = "Perplexity, rolling", ("longest",)

    def records(self, e: Evaluation, length: int) -> list[Record]:
        prefix = prefix_ids(e.tokenizer)
        if prefix:
            e = copy.copy(e)
            documents = [np.concatenate((ids[:1], prefix, ids[1:])) for ids in e.text.documents]
            e.text = Text(e.text.name, documents)
        return super().records(e, length)

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        windows = []
        for d, document in enumerate(text.documents):
            size = len(document) - 1
            for start in range(0, size, length):
                end = min(start + length, size)
                windows.append(Window(d, max(0, end - length), end, end - start))
        return windows


class Sliding(Protocol):
    """A window of this length moves by a stride S, and only the new tokens are scored.

    Each target has at least length - S tokens before it. S = 1 is exact, at a forward pass per token.
    """

    title, target_settings = "Perplexity, sliding", ("longest", "tokens", "stride")

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        piece = max(1, s.longest // 4)                                  # targets in a row, whole strides
        piece += -piece % min(s.stride or 1, s.longest)
        ends = fixed_ends(text, s.longest + piece, piece, max(1, s.tokens // piece), s.seed)
        step = min(s.stride or max(1, length // 4), length)
        stops = [(d, start, min(start + step, end))
                 for d, end in ends for start in range(end - piece, end, step)]
        return [Window(d, stop - length, stop, stop - start) for d, start, stop in stops]


class Fixed(Protocol):
    """The same targets at every length, with more context to their left.

    Windows of every length end at the same place, and only the last k tokens are scored. Kazemnejad et al.
    2023, arXiv:2305.19466, appendix F.
    """

    title = "Perplexity, fixed targets"
    target_settings: ClassVar[tuple[str, ...]] = ("longest", "targets", "windows")

    def records(self, e: Evaluation, length: int) -> list[Record]:
        """One record, with the truncated control, the plain model at L, and the gain over it."""
        known = (column for name, column in e.per_window.items() if name.endswith("/truncated_nll"))
        truncated = next(known, None)                                   # (blocks,)
        if truncated is None:                                           # without a method, which comes first
            losses_at_L, _ = e.score_ended(e.L)
            truncated = np.array([x.sum() for x in self.in_blocks(e, e.L, losses_at_L)[1]])
        losses, seconds = e.score_ended(length)
        blocks, losses = self.in_blocks(e, length, losses)
        total = float(truncated.sum())
        gain = (total - float(sum(x.sum() for x in losses))) / sum(w.n_scored for w in blocks)
        e.keep("fixed", length, {"truncated_nll": truncated})
        return [e.record_windows("fixed", length, blocks, losses, seconds, truncated_nll_sum=total,
                                 gain=gain)]

    def in_blocks(self, e: Evaluation, length: int,
                  losses: Sequence[np.ndarray]) -> tuple[list[Window], list[np.ndarray]]:
        """The targets in blocks of at most BLOCK, so that few long windows have an interval too."""
        k = e.settings.targets
        bounds = [(i, min(i + BLOCK, k)) for i in range(0, k, BLOCK)]
        windows = [Window(d, end - length, end - k + stop, stop - start)
                   for d, end in e.ends for start, stop in bounds]
        return windows, [x[-k:][start:stop] for x in losses for start, stop in bounds]


class TrigramReference(Fixed):
    """A Kneser-Ney trigram of the run's training split, on the targets of fixed.

    A model whose loss at L is not below this one's has not learned, and nothing follows from its curve.
    """

    title = "Perplexity of a trigram"

    def records(self, e: Evaluation, length: int) -> list[Record]:
        """One record, at L: it depends on no length."""
        if length != e.L or e.extend is not PLAIN:
            return []
        began = time.perf_counter()
        corpus = Corpus(e.config.data.dir, splits=("train",))
        trigram = Trigram(corpus.read("train", 0), corpus.vocab_size)
        first = -e.settings.targets - 2         # a loss needs two tokens before: a second separator at first
        losses = []
        for d, end in e.ends:
            ids = np.append(e.tokenizer.separator, e.text.documents[d][:end + 1])
            losses.append(trigram.losses(ids[first:]))
        windows, losses = self.in_blocks(e, length, losses)
        return [e.record_windows(self.name, length, windows, losses, time.perf_counter() - began)]


class Position(Protocol):
    """Loss by position in one forward pass over the longest windows: shows where the model breaks."""

    title, form, is_at_longest = "Loss by position", BY_POSITION, True
    target_settings = ("longest", "targets", "windows")

    def records(self, e: Evaluation, length: int) -> list[Record]:
        """One record for each bucket of positions."""
        losses, seconds = e.score_ended(length)
        targets = np.stack([e.text.documents[d][end + 1 - length:end + 1] for d, end in e.ends])
        n_bytes = e.byte_lengths[targets].sum(axis=0)                   # (longest,)
        n_documents = len({d for d, _ in e.ends})
        records = []
        for start, end in position_buckets(length):
            nll = np.array([x[start:end] for x in losses])              # (windows, bucket)
            records.append(e.record("position", length, nll, nll.size, int(n_bytes[start:end].sum()),
                                    n_documents, seconds, bucket=[start, end]))
        return records


class Repeat(Protocol):
    """Does the model use distant context? A passage of the text occurs twice, some tokens apart.

    The number is how much lower its loss is at the second occurrence. A model that ignores the first one is
    somewhat below 0, since less of the passage's own text comes before the second. The control has another
    window's passage in place of the first.
    """

    title, form, target_settings = "Repeated text", REPETITION, ("longest", "targets", "windows")

    def stretches(self, e: Evaluation) -> list[np.ndarray]:
        """The tokens of each window, at least `longest`."""
        return [e.text.documents[d][end - e.settings.longest:end] for d, end in e.ends]

    def records(self, e: Evaluation, length: int) -> list[Record]:
        """One record: two copies at the distance that this length has room for; none without a control."""
        distance = repeat_distance(length, e.L)
        if distance is None or len(e.ends) < 2:
            return []
        tokens, control, first, second = repeated(self.stretches(e), length, e.L)
        (losses, _), seconds = e.probe(self.name, length, tokens, np.concatenate((first, second)))
        nll_first, nll = losses[:, :len(first)], losses[:, len(first):]
        (without, _), more = e.probe(self.name, length, control, second)
        documents = np.array([d for d, _ in e.ends])
        e.keep(self.name, length, {
            "nll": nll.sum(axis=1), "first_nll": nll_first.sum(axis=1), "control_nll": without.sum(axis=1),
            "tokens": np.full(len(nll), nll.shape[1]), "document": documents})
        is_text = type(self) is Repeat
        return [e.record(self.name, length, nll, nll.size,
                         int(e.byte_lengths[tokens[:, second]].sum()) if is_text else None,
                         len({*documents.tolist()}) if is_text else None, seconds + more, distance=distance,
                         first_nll_sum=float(nll_first.sum()), gain=float((nll_first - nll).mean()),
                         control_nll_sum=float(without.sum()), use=float((without - nll).mean()))]


class Copy(Repeat):
    """The same on tokens drawn at random from the document, where only the first copy can help."""

    title = "Repeated random tokens"

    def stretches(self, e: Evaluation) -> list[np.ndarray]:
        rng = np.random.default_rng(e.settings.seed)
        return [rng.choice(e.text.documents[d][1:], e.settings.longest) for d, _ in e.ends]


class Answering(Protocol):
    """Probes whose answers are right or wrong, over generated documents.

    An answer is correct if each of its tokens ranks first, given the right tokens before it. Greedy decoding
    would write the same answer, and no other.
    """

    form, target_settings, needs_text = ANSWERS, ("windows",), False

    def documents(self, e: Evaluation, length: int) -> list[tuple[dict[str, Any], list[TaskDocument]]]:
        """Of each record: what it names besides, and its documents. None if they do not fit."""
        raise NotImplementedError

    def records(self, e: Evaluation, length: int) -> list[Record]:
        records, kept = [], []
        for about, documents in self.documents(e, length):
            is_answer = np.stack([document.is_answer for document in documents])        # (trials, length)
            at = np.flatnonzero(is_answer.any(axis=0))
            asked = is_answer[:, at]                                    # (trials, n)
            ids = np.stack([document.ids for document in documents])
            (losses, is_top), seconds = e.probe(self.name, length, ids, at)
            correct = (is_top | ~asked).all(axis=1).astype(int)
            columns = {"nll": np.where(asked, losses, 0).sum(axis=1), "tokens": asked.sum(axis=1),
                       "correct": correct, "trials": np.ones(len(documents), dtype=int),
                       "document": np.arange(len(documents))}
            kept.append(columns)
            records.append(e.record(self.name, length, columns["nll"], int(asked.sum()), None, None, seconds,
                                    **about, correct=int(correct.sum()), trials=len(documents)))
        if kept:
            e.keep(self.name, length, {key: np.concatenate([columns[key] for columns in kept])
                                       for key in kept[0]})
        return records


class Retrieval(Answering):
    """Share of the trials with the right answer to a question about facts in filler text.

    Over all depths; eval.py and report.csv have each. For a model that was trained to answer: docs/probes.md.
    """

    title = "Retrieval, {}"

    def documents(self, e: Evaluation, length: int) -> list[tuple[dict[str, Any], list[TaskDocument]]]:
        """One record for each depth, with the same facts at every length and depth."""
        def draws() -> list[np.random.Generator]:
            trials = range(max(1, e.settings.windows // 4))
            return [np.random.default_rng([e.settings.seed, trial]) for trial in trials]

        if length < max(tasks.shortest(self.name, e.tokenizer, rng) for rng in draws()):
            return []
        return [({"depth": depth}, [tasks.retrieval(self.name, e.tokenizer, length, depth, rng)
                                    for rng in draws()]) for depth in DEPTHS]


class Algorithm(Answering):
    """Share of the trials in which all of the answer is right.

    A window of this length has a quarter as many symbols. For a model that was trained on the task.
    """

    title = "Algorithm, {}"

    def documents(self, e: Evaluation, length: int) -> list[tuple[dict[str, Any], list[TaskDocument]]]:
        n = tasks.n_symbols(length)
        if not n:
            return []
        rngs = [np.random.default_rng([e.settings.seed, trial, n]) for trial in range(e.settings.windows)]
        return [({"symbols": n}, [tasks.algorithm(self.name, e.tokenizer, n, rng) for rng in rngs])]


PROTOCOLS: dict[str, Protocol] = {name: kind(name) for name, kind in {
    "nonoverlap": Nonoverlap, "rolling": Rolling, "sliding": Sliding, "fixed": Fixed,
    "trigram": TrigramReference, "position": Position, "repeat": Repeat, "copy": Copy,
    **dict.fromkeys(RETRIEVAL, Retrieval), **dict.fromkeys(ALGORITHMS, Algorithm)}.items()}


def describe_protocols() -> str:
    """Every protocol, for --help."""
    names: dict[str, list[str]] = {}
    for protocol in PROTOCOLS.values():
        names.setdefault(protocol.note, []).append(protocol.name)
    return "\n".join(["protocols:", *(textwrap.fill(f"{', '.join(same)}: {note}", 100, initial_indent="  ",
                                                    subsequent_indent="      ")
                                      for note, same in names.items())])


# -----------------------------------------------------------------------------------------------------------
# Losses


def spec_of(extend: Extend) -> str | None:
    """The method as records name it: None without one."""
    return None if extend is PLAIN else extend.spec


@torch.no_grad()
def losses_at(model: GPT, train: TrainConfig, tokens: np.ndarray,
              at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats, fp64, of the tokens (B, T) at indices `at` (n,), and whether each ranks first, (B, n).

    Logits are computed for CHUNK targets at a time: all (T, V) of them would take gigabytes.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    chunks = []
    with autocast(train, device):
        x = model.hidden(ids[:, :-1], last=ids.shape[1] - int(at.min()))        # what predicts at.min() on
        x = x[:, at - at.min()].flatten(0, 1)                                   # (B n, C)
        for some, wanted in zip(x.split(CHUNK), ids[:, at].flatten().split(CHUNK), strict=True):
            logits = model.logits(some).float()                                 # (CHUNK, V)
            losses = F.cross_entropy(logits, wanted, reduction="none")
            chunks.append(torch.stack((losses, logits.argmax(dim=-1) == wanted)))
    losses, is_top = torch.cat(chunks, dim=1).view(2, len(tokens), len(at)).cpu().double().numpy()
    return losses, is_top.astype(bool)


def open_extensions(specs: Sequence[str], model: GPT, config: Config, lengths: Sequence[int],
                    skip_unfit: bool = False) -> list[Extend]:
    """The extensions of the --extend flags; prints warnings.

    Raises UserError for a method that does not fit the model; with skip_unfit skips it and prints one line.
    """
    fitting: list[Extend] = []
    for extend in map(parse, dict.fromkeys(specs)):
        problems = [method.problem(model, config, length) for length in lengths for method in extend.methods]
        if any(problems):
            about = (f"--extend {extend.spec}: {next(filter(None, problems))}; this run has "
                     f"{config.position.encoding} at L = {config.train.seq_len}")
            if not skip_unfit:
                raise UserError(f"{about}, leave the method out or change it")
            print(f"skipped {about}", flush=True)
            continue
        fitting.append(extend)
        for method in extend.methods:
            warning = method.warning(model, config, max(lengths)) if isinstance(method, Rescaled) else None
            if warning:
                print(f"warning: --extend {extend.spec}: {warning}")
    return fitting
