"""From a prepared corpus to batches, each a pure function of the step.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, from which its first token is predicted, so every byte of text is a
target. A corpus may have a mask of targets, SPLIT.mask.bin, a byte for each token: 1 if it is scored, else 0.

The documents of a split stand in one row. Windows of T = train.seq_len tokens, and the next one as the last
target, are cut from it side by side. So a window may hold several documents, unless windows keep inside them.
An epoch reads each window once, in random order. Legend: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from base.errors import UserError
from base.files import read_json
from base.loss import IGNORED
from config import MIX, TrainConfig

FORMAT_VERSION = 1
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Batch:
    """Windows of a corpus, as the model takes them.

    `loss_divisor` is the number of scored targets of the whole step, divided by the number of processes. The
    losses of a step's targets, divided by it, added over its parts and averaged over processes, are the mean
    loss of the step.
    """

    inputs: Tensor                          # (B, T)
    targets: Tensor                         # (B, T); IGNORED where the corpus' mask leaves one out
    loss_divisor: float
    positions: Tensor | None = None         # (B, T); None: the model counts, data.positions says from where
    documents: Tensor | None = None         # (B, T), a number each; None: attention crosses them

    def apply(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each of its tensors changed."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
        return replace(self, **changed)

    def rows(self, rows: slice) -> Batch:
        """Some windows of the batch, with the loss_divisor of the whole."""
        return self.apply(lambda x: x[rows])

    def split(self, n: int) -> Iterator[Batch]:
        """The batch in n parts of equal size."""
        size = len(self.inputs) // n
        for first in range(0, len(self.inputs), size):
            yield self.rows(slice(first, first + size))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cuda":                       # it copies from pinned memory while the CPU goes on
            return self.apply(lambda x: x.pin_memory().to(device, non_blocking=True))
        return self.apply(lambda x: x.to(device))


class Corpus:
    """A prepared corpus, of which the files of the given splits are opened. Raises UserError if one is cut.

    `cross_documents` "never" keeps windows inside documents; generated documents are windows anyway
    (`stays_inside`). With `bos` the first input of each window is the separator.
    """

    def __init__(self, folder: str | Path, cross_documents: str = "attend", bos: bool = False,
                 splits: Sequence[str] = SPLITS) -> None:
        self.folder = Path(folder)
        self.meta = read_meta(self.folder / "meta.json")
        if self.meta.get("format_version") != FORMAT_VERSION:
            raise UserError(f"corpus {folder}: its meta.json is of another version or program; prepare it "
                            "again (data/prepare.py)")
        self.separator: int = self.meta["eot"]
        self.bos = bos
        self.is_packed = cross_documents == "mask"
        self.stays_inside = cross_documents == "never" or "task" in self.meta
        self.tokens: dict[str, np.ndarray] = {}                         # ids (n_tokens,), memory-mapped
        self.offsets: dict[str, np.ndarray] = {}                        # (n_documents + 1,) int64
        self.is_scored: dict[str, np.ndarray] = {}                      # (n_tokens,); not there: all are
        for split in splits:
            self._open(split)
        # what is slow to compute is kept, by its arguments: windows, and the newest epoch
        self.windows_of: dict[tuple[str, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.newest_epoch: dict[tuple[int, ...], np.ndarray] = {}

    def _open(self, split: str) -> None:
        """Map the files of a split into memory: fails if one is missing, or too short."""
        about = self.meta["splits"][split]
        path = self.folder / split
        try:
            mapped = np.memmap(f"{path}.bin", self.meta["dtype"], "r", shape=about["tokens"])
            self.tokens[split] = np.asarray(mapped)     # the same memory; slices of this are made faster
            if f"{split}.mask.bin" in about["sha256"]:
                self.is_scored[split] = np.memmap(f"{path}.mask.bin", bool, "r", shape=about["tokens"])
            self.offsets[split] = np.load(f"{path}.idx.npy", allow_pickle=False).astype(np.int64)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"corpus {self.folder}: {split}.bin or its index: {error}; prepare it again "
                            "(data/prepare.py)") from error

    # -------------------------------------------------------------------------------------------------------
    # Training: step -> windows -> where each begins -> batch

    def batch(self, t: TrainConfig, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """What one of world_size processes trains on in a step, from the arguments alone."""
        # each process reads the batch of the whole step: the mean loss is over all its scored targets
        whole = self.stack("train", t.seq_len, self.window_starts(t, step))
        if t.positions != "plain":
            whole = replace(whole, positions=training_positions(t, step))
        # the processes take windows in turn: together they have the same batch, however many they are
        part = whole.rows(slice(rank, None, world_size))
        # 1 at least: a batch without a scored target has the loss 0
        return replace(part, loss_divisor=max(1, whole.loss_divisor) / world_size)

    def window_starts(self, t: TrainConfig, step: int) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a step, for all processes."""
        first = step * t.batch_size                     # windows are numbered through all steps
        starts: list[tuple[Corpus, int]] = []
        for number in range(first, first + t.batch_size):
            starts.append((self, self.window_start(number, t.seq_len, t.seed)))
        return starts

    def window_start(self, number: int, seq_len: int, seed: int, stream: int = 0) -> int:
        """First token of a window, numbered through all epochs; each stream has other orders."""
        epoch, place = divmod(number, self.n_windows("train", seq_len))
        key = (seq_len, seed, epoch, stream)
        if key not in self.newest_epoch:
            self.newest_epoch = {key: self.epoch_starts(*key)}          # no step needs an older one
        return int(self.newest_epoch[key][place])

    def epoch_starts(self, seq_len: int, seed: int, epoch: int, stream: int) -> np.ndarray:
        """First tokens of an epoch's windows, (n_windows,), in the order in which they are read.

        The windows leave some tokens over. Each epoch shifts them at random within this room, all by one
        shift or those of each document by another, so that a token has a different position in each epoch.
        """
        rng = np.random.default_rng([seed, epoch, stream])
        starts, document, n_spare = self.windows("train", seq_len)
        shifts = rng.integers(n_spare + 1)                              # (n_documents,)
        return rng.permutation(starts + shifts[document])

    def stack(self, split: str, seq_len: int, starts: Sequence[tuple[Corpus, int]]) -> Batch:
        """The batch of windows that begin there, with loss_divisor the number of its scored targets."""
        # one token more than inputs: the target of the last one
        rows = [corpus.tokens[split][start:start + seq_len + 1] for corpus, start in starts]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))         # (B, T + 1)
        inputs = ids[:, :-1].clone()
        targets = ids[:, 1:].clone()
        # some corpora leave targets out, such as the questions of a task
        for row, (corpus, start) in enumerate(starts):
            if split in corpus.is_scored:
                is_left_out = torch.from_numpy(~corpus.is_scored[split][start + 1:start + seq_len + 1])
                targets[row][is_left_out] = IGNORED
        if self.bos:
            inputs[:, 0] = self.separator
        # a separator opens a document: number them, so that attention and positions can begin anew in each
        documents = None
        if self.is_packed:
            is_first = inputs == self.separator
            documents = is_first.cumsum(dim=-1)
        return Batch(inputs, targets, int((targets != IGNORED).sum()), documents=documents)

    # -------------------------------------------------------------------------------------------------------
    # Windows

    def n_windows(self, split: str, seq_len: int) -> int:
        """Number of windows of seq_len inputs and targets; in train, an epoch. Raises UserError if none."""
        starts, _, _ = self.windows(split, seq_len)
        if not len(starts):
            inside = " inside its documents" if self.stays_inside else ""
            raise UserError(f"corpus {self.folder}: {split} has {len(self.tokens[split])} tokens, too few"
                            f"{inside} for one window of train.seq_len = {seq_len} and a target; shorten it "
                            "or add text")
        return len(starts)

    def windows(self, split: str, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Windows: their first tokens, their documents; and how many tokens each document has left.

        Where windows may cross documents, the whole split counts as one document.
        """
        key = (split, seq_len)
        if key not in self.windows_of:
            offsets = self.offsets[split]
            if not self.stays_inside:
                offsets = offsets[[0, -1]]
            # for each document: how many windows it holds, how many tokens it has left, where it begins
            n_windows, n_spare = np.divmod(np.maximum(np.diff(offsets) - 1, 0), seq_len)
            if split == "train" and not self.stays_inside and n_windows[0] > 1:
                n_windows -= 1                                  # room for a random shift in each epoch
                n_spare += seq_len
            first_window = np.cumsum(n_windows) - n_windows     # the number of each document's first one
            # for each window: its document, and how many windows of the document precede it
            document = np.repeat(np.arange(len(n_windows)), n_windows)
            n_earlier = np.arange(len(document)) - first_window[document]
            self.windows_of[key] = (offsets[document] + n_earlier * seq_len, document, n_spare)
        return self.windows_of[key]

    def require_windows(self, seq_len: int, splits: Sequence[str] = SPLITS) -> None:
        """Raise UserError unless each split has a window; those of a task are its documents."""
        task = self.meta.get("task")
        if task and task["length"] != seq_len:
            raise UserError(f"corpus {self.folder}: its documents are windows of {task['length']} tokens, "
                            f"but train.seq_len is {seq_len}; set that one, or prepare the corpus again "
                            f"with --length {seq_len}")
        for split in splits:
            self.n_windows(split, seq_len)

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[Batch]:
        """Batches of n_windows validation windows (0: all), evenly spaced and always the same."""
        n_available = self.n_windows("val", seq_len)
        starts, _, _ = self.windows("val", seq_len)
        n = min(n_windows or n_available, n_available)
        chosen = starts[np.arange(n) * n_available // n].tolist()
        batches = []
        for first in range(0, n, batch_size):
            batch_starts = [(self, start) for start in chosen[first:first + batch_size]]
            batches.append(self.stack("val", seq_len, batch_starts))
        return batches

    # -------------------------------------------------------------------------------------------------------
    # Text

    def documents(self, split: str) -> list[np.ndarray]:
        """The ids of each document of a split, as views of the memory-mapped file."""
        return np.split(self.tokens[split], self.offsets[split][1:-1])

    def n_epochs(self, t: TrainConfig) -> float:
        """How often training reads each window."""
        return t.steps * t.batch_size / self.n_windows("train", t.seq_len)


class Mixture(Corpus):
    """A corpus, and others that have the given shares of its training windows; validation is on it alone.

    Shares are rounded to a multiple of 1 / MIX. The first `mixture_only` steps read the others alone, in
    proportion to their shares.
    """

    def __init__(self, folder: str | Path, shares: Mapping[str, float], cross_documents: str = "attend",
                 bos: bool = False, mixture_only: int = 0) -> None:
        super().__init__(folder, cross_documents, bos)
        names = sorted(shares)                          # the order in a config makes no difference
        self.others = [Corpus(name, cross_documents) for name in names]
        self.mixture_only = mixture_only
        for name, corpus in zip(names, self.others, strict=True):
            if corpus.meta["tokenizer"] != self.meta["tokenizer"]:      # its name and checksum
                raise UserError(f"data.mixture {name}: its tokenizer is {corpus.meta['tokenizer']['name']}, "
                                f"data.dir {folder} has {self.meta['tokenizer']['name']}, or another of that "
                                "name; prepare both with one")
        # of MIX windows, how many are of each corpus, this one first
        other_counts = [round(shares[name] * MIX) for name in names]
        self.counts = [MIX - sum(other_counts), *other_counts]
        # the same in the steps of the others alone: rounded sums, so that MIX is reached exactly
        sums = np.cumsum([0, *other_counts])
        self.counts_of_others = [0, *np.diff(np.round(MIX * sums / sums[-1]).astype(int)).tolist()]
        metas = [corpus.meta for corpus in self.others]
        self.meta = {**self.meta, "mixture": dict(zip(names, metas, strict=True))}

    def require_windows(self, seq_len: int, splits: Sequence[str] = SPLITS) -> None:
        super().require_windows(seq_len, splits)
        for corpus in self.others:
            corpus.require_windows(seq_len, ["train"])

    def window_starts(self, t: TrainConfig, step: int) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a step: each corpus is read epoch by epoch."""
        corpora = [self, *self.others]
        # two phases: first the others alone, then all. Each numbers its windows from 0, in orders of its own
        if step < self.mixture_only:
            counts = self.counts_of_others
            mix_stream = MIX + 1
            first_stream = len(corpora)
        else:
            counts = self.counts
            mix_stream = MIX
            first_stream = 0
            step -= self.mixture_only
        first = step * t.batch_size
        starts: list[tuple[Corpus, int]] = []
        for number in range(first, first + t.batch_size):
            # windows come in mixes of MIX; in each, a shuffled list says which corpus has which window
            mix, place = divmod(number, MIX)
            if place == 0 or not starts:        # a new mix, or the first one of this step
                rng = np.random.default_rng([t.seed, mix, mix_stream])
                corpus_of = rng.permutation(np.repeat(np.arange(len(corpora)), counts))         # (MIX,)
            i = int(corpus_of[place])
            # the corpus goes on after the windows that it had before: in earlier mixes, and in this one
            n_drawn = mix * counts[i] + int((corpus_of[:place] == i).sum())
            start = corpora[i].window_start(n_drawn, t.seq_len, t.seed, first_stream + i)
            starts.append((corpora[i], start))
        return starts

    def n_epochs(self, t: TrainConfig) -> float:
        """How often training reads each window of the first corpus."""
        return super().n_epochs(t) * self.counts[0] / MIX * (1 - self.mixture_only / t.steps)


def training_positions(t: TrainConfig, step: int) -> Tensor:
    """Positions (B, T) of the batch of a step, increasing in each row, by train.positions.

    T = train.seq_len, M = train.position_range.
    pose: 0 ... u - 1, then from u + s on, with u in 1 ... (T + 1) / 2 and s in 0 ... M - T, uniform for each
    row: short sequences see long distances. Zhu et al. 2023, arXiv:2309.10400, section 3.2, with two chunks.
    random: T of the integers 0 ... M - 1, drawn without replacement, for each row; Ruoss et al. 2023,
    arXiv:2305.16843, draw once for a whole batch.
    """
    # where step and epoch are equal this is also the stream of epoch_starts, whose key ends in 0: NumPy pads
    # keys with zeros. A key of its own would change published runs
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
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        folder = path.parent
        if path.name == "corpus.json":
            raise UserError(f"{path}: is missing or damaged; copy the meta.json of the corpus on which the "
                            "run was trained there") from error
        if any(folder.glob("*.txt")):
            raise UserError(f"{folder}: holds text, not a prepared corpus; run `python data/prepare.py "
                            f"{folder} --out {folder}-corpus` and give {folder}-corpus") from error
        raise UserError(f"{folder}: no prepared corpus there ({path.name} is missing or damaged); make it "
                        f"with `python data/prepare.py SOURCE --out {folder}`") from error
