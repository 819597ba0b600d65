"""The protocols: forward passes over chosen windows, and the records that eval.py writes.

Read `Evaluation` downwards: `run`, then one method per protocol, then the forward passes that they share.
eval.py describes what each protocol measures. windows.py chooses the windows.

Legend: B batch, T time, C = n_embd, V vocabulary, L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config, TrainConfig
from data import tasks
from data.tasks import ALGORITHMS, RETRIEVAL, Made
from data.tokenizer import Tokenizer, byte_lengths
from evaluation import probes
from evaluation.extension import Extend, extended, parse
from evaluation.progress import Progress
from evaluation.results import Record, Results, perplexity
from evaluation.windows import (
    Text,
    Window,
    ended_windows,
    fixed_ends,
    nonoverlap_windows,
    position_buckets,
    rolling_windows,
    sliding_windows,
)
from model import GPT
from runtime import parallel
from runtime.device import autocast
from runtime.errors import UserError
from runtime.files import finite
from runtime.parallel import Process

PROTOCOLS = ("nonoverlap", "rolling", "sliding", "fixed", "position")
PROBES = ("repeat", "copy", *RETRIEVAL, *ALGORITHMS)
DEFAULT_PROTOCOLS = ("nonoverlap", "fixed", "position")
DECIDING = {        # protocol -> the settings that decide its targets, in addition to text, seed and length
    "nonoverlap": ("longest", "tokens"), "rolling": ("longest",), "sliding": ("longest", "tokens", "stride"),
    **dict.fromkeys(("fixed", "position", "repeat", "copy"), ("longest", "targets", "windows")),
    **dict.fromkeys((*RETRIEVAL, *ALGORITHMS), ("windows",)),
}
PLAIN = Extend("plain", [])
CHUNK = 128                                     # tokens whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward pass
BLOCK = 256                                     # most targets of fixed in a row of the .npz
ALONE = Process(torch.device("cpu"))


@dataclass(frozen=True)
class Settings:
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

    def deciding(self, protocol: str) -> dict[str, int | None]:
        """The settings that decide this protocol's targets."""
        return {name: getattr(self, name) for name in DECIDING[protocol]}


class Evaluation:
    """Measures one model on one text, without and with each extension.

    `known` are results on the same targets: what they hold is not measured again.
    """

    def __init__(self, model: GPT, config: Config, tokenizer: Tokenizer, text: Text, settings: Settings,
                 extends: Sequence[Extend] = (), process: Process = ALONE) -> None:
        self.model, self.config, self.tokenizer, self.settings = model, config, tokenizer, settings
        self.process, self.L = process, config.train.seq_len
        self.text = Text(text.name, [d for d in text.documents if len(d) > settings.longest])
        self.lengths = sorted(set(settings.lengths))
        limit = model.active().max_length
        self.possible = [length for length in self.lengths if not limit or length <= limit]
        self.byte_lengths = byte_lengths(tokenizer)
        self.bos = tokenizer.eot if config.data.bos else None
        self.ends = fixed_ends(self.text, settings.longest, settings.targets, settings.windows, settings.seed)
        self.extends = [PLAIN, *extends]
        self.extend = PLAIN                             # the one that is being measured
        self.records: list[Record] = []
        self.per_window: dict[str, np.ndarray] = {}     # as Results.windows
        self._ended: dict[tuple[str, int], tuple[list[np.ndarray], float]] = {}
        self._progress = Progress(process.rank == 0)

    def run(self) -> list[Record]:
        """All records, in the order of extensions, protocols and lengths."""
        return [r for found in self.measure() for r in found]

    def measure(self, known: Results | None = None) -> Iterator[list[Record]]:
        """The records of each place, that is of a method, protocol and length, as soon as it is measured.

        `known` are results on the same targets. Their places are left out.
        """
        if known:
            self.records, self.per_window = list(known.records), dict(known.windows)
        done = {(r["extend"], r["protocol"], r["length"]) for r in self.records}
        left = [(extend, protocol, length) for extend in self.extends for protocol in self.settings.protocols
                for length in (self.possible[-1:] if protocol == "position" else self.possible)
                if (spec_of(extend), protocol, length) not in done]
        self._progress.left = sum(self._work(*place) for place in left)
        for self.extend, protocol, length in left:
            found = self._as_without(protocol, length) or self._measure(protocol, length)
            self.records += found
            yield found

    def _as_without(self, protocol: str, length: int) -> list[Record]:
        """The figures without a method where it changes nothing, as with a factor of 1; else nothing."""
        if not self.is_as_without(self.extend, length):
            return []
        for name, column in list(self.per_window.items()):
            if name.startswith(f"plain/{protocol}/{length}/"):
                self.per_window[self.extend.spec + name.removeprefix("plain")] = column
        return [{**r, "extend": self.extend.spec} for r in self.records
                if (r["extend"], r["protocol"], r["length"]) == (None, protocol, length)]

    def is_as_without(self, extend: Extend, length: int) -> bool:
        """Whether a method changes nothing at this length."""
        return extend is not PLAIN and all(
            method.changes_nothing(self.model, self.config, length) for method in extend.methods)

    def _work(self, extend: Extend, protocol: str, length: int) -> float:
        """How much work a place is, in FLOPs up to a factor."""
        is_shared = protocol == "position" and "fixed" in self.settings.protocols
        if is_shared or self.is_as_without(extend, length):
            return 0.0
        if protocol in RETRIEVAL:
            n_inputs = len(probes.DEPTHS) * max(1, self.settings.windows // 4) * length
        elif protocol in ALGORITHMS:
            n_inputs = self.settings.windows * length
        else:
            n_inputs = sum(w.end - w.start for w in self._windows(protocol, length))
        return n_inputs * self.model.flops_per_token(length)

    def _measure(self, protocol: str, length: int) -> list[Record]:
        if protocol in RETRIEVAL:
            return self.retrieval(protocol, length)
        if protocol in ALGORITHMS:
            return self.algorithm(protocol, length)
        if protocol in ("nonoverlap", "rolling", "sliding"):
            return self.tiled(protocol, length)
        return getattr(self, protocol)(length)

    def _windows(self, protocol: str, length: int) -> list[Window]:
        """The windows that a protocol scores at a length; for the probes repeat and copy, their places."""
        s = self.settings
        if protocol == "nonoverlap":
            return nonoverlap_windows(self.text, s.longest, [length], s.tokens, s.seed)[length]
        if protocol == "rolling":
            return rolling_windows(self.text, length)
        if protocol == "sliding":
            return sliding_windows(self.text, s.longest, [length], s.stride, s.tokens, s.seed)[length]
        return ended_windows(self.ends, length, min(length, s.targets) if protocol == "fixed" else length)

    def deciding(self) -> dict[str, dict[str, int | None]]:
        """Protocol -> the settings that decide its targets. Records with equal settings can be merged."""
        deciding = {protocol: self.settings.deciding(protocol) for protocol in self.settings.protocols}
        if "position" in deciding:                      # measured at one length, and buckets depend on it
            deciding["position"]["length"] = max(self.possible, default=None)
        return deciding

    # -------------------------------------------------------------------------------------------------------
    # Protocols: the records of each at one length

    def tiled(self, protocol: str, length: int) -> list[Record]:
        """nonoverlap, rolling, sliding: one record."""
        windows = self._windows(protocol, length)
        losses, seconds = self._score(protocol, length, windows)
        more = {"stride": max(w.n_scored for w in windows)} if protocol == "sliding" else {}
        return [self._record(protocol, length, windows, losses, seconds, **more)]

    def fixed(self, length: int) -> list[Record]:
        """One record, with the truncated control and the gain over it."""
        truncated = self._truncated()                                   # (blocks,)
        losses, seconds = self._score_ended(self.extend, length)
        total = float(truncated.sum())
        blocks, losses = self._in_blocks(length, losses)
        gain = (total - float(sum(x.sum() for x in losses))) / sum(w.n_scored for w in blocks)
        self._keep("fixed", length, {"truncated_nll": truncated})
        return [self._record("fixed", length, blocks, losses, seconds, truncated_nll_sum=total, gain=gain)]

    def _truncated(self) -> np.ndarray:
        """Loss of each block of targets without a method, at L."""
        known = (column for name, column in self.per_window.items() if name.endswith("/truncated_nll"))
        found = next(known, None)
        if found is None:
            losses = self._in_blocks(self.L, self._score_ended(PLAIN, self.L)[0])[1]
            found = np.array([x.sum() for x in losses])
        return found

    def _in_blocks(self, length: int, losses: Sequence[np.ndarray]) -> tuple[list[Window], list[np.ndarray]]:
        """The targets of fixed in blocks of at most BLOCK, so that few long windows have an interval too."""
        k = self.settings.targets
        bounds = [(i, min(i + BLOCK, k)) for i in range(0, k, BLOCK)]
        windows = [Window(d, end - length, end - k + stop, stop - start)
                   for d, end in self.ends for start, stop in bounds]
        return windows, [x[-k:][start:stop] for x in losses for start, stop in bounds]

    def position(self, longest: int) -> list[Record]:
        """One record for each bucket of positions in the longest windows."""
        losses, seconds = self._score_ended(self.extend, longest)
        windows = self._windows("position", longest)
        n_bytes = np.array([self._bytes(window) for window in windows]).sum(axis=0)     # (longest,)
        n_documents = len({w.document for w in windows})
        return [record(self.extend, "position", longest, nll, nll.size, int(n_bytes[start:end].sum()),
                       n_documents, seconds, bucket=[start, end])
                for start, end in position_buckets(longest)
                for nll in [np.array([x[start:end] for x in losses])]]  # (windows, bucket)

    def repeat(self, length: int) -> list[Record]:
        """One record: two copies of a passage of the text, at the distance that this length has room for."""
        stretches = [self.text.documents[d][end - self.settings.longest:end] for d, end in self.ends]
        return self._repeated("repeat", length, stretches)

    def copy(self, length: int) -> list[Record]:
        """The same on shuffled text, where only the first copy can help."""
        rng = np.random.default_rng(self.settings.seed)
        stretches = [rng.choice(self.text.documents[d][1:], self.settings.longest) for d, _ in self.ends]
        return self._repeated("copy", length, stretches)

    def _repeated(self, protocol: str, length: int, stretches: list[np.ndarray]) -> list[Record]:
        distance = probes.distance(length, self.L)
        if distance is None:
            return []
        tokens, first, second = probes.repeated(stretches, length, self.L)
        (losses, _), seconds = self._probe(protocol, length, tokens, np.concatenate((first, second)))
        nll_first, nll = losses[:, :len(first)], losses[:, len(first):]
        self._keep(protocol, length, {"nll": nll.sum(axis=1), "first_nll": nll_first.sum(axis=1),
                                      "tokens": np.full(len(nll), nll.shape[1]),
                                      "document": np.array([d for d, _ in self.ends])})
        n_bytes = int(self.byte_lengths[tokens[:, second]].sum()) if protocol == "repeat" else None
        return [record(self.extend, protocol, length, nll, nll.size, n_bytes,
                       len({d for d, _ in self.ends}) if n_bytes else None, seconds, distance=distance,
                       first_nll_sum=float(nll_first.sum()), gain=float((nll_first - nll).mean()))]

    def retrieval(self, kind: str, length: int) -> list[Record]:
        """One record for each depth: in how many trials the answer is correct."""
        trials, seed = max(1, self.settings.windows // 4), self.settings.seed
        if length < max(tasks.shortest(kind, self.tokenizer, np.random.default_rng([seed, trial]))
                        for trial in range(trials)):
            return []
        records, columns = [], []
        for depth in probes.DEPTHS:
            made = probes.hidden(kind, self.tokenizer, length, depth, trials, seed)
            answers, seconds = self._answers(kind, length, made)
            records.append(self._answer_record(kind, length, answers, seconds, depth=depth))
            columns.append(answers)
        self._keep(kind, length, {name: np.concatenate([answers[name] for answers in columns])
                                  for name in columns[0]})
        return records

    def algorithm(self, name: str, length: int) -> list[Record]:
        """One record, with a quarter of the length in symbols: in how many trials all is correct."""
        n, seed = tasks.n_symbols(length), self.settings.seed
        if n < 1:
            return []
        made = [tasks.algorithm(name, self.tokenizer, n, np.random.default_rng([seed, trial, n]))
                for trial in range(self.settings.windows)]
        answers, seconds = self._answers(name, length, made)
        self._keep(name, length, answers)
        return [self._answer_record(name, length, answers, seconds, symbols=n)]

    # -------------------------------------------------------------------------------------------------------
    # Forward passes, and the records of their losses

    def _score(self, protocol: str, length: int, windows: Sequence[Window]) -> tuple[list[np.ndarray], float]:
        """Losses of each window's targets under the current extension, and the seconds that they took."""
        began = time.perf_counter()
        with extended(self.model, self.config, self.extend.methods, length):
            scores = score(self.model, self.text, windows, self.config.train, self.process, self.bos)
            work = [(w.end - w.start) * self.model.flops_per_token(w.end - w.start) for w in windows]
            scored = list(self._progress(scores, f"{self.extend.spec} {protocol} {length}", work))
        return scored, time.perf_counter() - began

    def _score_ended(self, extend: Extend, length: int) -> tuple[list[np.ndarray], float]:
        """Losses of at least the last `targets` tokens of the windows that end at self.ends, and the seconds.

        If `position` is measured too, the longest windows score all of their tokens, because it shares these
        forward passes.
        """
        if (extend.spec, length) not in self._ended:
            is_shared = "position" in self.settings.protocols and length == max(self.possible)
            windows = ended_windows(self.ends, length, length if is_shared else self.settings.targets)
            self._ended[extend.spec, length] = self._score("fixed", length, windows)
        return self._ended[extend.spec, length]

    def _probe(self, protocol: str, length: int, tokens: np.ndarray,
               at: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], float]:
        """Losses of tokens (n, length) at the places `at`, whether each ranks first, and the seconds."""
        began = time.perf_counter()
        tokens = opened(tokens, self.bos)
        size = max(1, TOKENS_PER_FORWARD // length)
        batches = [tokens[i:i + size] for i in range(0, len(tokens), size)]
        with extended(self.model, self.config, self.extend.methods, length):
            turns = parallel.round_robin(self.process, batches, lambda batch: probes.losses_at(
                self.model, self.config.train, batch, at))
            work = [batch.size * self.model.flops_per_token(length) for batch in batches]
            scored = list(self._progress(turns, f"{self.extend.spec} {protocol} {length}", work))
        losses, is_top = (np.concatenate(parts) for parts in zip(*scored, strict=True))
        return (losses, is_top), time.perf_counter() - began

    def _answers(self, protocol: str, length: int,
                 made: Sequence[Made]) -> tuple[dict[str, np.ndarray], float]:
        """Of each document (trials,): the loss of its answer, whether it is correct; and the seconds."""
        tokens, is_answer = probes.stacked(made)
        at = np.flatnonzero(is_answer.any(axis=0))
        asked = is_answer[:, at]                                        # (trials, n)
        (losses, is_top), seconds = self._probe(protocol, length, tokens, at)
        return {"nll": np.where(asked, losses, 0).sum(axis=1), "tokens": asked.sum(axis=1),
                "correct": (is_top | ~asked).all(axis=1).astype(int), "trials": np.ones(len(made), dtype=int),
                "document": np.arange(len(made))}, seconds

    def _answer_record(self, protocol: str, length: int, answers: dict[str, np.ndarray], seconds: float,
                       **more: Any) -> Record:
        return record(self.extend, protocol, length, answers["nll"], int(answers["tokens"].sum()), None, None,
                      seconds, **more, correct=int(answers["correct"].sum()), trials=len(answers["trials"]))

    def _keep(self, protocol: str, length: int, columns: dict[str, Any]) -> None:
        """Add columns of numbers, one for each window or trial, to the .npz."""
        for name, column in columns.items():
            self.per_window[f"{self.extend.spec}/{protocol}/{length}/{name}"] = np.array(column)

    def _record(self, protocol: str, length: int, windows: Sequence[Window], losses: Sequence[np.ndarray],
                seconds: float, **more: Any) -> Record:
        nll = np.array([x.sum() for x in losses])                       # (windows,)
        n_bytes = np.array([self._bytes(window).sum() for window in windows])
        columns = {"nll": nll, "tokens": [w.n_scored for w in windows], "bytes": n_bytes,
                   "document": [w.document for w in windows], "end": [w.end for w in windows]}
        self._keep(protocol, length, columns)
        n_documents = len({w.document for w in windows})
        return record(self.extend, protocol, length, nll, sum(w.n_scored for w in windows),
                      int(n_bytes.sum()), n_documents, seconds, **more)

    def _bytes(self, window: Window) -> np.ndarray:
        """Bytes of each scored target (n_scored,)."""
        tokens = self.text.documents[window.document]
        return self.byte_lengths[tokens[window.end + 1 - window.n_scored:window.end + 1]]


def spec_of(extend: Extend) -> str | None:
    """The method as records name it: None without one."""
    return None if extend is PLAIN else extend.spec


def record(extend: Extend, protocol: str, length: int, nll: np.ndarray, n_tokens: int, n_bytes: int | None,
           n_documents: int | None, seconds: float, **more: Any) -> Record:
    """One record of the JSON: perplexity = exp(nll / tokens), bits per byte = nll / ln 2 / bytes.

    Raises UserError if the loss is NaN or infinite.
    """
    nll_sum = float(nll.sum())
    if not math.isfinite(nll_sum):
        raise UserError(f"{protocol} at {length} tokens, --extend {extend.spec}: the loss is {nll_sum}, so "
                        "the model has no probabilities there; evaluate another checkpoint, method or length")
    return {"extend": spec_of(extend), "protocol": protocol, "length": length,
            "nll_sum": nll_sum, "tokens": n_tokens, "bytes": n_bytes, "documents": n_documents,
            "ppl": finite(perplexity(nll_sum / n_tokens)),
            "bpb": nll_sum / math.log(2) / n_bytes if n_bytes else None,
            "seconds": round(seconds, 3), **more}


def score(model: GPT, text: Text, windows: Sequence[Window], train: TrainConfig,
          process: Process = ALONE, bos: int | None = None) -> Iterator[np.ndarray]:
    """Losses of each window's targets (n_scored,), fp64, in order. Windows of one shape share a forward pass.

    `bos` is a token that replaces the first one of each window, as data.bos does in training.

    Several processes divide the forward passes, which are the same for any number of processes.
    """
    device = next(model.parameters()).device

    def losses_of(batch: Sequence[Window]) -> np.ndarray:               # (B, n_scored)
        rows = opened(np.stack([text.documents[w.document][w.start:w.end + 1] for w in batch]), bos)
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device)     # (B, length + 1)
        with autocast(train, device):
            losses = token_losses(model, tokens[:, :-1], tokens[:, -batch[0].n_scored:])
        return losses.double().cpu().numpy()

    batches = []
    for (length, _), group in itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored)):
        alike, size = list(group), max(1, TOKENS_PER_FORWARD // length)
        batches += [alike[i:i + size] for i in range(0, len(alike), size)]
    for losses in parallel.round_robin(process, batches, losses_of):
        yield from losses


def opened(rows: np.ndarray, bos: int | None) -> np.ndarray:
    """Windows of ids (B, T), whose first token is replaced by `bos` unless it is None."""
    if bos is None:
        return rows
    return np.concatenate((np.full_like(rows[:, :1], bos), rows[:, 1:]), axis=1)


@torch.no_grad()
def token_losses(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of the last targets (B, n) given inputs (B, T), n <= T, in nats, fp32, (B, n).

    Logits are computed for CHUNK targets at a time: all (T, V) of them would take gigabytes.
    """
    x = model.hidden(inputs, last=targets.shape[1]).flatten(0, 1)       # (B n, C)
    losses = [F.cross_entropy(model.logits(some).float(), wanted, reduction="none")
              for some, wanted in zip(x.split(CHUNK), targets.flatten().split(CHUNK), strict=True)]
    return torch.cat(losses).view(targets.shape)


def open_extensions(specs: Sequence[str], model: GPT, config: Config, lengths: Sequence[int],
                    skip_unfit: bool = False) -> list[Extend]:
    """The extensions of the --extend flags; prints warnings.

    Raises UserError for a method that does not fit the model; with skip_unfit skips it and prints one line.
    """
    extends = [parse(spec) for spec in dict.fromkeys(specs)]
    names = [extend.spec for extend in extends]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--extend {name}: given twice, with different lists; evaluate them one by one, "
                            "each with another --json")
    fitting = []
    for extend in extends:
        problems = [method.problem(model, config, length) for length in lengths for method in extend.methods]
        problem = next(filter(None, problems), None)
        run = f"this run has {config.position.encoding} at L = {config.train.seq_len}"
        if problem and not skip_unfit:
            raise UserError(f"--extend {extend.spec}: {problem}; {run}, leave the method out or change it")
        if problem:
            print(f"skipped --extend {extend.spec}: {problem}; {run}", flush=True)
            continue
        fitting.append(extend)
        for method in extend.methods:
            warning = method.warning(model, config, max(lengths))
            if warning:
                print(f"warning: --extend {extend.spec}: {warning}")
    return fitting
