"""Reading a prepared corpus: checks, memory-mapped tokens, document bounds, batches as pure functions.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, from which its first token is predicted, so every byte of text is a
target. A corpus may have a mask of targets, SPLIT.mask.bin, a byte for each token: 1 if it is scored, else 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from base.errors import UserError
from base.files import read_json
from base.loss import IGNORED
from config import TrainConfig

FORMAT_VERSION = 1
SPLITS = ("train", "val")
MIX = 1000      # samples in which each corpus of a mixture has its share exactly


class Corpus:
    """A prepared corpus; opening it checks sizes and offsets, and ids are checked as they are read.

    Raises UserError with the problem and its fix. `cross_documents` "never" keeps windows inside documents;
    generated documents are windows anyway (`stays_inside`). With a mixture, other corpora have the given
    shares of the training windows, to the nearest of MIX, and this one the rest; validation is on this one.
    Windows of the first `mixture_only` steps come from the others alone, in proportion to their shares. With
    `bos` the first input of each window is the separator. Only the files of the given splits are opened.
    """

    def __init__(self, folder: str | Path, cross_documents: str = "attend",
                 mixture: Mapping[str, float] | None = None, splits: Sequence[str] = SPLITS,
                 bos: bool = False, mixture_only: int = 0) -> None:
        self.folder, self.bos, self.mixture_only = Path(folder), bos, mixture_only
        twice = lru_cache(maxsize=2)                                    # a batch may straddle two
        self.epoch, self.mix = twice(self._epoch), twice(self._mix)
        self.windows = lru_cache(self._windows)
        self.starts_inside = twice(self._starts_inside)                 # of each split
        self.meta = read_meta(self.folder / "meta.json")
        self.stays_inside = cross_documents == "never" or "task" in self.meta
        self.vocab_size: int = self.meta["vocab_size"]
        self.tokens: dict[str, np.ndarray] = {}                         # ids (n_tokens,), memory-mapped
        self.offsets: dict[str, np.ndarray] = {}                        # (n_documents + 1,) int64
        self.masks: dict[str, np.ndarray | None] = {}                   # (n_tokens,) or None: all are scored
        for split in splits:
            self._open(split)
        mixture = dict(sorted((mixture or {}).items()))     # the order in a config makes no difference
        self.corpora = [self, *(Corpus(name, cross_documents, splits=splits) for name in mixture)]
        shares = [round(share * MIX) for share in mixture.values()]
        self.counts = [MIX - sum(shares), *shares]                      # of each corpus in MIX samples
        bounds = [round(MIX * part / max(1, sum(shares))) for part in itertools.accumulate([0, *shares])]
        self.first_counts = [0, *np.diff(bounds).tolist()]              # the same in the first steps
        for name, share, count in zip([folder, *mixture], [1.0, *mixture.values()], self.counts, strict=True):
            if count < 1 or share < 1 / MIX:
                raise UserError(f"data.mixture: leaves less than 1/{MIX} of the windows to {name}")
        for name, other in zip(mixture, self.corpora[1:], strict=True):
            if any(other.meta[key] != self.meta[key] for key in ("tokenizer", "vocab_size", "eot")):
                names = [corpus.meta["tokenizer"]["name"] for corpus in (other, self)]
                raise UserError(f"data.mixture {name}: its tokenizer is {names[0]}, data.dir {folder} has "
                                f"{names[1]}, or another of that name; prepare both with one")
            self.meta.setdefault("mixture", {})[name] = other.meta

    def _open(self, split: str) -> None:
        """Open the files of a split, after checking their sizes and the documents' bounds."""
        about, dtype = self.meta["splits"][split], np.dtype(self.meta["dtype"])
        has_mask = f"{split}.mask.bin" in about["sha256"]
        try:
            for name, size in ((f"{split}.bin", dtype.itemsize), (f"{split}.mask.bin", 1))[:1 + has_mask]:
                found = (self.folder / name).stat().st_size
                if found != about["tokens"] * size:
                    raise ValueError(f"{name} has {found:,} bytes, not {about['tokens'] * size:,}")
            offsets = np.load(self.folder / f"{split}.idx.npy", allow_pickle=False).astype(np.int64)
            if len(offsets) != about["documents"] + 1 or offsets[-1] != about["tokens"]:
                raise ValueError(f"{split}.idx.npy does not fit {about['documents']:,} documents")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"corpus {self.folder}: {error}; prepare it again (data/prepare.py)") from error
        self.offsets[split] = offsets
        self.tokens[split] = np.memmap(self.folder / f"{split}.bin", dtype, "r")
        self.masks[split] = np.memmap(self.folder / f"{split}.mask.bin", bool, "r") if has_mask else None

    def read(self, split: str, start: int, end: int | None = None) -> np.ndarray:
        """The ids of a split from start to end, after checking that they are in the vocabulary."""
        ids = self.tokens[split][start:end]
        if (largest := int(ids.max())) >= self.vocab_size:
            raise UserError(f"corpus {self.folder}: {split}.bin holds id {largest}, beyond its vocabulary of "
                            f"{self.vocab_size}; prepare it again with data/prepare.py")
        return ids

    def documents(self, split: str) -> list[np.ndarray]:
        """The ids of each document of a split, as views of the memory-mapped file."""
        tokens = self.read(split, 0)
        return [tokens[start:end] for start, end in itertools.pairwise(self.offsets[split])]

    def _windows(self, split: str, seq_len: int) -> int:
        """Number of windows of seq_len inputs and targets; in train, an epoch. Raises UserError if none."""
        n_tokens = len(self.tokens[split])
        n_windows = (n_tokens - 1) // seq_len
        if self.stays_inside:
            n_windows = len(self.starts_inside(split, seq_len)[0])
        if n_windows < 1:
            inside = " inside its documents" if self.stays_inside else ""
            raise UserError(f"corpus {self.folder}: {split} has {n_tokens} tokens, too few{inside} for one "
                            f"window of train.seq_len = {seq_len} and a target; shorten it or add text")
        has_offset = split == "train" and not self.stays_inside         # a random one in each epoch
        return max(1, n_windows - 1) if has_offset else n_windows

    def require_windows(self, seq_len: int) -> None:
        """Raise UserError unless each corpus can be trained on, and this one validated on."""
        for corpus in self.corpora:
            task = corpus.meta.get("task")
            if task and task["length"] != seq_len:
                raise UserError(f"corpus {corpus.folder}: its documents are windows of {task['length']} "
                                f"tokens, but train.seq_len is {seq_len}; set that one, or prepare the "
                                f"corpus again with --length {seq_len}")
            corpus.windows("train", seq_len)
        self.windows("val", seq_len)

    def batch(self, seq_len: int, batch_size: int, seed: int, step: int,
              rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch_size / world_size, seq_len) of a step, from the arguments alone."""
        return self.stack("train", seq_len, self.places(seq_len, batch_size, seed, step, rank, world_size))

    def places(self, seq_len: int, batch_size: int, seed: int, step: int,
               rank: int = 0, world_size: int = 1) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a batch.

        An epoch of a corpus is a permutation of its windows. The ranks take samples in turn, so that together
        they have the same batch for any world size. The first steps, in which the other corpora of a mixture
        are alone, count their samples by themselves.
        """
        is_first, places = step < self.mixture_only, []
        counts = self.first_counts if is_first else self.counts
        for sample in range(step * batch_size + rank, (step + 1) * batch_size, world_size):
            number, index = 0, sample if is_first else sample - self.mixture_only * batch_size
            if len(self.corpora) > 1:       # which one, and how many samples were drawn from it before
                mix, i = divmod(index, MIX)
                numbers = self.mix(seed, mix, is_first)
                number = int(numbers[i])
                index = mix * counts[number] + int((numbers[:i] == number).sum())
            corpus = self.corpora[number]
            epoch, window = divmod(index, corpus.windows("train", seq_len))
            starts = corpus.epoch(seq_len, seed, epoch, number + is_first * len(self.corpora))
            places.append((corpus, int(starts[window])))
        return places

    def n_scored(self, seq_len: int, batch_size: int, seed: int, step: int) -> int:
        """Number of targets that are scored in the batch of a step, of all ranks."""
        if all(corpus.masks["train"] is None for corpus in self.corpora):
            return batch_size * seq_len
        _, targets = self.batch(seq_len, batch_size, seed, step)
        return int((targets != IGNORED).sum())

    def stack(self, split: str, seq_len: int, places: Sequence[tuple[Corpus, int]]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of windows; targets that a mask leaves out are IGNORED."""
        ids = np.stack([corpus.read(split, start, start + seq_len + 1) for corpus, start in places])
        inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (ids[:, :-1], ids[:, 1:]))
        for row, (corpus, start) in enumerate(places):
            if (mask := corpus.masks[split]) is not None:
                targets[row][torch.from_numpy(~mask[start + 1:start + seq_len + 1])] = IGNORED
        if self.bos:
            inputs[:, 0] = self.meta["eot"]
        return inputs, targets

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of n_windows validation windows (0: all), evenly spaced and always the same."""
        available = self.windows("val", seq_len)
        count = min(n_windows or available, available)
        chosen = np.arange(count) * available // count
        starts = self.starts_inside("val", seq_len)[0][chosen] if self.stays_inside else chosen * seq_len
        places = [(self, start) for start in starts.tolist()]
        return [self.stack("val", seq_len, places[i:i + batch_size]) for i in range(0, count, batch_size)]

    def _epoch(self, seq_len: int, *seed: int) -> np.ndarray:
        """First tokens of the windows of an epoch, in the order of training.

        Each epoch draws new offsets, one for the corpus or one per document, so that a token has a different
        position in each epoch.
        """
        rng = np.random.default_rng(seed)
        n_windows = self.windows("train", seq_len)
        if not self.stays_inside:
            offset = int(rng.integers(len(self.tokens["train"]) - n_windows * seq_len))
            return offset + rng.permutation(n_windows) * seq_len
        starts, document, n_spare = self.starts_inside("train", seq_len)
        return rng.permutation(starts + rng.integers(n_spare + 1)[document])

    def _starts_inside(self, split: str, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Windows inside documents: their first tokens, their documents; and each document's spare tokens."""
        offsets = self.offsets[split]
        n_windows, n_spare = np.divmod(np.diff(offsets) - 1, seq_len)
        document = np.repeat(np.arange(len(n_windows)), n_windows)
        before = np.cumsum(n_windows) - n_windows                       # windows of earlier documents
        within = np.arange(len(document)) - before[document]
        return offsets[document] + within * seq_len, document, n_spare

    def _mix(self, seed: int, mix: int, is_first: bool) -> np.ndarray:
        """The numbers of the corpora of MIX samples, each as often as its share, in random order."""
        order = np.repeat(np.arange(len(self.corpora)), self.first_counts if is_first else self.counts)
        return np.random.default_rng([seed, mix, MIX + is_first]).permutation(order)


def training_positions(t: TrainConfig, step: int) -> Tensor | None:
    """Positions (B, T) of the batch of a step, increasing in each row, or None: 0 ... T - 1.

    See train.positions; T = train.seq_len, M = train.position_range.
    pose: 0 ... u - 1, then from u + s on, with u in 1 ... (T + 1) / 2 and s in 0 ... M - T, uniform for each
    row: short sequences see long distances. Zhu et al. 2023, arXiv:2309.10400, section 3.2, with two chunks.
    random: T of the integers 0 ... M - 1, drawn without replacement, for each row; Ruoss et al. 2023,
    arXiv:2305.16843, draw once for a whole batch.
    """
    if t.positions == "plain":
        return None
    rng, B, T, M = np.random.default_rng([t.seed, step]), t.batch_size, t.seq_len, t.position_range
    if t.positions == "pose":
        first = rng.integers(1, (T + 1) // 2 + 1, size=(B, 1))
        skip = rng.integers(M - T + 1, size=(B, 1))
        index = np.arange(T)
        return torch.from_numpy(index + (index >= first) * skip)
    rows = [rng.choice(M, T, replace=False, shuffle=False) for _ in range(B)]
    return torch.from_numpy(np.sort(rows, axis=1))


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a corpus, or the corpus.json of a run. Raises UserError."""
    again = "copy the meta.json of the run's corpus there"
    if path.name == "meta.json":
        again = f"make it with `python data/prepare.py SOURCE --out {path.parent}`"
    try:
        meta = read_json(path)
        if meta.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format_version {meta.get('format_version')}, this code reads {FORMAT_VERSION}")
        return meta
    except FileNotFoundError as error:
        raise UserError(f"{path.parent}: no prepared corpus there (no {path.name}); {again}") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {again}") from error
