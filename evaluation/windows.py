"""The text that eval.py scores: its documents, the lengths that fit, and the windows of each protocol.

Windows are functions of the text, the lengths and a seed, never of the model, so that every model is scored
on the same targets. No window crosses a document. eval.py describes the protocols.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.encode import first_unknown
from data.loader import Corpus
from data.sources import SUFFIXES
from data.tokenizer import Tokenizer
from runtime.errors import UserError, shortened

MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32, 64)      # of L, the training length: the default lengths


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
        if path.name.lower().endswith((*(end for end in SUFFIXES if end != ".txt"), ".gz", ".zst")):
            raise UserError(f"--data {path}: not plain text; prepare it first with data/prepare.py, and give "
                            "the prepared folder")
        name = path.name.removesuffix(".txt")       # not its stem: books-0.5 and books-0.75 differ
        text = path.read_bytes()
        try:
            return Text(name, [np.concatenate(([tokenizer.eot], tokenizer.encode(text)))])
        except UserError as error:
            raise UserError(f"--data {path}, byte {first_unknown(text, tokenizer)}: {error}") from error
    if source and not (path / "meta.json").exists():
        raise UserError(f"--data {path}: neither a prepared corpus (no meta.json) nor a text file; give one "
                        "of these")
    corpus = Corpus(path, splits=("val",))
    about = corpus.meta["tokenizer"]
    if about["sha256"] != tokenizer.sha256:
        raise UserError(f"--data {path}: prepared with tokenizer {about['name']}, but the run was trained "
                        f"with {tokenizer.name}; prepare it again, with the run's folder as --tokenizer")
    if not source and trained_on and corpus.meta["splits"]["val"] != trained_on["splits"]["val"]:
        raise UserError(f"data.dir {path}: {path.resolve()} has another validation text than the corpus of "
                        f"the run had; prepare that one again, or give --data {path} to evaluate on this "
                        "one, of which the run may have seen parts in training")
    return Text(path.name, corpus.documents("val"))


def choose_lengths(wanted: str | None, L: int, text: Text, generated: int = 0,
                   needs_L: bool = True) -> list[int]:
    """The lengths of --lengths, or L/2 ... 64 L as far as the documents go. Raises UserError.

    The documents must have L tokens too if `needs_L`, or if the lengths follow from it.

    If nothing but generated documents is measured, the default is up to `generated` times L.
    """
    longest = 2**31 if generated else max(len(document) for document in text.documents) - 1
    if wanted is None:
        lengths = [int(m * L) for m in MULTIPLES if m * L <= longest and m <= (generated or max(MULTIPLES))]
        if L not in lengths:
            raise UserError(f"data {text.name}: its longest document has {longest} tokens, fewer than the "
                            f"training length {L}; give a longer text with --data, or --train-length with "
                            "the length that the model was really trained at")
        return lengths
    try:
        lengths = [int(part) for part in wanted.split(",")]
    except ValueError as error:
        raise UserError(f"--lengths {shortened(wanted)}: must be integers and commas, such as "
                        "256,512") from error
    if min(lengths) < 1 or max(*lengths, L * needs_L) > longest:
        with_L = f" and the training length {L} (--train-length overrules it)" if needs_L else ""
        raise UserError(f"--lengths {wanted}: the lengths{with_L} must be in 1 ... {longest}, the longest "
                        f"document of {text.name}")
    return lengths


# -----------------------------------------------------------------------------------------------------------
# The windows of each protocol


def nonoverlap_windows(text: Text, longest: int, lengths: Sequence[int], max_tokens: int,
                       seed: int) -> dict[int, list[Window]]:
    """Length -> blocks that tile the same targets: stretches of `longest` tokens, max_tokens in all."""
    stretches = [(d, start) for d, document in enumerate(text.documents)
                 for start in range(0, (len(document) - 1) // longest * longest, longest)]
    order = np.random.default_rng(seed).permutation(len(stretches))
    chosen = sorted(stretches[i] for i in order[:max(1, max_tokens // longest)])
    windows: dict[int, list[Window]] = {}
    for length in lengths:
        windows[length] = []
        for document, start in chosen:
            for block in range(start, start + longest, length):
                end = min(block + length, start + longest)              # the last block may be shorter
                windows[length].append(Window(document, block, end, end - block))
    return windows


def rolling_windows(text: Text, length: int) -> list[Window]:
    """Windows that score every token after the separator once; the last one of a document reaches back."""
    windows = []
    for d, document in enumerate(text.documents):
        n_targets = len(document) - 1
        for start in range(0, n_targets, length):
            end = min(start + length, n_targets)
            windows.append(Window(d, max(0, end - length), end, end - start))
    return windows


def sliding_windows(text: Text, longest: int, lengths: Sequence[int], stride: int | None, max_tokens: int,
                    seed: int) -> dict[int, list[Window]]:
    """Length -> windows that move through the same targets by `stride` (default a quarter of the length)."""
    piece = max(1, longest // 4)                                        # targets in a row
    ends = fixed_ends(text, longest + piece, piece, max(1, max_tokens // piece), seed)
    if not ends:
        raise UserError(f"data {text.name}: no document has the {longest + piece + 1} tokens that sliding "
                        f"needs for a context of {longest}; give shorter --lengths")
    windows: dict[int, list[Window]] = {}
    for length in lengths:
        step = min(stride or max(1, length // 4), length)
        stops = [(d, start, min(start + step, end)) for d, end in ends
                 for start in range(end - piece, end, step)]
        windows[length] = [Window(d, stop - length, stop, stop - start) for d, start, stop in stops]
    return windows


def fixed_ends(text: Text, longest: int, n_scored: int, n_windows: int, seed: int) -> list[tuple[int, int]]:
    """(document, end) of windows of up to `longest` inputs; no token is scored twice.

    Documents take turns, so that a few long ones do not dominate the result. Inside a document, places are
    drawn at random.
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
