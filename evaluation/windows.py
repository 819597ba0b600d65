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

from base.errors import UserError
from data.loader import Corpus
from data.tokenizer import Tokenizer

MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32, 64)      # of L, the training length: the default lengths
FEW = 8         # documents that the longest default length must have, so that one does not decide
NO_TEXT = (".jsonl", ".parquet", ".gz", ".zst", ".zip")     # suffixes of sources of data/prepare.py


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
    if source and not (path / "meta.json").exists():
        raise UserError(f"--data {path}: neither a prepared corpus (no meta.json) nor a text file")
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


def choose_lengths(wanted: str | None, L: int, text: Text, generated: int = 0,
                   needs_L: bool = True, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    """The lengths of --lengths, or multiples of L as far as at least FEW documents go. Raises UserError.

    The documents must have L tokens too if `needs_L`, or if the lengths follow from it. If nothing but
    generated documents is measured, the default is up to `generated` times L.
    """
    sizes = sorted(map(len, text.documents), reverse=True)
    longest = 2**31 if generated else sizes[0] - 1
    if wanted is None:
        several = longest if generated else max(sizes[:FEW][-1] - 1, min(L, longest))
        lengths = [int(m * L) for m in multiples if m * L <= several and m <= (generated or max(multiples))]
        if L in lengths:
            if not generated and lengths[-1] * 2 <= min(longest, max(multiples) * L):
                print(f"lengths up to {lengths[-1]}: fewer than {FEW} documents of {text.name} are twice as "
                      "long; --lengths gives others")
            return lengths
        raise UserError(f"data {text.name}: its longest document has {longest} tokens, fewer than the "
                        f"training length {L}; give a longer text with --data, or --train-length")
    try:
        lengths = [int(part) for part in wanted.split(",")]
    except ValueError as error:
        raise UserError(f"--lengths {wanted}: must be integers and commas, such as 256,512") from error
    if min(lengths) < 1 or max(*lengths, L * needs_L) > longest:
        with_L = f" and the training length {L} (--train-length overrules it)" if needs_L else ""
        raise UserError(f"--lengths {wanted}: the lengths{with_L} must be in 1 ... {longest}, the longest "
                        f"document of {text.name}")
    return lengths


def fixed_ends(text: Text, longest: int, n_scored: int, n_windows: int, seed: int) -> list[tuple[int, int]]:
    """(document, end) of windows of up to `longest` inputs; no token is scored twice.

    Documents take turns, so that a few long ones do not dominate the result. Inside a document, places are
    drawn at random.
    """
    rng = np.random.default_rng(seed)
    turns, chosen = [], np.flatnonzero([len(document) > longest for document in text.documents])
    if n_windows < len(chosen):
        chosen = rng.permutation(chosen)[:n_windows]                    # not the first ones of the file
    for d in chosen.tolist():
        ends = np.arange(longest, len(text.documents[d]), n_scored)     # n_scored apart: no target twice
        turns += [(turn, d, int(end)) for turn, end in enumerate(rng.permutation(ends))]
    return sorted((d, end) for _, d, end in sorted(turns)[:n_windows])


def position_buckets(longest: int) -> list[tuple[int, int]]:
    """[from, to) of positions, two to an octave from 4 on; position i has i + 1 tokens of context."""
    steps = (round(2 ** (i / 2)) for i in range(4, 2 * longest.bit_length()))
    return list(itertools.pairwise(sorted({0, longest, *(step for step in steps if step < longest)})))


def repeat_distance(length: int, L: int) -> int | None:
    """Tokens from a passage of L / 4 to its copy in a window of this length; None if two do not fit."""
    quarter = L // 4
    return length - 2 * quarter if quarter >= 2 and length >= 3 * quarter else None


def repeat_passages(stretches: Sequence[np.ndarray], length: int,
                    L: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Windows (n, length) whose last L / 4 tokens repeat an earlier passage; the indices to score in both.

    The second result is the same windows, each with the passage of another in place of the first copy.

    A window is L / 4 tokens of context, the passage, the tokens that follow it in the stretch (which has at
    least `length`), and the passage again. Contexts and passages are the same at every length. The first half
    of a passage is not scored: it shows the model what is being repeated.
    """
    p = L // 4
    tokens = np.stack([np.concatenate((stretch[:length - p], stretch[p:2 * p])) for stretch in stretches])
    control, half = tokens.copy(), np.arange(p // 2, p)
    control[:, p:2 * p] = np.roll(tokens[:, p:2 * p], 1, axis=0)
    return tokens, control, p + half, length - p + half
