"""Documents to ids: in pieces of bounded size, on all cores, in order."""

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
from data.sources import Generated, Part, Shard
from data.tokenizer import CorpusTokenizer, Tokenizer
from runtime.errors import UserError


class Piece(NamedTuple):
    """A document or a part of one: at most MAX_PIECE bytes."""

    split: str
    where: str
    text: bytes | Generated
    opens: bool                 # the first piece of its document
    end: Position


class Encoded(NamedTuple):
    """The ids that a chunk of pieces adds to a split."""

    split: str
    ids: np.ndarray             # (n,) of the corpus' dtype
    starts: np.ndarray          # where documents begin among them
    mask: np.ndarray            # (n,) bool, which of them are answers; empty for text


def read_pieces(shards: Sequence[Shard], tokenizer: CorpusTokenizer, after: Position) -> Iterator[Piece]:
    """All documents in pieces, from the first piece that ends after a position."""
    for s in range(after.shard, len(shards)):
        first = after.document if s == after.shard else 0
        for d, document in enumerate(islice(shards[s].documents(), first, None), first):
            done = after.n_bytes if (s, d) == after[:2] else 0
            if isinstance(document.text, Generated):
                if not done:
                    yield Piece(document.split, document.where, document.text, True, Position(s, d, 1))
                continue
            for text in pieces(document.blocks(done), tokenizer.cut):
                opens, done = not done, done + len(text)
                if isinstance(document.text, Part):
                    shards[s].seen = done
                yield Piece(document.split, document.where, text, opens, Position(s, d, done))


def chunked(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups large enough for one call; a piece inside a document starts a new group."""
    chunk: list[Piece] = []
    n_bytes = 0
    for piece in found:
        if chunk and (not piece.opens or n_bytes >= cutting.MAX_PIECE):
            yield chunk
            chunk, n_bytes = [], 0
        chunk.append(piece)
        n_bytes += 100 if isinstance(piece.text, Generated) else len(piece.text)
    if chunk:
        yield chunk


def encode(chunk: list[Piece], tokenizer: CorpusTokenizer, lengths: np.ndarray, dtype: str) -> list[Encoded]:
    """Ids of a chunk, for each split that occurs in it."""
    encoded = []
    for split in SPLITS:
        found = [piece for piece in chunk if piece.split == split]
        if not found:
            continue
        texts = [piece.text for piece in found if isinstance(piece.text, bytes)]
        made = [piece.text.make(tokenizer) for piece in found if isinstance(piece.text, Generated)]
        mask = np.zeros(0, dtype=bool)
        if texts:
            try:
                ids = tokenizer.encode_documents(texts, continues=not found[0].opens)
            except UserError as error:
                places = ((piece, first_unknown(piece.text, tokenizer)) for piece in found
                          if isinstance(piece.text, bytes))
                where = next((f"{piece.where}, byte {piece.end.n_bytes - len(piece.text) + offset}: "
                              for piece, offset in places if offset is not None), "")
                raise UserError(f"{where}{error}") from error
            starts = np.flatnonzero(ids == tokenizer.eot)
            if tokenizer.is_lossless:
                assert lengths[ids].sum() == sum(map(len, texts)), f"{found[0].where}: bytes were lost"
        else:
            ids, mask = (np.concatenate(parts) for parts in zip(*made, strict=True))
            starts = np.cumsum([0, *(len(document.ids) for document in made[:-1])])
        assert int(ids.max()) < tokenizer.vocab_size
        encoded.append(Encoded(split, ids.astype(dtype), starts, mask))
    return encoded


def first_unknown(text: bytes, tokenizer: Tokenizer) -> int | None:
    """The offset in bytes of the first character that this tokenizer cannot encode, if there is one."""
    def is_unknown(character: str) -> bool:
        try:
            tokenizer.encode(character.encode(errors="surrogateescape"))
        except UserError:
            return True
        return False

    characters = text.decode(errors="surrogateescape")
    unknown = set(filter(is_unknown, set(characters)))
    first = next((i for i, character in enumerate(characters) if character in unknown), None)
    return None if first is None else len(characters[:first].encode(errors="surrogateescape"))


def in_order(function: Callable[[list[Piece]], list[Encoded]], chunks: Iterator[list[Piece]],
             workers: int) -> Generator[tuple[list[Piece], list[Encoded]], None, None]:
    """Yield each chunk and its ids in order; a few chunks are encoded ahead.

    Threads, not processes: tiktoken and numpy release the interpreter's lock, and nothing is copied.
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
