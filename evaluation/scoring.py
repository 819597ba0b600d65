"""The forward passes of an evaluation, which protocols share, and the rows that they become.

Legend: B batch, T time, C = n_embd, V vocabulary, L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

from base.errors import UserError
from config import Config, TrainConfig
from data.tokenizer import Tokenizer, byte_lengths
from evaluation.extension import PLAIN, Extend, extended
from evaluation.results import make_table
from evaluation.windows import Text, Window, fixed_ends
from model import GPT
from runtime.device import autocast

CHUNK = 128                                     # tokens whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward pass


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
    """One model on one text, under one method of --extend at a time."""

    def __init__(self, model: GPT, config: Config, tokenizer: Tokenizer, text: Text, settings: Settings,
                 extends: Sequence[Extend] = (), run: str = "") -> None:
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
        self.scores_all = False                 # at the longest length, score_ended scores all tokens
        self._ended: dict[tuple[str, int], tuple[list[np.ndarray], float]] = {}

    def forward(self, protocol: str, length: int, batches: Sequence[Any],
                do: Callable[[Any], Any]) -> tuple[list[Any], float]:
        """do(batch) for each, under the current method, and the seconds."""
        began = time.perf_counter()
        title = f"{self.extend.spec} {protocol} {length}"
        with extended(self.model, self.config, self.extend.methods, length):
            done = [do(batch) for batch in tqdm(batches, title, leave=False, disable=None)]
        return done, time.perf_counter() - began

    def score(self, protocol: str, length: int, windows: Sequence[Window]) -> tuple[list[np.ndarray], float]:
        """Losses of each window's targets (n_scored,), fp64, in order; and the seconds.

        Windows of one shape share a forward pass.
        """
        def losses_of(batch: Sequence[Window]) -> np.ndarray:           # (B, n_scored)
            rows = np.stack([self.text.documents[w.document][w.start:w.end + 1] for w in batch])
            rows = self.with_bos(rows)
            places = np.arange(rows.shape[1] - batch[0].n_scored, rows.shape[1])
            return losses_at(self.model, self.config.train, rows, places)[0]

        batches = []
        for (n, _), group in itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored)):
            same_shape = list(group)
            size = max(1, TOKENS_PER_FORWARD // n)
            batches += [same_shape[i:i + size] for i in range(0, len(same_shape), size)]
        losses, seconds = self.forward(protocol, length, batches, losses_of)
        return [row for batch in losses for row in batch], seconds

    def score_ended(self, length: int) -> tuple[list[np.ndarray], float]:
        """Losses of at least the last `targets` tokens of the windows that end at self.ends, and the seconds.

        The longest windows score all of their tokens if `position` is measured too: it shares these passes.
        """
        key = self.extend.spec, length
        if key not in self._ended:
            is_shared = self.scores_all and length == max(self.possible)
            n_scored = length if is_shared else self.settings.targets
            windows = [Window(d, end - length, end, n_scored) for d, end in self.ends]
            self._ended[key] = self.score("fixed", length, windows)
        return self._ended[key]

    def probe(self, protocol: str, length: int, tokens: np.ndarray,
              places: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], float]:
        """Losses of tokens (n, length) at `places`, whether each ranks first, and the seconds."""
        tokens = self.with_bos(tokens)
        size = max(1, TOKENS_PER_FORWARD // length)
        batches = [tokens[i:i + size] for i in range(0, len(tokens), size)]
        pairs, seconds = self.forward(
            protocol, length, batches, lambda batch: losses_at(self.model, self.config.train, batch, places))
        losses, is_top = zip(*pairs, strict=True)
        return (np.concatenate(losses), np.concatenate(is_top)), seconds

    def with_bos(self, rows: np.ndarray) -> np.ndarray:
        """Windows of ids (B, T); with data.bos, as in training, the separator replaces the first of each."""
        if not self.config.data.bos:
            return rows
        return np.concatenate((np.full_like(rows[:, :1], self.tokenizer.separator), rows[:, 1:]), axis=1)

    def rows(self, protocol: str, length: int, seconds: float, **columns: Any) -> pd.DataFrame:
        """Rows of the table under the current method: `columns` and what they have in common.

        Raises UserError if a loss is NaN or infinite.
        """
        total = float(np.sum(columns["nll"]))
        if not np.isfinite(total):
            raise UserError(f"{protocol} at {length} tokens, --extend {self.extend.spec}: the loss is "
                            f"{total}; evaluate another checkpoint, method or length")
        return make_table(
            run=self.run, seed=self.config.train.seed, encoding=self.config.position.encoding,
            extend=self.extend.spec, protocol=protocol, length=length, seconds=seconds / len(columns["nll"]),
            **columns)

    def rows_of_windows(self, protocol: str, length: int, seconds: float, windows: Sequence[Window],
                        losses: Sequence[np.ndarray], **columns: Any) -> pd.DataFrame:
        """The rows of windows, from the losses of their targets."""
        targets = [self.text.documents[w.document][w.end + 1 - w.n_scored:w.end + 1] for w in windows]
        return self.rows(
            protocol, length, seconds,
            nll=np.array([x.sum() for x in losses]), tokens=[w.n_scored for w in windows],
            bytes=[self.byte_lengths[ids].sum() for ids in targets],
            document=[w.document for w in windows], end=[w.end for w in windows], **columns)


@torch.no_grad()
def losses_at(model: GPT, train: TrainConfig, tokens: np.ndarray,
              places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats, fp64, of tokens (B, T) at indices `places` (n,), and whether each ranks first, (B, n).

    Logits are computed for CHUNK targets at a time: all (T, V) of them would take gigabytes.
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    first = int(places.min())
    chunks = []
    with autocast(train, device):
        x = model.hidden(ids[:, :-1], last=ids.shape[1] - first)                # what predicts `first` on
        x = x[:, places - first].flatten(0, 1)                                  # (B n, C)
        targets = ids[:, places].flatten()
        for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = model.logits(part).float()                                 # (CHUNK, V)
            losses = F.cross_entropy(logits, wanted, reduction="none")
            is_top = logits.argmax(dim=-1) == wanted
            chunks.append(torch.stack((losses, is_top)))
    losses, is_top = torch.cat(chunks, dim=1).view(2, len(tokens), len(places)).cpu().double().numpy()
    return losses, is_top.astype(bool)
