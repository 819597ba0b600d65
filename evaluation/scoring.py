"""The text that eval.py scores, its windows, and the forward passes that protocols share.

Windows are functions of the text, the lengths and a seed, never of the model, so that every model is scored
on the same targets. No window crosses a document.

Legend: B batch, T time, C = n_embd, V vocabulary, L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

from base.errors import UserError
from config import Config, TrainConfig
from data.loader import Corpus
from data.tokenizer import Tokenizer, byte_lengths
from evaluation.extension import PLAIN, Combination, extended
from evaluation.results import make_table
from model import GPT
from runtime.device import autocast

CHUNK = 128                                     # tokens whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward pass
MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32, 64)       # of L, the training length: the default lengths
FEW = 8         # documents that the longest default length must have, so that one does not decide
NO_TEXT = (".jsonl", ".parquet", ".gz", ".zst", ".zip")     # suffixes of sources of data/prepare.py


# -----------------------------------------------------------------------------------------------------------
# The text and its windows


class Window(NamedTuple):
    """Inputs document[start:end]. The targets are one token further on; the last n_scored of them count."""

    document: int
    start: int
    end: int
    n_scored: int


class Text(NamedTuple):
    """Documents to evaluate on: token ids, each document beginning with the separator."""

    name: str
    documents: list[np.ndarray]

    def sha256(self) -> str:
        """Checksum of the ids and the bounds of documents: distinguishes two texts of the same name."""
        ids = hashlib.sha256()
        for document in self.documents:
            ids.update(len(document).to_bytes(8, "little"))
            ids.update(document.astype("<u4").tobytes())
        return ids.hexdigest()


def open_text(source: str | None, data_dir: str, tokenizer: Tokenizer,
              trained_on: dict[str, Any] | None = None) -> Text:
    """The validation documents of a prepared corpus (default: the run's), or a text file as one document.

    `trained_on` is the meta.json of the run's corpus. Without a source, raises UserError if data_dir now
    holds another validation text, of which the run may have been trained on parts.
    """
    if not source and not data_dir:
        raise UserError("--data: missing; a Hugging Face folder has no corpus, so give a text file or a "
                        "prepared corpus")
    path = Path(source or data_dir)
    if path.is_file():
        if path.suffix.lower() in NO_TEXT:
            raise UserError(f"--data {path}: not plain text; prepare it first with data/prepare.py, and give "
                            "the prepared folder")
        ids = tokenizer.encode(path.read_bytes())
        return Text(path.name.removesuffix(".txt"), [np.concatenate(([tokenizer.separator], ids))])
    if source and not path.exists():
        raise UserError(f"--data {path}: no such file or folder; give a text file, or a corpus that "
                        "data/prepare.py made")
    corpus = Corpus(path, splits=("val",))
    about = corpus.meta["tokenizer"]
    if about["sha256"] != tokenizer.sha256:
        raise UserError(f"--data {path}: prepared with tokenizer {about['name']}, but the run was trained "
                        f"with {tokenizer.name}; prepare it again, with the run's folder as --tokenizer")
    if not source and trained_on and corpus.meta["splits"]["val"] != trained_on["splits"]["val"]:
        raise UserError(f"data.dir {path}: has another validation text than the corpus of the run had; "
                        f"prepare that one again, or give --data {path} to evaluate on this one, of which "
                        "the run may have seen parts in training")
    return Text(path.name, corpus.documents("val"))


def choose_lengths(wanted: list[int] | None, L: int, text: Text, needed: Sequence[int] = (),
                   multiples: Sequence[float] = MULTIPLES) -> list[int]:
    """The lengths of --lengths, or multiples of L as far as at least FEW documents go. Raises UserError.

    A document must have the `needed` lengths too. A text without documents has no limit: they are generated.
    """
    sizes = sorted((len(document) - 1 for document in text.documents), reverse=True) or [2**31]
    longest = sizes[0]
    lengths = wanted
    if lengths is None:
        several = max(sizes[:FEW][-1], min(L, longest))
        lengths = [int(m * L) for m in multiples if m * L <= several]
        if L not in lengths:
            raise UserError(f"data {text.name}: its longest document has {longest} tokens, fewer than the "
                            f"training length {L}; give a longer text with --data, or --train-length")
    if min(lengths) < 1 or max([*lengths, *needed]) > longest:
        raise UserError(f"--lengths {','.join(map(str, lengths))}: all of them, --longest, and for fixed L = "
                        f"{L} (--train-length overrules it), must be in 1 ... {longest}, the longest "
                        f"document of {text.name}")
    return lengths


def fixed_ends(text: Text, longest: int, n_scored: int, n_windows: int, seed: int) -> list[tuple[int, int]]:
    """(document, end) of windows of up to `longest` inputs; their last n_scored targets are apart.

    Documents take turns, so that a few long ones do not dominate the result. Inside a document, places are
    drawn at random.
    """
    rng = np.random.default_rng(seed)
    turns = []
    chosen = np.flatnonzero([len(document) > longest for document in text.documents])
    if n_windows < len(chosen):
        chosen = rng.permutation(chosen)[:n_windows]                    # not the first ones of the file
    for d in chosen.tolist():
        ends = np.arange(longest, len(text.documents[d]), n_scored)     # n_scored apart: no target twice
        turns += [(turn, d, int(end)) for turn, end in enumerate(rng.permutation(ends))]
    return sorted((d, end) for _, d, end in sorted(turns)[:n_windows])


# -----------------------------------------------------------------------------------------------------------
# The forward passes


class Settings(NamedTuple):
    """What to measure, and on how much of the text. eval.py --help explains each."""

    protocols: Sequence[str]
    lengths: Sequence[int]                      # contexts in tokens
    longest: int                                # at least every length, for fixed also L
    targets: int                                # fixed: k, the tokens scored of each window
    windows: int = 32                           # fixed, position, repeat, copy; examples of an algorithm; a
                                                # quarter as many examples of retrieval at each depth
    tokens: int = 2**16                         # nonoverlap, sliding: tokens scored
    stride: int | None = None                   # sliding: S; None is a quarter of each length
    seed: int = 0                               # chooses windows


class Evaluation:
    """One model on one text, under one method of --extend at a time."""

    def __init__(self, model: GPT, config: Config, tokenizer: Tokenizer, text: Text, settings: Settings,
                 extends: Sequence[Combination] = (), run: str = "") -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.settings = settings
        self.run = run
        self.L = config.train.seq_len
        self.whole_text = text
        self.text = Text(text.name, [d for d in text.documents if len(d) > settings.longest])
        self.lengths = sorted(set(settings.lengths))
        limit = model.active().max_length
        self.possible = [length for length in self.lengths if not limit or length <= limit]
        self.byte_lengths = byte_lengths(tokenizer)
        # where windows of fixed, position, repeat and copy end: (document, end)
        self.ends = fixed_ends(self.text, settings.longest, settings.targets, settings.windows, settings.seed)
        self.extends = [PLAIN, *extends]
        self.extend = PLAIN                    # the method that is being measured
        self.table = make_table()               # what was measured so far
        self.title = ""                         # of the progress bar
        self.seconds = 0.0                      # of the forward passes of a method, protocol and length
        self.scores_all = False                 # at the longest length, score_ended scores all tokens
        self._ended: dict[tuple[str, int], list[np.ndarray]] = {}

    def score(self, length: int, windows: Sequence[Window]) -> list[np.ndarray]:
        """Losses of each window's targets (n_scored,), fp64, in order. Windows of one shape share a pass."""
        def last_losses(batch: Sequence[Window]) -> np.ndarray:         # (B, n_scored)
            rows = np.stack([self.text.documents[w.document][w.start:w.end + 1] for w in batch])
            places = np.arange(rows.shape[1] - batch[0].n_scored, rows.shape[1])
            return self.losses_at(rows, places)[0]

        batches = []
        for (n, _), group in itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored)):
            batches += split(list(group), n)
        return [row for losses in self.forward(length, batches, last_losses) for row in losses]

    def score_ended(self, length: int) -> list[np.ndarray]:
        """Losses of at least the last `targets` tokens of the windows that end at self.ends.

        The longest windows score all of their tokens if `position` is measured too: it shares these passes.
        """
        key = self.extend.spec, length
        if key not in self._ended:
            is_shared = self.scores_all and length == max(self.possible)
            n_scored = length if is_shared else self.settings.targets
            windows = [Window(d, end - length, end, n_scored) for d, end in self.ends]
            self._ended[key] = self.score(length, windows)
        return self._ended[key]

    def probe(self, length: int, tokens: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Losses of tokens (n, T) at `places`, and whether each ranks first. --extend acts as at `length`."""
        batches = split(tokens, length)
        pairs = self.forward(length, batches, lambda batch: self.losses_at(batch, places))
        losses, is_top = zip(*pairs, strict=True)
        return np.concatenate(losses), np.concatenate(is_top)

    def forward(self, length: int, batches: Sequence[Any], of_batch: Callable[[Any], Any]) -> list[Any]:
        """of_batch(batch) for each, under the current method; self.seconds goes up."""
        began = time.perf_counter()
        with extended(self.model, self.config, self.extend.methods, length):
            results = [of_batch(batch) for batch in tqdm(batches, self.title, leave=False, disable=None)]
        self.seconds += time.perf_counter() - began
        return results

    def losses_at(self, tokens: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`losses_at` of the module; under data.bos windows begin with the separator, as in training."""
        if self.config.data.bos:
            tokens = tokens.copy()
            tokens[:, 0] = self.tokenizer.separator
        return losses_at(self.model, self.config.train, tokens, places)

    def rows(self, windows: Sequence[Window], losses: Sequence[np.ndarray], **columns: Any) -> pd.DataFrame:
        """The rows of windows in the table, from the losses of their targets."""
        targets = [self.text.documents[w.document][w.end + 1 - w.n_scored:w.end + 1] for w in windows]
        return make_table(
            nll=[x.sum() for x in losses], tokens=[w.n_scored for w in windows],
            bytes=[self.byte_lengths[ids].sum() for ids in targets],
            document=[w.document for w in windows], end=[w.end for w in windows], **columns)


def split(rows: Any, n_tokens: int) -> list[Any]:
    """Rows of n_tokens each, in batches that share a forward pass."""
    size = max(1, TOKENS_PER_FORWARD // n_tokens)
    return [rows[i:i + size] for i in range(0, len(rows), size)]


@torch.no_grad()
def losses_at(model: GPT, train: TrainConfig, tokens: np.ndarray,
              places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats, fp64, of tokens (B, T) at indices `places` (n,), and whether each ranks first, (B, n).

    Logits are computed for CHUNK targets at a time: all (T, V) of them would take gigabytes.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    first = int(places.min())
    losses, is_top = [], []
    with autocast(train, device):
        x = model.hidden(ids[:, :-1], last=ids.shape[1] - first)                # what predicts `first` on
        x = x[:, places - first].flatten(0, 1)                                  # (B n, C)
        targets = ids[:, places].flatten()
        for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = model.logits(part).float()                                 # (CHUNK, V)
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
            is_top.append(logits.argmax(dim=-1) == wanted)
    shape = len(tokens), len(places)
    return (torch.cat(losses).view(shape).cpu().double().numpy(),
            torch.cat(is_top).view(shape).cpu().numpy())
