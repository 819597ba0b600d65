"""From documents to ids: in pieces of bounded size, over all cores, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np

from data import pieces as cutting
from data.journal import Position
from data.loader import SPLITS
from data.pieces import pieces
from data.sources import Part, Passkey, Shard
from data.tokenizer import CorpusTokenizer


class Piece(NamedTuple):
    """A document, or some of it: at most MAX_PIECE bytes in memory."""

    split: str
    where: str
    text: bytes | Passkey
    opens: bool                 # is a document's first
    end: Position


class Encoded(NamedTuple):
    """What a chunk of pieces adds to a split."""

    split: str
    ids: np.ndarray             # (n,) of the corpus' dtype
    starts: np.ndarray          # where documents begin among them


def read_pieces(shards: Sequence[Shard], tokenizer: CorpusTokenizer, after: Position) -> Iterator[Piece]:
    """All documents in pieces, from the first that ends after a position."""
    for s in range(after.shard, len(shards)):
        first = after.document if s == after.shard else 0
        for d, document in enumerate(islice(shards[s].documents(), first, None), first):
            done = after.n_bytes if (s, d) == after[:2] else 0
            if isinstance(document.text, Passkey):
                if not done:
                    yield Piece(document.split, document.where, document.text, True, Position(s, d, 1))
                continue
            for text in pieces(document.blocks(done), tokenizer.cut):
                opens, done = not done, done + len(text)
                if isinstance(document.text, Part):
                    shards[s].seen = done
                yield Piece(document.split, document.where, text, opens, Position(s, d, done))


def chunked(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that are worth a call; one that goes on with a document comes first in its group."""
    chunk: list[Piece] = []
    n_bytes = 0
    for piece in found:
        if chunk and (not piece.opens or n_bytes >= cutting.MAX_PIECE):
            yield chunk
            chunk, n_bytes = [], 0
        chunk.append(piece)
        n_bytes += 100 if isinstance(piece.text, Passkey) else len(piece.text)
    if chunk:
        yield chunk


def encode(chunk: list[Piece], tokenizer: CorpusTokenizer, lengths: np.ndarray, dtype: str) -> list[Encoded]:
    """Ids of a chunk, for each split that it has documents of."""
    encoded = []
    for split in SPLITS:
        mine = [piece for piece in chunk if piece.split == split]
        if not mine:
            continue
        texts = [piece.text for piece in mine if isinstance(piece.text, bytes)]
        if texts:
            ids = tokenizer.encode_documents(texts, continues=not mine[0].opens)
            if tokenizer.is_lossless:
                assert lengths[ids].sum() == sum(map(len, texts)), f"{mine[0].where}: bytes were lost"
        else:
            ids = np.concatenate([piece.text.ids(tokenizer) for piece in mine
                                  if isinstance(piece.text, Passkey)])
        assert int(ids.max()) < tokenizer.vocab_size
        encoded.append(Encoded(split, ids.astype(dtype), np.flatnonzero(ids == tokenizer.eot)))
    return encoded


def in_order(function: Callable[[list[Piece]], list[Encoded]], chunks: Iterator[list[Piece]],
             workers: int) -> Generator[tuple[list[Piece], list[Encoded]], None, None]:
    """Each chunk and its ids, in order, some ahead of the one that is asked for.

    Threads, not processes: tiktoken and numpy work without the interpreter's lock, and nothing is copied.
    """
    pending: deque[tuple[list[Piece], Future[list[Encoded]]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(function, chunk)))
            if len(pending) > workers + 2:
                first, future = pending.popleft()
                yield first, future.result()
        for first, future in pending:
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
