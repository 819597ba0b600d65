"""The protocols of eval.py, a class each: the targets, what is measured of them, and how it is shown.

To add one, write a class below and a line in PROTOCOLS. eval.py's table, its --help and JSON, and the report
of compare.py then have it too. `rows` gives rows of the table in results.py, to which `measure` adds what all
have in common, such as run, method and length; scoring.py has the forward passes. The docstring is the note
of --help and of reports.

Legend: B batch, T time, L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from base.errors import UserError
from data import tasks
from data.loader import Corpus
from data.tasks import ALGORITHMS, RETRIEVAL, TaskDocument
from evaluation.extension import PLAIN
from evaluation.results import (
    ANSWERS,
    BY_POSITION,
    GAIN,
    PERPLEXITY,
    REPETITION,
    USE,
    Form,
    Measure,
    add,
    join,
    make_table,
    perplexity,
)
from evaluation.scoring import Evaluation, Settings, Text, Window, fixed_ends
from evaluation.trigram import Trigram
from hf.tokenizer import prefix_ids

DEFAULT_PROTOCOLS = ("nonoverlap", "fixed", "position")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)            # share of the filler before the first fact that is asked for
BLOCK = 256                                     # most targets of fixed in a row of the table


class Protocol:
    """A protocol under its name in --protocol. By default it scores `windows` and shows perplexity."""

    title: str
    form: ClassVar[Form] = PERPLEXITY
    place_name: ClassVar[str] = ""                      # what the column `place` holds
    target_settings: ClassVar[tuple[str, ...]]          # what decides its targets, besides text and seed
    is_at_longest: ClassVar[bool] = False               # measured at the longest length alone
    needs: ClassVar[str] = "longer documents"           # what is missing if it measures nothing
    needs_text: ClassVar[bool] = True                   # False: it generates documents
    needs_L: ClassVar[bool] = False                     # its documents have at least L tokens
    most_multiples: ClassVar[int] = 64                  # of L, the longest default length without a text

    def __init__(self, name: str) -> None:
        self.name = name
        self.note = " ".join((inspect.getdoc(self) or "").split())
        self.title = self.title.format(name.replace("_", " "))

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        """The windows of one length, which score the same targets at every length."""
        raise NotImplementedError

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        """The rows of one length, under e.extend; None where nothing fits."""
        windows = self.windows(e.text, e.settings, length)
        if not windows:
            return None
        if any(window.start < 0 for window in windows):
            raise UserError(f"{self.name}: a window of {length} tokens begins before its document; "
                            "its windows() must give a start of 0 or more")
        return e.rows(windows, e.score(length, windows))

    def cells(self, record: dict[str, Any]) -> dict[str, str]:
        """What eval.py prints of a sum of results.py: column -> text. No columns: nothing is printed."""
        ppl = math.inf if record["ppl"] is None else record["ppl"]
        cells = {"ppl": f"{ppl:.4g}"}
        if record["bpb"]:
            cells["bits/byte"] = f"{record['bpb']:.4g}"
        return cells

    def column(self, length: int, place: str) -> tuple[float, str]:
        """Where a report shows a place: on the x axis, and the heading of its column.

        A protocol without a `column` of its own has one for each length, which adds up its places.
        """
        return length, str(length)

    def measures(self) -> list[Measure]:
        """The tables of compare.py's report."""
        return [Measure(self.name, self.title, self.note, self.form)]


# -----------------------------------------------------------------------------------------------------------
# Perplexity of windows


class Nonoverlap(Protocol):
    """Blocks of this length; every token is scored, as in the ALiBi paper.

    Longer blocks have fewer tokens with little context, so perplexity falls with the length even for a model
    that ignores distant context.
    """

    title = "Perplexity, nonoverlap"
    target_settings = ("longest", "tokens")

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        # stretches of the longest length, of which some are drawn
        stretches = [(d, start) for d, document in enumerate(text.documents)
                     for start in range(0, (len(document) - 1) // s.longest * s.longest, s.longest)]
        order = np.random.default_rng(s.seed).permutation(len(stretches))
        drawn = sorted(stretches[i] for i in order[:max(1, s.tokens // s.longest)])
        # each in blocks of this length
        windows = []
        for d, start in drawn:
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

    title = "Perplexity, rolling"
    target_settings = ("longest",)

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        prefix = prefix_ids(e.tokenizer)
        if not prefix:
            return super().rows(e, length)
        opened = copy.copy(e)
        documents = [np.concatenate((ids[:1], prefix, ids[1:])) for ids in e.text.documents]
        opened.text = Text(e.text.name, documents)
        rows = super().rows(opened, length)
        e.seconds = opened.seconds
        return rows

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

    title = "Perplexity, sliding"
    target_settings = ("longest", "tokens", "stride")
    needs = "documents longer than the longest length by a quarter of it, rounded up to whole strides"

    def windows(self, text: Text, s: Settings, length: int) -> list[Window]:
        # pieces of text, whose targets are the same at every length: whole strides
        piece = max(1, s.longest // 4)
        piece += -piece % min(s.stride or 1, s.longest)
        ends = fixed_ends(text, s.longest + piece, piece, max(1, s.tokens // piece), s.seed)
        # each target's stride, at the end of a window
        step = min(s.stride or max(1, length // 4), length)
        windows = []
        for d, end in ends:
            for start in range(end - piece, end, step):
                stop = min(start + step, end)
                windows.append(Window(d, stop - length, stop, stop - start))
        return windows


class Fixed(Protocol):
    """The same targets at every length, with more context to their left.

    Windows of every length end at the same place, and only the last k tokens are scored. Kazemnejad et al.
    2023, arXiv:2305.19466, appendix F.
    """

    title = "Perplexity, fixed targets"
    target_settings = ("longest", "targets", "windows", "truncated")
    needs_L = True

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        """With the truncated control: the plain model with the last L tokens of each target."""
        measured = e.table[e.table.protocol == "fixed"]
        if measured.empty:                                  # so no method acts: the plain model comes first
            truncated = self.truncated_nll(e)
            e.seconds = 0.0                                 # the control's time does not count
        else:                                               # the same under each method and at each length
            truncated = measured.truncated_nll.to_numpy()
        windows, losses = in_blocks(e, length, e.score_ended(length))
        return e.rows(windows, losses, truncated_nll=truncated[:len(windows)])

    def truncated_nll(self, e: Evaluation) -> np.ndarray:
        """Loss of each block (blocks,), where each target has its own last L tokens before it.

        That is a forward pass over L tokens for each target. In one window of L the first of k targets would
        have L - k + 1, and a model that sees no further than L would differ with more context.
        """
        k = e.settings.targets
        windows = [Window(d, max(0, target - e.L), target, 1)
                   for d, end in e.ends for target in range(end - k + 1, end + 1)]
        per_window = np.concatenate(e.score(e.L, windows)).reshape(len(e.ends), k)
        _, blocks = in_blocks(e, e.L, per_window)
        return np.array([x.sum() for x in blocks])

    def cells(self, record: dict[str, Any]) -> dict[str, str]:
        truncated = perplexity(record["truncated_nll_sum"] / record["tokens"])
        return {**super().cells(record), "truncated ppl": f"{truncated:.4g}",
                "gain (nats/token)": f"{record['gain']:+z.4f}"}

    def measures(self) -> list[Measure]:
        note = ("Loss with the context truncated to L minus loss with all of it, on the same targets: "
                "positive where longer context helps, 0 where it is ignored, negative where it breaks the "
                "model.")
        return [*super().measures(), Measure("gain", "Gain over truncation, fixed targets", note, GAIN)]


def in_blocks(e: Evaluation, length: int,
              losses: Sequence[np.ndarray] | np.ndarray) -> tuple[list[Window], list[np.ndarray]]:
    """The targets in blocks of at most BLOCK, so that few long windows have an interval too."""
    k = e.settings.targets
    windows, blocks = [], []
    for (d, end), of_window in zip(e.ends, losses, strict=True):
        for start in range(0, k, BLOCK):
            block = of_window[-k:][start:start + BLOCK]
            blocks.append(block)
            windows.append(Window(d, end - length, end - k + start + len(block), len(block)))
    return windows, blocks


class TrigramReference(Protocol):
    """A Kneser-Ney trigram of the train split of data.dir, on the targets of fixed.

    It does not count the other corpora of a mixture. A model whose loss at L is not below this one's has not
    learned, and nothing follows from its curve.
    """

    title = "Perplexity of a trigram"
    needs = "L among --lengths"
    target_settings = ("longest", "targets", "windows")
    needs_L = True

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        """At L alone: it depends on no length."""
        if length != e.L or e.extend is not PLAIN:
            return None
        corpus = Corpus(e.config.data.dir, splits=("train",))
        trigram = Trigram(corpus.tokens["train"], corpus.meta["vocab_size"])
        n = e.settings.targets + 2              # the targets, and two tokens before the first of them
        losses = []
        for d, end in e.ends:
            # documents begin with a separator; if their first token is a target, it needs a second one
            ids = np.append(e.tokenizer.separator, e.text.documents[d][:end + 1])
            losses.append(trigram.losses(ids[-n:]))
        windows, losses = in_blocks(e, length, losses)
        return e.rows(windows, losses)

    def measures(self) -> list[Measure]:
        return []                               # a report shows it in the gate


class Position(Protocol):
    """Loss by position in one forward pass over the longest windows: shows where the model breaks."""

    title = "Loss by position"
    form = BY_POSITION
    is_at_longest = True
    target_settings = ("longest", "targets", "windows", "length")

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        """A row for each window and bucket of positions."""
        nll = np.stack([losses[-length:] for losses in e.score_ended(length)])          # (windows, length)
        targets = np.stack([e.text.documents[d][end + 1 - length:end + 1] for d, end in e.ends])
        n_bytes = e.byte_lengths[targets]                               # (windows, length)
        buckets = []
        for start, stop in position_buckets(length):
            buckets.append(make_table(
                place=f"{start}-{stop - 1}", nll=nll[:, start:stop].sum(axis=1), tokens=stop - start,
                bytes=n_bytes[:, start:stop].sum(axis=1), document=[d for d, _ in e.ends],
                end=[end - length + stop for _, end in e.ends]))
        return join(*buckets)

    def cells(self, record: dict[str, Any]) -> dict[str, str]:
        return {}                               # the picture shows it

    def column(self, length: int, place: str) -> tuple[float, str]:
        first, last = map(int, place.split("-"))
        return math.sqrt((first + 1) * (last + 1)), place


def position_buckets(longest: int) -> list[tuple[int, int]]:
    """[from, to) of positions, two to an octave from 4 on; position i has i + 1 tokens of context."""
    steps = [round(2 ** (i / 2)) for i in range(4, 2 * longest.bit_length())]
    inside = [step for step in steps if step < longest]
    return list(itertools.pairwise(sorted({0, *inside, longest})))


# -----------------------------------------------------------------------------------------------------------
# Probes


class Repeat(Protocol):
    """Does the model use distant context? A passage of the text occurs twice, some tokens apart.

    "Repeat" is how much lower its loss is at the second occurrence. A model that ignores the first one is
    somewhat below 0, since the second lacks the text that led up to the first. "Use" is how much lower it is
    than in a control, which has another window's passage in place of the first.
    """

    title = "Repeated text"
    form = REPETITION
    place_name = "distance"
    has_bytes: ClassVar[bool] = True            # its tokens are text
    use_key: ClassVar[str] = "use"              # of its second table in reports
    target_settings = ("longest", "targets", "windows")
    needs = "a length of 3/4 L or more, two windows, and L of 4 or more"

    def stretches(self, e: Evaluation) -> list[np.ndarray]:
        """The tokens of each window, at least `longest`."""
        return [e.text.documents[d][end - e.settings.longest:end] for d, end in e.ends]

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        """Two copies at the distance that this length has room for; None without another window's passage."""
        if e.L < 4 or length < 3 * (e.L // 4) or len(e.ends) < 2:
            return None
        tokens, control, first, second = repeat_passages(self.stretches(e), length, e.L)
        losses, _ = e.probe(length, tokens, np.concatenate((first, second)))
        losses_of_control, _ = e.probe(length, control, second)
        n_bytes = e.byte_lengths[tokens[:, second]].sum(axis=1) if self.has_bytes else np.nan
        return make_table(
            place=str(second[0] - first[0]), nll=losses[:, len(first):].sum(axis=1),
            first_nll=losses[:, :len(first)].sum(axis=1), control_nll=losses_of_control.sum(axis=1),
            tokens=len(second), bytes=n_bytes, document=[d for d, _ in e.ends])

    def cells(self, record: dict[str, Any]) -> dict[str, str]:
        return {"repeat": f"{record['gain']:+z.3f} nats/token", "use": f"{record['use']:+z.3f}"}

    def column(self, length: int, place: str) -> tuple[float, str]:
        return int(place), place

    def measures(self) -> list[Measure]:
        note = ("How much better the second occurrence is predicted than with another passage in place of "
                "the first: 0 where the first is ignored.")
        return [*super().measures(), Measure(self.use_key, f"{self.title}, use of the first copy", note, USE)]


class Copy(Repeat):
    """The same on tokens drawn at random from the document, where only the first copy can help."""

    title = "Repeated random tokens"
    has_bytes = False
    use_key = "copy-use"

    def stretches(self, e: Evaluation) -> list[np.ndarray]:
        rng = np.random.default_rng(e.settings.seed)
        return [rng.choice(e.text.documents[d][1:], e.settings.longest) for d, _ in e.ends]


def repeat_passages(stretches: Sequence[np.ndarray], length: int,
                    L: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Windows (n, length) whose last L / 4 tokens repeat an earlier passage; the indices to score in both.

    The second result is the same windows, each with the passage of another in place of the first copy.

    A window is L / 4 tokens of context, the passage, the tokens that follow it in the stretch (which has at
    least `length`), and the passage again. Contexts and passages are the same at every length. The first half
    of a passage is not scored: it shows the model what is being repeated.
    """
    p = L // 4
    tokens = np.stack([np.concatenate((stretch[:length - p], stretch[p:2 * p])) for stretch in stretches])
    control = tokens.copy()
    # that of half the windows further: neighbours in a document may share tokens
    control[:, p:2 * p] = np.roll(tokens[:, p:2 * p], len(tokens) // 2, axis=0)
    half = np.arange(p // 2, p)
    return tokens, control, p + half, length - p + half


class Answering(Protocol):
    """Probes whose answers are right or wrong, over generated documents.

    An answer is correct if each of its tokens ranks first, given the right tokens before it. Greedy decoding
    would write the same answer, and no other.
    """

    form = ANSWERS
    target_settings = ("windows",)
    needs = "longer --lengths"
    needs_text = False

    def documents(self, e: Evaluation, length: int) -> Iterator[tuple[str, list[TaskDocument]]]:
        """Each place with its documents; none if they do not fit."""
        raise NotImplementedError

    def rows(self, e: Evaluation, length: int) -> pd.DataFrame | None:
        parts = []
        for place, documents in self.documents(e, length):
            is_answer = np.stack([document.is_answer for document in documents])        # (examples, T)
            places = np.flatnonzero(is_answer.any(axis=0))
            is_asked = is_answer[:, places]                             # (examples, n)
            ids = np.stack([document.ids for document in documents])
            losses, is_top = e.probe(length, ids, places)
            parts.append(make_table(
                place=place, nll=np.where(is_asked, losses, 0).sum(axis=1), tokens=is_asked.sum(axis=1),
                correct=(is_top | ~is_asked).all(axis=1), document=range(len(documents))))
        return join(*parts) if parts else None

    def cells(self, record: dict[str, Any]) -> dict[str, str]:
        return {"correct": f"{record['correct']}/{record['examples']}"}


class Retrieval(Answering):
    """Share of the examples with the right answer to a question about facts in filler text.

    Over all depths; eval.py has each. For a model that was trained to answer: docs/probes.md.
    """

    title = "Retrieval, {}"
    place_name = "depth"

    def documents(self, e: Evaluation, length: int) -> Iterator[tuple[str, list[TaskDocument]]]:
        """At each depth, with the same facts at every length and depth."""
        def draws() -> list[np.random.Generator]:           # new ones each time: drawing facts uses them up
            examples = range(max(1, e.settings.windows // 4))
            return [np.random.default_rng([e.settings.seed, example]) for example in examples]

        if length >= max(tasks.shortest(self.name, e.tokenizer, rng) for rng in draws()):
            for depth in DEPTHS:
                yield f"{depth:g}", [tasks.retrieval(self.name, e.tokenizer, length, depth, rng)
                                     for rng in draws()]


class Algorithm(Answering):
    """Share of the examples in which all of the answer is right.

    At each length there are length / 4 symbols, in at most length + 1 tokens. For a model that was trained on
    the task.
    """

    title = "Algorithm, {}"
    place_name = "symbols"
    most_multiples = 8          # of the symbols of training

    def documents(self, e: Evaluation, length: int) -> Iterator[tuple[str, list[TaskDocument]]]:
        n = tasks.n_symbols(length)
        if n:
            seeds = [(e.settings.seed, example, n) for example in range(e.settings.windows)]
            rngs = [np.random.default_rng(seed) for seed in seeds]
            yield str(n), [tasks.algorithm(self.name, e.tokenizer, n, rng) for rng in rngs]


PROTOCOLS: dict[str, Protocol] = {name: kind(name) for name, kind in {
    "nonoverlap": Nonoverlap, "rolling": Rolling, "sliding": Sliding, "fixed": Fixed,
    "trigram": TrigramReference, "position": Position, "repeat": Repeat, "copy": Copy,
    **dict.fromkeys(RETRIEVAL, Retrieval), **dict.fromkeys(ALGORITHMS, Algorithm)}.items()}


# -----------------------------------------------------------------------------------------------------------
# All of them


def measure(e: Evaluation) -> Iterator[pd.DataFrame]:
    """The rows of each method, protocol and length that e.table lacks, as soon as they are in it.

    Raises UserError if a loss is NaN or infinite.
    """
    known = e.table.groupby(["extend", "protocol", "length"]).groups
    e.scores_all = any(PROTOCOLS[name].is_at_longest for name in e.settings.protocols)
    for extend, name in itertools.product(e.extends, e.settings.protocols):
        protocol = PROTOCOLS[name]
        lengths = e.possible[-1:] if protocol.is_at_longest else e.possible
        for length in lengths:
            if (extend.spec, name, length) in known:
                continue
            e.extend = extend
            e.title = f"{extend.spec} {name} {length}"
            e.seconds = 0.0
            rows = protocol.rows(e, length)
            if rows is None:
                continue
            total = rows["nll"].to_numpy().sum()                        # pandas would leave out NaN
            if not np.isfinite(total):
                raise UserError(f"{name} at {length} tokens, --extend {extend.spec}: the loss is {total}; "
                                "evaluate another checkpoint, method or length")
            rows = rows.assign(
                run=e.run, seed=e.config.train.seed, encoding=e.config.position.encoding,
                extend=extend.spec, protocol=name, length=length, seconds=e.seconds / len(rows))
            e.table = add(e.table, rows)
            yield rows


def target_settings(e: Evaluation) -> dict[str, dict[str, int | str | None]]:
    """Protocol -> the settings that decide its targets. Evaluations with equal settings can be merged."""
    # results without `truncated` are older: their control was one window of L, so they cannot be merged
    values = {**e.settings._asdict(), "length": max(e.possible), "truncated": "per target"}
    return {name: {key: values[key] for key in PROTOCOLS[name].target_settings}
            for name in e.settings.protocols}
