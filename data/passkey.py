"""Passkey retrieval: a key is hidden in filler text, and the end of the document asks for it.

A short form of the test of Mohtashami and Jaggi 2023, arXiv:2305.16300, which a small model can learn at a
small training length: a key of five digits, and filler of a few sentences in random order.
`python data/prepare.py passkey` makes a corpus to train on, `eval.py --protocol passkey` tests any depth and
length.

Retrieval needs induction: which token followed these tokens before? A small model does not learn it from keys
alone, where five tokens in a hundred can be predicted: 2 layers of width 128 learned nothing of it in 1,300
steps of 4,096 tokens. They learn it within 900 steps if most documents are repeated strings, so 3 in 4 are.
"""

from __future__ import annotations

import numpy as np

from data.tokenizer import Tokenizer

FILLER = (" The mill stands by the river.", " A cart waits at the gate.", " It may rain before dusk.",
          " Two crows sit on the wall.", " Smoke rises from a chimney.", " Nobody is on the road.")
QUESTION = " key="
N_DIGITS = 5
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def shortest(tokenizer: Tokenizer) -> int:
    """Tokens of a passkey document without filler: the separator, and question and answer twice."""
    return 1 + 2 * len(encode(tokenizer, [QUESTION, *"0" * N_DIGITS, "."]))


def passkey_document(tokenizer: Tokenizer, length: int, depth: float,
                     rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Ids of a document (length,), and how many of the last ones are the answer.

    The document is the separator, filler, " key=", the digits and a full stop, filler, and again " key=", the
    digits and a full stop. `depth` is the share of the filler before the key: 0 puts it at the start, 1 right
    before the question. Raises ValueError if the length is too small.
    """
    # each digit separately: BPE would merge some keys into fewer tokens than others
    answer = encode(tokenizer, [*map(str, rng.integers(10, size=N_DIGITS)), "."])
    question = encode(tokenizer, [QUESTION])
    n_filler = length - shortest(tokenizer)
    if n_filler < 0:
        raise ValueError(f"a passkey document needs at least {length - n_filler} tokens, got {length}")
    sentences = [encode(tokenizer, [text]) for text in FILLER]
    n_sentences = n_filler // min(map(len, sentences)) + 1              # enough even if all are the shortest
    filler = np.concatenate([sentences[i] for i in rng.integers(len(FILLER), size=n_sentences)])
    before = round(depth * n_filler)
    parts = ([tokenizer.eot], filler[:before], question, answer, filler[before:n_filler], question, answer)
    return np.concatenate(parts), len(answer)


def repeating_document(tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """Ids of the separator and a random string of 8 to 39 characters, repeated two to three times."""
    string = encode(tokenizer, list(rng.choice(list(CHARACTERS), size=rng.integers(8, 40))))
    n = len(string)
    return np.concatenate(([tokenizer.eot], np.tile(string, 3)[:rng.integers(2 * n, 3 * n)]))


def encode(tokenizer: Tokenizer, pieces: list[str]) -> np.ndarray:
    """Ids of pieces, each encoded on its own."""
    return np.concatenate([tokenizer.encode(piece.encode()) for piece in pieces])
