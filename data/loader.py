"""Reading a prepared corpus: checks, memory-mapped tokens, document bounds, batches as pure functions.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, from which its first token is predicted, so every byte of text is a
target. A corpus may have a mask of targets, SPLIT.mask.bin, a byte for each token: 1 if it is scored, else 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
MIX = 1000      # windows in which each corpus of a mixture has its share exactly


@dataclass(frozen=True)
class Batch:
    """Windows of a corpus, as the model takes them.

    `loss_divisor` is the number of scored targets of the whole step over the number of processes; in a batch
    for validation, of its own targets. The losses of a step's targets over loss_divisor, added over its parts
    and averaged over processes, are the mean loss of the step.
    """

    inputs: Tensor                          # (B, T)
    targets: Tensor                         # (B, T); IGNORED where the corpus' mask leaves one out
    loss_divisor: float
    positions: Tensor | None = None         # (B, T); None: 0 ... T - 1
    documents: Tensor | None = None         # (B, T), a number each; None: attention crosses them

    def split(self, n: int) -> Iterator[Batch]:
        """The batch in n parts of equal size, each with the loss_divisor of the whole."""
        size = len(self.inputs) // n
        for first in range(0, len(self.inputs), size):
            rows: dict[str, Any] = {}
            for name, x in vars(self).items():
                if isinstance(x, Tensor):
                    rows[name] = x[first:first + size]
            yield replace(self, **rows)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        moved: dict[str, Any] = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                if device.type not in ("cpu", "mps"):
                    x = x.pin_memory()                  # from there a GPU copies while the CPU goes on
                moved[name] = x.to(device, non_blocking=True)
        return replace(self, **moved)


class Corpus:
    """A prepared corpus; opening it checks sizes and offsets, and ids are checked as they are read.

    Raises UserError with the problem and its fix. `cross_documents` "never" keeps windows inside documents;
    generated documents are windows anyway (`stays_inside`). With `bos` the first input of each window is the
    separator. Only the files of the given splits are opened.
    """

    def __init__(self, folder: str | Path, cross_documents: str = "attend", bos: bool = False,
                 splits: Sequence[str] = SPLITS) -> None:
        self.folder, self.bos = Path(folder), bos
        self.meta = read_meta(self.folder / "meta.json")
        self.is_packed = cross_documents == "mask"
        self.stays_inside = cross_documents == "never" or "task" in self.meta
        self.vocab_size: int = self.meta["vocab_size"]
        self.tokens: dict[str, np.ndarray] = {}                         # ids (n_tokens,), memory-mapped
        self.offsets: dict[str, np.ndarray] = {}                        # (n_documents + 1,) int64
        self.masks: dict[str, np.ndarray | None] = {}                   # (n_tokens,) or None: all are scored
        for split in splits:
            self._open(split)
        # what is slow to compute is kept: windows inside documents, and the newest epoch, by their arguments
        self.inside: dict[tuple[str, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.newest_epoch: tuple[tuple[int, ...], np.ndarray] = ((), np.array([]))

    def _open(self, split: str) -> None:
        """Open the files of a split, after checking their sizes and the documents' bounds."""
        about = self.meta["splits"][split]
        dtype = np.dtype(self.meta["dtype"])
        has_mask = f"{split}.mask.bin" in about["sha256"]
        item_sizes = {f"{split}.bin": dtype.itemsize}
        if has_mask:
            item_sizes[f"{split}.mask.bin"] = 1
        try:
            for name, item_size in item_sizes.items():
                n_bytes = (self.folder / name).stat().st_size
                expected = about["tokens"] * item_size
                if n_bytes != expected:
                    raise ValueError(f"{name} has {n_bytes:,} bytes, not {expected:,}")
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
        largest = int(ids.max())
        if largest >= self.vocab_size:
            raise UserError(f"corpus {self.folder}: {split}.bin holds id {largest}, beyond its vocabulary of "
                            f"{self.vocab_size}; prepare it again with data/prepare.py")
        return ids

    def documents(self, split: str) -> list[np.ndarray]:
        """The ids of each document of a split, as views of the memory-mapped file."""
        tokens = self.read(split, 0)
        return [tokens[start:end] for start, end in itertools.pairwise(self.offsets[split])]

    def windows(self, split: str, seq_len: int) -> int:
        """Number of windows of seq_len inputs and targets; in train, an epoch. Raises UserError if none."""
        n_tokens = len(self.tokens[split])
        if self.stays_inside:
            n_windows = len(self.starts_inside(split, seq_len)[0])
        else:
            n_windows = (n_tokens - 1) // seq_len
        if n_windows < 1:
            inside = " inside its documents" if self.stays_inside else ""
            raise UserError(f"corpus {self.folder}: {split} has {n_tokens} tokens, too few{inside} for one "
                            f"window of train.seq_len = {seq_len} and a target; shorten it or add text")
        if split == "train" and not self.stays_inside:
            return max(1, n_windows - 1)                # room for a random offset in each epoch
        return n_windows

    def starts_inside(self, split: str, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Windows inside documents: their first tokens, their documents; and each document's spare tokens."""
        key = (split, seq_len)
        if key not in self.inside:
            offsets = self.offsets[split]
            n_windows, n_spare = np.divmod(np.diff(offsets) - 1, seq_len)
            document = np.repeat(np.arange(len(n_windows)), n_windows)
            n_before = np.cumsum(n_windows) - n_windows                 # windows of earlier documents
            within = np.arange(len(document)) - n_before[document]
            self.inside[key] = (offsets[document] + within * seq_len, document, n_spare)
        return self.inside[key]

    def require_windows(self, seq_len: int, splits: Sequence[str] = SPLITS) -> None:
        """Raise UserError unless each split has a window; those of a task are its documents."""
        task = self.meta.get("task")
        if task and task["length"] != seq_len:
            raise UserError(f"corpus {self.folder}: its documents are windows of {task['length']} tokens, "
                            f"but train.seq_len is {seq_len}; set that one, or prepare the corpus again "
                            f"with --length {seq_len}")
        for split in splits:
            self.windows(split, seq_len)

    def start(self, seq_len: int, index: int, seed: int, stream: int = 0) -> int:
        """First token of window number `index`, counted over all epochs; each stream has other orders.

        An epoch is a permutation of the windows. Each draws new offsets, one for the corpus or one per
        document, so that a token has a different position in each epoch.
        """
        n_windows = self.windows("train", seq_len)
        epoch, number = divmod(index, n_windows)
        key = (seq_len, seed, epoch, stream)
        if self.newest_epoch[0] != key:                 # training goes forward: an older one is not needed
            rng = np.random.default_rng([seed, epoch, stream])
            if self.stays_inside:
                starts, document, n_spare = self.starts_inside("train", seq_len)
                offsets = rng.integers(n_spare + 1)     # of each document
                order = rng.permutation(starts + offsets[document])
            else:
                n_offsets = len(self.tokens["train"]) - n_windows * seq_len
                offset = int(rng.integers(n_offsets))
                order = offset + rng.permutation(n_windows) * seq_len
            self.newest_epoch = (key, order)
        return int(self.newest_epoch[1][number])

    def places(self, t: TrainConfig, step: int) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a step, for all processes."""
        first = step * t.batch_size
        places: list[tuple[Corpus, int]] = []
        for index in range(first, first + t.batch_size):
            places.append((self, self.start(t.seq_len, index, t.seed)))
        return places

    def batch(self, t: TrainConfig, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """What one of world_size processes trains on in a step, from the arguments alone."""
        places = self.places(t, step)
        positions = training_positions(t, step)
        # count the targets of the whole step: its mean loss is over all of them
        n_scored = 0
        for corpus, start in places:
            mask = corpus.masks["train"]
            if mask is None:
                n_scored += t.seq_len
            else:
                n_scored += int(mask[start + 1:start + t.seq_len + 1].sum())
        # the processes take windows in turn: together they have the same batch, however many they are
        turn = slice(rank, None, world_size)
        inputs, targets, documents = self.stack("train", t.seq_len, places[turn])
        if positions is not None:
            positions = positions[turn]
        return Batch(inputs, targets, n_scored / world_size, positions, documents)

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[Batch]:
        """Batches of n_windows validation windows (0: all), evenly spaced and always the same."""
        available = self.windows("val", seq_len)
        count = min(n_windows or available, available)
        if self.stays_inside:
            starts, _, _ = self.starts_inside("val", seq_len)
        else:
            starts = np.arange(available) * seq_len
        chosen = np.arange(count) * available // count
        places: list[tuple[Corpus, int]] = [(self, int(start)) for start in starts[chosen]]
        batches = []
        for first in range(0, count, batch_size):
            inputs, targets, documents = self.stack("val", seq_len, places[first:first + batch_size])
            n_scored = int((targets != IGNORED).sum())
            batches.append(Batch(inputs, targets, n_scored, documents=documents))
        return batches

    def stack(self, split: str, seq_len: int,
              places: Sequence[tuple[Corpus, int]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets and document numbers (B, T) of windows; see Batch."""
        rows = [corpus.read(split, start, start + seq_len + 1) for corpus, start in places]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))         # (B, T + 1)
        inputs = ids[:, :-1].clone()
        targets = ids[:, 1:].clone()
        for row, (corpus, start) in enumerate(places):
            mask = corpus.masks[split]
            if mask is not None:
                is_left_out = torch.from_numpy(~mask[start + 1:start + seq_len + 1])
                targets[row][is_left_out] = IGNORED
        if self.bos:
            inputs[:, 0] = self.meta["eot"]
        documents = None
        if self.is_packed:
            is_first = inputs == self.meta["eot"]       # a separator opens a document
            documents = is_first.cumsum(dim=-1)
        return inputs, targets, documents

    def n_epochs(self, t: TrainConfig) -> float:
        """How often training reads each token."""
        return t.steps * t.batch_size * t.seq_len / len(self.tokens["train"])


class Mixture(Corpus):
    """A corpus, and others that have the given shares of its training windows; validation is on it alone.

    Shares are rounded to a multiple of 1 / MIX. The first `only` steps read the others alone, in proportion
    to their shares, and count their windows by themselves.
    """

    def __init__(self, folder: str | Path, shares: Mapping[str, float], cross_documents: str = "attend",
                 bos: bool = False, only: int = 0) -> None:
        super().__init__(folder, cross_documents, bos)
        shares = dict(sorted(shares.items()))           # the order in a config makes no difference
        self.others = [Corpus(name, cross_documents) for name in shares]
        self.only = only
        counts = [round(share * MIX) for share in shares.values()]
        total = sum(counts)
        self.counts = [MIX - total, *counts]            # windows of each corpus, this one first, in MIX
        # the same in the first steps: sums are rounded, so that the counts add up to MIX
        sums = itertools.accumulate(counts, initial=0)
        parts = [round(MIX * n / max(1, total)) for n in sums]
        self.first_counts = [0, *np.diff(parts).tolist()]
        for name, count in zip([str(folder), *shares], self.counts, strict=True):
            if count < 1 or shares.get(name, 1.0) < 1 / MIX:
                raise UserError(f"data.mixture: leaves less than 1/{MIX} of the windows to {name}")
        for name, other in zip(shares, self.others, strict=True):
            if any(other.meta[key] != self.meta[key] for key in ("tokenizer", "vocab_size", "eot")):
                raise UserError(f"data.mixture {name}: its tokenizer is {other.meta['tokenizer']['name']}, "
                                f"data.dir {folder} has {self.meta['tokenizer']['name']}, or another of that "
                                "name; prepare both with one")
        metas = [other.meta for other in self.others]
        self.meta = {**self.meta, "mixture": dict(zip(shares, metas, strict=True))}

    def require_windows(self, seq_len: int, splits: Sequence[str] = SPLITS) -> None:
        super().require_windows(seq_len, splits)
        for other in self.others:
            other.require_windows(seq_len, ["train"])

    def places(self, t: TrainConfig, step: int) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a step: each corpus is read epoch by epoch."""
        corpora = [self, *self.others]
        if step < self.only:
            phase = 1
            counts = self.first_counts
        else:
            phase = 0
            counts = self.counts
            step -= self.only                           # both phases count their windows from 0
        first = step * t.batch_size
        places: list[tuple[Corpus, int]] = []
        for index in range(first, first + t.batch_size):
            mix, i = divmod(index, MIX)
            if i == 0 or not places:                    # another MIX windows: which corpus has which of them
                rng = np.random.default_rng([t.seed, mix, MIX + phase])
                in_order = np.repeat(np.arange(len(corpora)), counts)
                numbers = rng.permutation(in_order)     # (MIX,)
            number = int(numbers[i])
            # windows that this corpus had before: in earlier mixes, and in this one
            n_before = mix * counts[number]
            n_before += int((numbers[:i] == number).sum())
            stream = number + phase * len(corpora)
            start = corpora[number].start(t.seq_len, n_before, t.seed, stream)
            places.append((corpora[number], start))
        return places

    def n_epochs(self, t: TrainConfig) -> float:
        """How often training reads each token of the first corpus."""
        return super().n_epochs(t) * self.counts[0] / MIX * (1 - self.only / t.steps)


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
    rng = np.random.default_rng([t.seed, step])
    B, T, M = t.batch_size, t.seq_len, t.position_range
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
