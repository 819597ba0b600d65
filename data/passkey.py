"""Passkey retrieval: a key is told somewhere in filler, and asked for at the end.

The form of the test is that of Mohtashami and Jaggi 2023, arXiv:2305.16300, made short, so that a small model
can learn it at a small training length: five digits, filler of a few sentences of our own, in random order.
`python data/prepare.py passkey` makes a corpus to learn it from, `eval.py --protocol passkey` asks at any
depth and length.

Finding a key takes induction: what followed these tokens before? A small model does not learn that from keys
alone, five tokens to predict in a hundred (1,300 steps of 4,096 tokens taught 2 layers of 128 nothing of it);
it does within 900 steps where most documents are strings that repeat, so three in four are.
"""

from __future__ import annotations

import numpy as np

from data.tokenizer import Tokenizer

FILLER = (" The mill stands by the river.", " A cart waits at the gate.", " It may rain before dusk.",
          " Two crows sit on the wall.", " Smoke rises from a chimney.", " Nobody is on the road.")
QUESTION = " key="
N_DIGITS = 5
SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def shortest(tokenizer: Tokenizer) -> int:
    """Tokens of a passkey document without any filler: the separator, and twice question and answer."""
    return 1 + 2 * len(encode(tokenizer, [QUESTION, *"0" * N_DIGITS, "."]))


def passkey_document(tokenizer: Tokenizer, length: int, depth: float,
                     rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Ids of a document (length,), and how many of the last ones are the answer.

    The separator, filler, " key=", the digits and a full stop, filler, " key=" and the same again. depth is
    the share of the filler that precedes the key: 0 tells it first, 1 right before the question. Raises
    ValueError below the least length.
    """
    # digit by digit: BPE would merge some keys into fewer tokens than others
    answer = encode(tokenizer, [*map(str, rng.integers(10, size=N_DIGITS)), "."])
    question = encode(tokenizer, [QUESTION])
    n_filler = length - shortest(tokenizer)
    if n_filler < 0:
        raise ValueError(f"a passkey document takes at least {length - n_filler} tokens, got {length}")
    sentences = [encode(tokenizer, [text]) for text in FILLER]
    n_sentences = n_filler // min(map(len, sentences)) + 1              # enough of the shortest
    filler = np.concatenate([sentences[i] for i in rng.integers(len(FILLER), size=n_sentences)])
    before = round(depth * n_filler)
    parts = ([tokenizer.eot], filler[:before], question, answer, filler[before:n_filler], question, answer)
    return np.concatenate(parts), len(answer)


def repeating_document(tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """Ids of the separator and a random string of 8 to 39 signs, two to three times over."""
    signs = encode(tokenizer, list(rng.choice(list(SIGNS), size=rng.integers(8, 40))))
    n = len(signs)
    return np.concatenate(([tokenizer.eot], np.tile(signs, 3)[:rng.integers(2 * n, 3 * n)]))


def encode(tokenizer: Tokenizer, pieces: list[str]) -> np.ndarray:
    """Ids of pieces, each encoded on its own."""
    return np.concatenate([tokenizer.encode(piece.encode()) for piece in pieces])
