"""Reading a prepared corpus: checks, memory-mapped tokens, document bounds, batches as pure functions.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, from which its first token is predicted, so every byte of text is a
target. A corpus may have a mask of targets, SPLIT.mask.bin, a byte for each token: 1 if it is scored, else 0.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from data import integrity
from runtime.errors import UserError, shortened
from runtime.files import read_json
from runtime.loss import IGNORED

FORMAT_VERSION = 1
SPLITS = ("train", "val")
MIX = 1000      # samples in which each corpus of a mixture has its share exactly
# header of a list of uint64; matched here, because numpy evaluates it and trusts its sizes
NPY_HEADER = re.compile(rb"\x93NUMPY\x01\x00..{'descr': '<u8', 'fortran_order': False, "
                        rb"'shape': \((\d{1,18}),\), } *\n", re.DOTALL)


class _Known(BaseModel):
    model_config = ConfigDict(strict=True)      # further keys are allowed


class TokenizerMeta(_Known):
    name: str
    sha256: str


class SplitMeta(_Known):
    tokens: int = Field(ge=1, lt=2**60)
    bytes: int = Field(ge=0)
    documents: int = Field(ge=1, lt=2**60)
    sha256: dict[str, str]


class TaskMeta(_Known):
    name: str
    length: int = Field(ge=2)


class Meta(_Known):
    """The keys that meta.json must have."""

    format_version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=2, le=2**32)
    eot: int = Field(ge=0)
    tokenizer: TokenizerMeta
    splits: dict[Literal["train", "val"], SplitMeta] = Field(min_length=2)
    task: TaskMeta | None = None    # its documents are windows of this length (data/tasks.py)


class Corpus:
    """A prepared corpus; opening it checks sizes, offsets, and checksum and ids of sampled blocks.

    The ids of a batch are checked as they are read. Raises UserError with the problem and its fix.
    `cross_documents` "never" keeps windows inside documents; generated documents are windows anyway. With a
    mixture, other corpora have the given shares of the training windows, to the nearest of MIX, and this one
    the rest; validation is on this one. Windows of the first `mixture_only` steps come from the others alone,
    in proportion to their shares. With `bos` the first input of each window is the separator. Only
    the files of the given splits are opened.
    """

    def __init__(self, folder: str | Path, cross_documents: str = "attend",
                 mixture: Mapping[str, float] | None = None, splits: Sequence[str] = SPLITS,
                 bos: bool = False, mixture_only: int = 0) -> None:
        self.folder = Path(folder)
        self.cross_documents, self.bos, self.mixture_only = cross_documents, bos, mixture_only
        twice = lru_cache(maxsize=2)                                    # a batch may straddle two
        self.epoch, self.mix = twice(self._epoch), twice(self._mix)
        self.starts_inside = twice(self._starts_inside)                 # of each split
        mixture = dict(sorted((mixture or {}).items()))     # the order in a config makes no difference
        others = {name: Corpus(name, cross_documents, splits=splits) for name in mixture}
        shares = [max(1, round(share * MIX)) for share in mixture.values()]
        self.corpora: list[Corpus] = [self, *others.values()]
        self.counts = [MIX - sum(shares), *shares]                      # of each corpus in MIX samples
        bounds = [round(MIX * part / max(1, sum(shares))) for part in itertools.accumulate([0, *shares])]
        self.first_counts = [0, *np.diff(bounds).tolist()]              # the same in the first steps
        if self.counts[0] < 1:
            raise UserError(f"data.mixture: leaves less than 1/{MIX} of the windows to data.dir {folder}; "
                            "lower the shares")
        self.meta = read_meta(self.folder / "meta.json")
        self.vocab_size: int = self.meta["vocab_size"]
        self.record = integrity.read_record(self.folder)
        self.mapped: dict[str, tuple[BufferedReader, dict[str, int]]] = {}  # name -> file, its size and times
        self.tokens = {split: self._read_tokens(split) for split in splits}         # ids (n_tokens,)
        self.offsets = {split: self._read_offsets(split) for split in splits}       # (n_documents + 1,)
        self.masks = {split: self._read_mask(split) for split in splits}            # (n_tokens,) or None
        for name, other in others.items():
            if any(other.meta[key] != self.meta[key] for key in ("tokenizer", "vocab_size", "eot")):
                names = [corpus.meta["tokenizer"]["name"] for corpus in (other, self)]
                raise UserError(f"data.mixture {name}: its tokenizer is {names[0]}, data.dir {folder} has "
                                f"{names[1]}, or another of that name; prepare both with one")
        if others:
            self.meta |= {"mixture": {name: other.meta for name, other in others.items()}}

    def _read_tokens(self, split: str) -> np.ndarray:
        """Ids, memory-mapped, after checking their number and sampled blocks."""
        name, n_tokens = f"{split}.bin", self.meta["splits"][split]["tokens"]
        dtype = np.dtype(self.meta["dtype"])
        path = integrity.existing(self.folder, name)
        if path.stat().st_size != n_tokens * dtype.itemsize:
            raise integrity.fault(self.folder, f"{name} has {path.stat().st_size:,} bytes, but meta.json "
                                               f"names {n_tokens:,} ids of {dtype}")
        file = path.open("rb")          # kept open, so that a change of the mapped file can be noticed
        self.mapped[name] = file, integrity.times(os.fstat(file.fileno()))
        self._compare_sampled(split, name, lambda block: self.check_ids(np.frombuffer(block, dtype), split))
        return np.memmap(file, dtype=dtype, mode="r")

    def _read_offsets(self, split: str) -> np.ndarray:
        """Document bounds (n_documents + 1,) int64: increasing, from 0 to the number of tokens."""
        name, about = f"{split}.idx.npy", self.meta["splits"][split]
        path = integrity.existing(self.folder, name)
        self._compare_sampled(split, name)
        with path.open("rb") as file:
            header = NPY_HEADER.match(file.read(256))
        n_offsets = about["documents"] + 1
        if not header or int(header[1]) != n_offsets or path.stat().st_size != header.end() + 8 * n_offsets:
            raise integrity.fault(self.folder, f"{name} does not hold {n_offsets:,} uint64, as numpy.save "
                                               "writes them")
        offsets = np.fromfile(path, dtype="<u8", offset=header.end()).astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != about["tokens"] or (offsets[1:] <= offsets[:-1]).any():
            raise integrity.fault(self.folder, f"{name} does not hold the growing bounds, from 0 to "
                                               f"{about['tokens']:,}, of {about['documents']:,} documents")
        return offsets

    def _read_mask(self, split: str) -> np.ndarray | None:
        """Which tokens are scored, memory-mapped; None if meta.json lists no mask: then all are."""
        name, about = f"{split}.mask.bin", self.meta["splits"][split]
        if name not in about["sha256"]:
            return None
        path = integrity.existing(self.folder, name)
        if path.stat().st_size != about["tokens"]:
            raise integrity.fault(self.folder, f"{name} has {path.stat().st_size:,} bytes, but meta.json "
                                               f"names {about['tokens']:,} ids")
        file = path.open("rb")          # kept open, as in _read_tokens
        self.mapped[name] = file, integrity.times(os.fstat(file.fileno()))
        self._compare_sampled(split, name)
        return np.memmap(file, dtype=bool, mode="r")

    def _compare_sampled(self, split: str, name: str,
                         inspect: Callable[[bytes], None] | None = None) -> None:
        """Compare the sampled blocks of a file with the recorded checksum; `inspect` gets each of them."""
        path, entry = self.folder / name, self.record.get(name)
        found, is_whole = integrity.read_sampled(path, inspect)
        expected = self.meta["splits"][split]["sha256"].get(name) if is_whole else \
            entry["sampled_sha256"] if entry else found
        if found != expected:
            raise integrity.fault(self.folder, f"{name} is not what was written (checksum differs)")
        if not is_whole and not (entry and integrity.is_unchanged(path, entry)):
            print(f"reading all of {path}: copied or changed since its checksum was compared", flush=True)
            integrity.compare_whole(self.folder, {name: self.meta["splits"][split]["sha256"].get(name, "")})

    def require_unchanged(self) -> None:
        """Raise UserError if a mapped file was written to, and its content is not what it was.

        Files that were replaced or deleted make no difference: the old content stays mapped.
        """
        for corpus in self.corpora:
            for name, (file, before) in corpus.mapped.items():
                now = integrity.times(os.fstat(file.fileno()))
                if now != before:
                    file.seek(0)
                    expected = corpus.meta["splits"][name.partition(".")[0]]["sha256"].get(name)
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                        raise integrity.fault(corpus.folder, f"{name} was overwritten while it was in use")
                    corpus.mapped[name] = file, now

    def check_ids(self, ids: np.ndarray, split: str) -> None:
        """Raise UserError if an id that was read from a split is beyond the vocabulary."""
        if (largest := int(ids.max())) >= self.vocab_size:
            raise integrity.fault(self.folder, f"{split}.bin holds id {largest}, beyond its vocabulary of "
                                               f"{self.vocab_size}")

    def read(self, split: str, start: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (seq_len,) of a window; targets that the mask leaves out are IGNORED."""
        ids, mask = self.tokens[split][start:start + seq_len + 1], self.masks[split]
        self.check_ids(ids, split)
        ids = ids.astype(np.int64)
        if mask is None:
            return ids[:-1], ids[1:]
        return ids[:-1], np.where(mask[start + 1:start + seq_len + 1], ids[1:], IGNORED)

    def documents(self, split: str) -> list[np.ndarray]:
        """The ids of each document of a split, as views of the memory-mapped file."""
        self.check_ids(self.tokens[split], split)
        return [self.tokens[split][start:end] for start, end in itertools.pairwise(self.offsets[split])]

    @property
    def stays_inside(self) -> bool:
        """Whether windows lie inside documents. Those of a task are windows themselves (data/tasks.py)."""
        return self.cross_documents == "never" or "task" in self.meta

    def windows(self, split: str, seq_len: int) -> int:
        """Number of non-overlapping windows of seq_len inputs and targets. Raises UserError if zero."""
        n_tokens, inside = len(self.tokens[split]), ""
        n_windows = (n_tokens - 1) // seq_len
        if self.stays_inside:
            inside = " inside its documents"
            n_windows = len(self.starts_inside(split, seq_len)[0])
        if n_windows < 1:
            raise UserError(f"corpus {self.folder}: {split} has {n_tokens} tokens, too few{inside} for one "
                            f"window of train.seq_len = {seq_len} and a target; shorten it or add text")
        return n_windows

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
        places = self.places(seq_len, batch_size, seed, step, rank, world_size)
        return self.stack([corpus.read("train", start, seq_len) for corpus, start in places])

    def places(self, seq_len: int, batch_size: int, seed: int, step: int,
               rank: int = 0, world_size: int = 1) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a batch.

        An epoch of a corpus is a permutation of its windows. The ranks take samples in turn, so that together
        they have the same batch for any world size.
        """
        samples = range(step * batch_size + rank, (step + 1) * batch_size, world_size)
        is_first, places = step < self.mixture_only, []
        for sample in samples:
            number, index = self._draw(seed, sample - (0 if is_first else self.mixture_only * batch_size),
                                       is_first)
            corpus = self.corpora[number]
            epoch, window = divmod(index, corpus.n_in_epoch(seq_len))
            starts = corpus.epoch(seq_len, seed, epoch, number + is_first * len(self.corpora))
            places.append((corpus, int(starts[window])))
        return places

    def n_scored(self, seq_len: int, batch_size: int, seed: int, step: int) -> int:
        """Number of targets that are scored in the batch of a step, of all ranks."""
        if all(corpus.masks["train"] is None for corpus in self.corpora):
            return batch_size * seq_len
        _, targets = self.batch(seq_len, batch_size, seed, step)
        return int((targets != IGNORED).sum())

    def stack(self, windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (T,) of windows -> inputs and targets (B, T)."""
        inputs, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*windows, strict=True))
        if self.bos:
            inputs[:, 0] = self.meta["eot"]
        return inputs, targets

    def n_in_epoch(self, seq_len: int) -> int:
        """Number of windows of an epoch."""
        n_windows = self.windows("train", seq_len)
        # one less if windows cross documents, to leave room for the random offset
        return n_windows if self.stays_inside else max(1, n_windows - 1)

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of n_windows validation windows (0: all), evenly spaced and always the same."""
        available = self.windows("val", seq_len)
        count = min(n_windows or available, available)
        chosen = np.arange(count) * available // count
        starts = (self.starts_inside("val", seq_len)[0][chosen] if self.stays_inside
                  else chosen * seq_len)
        windows = [self.read("val", start, seq_len) for start in starts.tolist()]
        return [self.stack(windows[i:i + batch_size]) for i in range(0, count, batch_size)]

    def _epoch(self, seq_len: int, *seed: int) -> np.ndarray:
        """First tokens of the windows of an epoch, in the order of training.

        Each epoch draws new offsets, one for the corpus or one per document, so that a token has a different
        position in each epoch.
        """
        rng = np.random.default_rng(seed)
        n_windows = self.n_in_epoch(seq_len)
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

    def _draw(self, seed: int, sample: int, is_first: bool) -> tuple[int, int]:
        """The number of the corpus that a sample is drawn from, and how many were drawn from it before.

        The first steps, in which other corpora are alone, count their samples by themselves.
        """
        if len(self.corpora) == 1:
            return 0, sample
        mix, i = divmod(sample, MIX)
        numbers, counts = self.mix(seed, mix, is_first), self.first_counts if is_first else self.counts
        number = int(numbers[i])
        return number, mix * counts[number] + int((numbers[:i] == number).sum())

    def _mix(self, seed: int, mix: int, is_first: bool) -> np.ndarray:
        """The numbers of the corpora of MIX samples, each as often as its share, in random order."""
        order = np.repeat(np.arange(len(self.corpora)), self.first_counts if is_first else self.counts)
        return np.random.default_rng([seed, mix, MIX + is_first]).permutation(order)


def number_documents(tokens: Tensor, eot: int) -> Tensor:
    """Number the documents of each window, (B, T), by counting the separators, which open documents."""
    return (tokens == eot).cumsum(dim=-1)


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a prepared corpus. Raises UserError if it is missing, damaged or of another format."""
    folder = path.parent
    try:
        meta = read_json(path)
        version = meta["format_version"]
        if version == FORMAT_VERSION:
            Meta.model_validate(meta)
    except FileNotFoundError as error:
        raise UserError(f"data.dir {folder}: no prepared corpus there (no {path.name}); make one with "
                        f"`python data/prepare.py SOURCE --out {folder}`, SOURCE being stdlib, a file, a "
                        "folder, or hf:NAME") from error
    except ValidationError as errors:
        first = errors.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: damaged ({key}: {first['msg']}, got {shortened(first['input'])}); "
                        "prepare the corpus again with data/prepare.py") from errors
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); "
                        "prepare the corpus again with data/prepare.py") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {shortened(version)}, this code reads {FORMAT_VERSION}; "
                        "prepare the corpus again with data/prepare.py")
    return meta
