"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--protocol fixed] [--extend yarn]`.

Several protocols, because the usual number flatters. In all of them no window crosses a document, the same
documents are used at every length, and sums and counts are kept, never means of means; in nonoverlap,
rolling, sliding and fixed each target is scored once, and the targets are the same at every length. Windows
begin wherever they fall, as in training: nothing is put in front of them.

  nonoverlap  The text is cut into blocks of the length and every token is scored (the ALiBi paper's number).
              Longer blocks have fewer tokens with little context, so it falls even for a model that ignores
              far context.
  rolling     nonoverlap over every token of the documents. What is left over at a document's end is scored at
              the end of a whole window. It is lm-evaluation-harness' loglikelihood_rolling.
  sliding     The window moves by a stride S and only what is new is scored: each target has at least
              length - S tokens before it. S = 1 is exact, and costs length forwards a token.
  fixed       Windows of every length end at the same place and only the last k tokens are scored: the same
              targets, with more context to their left. truncated is that figure at L, the training length,
              where nothing is new to the model: what a longer context must beat. gain = loss(truncated) -
              loss, nats a token: positive where more context helps, 0 where it is ignored, negative where it
              breaks the model. Kazemnejad et al. 2023, arXiv:2305.19466, appendix F.
  position    Loss by position in one forward over the longest windows: shows where it breaks.
  repeat, copy, passkey   Probes: is far context used, not merely survived? See probes.py.

Each --extend METHOD[:key=value,...] adds a curve of the same model under a method that stretches its context
(positions/extension.py); METHOD+METHOD applies both. Forwards are full ones, no key is cached.
`torchrun --nproc_per_node=N eval.py RUN ...` shares them out over N processes, a GPU each, to the same sums.

Writes RUN/eval/DATA.json (records), .npz (sums for each window) and .png (the picture).

Legend: B batch, T time, C = n_embd, V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config, TrainConfig
from data.loader import Corpus
from data.passkey import shortest
from data.sources import SUFFIXES
from data.tokenizer import Tokenizer, byte_lengths
from evaluation import probes
from evaluation.extension import Extend, extended, parse
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
from model import GPT, autocast
from runtime import parallel
from runtime.errors import UserError
from runtime.files import read_json
from runtime.parallel import World

PROTOCOLS = ("nonoverlap", "rolling", "sliding", "fixed", "position")
PROBES = ("repeat", "copy", "passkey")
DEFAULT_PROTOCOLS = ("nonoverlap", "fixed", "position")
PLAIN = Extend("plain", [])
MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32, 64)      # of L, the default lengths
CHUNK = 128                                     # tokens whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward
ALONE = World(torch.device("cpu"))


# -----------------------------------------------------------------------------------------------------------
# Scoring


@torch.no_grad()
def token_losses(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of the last targets (B, n) given inputs (B, T), n <= T, in nats, fp32, (B, n).

    Logits are made only for the targets, CHUNK positions at a time: (T, V) of them would take gigabytes.
    """
    x = model.hidden(inputs)[:, -targets.shape[1]:].flatten(0, 1)       # (B n, C)
    losses = [F.cross_entropy(model.logits(some).float(), wanted, reduction="none")
              for some, wanted in zip(x.split(CHUNK), targets.flatten().split(CHUNK), strict=True)]
    return torch.cat(losses).view(targets.shape)


def score(model: GPT, text: Text, windows: Sequence[Window], train: TrainConfig,
          world: World = ALONE) -> Iterator[np.ndarray]:
    """Losses of each window's targets (n_scored,), fp64, in order. Windows of one shape share a forward.

    Several processes take turns at the forwards, which are the same whatever their number.
    """
    device = next(model.parameters()).device

    def losses_of(batch: list[Window]) -> np.ndarray:                   # (B, n_scored)
        rows = np.stack([text.documents[w.document][w.start:w.end + 1] for w in batch])
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device)     # (B, length + 1)
        with autocast(train, device):
            losses = token_losses(model, tokens[:, :-1], tokens[:, -batch[0].n_scored:])
        return losses.double().cpu().numpy()

    shapes = itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored))
    batches = [batch for (length, _), alike in shapes
               for batch in batched(list(alike), max(1, TOKENS_PER_FORWARD // length))]
    for losses in parallel.take_turns(world, batches, losses_of):
        yield from losses


def batched(windows: list[Window], size: int) -> Iterator[list[Window]]:
    """Consecutive parts of at most this size."""
    for start in range(0, len(windows), size):
        yield windows[start:start + size]


def record(extend: Extend, protocol: str, length: int, nll: np.ndarray, n_tokens: int, n_bytes: int | None,
           n_documents: int | None, seconds: float, **more: Any) -> dict[str, Any]:
    """One line of the JSON: perplexity exp(nll / tokens), and bits per byte nll / ln 2 / bytes."""
    nll_sum = float(nll.sum())
    return {"extend": None if extend is PLAIN else extend.spec, "protocol": protocol, "length": length,
            "nll_sum": nll_sum, "tokens": n_tokens, "bytes": n_bytes, "documents": n_documents,
            "ppl": math.exp(nll_sum / n_tokens), "bpb": nll_sum / math.log(2) / n_bytes if n_bytes else None,
            "seconds": round(seconds, 3), **more}


class Evaluation:
    """One model on one text under some protocols and extensions: the lengths it can take, and its records."""

    def __init__(self, model: GPT, text: Text, tokenizer: Tokenizer, config: Config, protocols: Sequence[str],
                 lengths: Sequence[int], n_scored: int, n_windows: int, max_tokens: int, seed: int,
                 extends: Sequence[Extend] = (), stride: int | None = None, world: World = ALONE) -> None:
        self.world = world
        self.model, self.tokenizer, self.config, self.protocols = model, tokenizer, config, protocols
        self.max_tokens, self.seed, self.stride, self.n_windows = max_tokens, seed, stride, n_windows
        self.L, self.lengths, self.n_scored = config.train.seq_len, sorted(set(lengths)), n_scored
        self.longest = max(*self.lengths, self.L)       # truncated needs L tokens even if no length does
        self.text = Text(text.name, [document for document in text.documents if len(document) > self.longest])
        limit = model.encoding.max_length
        self.possible = [length for length in self.lengths if not limit or length <= limit]
        self.byte_lengths = byte_lengths(tokenizer)
        self.ends = fixed_ends(self.text, self.longest, n_scored, n_windows, seed)
        self.extends = [PLAIN, *extends]                # plain first: its figure at L is truncated's
        self.extend = PLAIN                             # the one that is being measured
        self.per_window: dict[str, np.ndarray] = {}     # "extend/protocol/length/column" -> a number a window
        self._ended: dict[tuple[str, int], tuple[list[np.ndarray], float]] = {}

    def run(self) -> list[dict[str, Any]]:
        """All records, in the order of extensions and protocols."""
        records: list[dict[str, Any]] = []
        for extend in self.extends if self.possible else []:
            self.extend = extend
            for protocol in self.protocols:
                records += getattr(self, protocol)()
        return records

    def nonoverlap(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length."""
        windows = nonoverlap_windows(self.text, self.longest, self.lengths, self.max_tokens, self.seed)
        for length in self.possible:
            losses, seconds = self._score("nonoverlap", length, windows[length])
            yield self._record("nonoverlap", length, windows[length], losses, seconds)

    def rolling(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length."""
        for length in self.possible:
            windows = rolling_windows(self.text, length)
            losses, seconds = self._score("rolling", length, windows)
            yield self._record("rolling", length, windows, losses, seconds)

    def sliding(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length."""
        windows = sliding_windows(self.text, self.longest, self.lengths, self.stride, self.max_tokens,
                                  self.seed)
        for length in self.possible:
            losses, seconds = self._score("sliding", length, windows[length])
            yield self._record("sliding", length, windows[length], losses, seconds,
                               stride=max(w.n_scored for w in windows[length]))

    def fixed(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length, with the truncated control and the gain over it."""
        k = self.n_scored
        truncated = np.array([x[-k:].sum() for x in self._score_ended(PLAIN, self.L)[0]])       # (windows,)
        for length in self.possible:
            losses, seconds = self._score_ended(self.extend, length)
            losses = [x[-k:] for x in losses]
            total = float(truncated.sum())
            gain = (total - float(sum(x.sum() for x in losses))) / (len(self.ends) * k)
            windows = ended_windows(self.ends, length, k)
            yield self._record("fixed", length, windows, losses, seconds, truncated_nll_sum=total, gain=gain)
            self.per_window[f"{self.extend.spec}/fixed/{length}/truncated_nll"] = truncated

    def position(self) -> Iterator[dict[str, Any]]:
        """A record for each bucket of positions in the longest windows."""
        longest = max(self.possible)
        losses, seconds = self._score_ended(self.extend, longest)
        windows = ended_windows(self.ends, longest, longest)
        n_bytes = np.array([self._bytes(window) for window in windows]).sum(axis=0)     # (longest,)
        documents = {w.document for w in windows}
        for start, end in position_buckets(longest):
            nll = np.array([x[start:end] for x in losses])              # (windows, bucket)
            yield record(self.extend, "position", longest, nll, nll.size, int(n_bytes[start:end].sum()),
                         len(documents), seconds, bucket=[start, end])

    def repeat(self) -> Iterator[dict[str, Any]]:
        """A record for each distance between the two copies of a passage of the text."""
        stretches = [self.text.documents[d][end - self.longest:end] for d, end in self.ends]
        yield from self._repeated("repeat", stretches)

    def copy(self) -> Iterator[dict[str, Any]]:
        """The same on shuffled text, where nothing but the first copy helps."""
        rng = np.random.default_rng(self.seed)
        stretches = [rng.choice(self.text.documents[d][1:], self.longest) for d, _ in self.ends]
        yield from self._repeated("copy", stretches)

    def _repeated(self, protocol: str, stretches: list[np.ndarray]) -> Iterator[dict[str, Any]]:
        for length in self.possible:
            distance = probes.distance(length, self.L)
            if distance is None:
                continue
            tokens, first, second = probes.repeated(stretches, length, self.L)
            (losses, _), seconds = self._probe(protocol, length, tokens, np.concatenate((first, second)))
            nll_first, nll = losses[:, :len(first)], losses[:, len(first):]
            n_bytes = int(self.byte_lengths[tokens[:, second]].sum()) if protocol == "repeat" else None
            yield record(self.extend, protocol, length, nll, nll.size, n_bytes,
                         len({d for d, _ in self.ends}) if n_bytes else None, seconds, distance=distance,
                         first_nll_sum=float(nll_first.sum()), gain=float((nll_first - nll).mean()))

    def passkey(self) -> Iterator[dict[str, Any]]:
        """A record for each length and depth: how often all digits of the key are the likeliest."""
        trials = max(1, self.n_windows // 4)
        lengths = [length for length in self.possible if length >= shortest(self.tokenizer)]
        for length, depth in itertools.product(lengths, probes.DEPTHS):
            tokens, answer = probes.passkeys(self.tokenizer, length, depth, trials, self.seed)
            (nll, is_top), seconds = self._probe("passkey", length, tokens, answer)
            yield record(self.extend, "passkey", length, nll, nll.size, None, None, seconds, depth=depth,
                         correct=int(is_top.all(axis=1).sum()), trials=trials)

    def _probe(self, protocol: str, length: int, tokens: np.ndarray,
               at: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], float]:
        """Losses and hits of the tokens (n, length) at these places (n_at,) under the current extension."""
        began = time.perf_counter()
        size = max(1, TOKENS_PER_FORWARD // length)
        pieces = [tokens[i:i + size] for i in range(0, len(tokens), size)]
        with extended(self.model, self.config, self.extend.methods, length):
            turns = parallel.take_turns(self.world, pieces, lambda piece: probes.losses_at(
                self.model, self.config.train, piece, at))
            scored = list(self._bar(turns, f"{protocol} {length}", "batch", len(pieces)))
        losses, is_top = (np.concatenate(parts) for parts in zip(*scored, strict=True))
        return (losses, is_top), time.perf_counter() - began

    def _score_ended(self, extend: Extend, length: int) -> tuple[list[np.ndarray], float]:
        """Losses of the windows that end at self.ends, and the seconds they took: the last n_scored at least.

        All positions of the longest ones where `position` is wanted too, so that both share these forwards.
        """
        if (extend.spec, length) not in self._ended:
            share = "position" in self.protocols and length == max(self.possible)
            windows = ended_windows(self.ends, length, length if share else self.n_scored)
            self._ended[extend.spec, length] = self._score("fixed", length, windows)
        return self._ended[extend.spec, length]

    def _score(self, protocol: str, length: int, windows: Sequence[Window]) -> tuple[list[np.ndarray], float]:
        began = time.perf_counter()
        with extended(self.model, self.config, self.extend.methods, length):
            scores = score(self.model, self.text, windows, self.config.train, self.world)
            return list(self._bar(scores, f"{protocol} {length}", "window", len(windows))), (
                time.perf_counter() - began)

    def _bar(self, things: Any, what: str, unit: str, total: int) -> Any:
        from tqdm import tqdm

        return tqdm(things, total=total, unit=unit, desc=f"{self.extend.spec} {what}", delay=3, leave=False,
                    disable=True if self.world.rank else None)          # None: on a terminal only

    def _bytes(self, window: Window) -> np.ndarray:
        """Bytes of each scored target (n_scored,)."""
        tokens = self.text.documents[window.document]
        return self.byte_lengths[tokens[window.end + 1 - window.n_scored:window.end + 1]]

    def _record(self, protocol: str, length: int, windows: Sequence[Window], losses: Sequence[np.ndarray],
                seconds: float, **more: Any) -> dict[str, Any]:
        nll = np.array([x.sum() for x in losses])                       # (windows,)
        n_bytes = np.array([self._bytes(window).sum() for window in windows])
        columns = {"nll": nll, "tokens": [w.n_scored for w in windows], "bytes": n_bytes,
                   "document": [w.document for w in windows], "end": [w.end for w in windows]}
        for name, column in columns.items():
            self.per_window[f"{self.extend.spec}/{protocol}/{length}/{name}"] = np.array(column)
        n_documents = len({w.document for w in windows})
        return record(self.extend, protocol, length, nll, sum(w.n_scored for w in windows),
                      int(n_bytes.sum()), n_documents, seconds, **more)


# -----------------------------------------------------------------------------------------------------------
# Command


def open_text(source: str | None, data_dir: str, tokenizer: Tokenizer) -> Text:
    """Validation documents of a prepared corpus (default: the run's own), or a text file as one document."""
    if not source and not data_dir:
        raise UserError("--data: missing; a folder of Hugging Face has no corpus of its own; give a text, or "
                        "a prepared corpus")
    path = Path(source or data_dir)
    if path.is_file():
        if path.name.lower().endswith((*(end for end in SUFFIXES if end != ".txt"), ".gz", ".zst")):
            raise UserError(f"--data {path}: not plain text; prepare it first with data/prepare.py, and give "
                            "that folder")
        return Text(path.stem, [np.concatenate(([tokenizer.eot], tokenizer.encode(path.read_bytes())))])
    corpus = Corpus(path, splits=("val",))
    theirs = corpus.meta["tokenizer"]
    if theirs["sha256"] != tokenizer.sha256:
        raise UserError(f"--data {path}: tokenizer {theirs['name']}, but the run was trained with "
                        f"{tokenizer.name}; prepare it with the same: --tokenizer NAME, or the run's folder")
    return Text(path.name, corpus.documents("val"))


def choose_lengths(wanted: str | None, L: int, text: Text) -> list[int]:
    """The lengths asked for, or L/2 ... 64 L as far as documents go. Raises UserError for the impossible."""
    longest = max(len(document) for document in text.documents) - 1
    if wanted is None:
        lengths = [int(m * L) for m in MULTIPLES if m * L <= longest]
        if L not in lengths:
            raise UserError(f"data {text.name}: its longest document has {longest} tokens, fewer than the "
                            f"training length {L}; give longer text with --data")
        return lengths
    try:
        lengths = [int(part) for part in wanted.split(",")]
    except ValueError as error:
        raise UserError(f"--lengths {wanted}: must be integers and commas, such as 256,512") from error
    if min(lengths) < 1 or max(*lengths, L) > longest:
        raise UserError(f"--lengths {wanted}: these and the training length {L} must lie in 1 ... {longest}, "
                        f"the longest document of {text.name}")
    return lengths


def open_extensions(specs: Sequence[str], model: GPT, config: Config, lengths: Sequence[int]) -> list[Extend]:
    """What the --extend flags ask for. Raises UserError for what does not fit the model; prints warnings."""
    extends = [parse(spec) for spec in dict.fromkeys(specs)]
    names = [extend.spec for extend in extends]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--extend {name}: twice, with other lists; give them one call each, with --json")
    for extend, length in itertools.product(extends, lengths):
        for method in extend.methods:
            problem = method.problem(model, config, length)
            if problem:
                raise UserError(f"--extend {extend.spec}: {problem}; this run has {config.position.encoding}"
                                f" at L = {config.train.seq_len}, leave the method out or change it")
    for extend in extends:
        for method in extend.methods:
            warning = method.warning(model, config, max(lengths))
            if warning:
                print(f"warning: --extend {extend.spec}: {warning}")
    return extends


def is_of_another_text(path: Path, text: Text) -> bool:
    """Whether results that are there already were measured on another text."""
    try:
        return read_json(path).get("data_sha256", "") != text.sha256()
    except (OSError, ValueError, AttributeError):                       # none, or damaged: nothing to keep
        return False
