"""Reading a prepared corpus: checks, memory-mapped tokens, document bounds, and batches as pure functions.

A corpus is a folder with, for each split (train, val), SPLIT.bin (token ids, uint16 or uint32) and
SPLIT.idx.npy (uint64 offsets, document d is tokens[offsets[d]:offsets[d + 1]]), and meta.json, written last.
Each document opens with the separator, so its first token has something to be predicted from, and every byte
of text is a target.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import UserError

FORMAT_VERSION = 1
SPLITS = ("train", "val")


class Corpus:
    """A prepared corpus, verified: every file's size and checksum. Raises UserError with fault and fix."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.meta = read_meta(self.folder / "meta.json")
        self.tokens: dict[str, np.ndarray] = {}         # split -> ids (n_tokens,)
        self.offsets: dict[str, np.ndarray] = {}        # split -> document bounds (n_documents + 1,)
        for split in SPLITS:
            about = self.meta["splits"][split]
            for name in (f"{split}.bin", f"{split}.idx.npy"):
                self._verify(name, about["sha256"][name])
            self.tokens[split] = np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")
            offsets = np.load(self.folder / f"{split}.idx.npy", allow_pickle=False)
            self.offsets[split] = offsets.astype(np.int64)

    def _verify(self, name: str, sha256: str) -> None:
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"corpus {self.folder}: {name} is missing; prepare it again with data/prepare.py")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise UserError(f"corpus {self.folder}: {name} is not what was written (checksum differs); "
                                "prepare it again with data/prepare.py")

    def windows(self, split: str, seq_len: int) -> int:
        """How many non-overlapping windows of seq_len inputs and targets the split holds, at least 1."""
        n_windows = (len(self.tokens[split]) - 1) // seq_len
        if n_windows < 1:
            raise UserError(f"corpus {self.folder}: {split} has {len(self.tokens[split])} tokens, "
                            f"too few for one window of train.seq_len = {seq_len} and its last target; "
                            "shorten it or add text")
        return n_windows

    def batch(self, seq_len: int, batch_size: int, seed: int, step: int,
              rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch_size / world_size, seq_len) of a step: a pure function of its arguments.

        An epoch is a permutation of the windows, which start at an offset of its own, so that tokens fall on
        other positions each time. Ranks take turns, so their union is the same whatever the world size.
        """
        tokens = self.tokens["train"]
        n_windows = max(1, self.windows("train", seq_len) - 1)          # one less: room for the offset
        samples = np.arange(step * batch_size + rank, (step + 1) * batch_size, world_size)
        starts = []
        for sample in samples:
            epoch, index = divmod(int(sample), n_windows)
            offset, order = _epoch(seed, epoch, n_windows, len(tokens) - n_windows * seq_len)
            starts.append(offset + int(order[index]) * seq_len)
        return self._gather("train", starts, seq_len)

    def val_batches(self, seq_len: int, batch_size: int, n_windows: int) -> list[tuple[Tensor, Tensor]]:
        """n_windows (0: all) of the validation split, evenly spaced and always the same, in batches."""
        available = self.windows("val", seq_len)
        count = min(n_windows or available, available)
        starts = np.arange(count) * available // count * seq_len
        return [self._gather("val", starts[i:i + batch_size], seq_len) for i in range(0, count, batch_size)]

    def _gather(self, split: str, starts: Any, seq_len: int) -> tuple[Tensor, Tensor]:
        windows = np.stack([self.tokens[split][s:s + seq_len + 1] for s in starts])
        rows = torch.from_numpy(windows.astype(np.int64))
        return rows[:, :-1], rows[:, 1:]                                # (B, T) each


@lru_cache(maxsize=2)       # a batch may straddle two epochs
def _epoch(seed: int, epoch: int, n_windows: int, n_offsets: int) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng([seed, epoch])
    return int(rng.integers(n_offsets)), rng.permutation(n_windows)


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a prepared corpus. Raises UserError where there is none, or one of another format."""
    folder = path.parent
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
    except FileNotFoundError as error:
        raise UserError(f"data.dir {folder}: no prepared corpus there (no {path.name}); make one with "
                        f"`python data/prepare.py SOURCE --out {folder}`, SOURCE being stdlib, a .txt file "
                        "or a folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); "
                        "prepare the corpus again with data/prepare.py") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r}, this code reads {FORMAT_VERSION}; "
                        "prepare the corpus again with data/prepare.py")
    return meta
