"""Which tokens eval.py scores, and after how many: functions of text, lengths and a seed, never of the model.

The protocols are described in eval.py. No window crosses a document.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runtime.errors import UserError


class Window(NamedTuple):
    """Inputs document[start:end] and the targets one token further on, of which the last n_scored count."""

    document: int
    start: int
    end: int
    n_scored: int


class Text(NamedTuple):
    """Documents to evaluate on, ids that open with the separator."""

    name: str
    documents: list[np.ndarray]

    def sha256(self) -> str:
        """Fingerprint of the ids, by which compare.py tells two texts of one name apart."""
        ids = hashlib.sha256()
        for document in self.documents:
            ids.update(len(document).to_bytes(8, "little"))
            ids.update(document.astype("<u4").tobytes())
        return ids.hexdigest()


def nonoverlap_windows(text: Text, longest: int, lengths: Sequence[int], max_tokens: int,
                       seed: int) -> dict[int, list[Window]]:
    """Length -> blocks that tile the same targets: whole stretches of `longest`, until max_tokens of them."""
    stretches = [(d, start) for d, document in enumerate(text.documents)
                 for start in range(0, (len(document) - 1) // longest * longest, longest)]
    order = np.random.default_rng(seed).permutation(len(stretches))
    chosen = sorted(stretches[i] for i in order[:max(1, max_tokens // longest)])
    windows: dict[int, list[Window]] = {}
    for length in lengths:
        windows[length] = []
        for document, start in chosen:
            for block in range(start, start + longest, length):
                end = min(block + length, start + longest)              # the last block is shorter if need be
                windows[length].append(Window(document, block, end, end - block))
    return windows


def rolling_windows(text: Text, length: int) -> list[Window]:
    """Windows in which every token after the separator is scored once; a document's last reaches back."""
    windows = []
    for d, document in enumerate(text.documents):
        n_targets = len(document) - 1
        for start in range(0, n_targets, length):
            end = min(start + length, n_targets)
            windows.append(Window(d, max(0, end - length), end, end - start))
    return windows


def sliding_windows(text: Text, longest: int, lengths: Sequence[int], stride: int | None, max_tokens: int,
                    seed: int) -> dict[int, list[Window]]:
    """Length -> windows that step through the same targets, by `stride` or else a quarter of the length."""
    piece = max(1, longest // 4)                                        # targets in a row
    ends = fixed_ends(text, longest + piece, piece, max(1, max_tokens // piece), seed)
    if not ends:
        raise UserError(f"data {text.name}: no document has the {longest + piece + 1} tokens that sliding "
                        f"needs for a length of {longest}; give shorter --lengths")
    windows: dict[int, list[Window]] = {}
    for length in lengths:
        step = min(stride or max(1, length // 4), length)
        stops = [(d, start, min(start + step, end)) for d, end in ends
                 for start in range(end - piece, end, step)]
        windows[length] = [Window(d, stop - length, stop, stop - start) for d, start, stop in stops]
    return windows


def fixed_ends(text: Text, longest: int, n_scored: int, n_windows: int, seed: int) -> list[tuple[int, int]]:
    """(document, end) of windows of up to `longest` inputs; no token is a scored target twice.

    Documents take turns, so that a few long ones do not decide the figure; places inside one are drawn at
    random.
    """
    rng = np.random.default_rng(seed)
    turns = []
    for d, document in enumerate(text.documents):
        ends = np.arange(longest, len(document), n_scored)              # n_scored apart: no target twice
        turns += [(turn, d, int(end)) for turn, end in enumerate(rng.permutation(ends))]
    return sorted((d, end) for _, d, end in sorted(turns)[:n_windows])


def ended_windows(ends: Sequence[tuple[int, int]], length: int, n_scored: int) -> list[Window]:
    """The windows of one length that end at these (document, end) places."""
    return [Window(document, end - length, end, n_scored) for document, end in ends]


def position_buckets(longest: int) -> list[tuple[int, int]]:
    """[from, to) of positions, two to an octave from 4 on; position i has i + 1 tokens of context."""
    steps = (round(2 ** (i / 2)) for i in range(4, 2 * longest.bit_length()))
    return list(itertools.pairwise(sorted({0, longest, *(step for step in steps if step < longest)})))
