"""Reading a prepared corpus: checks, memory-mapped tokens, document bounds, and batches as pure functions.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, so its first token has something to be predicted from, and every byte
of text is a target.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from runtime.errors import UserError, shortened
from runtime.files import read_json

FORMAT_VERSION = 1
SPLITS = ("train", "val")
MIX = 1000      # samples in which each corpus of a mixture has its share exactly
CHUNK = 2**22   # bytes read at a time
# of a list of uint64: matched, not handed to numpy, which evaluates it and believes its sizes
NPY_HEADER = re.compile(rb"\x93NUMPY\x01\x00..{'descr': '<u8', 'fortran_order': False, "
                        rb"'shape': \((\d{1,18}),\), } *\n", re.DOTALL)


class _Known(BaseModel):
    model_config = ConfigDict(strict=True)      # more keys than these do no harm


class TokenizerMeta(_Known):
    name: str
    sha256: str


class SplitMeta(_Known):
    tokens: int = Field(ge=1, lt=2**60)
    bytes: int = Field(ge=0)
    documents: int = Field(ge=1, lt=2**60)
    sha256: dict[str, str]


class Meta(_Known):
    """What meta.json must hold at least."""

    format_version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=2, le=2**32)
    eot: int = Field(ge=0)
    tokenizer: TokenizerMeta
    splits: dict[Literal["train", "val"], SplitMeta] = Field(min_length=2)


class Corpus:
    """A prepared corpus, verified: checksums, sizes, ids, offsets. Raises UserError with fault and fix.

    `cross_documents` "never" keeps windows inside documents. With a mixture, other corpora have the given
    shares of the training windows, to the nearest of MIX, and this one the rest; validation is on this one.
    """

    def __init__(self, folder: str | Path, cross_documents: str = "attend",
                 mixture: Mapping[str, float] | None = None, is_verified: bool = False) -> None:
        self.folder = Path(folder)
        self.cross_documents = cross_documents
        twice = lru_cache(maxsize=2)                                    # a batch may straddle two
        self.epoch, self.mix = twice(self._epoch), twice(self._mix)
        self.starts_inside = twice(self._starts_inside)                 # of each split
        mixture = dict(sorted((mixture or {}).items()))                 # their order in a config is no matter
        others = {name: Corpus(name, cross_documents, is_verified=is_verified) for name in mixture}
        shares = [max(1, round(share * MIX)) for share in mixture.values()]
        self.corpora: list[Corpus] = [self, *others.values()]
        self.counts = [MIX - sum(shares), *shares]                      # of each corpus in MIX samples
        if self.counts[0] < 1:
            raise UserError(f"data.mixture: leaves less than 1/{MIX} of the windows to data.dir {folder}; "
                            "lower the shares")
        self.meta = read_meta(self.folder / "meta.json")
        self.tokens: dict[str, np.ndarray] = {}         # split -> ids (n_tokens,)
        self.offsets: dict[str, np.ndarray] = {}        # split -> document bounds (n_documents + 1,)
        for split in SPLITS:
            self.tokens[split] = self._read_tokens(split, is_verified)
            self.offsets[split] = self._read_offsets(split, is_verified)
        for name, other in others.items():
            if any(other.meta[key] != self.meta[key] for key in ("tokenizer", "vocab_size", "eot")):
                names = [corpus.meta["tokenizer"]["name"] for corpus in (other, self)]
                raise UserError(f"data.mixture {name}: its tokenizer is {names[0]}, data.dir {folder} has "
                                f"{names[1]}, or another of that name; prepare both with one")
        if others:
            self.meta |= {"mixture": {name: other.meta for name, other in others.items()}}

    def _read_tokens(self, split: str, is_verified: bool) -> np.ndarray:
        """Ids, mapped, after one pass over them: all there, as written, and within the vocabulary."""
        name, about, vocab_size = f"{split}.bin", self.meta["splits"][split], self.meta["vocab_size"]
        dtype = np.dtype(self.meta["dtype"])
        path = self._path(name)
        if path.stat().st_size != about["tokens"] * dtype.itemsize:
            raise self._fault(f"{name} has {path.stat().st_size:,} bytes, not the {about['tokens']:,} ids of "
                              f"{dtype} that meta.json names")
        tokens = np.memmap(path, dtype=dtype, mode="r")
        if is_verified:
            return tokens
        digest, largest = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
        self._compare(digest.hexdigest(), name, about)
        if largest >= vocab_size:
            raise self._fault(f"{name} holds id {largest}, beyond its vocabulary of {vocab_size}")
        return tokens

    def _read_offsets(self, split: str, is_verified: bool) -> np.ndarray:
        """Document bounds (n_documents + 1,) int64: from 0 to the last token, growing."""
        name, about = f"{split}.idx.npy", self.meta["splits"][split]
        path = self._path(name)
        if not is_verified:
            with path.open("rb") as file:
                self._compare(hashlib.file_digest(file, "sha256").hexdigest(), name, about)
        with path.open("rb") as file:
            header = NPY_HEADER.match(file.read(256))
        n_offsets = about["documents"] + 1
        if not header or int(header[1]) != n_offsets or path.stat().st_size != header.end() + 8 * n_offsets:
            raise self._fault(f"{name} does not hold {n_offsets:,} uint64, as numpy.save writes them")
        offsets = np.fromfile(path, dtype="<u8", offset=header.end()).astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != about["tokens"] or (offsets[1:] <= offsets[:-1]).any():
            raise self._fault(f"{name} does not hold the growing bounds, from 0 to {about['tokens']:,}, of "
                              f"{about['documents']:,} documents")
        return offsets

    def _path(self, name: str) -> Path:
        if not (self.folder / name).is_file():
            raise self._fault(f"{name} is missing")
        return self.folder / name

    def _compare(self, sha256: str, name: str, about: dict[str, Any]) -> None:
        if sha256 != about["sha256"].get(name):
            raise self._fault(f"{name} is not what was written (checksum differs)")

    def _fault(self, problem: str) -> UserError:
        return UserError(f"corpus {self.folder}: {problem}; prepare it again with data/prepare.py")

    def windows(self, split: str, seq_len: int) -> int:
        """How many non-overlapping windows of seq_len inputs and targets the split holds, at least 1."""
        n_tokens, inside = len(self.tokens[split]), ""
        n_windows = (n_tokens - 1) // seq_len
        if self.cross_documents == "never":
            inside = " inside its documents"
            n_windows = len(self.starts_inside(split, seq_len)[0])
        if n_windows < 1:
            raise UserError(f"corpus {self.folder}: {split} has {n_tokens} tokens, too few{inside} for one "
                            f"window of train.seq_len = {seq_len} and a target more; shorten it or add text")
        return n_windows

    def require_windows(self, seq_len: int) -> None:
        """Raise UserError unless each corpus can be trained on, and this one validated on."""
        for corpus in self.corpora:
            corpus.windows("train", seq_len)
        self.windows("val", seq_len)

    def batch(self, seq_len: int, batch_size: int, seed: int, step: int,
              rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch_size / world_size, seq_len) of a step: a function of its arguments."""
        places = self.places(seq_len, batch_size, seed, step, rank, world_size)
        return _stack([corpus.tokens["train"][start:start + seq_len + 1] for corpus, start in places])

    def places(self, seq_len: int, batch_size: int, seed: int, step: int,
               rank: int = 0, world_size: int = 1) -> list[tuple[Corpus, int]]:
        """Corpus and first token of each window of a batch.

        An epoch of a corpus is a permutation of its windows. Ranks take turns, so their union is the same
        whatever the world size.
        """
        samples = range(step * batch_size + rank, (step + 1) * batch_size, world_size)
        places = []
        for sample in samples:
            number, index = self._draw(seed, sample)
            corpus = self.corpora[number]
            epoch, window = divmod(index, corpus.n_in_epoch(seq_len))
            starts = corpus.epoch(seq_len, seed, epoch, number)
            places.append((corpus, int(starts[window])))
        return places

    def n_in_epoch(self, seq_len: int) -> int:
        """How many windows an epoch has."""
        n_windows = self.windows("train", seq_len)
        # where windows may begin anywhere, one less: room for the offset
        return n_windows if self.cross_documents == "never" else max(1, n_windows - 1)

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[tuple[Tensor, Tensor]]:
        """n_windows (0: all) of the validation split, evenly spaced and always the same, in batches."""
        available = self.windows("val", seq_len)
        count = min(n_windows or available, available)
        chosen = np.arange(count) * available // count
        starts = (self.starts_inside("val", seq_len)[0][chosen] if self.cross_documents == "never"
                  else chosen * seq_len)
        windows = [self.tokens["val"][start:start + seq_len + 1] for start in starts]
        return [_stack(windows[i:i + batch_size]) for i in range(0, count, batch_size)]

    def _epoch(self, seq_len: int, *seed: int) -> np.ndarray:
        """Where the windows of an epoch start, in the order of training.

        They begin at an offset of the epoch's own, or of each document's, so that tokens fall on other
        positions each time.
        """
        rng = np.random.default_rng(seed)
        n_windows = self.n_in_epoch(seq_len)
        if self.cross_documents != "never":
            offset = int(rng.integers(len(self.tokens["train"]) - n_windows * seq_len))
            return offset + rng.permutation(n_windows) * seq_len
        starts, document, n_spare = self.starts_inside("train", seq_len)
        return rng.permutation(starts + rng.integers(n_spare + 1)[document])

    def _starts_inside(self, split: str, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Windows inside documents: their first tokens and documents; and how many tokens each has left."""
        offsets = self.offsets[split]
        n_windows, n_spare = np.divmod(np.diff(offsets) - 1, seq_len)
        document = np.repeat(np.arange(len(n_windows)), n_windows)
        before = np.cumsum(n_windows) - n_windows                       # windows of earlier documents
        within = np.arange(len(document)) - before[document]
        return offsets[document] + within * seq_len, document, n_spare

    def _draw(self, seed: int, sample: int) -> tuple[int, int]:
        """The corpus that gives a sample of the run, by number, and how many it gave before."""
        if len(self.corpora) == 1:
            return 0, sample
        mix, i = divmod(sample, MIX)
        numbers = self.mix(seed, mix)
        number = int(numbers[i])
        return number, mix * self.counts[number] + int((numbers[:i] == number).sum())

    def _mix(self, seed: int, mix: int) -> np.ndarray:
        """The corpora of MIX samples, by number, each as often as it is due, in random order."""
        order = np.repeat(np.arange(len(self.corpora)), self.counts)
        return np.random.default_rng([seed, mix, MIX]).permutation(order)


def _stack(windows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Windows of T + 1 ids -> inputs and targets (B, T)."""
    rows = torch.from_numpy(np.stack(windows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def number_documents(tokens: Tensor, eot: int) -> Tensor:
    """Which document of its window each token (B, T) is of, counting separators, which open documents."""
    return (tokens == eot).cumsum(dim=-1)


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a prepared corpus. Raises UserError where there is none, or one of another format."""
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
