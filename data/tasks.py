"""Tasks: generated documents with answers that only the text before them can tell.

`python data/prepare.py TASK` makes a corpus to train on, `eval.py --protocol NAME` tests a run on new ones.

Retrieval: facts are hidden in filler text, and the end of the document asks for some of them.
  passkey      one key of five digits: a short form of Mohtashami and Jaggi 2023, arXiv:2305.16300
  needle       one fact, a word and its number                    RULER's needles: Hsieh et al. 2024,
  multi_key    one of several facts; the others distract          arXiv:2404.06654, section 3, in short
  multi_query  several of these facts, in another order           forms that a small model can learn
  multi_value  all numbers of one word, in their order            at a small training length
  variables    all variables that hold a number, by chains of assignments: RULER's variable tracking
Algorithms, trained on up to n symbols, tested on more: Kazemnejad et al. 2023, arXiv:2305.19466, section 4
  copying, reversal, sorting   of letters
  addition                     of two numbers of n digits, all written from the lowest digit on
  parity                       of n bits
  flip_flop                    read the bit that was written last: Liu et al. 2023, arXiv:2306.00946

The corpora needles (the four kinds of needles in turn), variables and those of the algorithms have one
document for each training window, filled up with separators, and a mask of targets: the answers alone are
scored. The corpus passkey has a key in one document of four, the others repeat a string; it has no mask.
Nor has the corpus repeats, random tokens that repeat: in a mixture it teaches a model to look back.
Retrieval needs induction: which token followed these tokens before? A small model does not learn it from keys
alone: 2 layers of width 128 learned nothing of it in 1,300 steps of 4,096 tokens. They learn it within 900
steps if most documents are repeated strings. So train on needles from a run that predicts repeated text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from data.tokenizer import Tokenizer

FILLER = (" The mill stands by the river.", " A cart waits at the gate.", " It may rain before dusk.",
          " Two crows sit on the wall.", " Smoke rises from a chimney.", " Nobody is on the road.")
WORDS = ("apple", "horse", "stone", "paper", "glass", "table", "water", "cloud", "music", "green", "north",
         "queen", "light", "bread", "money", "garden", "letter", "winter", "summer", "doctor", "silver",
         "mother", "corner", "island")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHARACTERS = LETTERS + LETTERS.upper() + "0123456789"
N_FACTS, N_ASKED, N_VALUES = 4, 2, 2    # multi_key and multi_query; multi_query; multi_value
N_CHAINS, N_CHAIN = 2, 3                # variables: chains, and variables in each
READ_OR_WRITE = 0.2                     # flip_flop: share of these instructions, as in Liu et al. 2023


class Made(NamedTuple):
    """A document: its ids, the separator first, and which of them are answers, both (n,)."""

    ids: np.ndarray
    is_answer: np.ndarray


Part = tuple[Sequence[str], bool]       # pieces of text, each encoded on its own; whether they are an answer


@lru_cache(maxsize=4096)
def piece_ids(tokenizer: Tokenizer, piece: str) -> tuple[int, ...]:
    """Ids of a piece of text."""
    return tuple(tokenizer.encode(piece.encode(), continues=True).tolist())


def encode(tokenizer: Tokenizer, pieces: Iterable[str]) -> list[int]:
    """Ids of pieces, each encoded on its own: BPE would merge some numbers into fewer tokens than others."""
    return [token for piece in pieces for token in piece_ids(tokenizer, piece)]     # type: ignore[arg-type]


def joined(tokenizer: Tokenizer, parts: Iterable[Part]) -> Made:
    """A document of the separator and these parts."""
    ids, is_answer = [tokenizer.eot], [False]
    for pieces, answers in parts:
        ids += encode(tokenizer, pieces)
        is_answer += [answers] * (len(ids) - len(is_answer))
    return Made(np.array(ids), np.array(is_answer))


# -----------------------------------------------------------------------------------------------------------
# Retrieval


class Hidden(NamedTuple):
    """Hidden groups of facts that stay in their order; the end of the document asks for the first."""

    groups: list[list[list[str]]]       # facts in pieces
    question: Sequence[Part]


def numbers(rng: Generator, n: int) -> list[list[str]]:
    """Different random numbers, as lists of three digits."""
    return [list(f"{x:03}") for x in rng.choice(1000, size=n, replace=False)]


def passkey(rng: Generator) -> Hidden:
    """" key=48213." and the question " key="."""
    key = [*map(str, rng.integers(10, size=5)), "."]
    return Hidden([[[" key=", *key]]], [([" key="], False), (key, True)])


def facts(rng: Generator, n: int, n_asked: int) -> Hidden:
    """Facts such as " apple=482.", of which n_asked are asked for, in random order."""
    words = [f" {WORDS[i]}" for i in rng.choice(len(WORDS), size=n, replace=False)]
    hidden = [[word, "=", *number, "."] for word, number in zip(words, numbers(rng, n), strict=True)]
    question = [part for i in rng.permutation(n_asked)
                for part in ((hidden[i][:2], False), (hidden[i][2:], True))]
    return Hidden([[fact] for fact in hidden], question)


def multi_value(rng: Generator) -> Hidden:
    """Words with several numbers: " apple=482." ... " apple=913." The question " apple=": "482,913."."""
    asked, other = (f" {WORDS[i]}" for i in rng.choice(len(WORDS), size=2, replace=False))
    values = numbers(rng, 2 * N_VALUES)
    groups = [[[word, "=", *number, "."] for number in values[i:i + N_VALUES]]
              for word, i in ((asked, 0), (other, N_VALUES))]
    answer = [piece for number in values[:N_VALUES] for piece in (",", *number)][1:]
    return Hidden(groups, [([asked, "="], False), ([*answer, "."], True)])


def variables(rng: Generator) -> Hidden:
    """Chains such as " A=482." " B= A." " C= B." The question " 482:" has the answer " A B C."."""
    names = [f" {letter}" for letter in rng.permutation(list(LETTERS.upper()))[:N_CHAINS * N_CHAIN]]
    chains = [names[i:i + N_CHAIN] for i in range(0, len(names), N_CHAIN)]
    values = numbers(rng, N_CHAINS)
    groups = [[[chain[0], "=", *value, "."], *([b, "=", a, "."] for a, b in pairwise(chain))]
              for chain, value in zip(chains, values, strict=True)]
    return Hidden(groups, [([" ", *values[0], ":"], False), ([*chains[0], "."], True)])


RETRIEVAL: dict[str, Callable[[Generator], Hidden]] = {
    "passkey": passkey,
    "needle": lambda rng: facts(rng, 1, 1),
    "multi_key": lambda rng: facts(rng, N_FACTS, 1),
    "multi_query": lambda rng: facts(rng, N_FACTS, N_ASKED),
    "multi_value": multi_value,
    "variables": variables,
}
NEEDLES = ("needle", "multi_key", "multi_query", "multi_value")


def retrieval(kind: str, tokenizer: Tokenizer, length: int, depth: float, rng: Generator) -> Made:
    """A document of `length` ids: the separator, filler with hidden facts, and the question with its answer.

    `depth` is the share of the filler before the first fact of the group that is asked for: 0 puts it at the
    start, 1 right before the question. The rest of this group follows it anywhere; other groups are anywhere.
    The same rng gives the same facts at every length and depth. Raises ValueError if the length is too small.
    """
    hidden = RETRIEVAL[kind](rng)
    places = [np.sort(rng.random(len(group))) for group in hidden.groups[1:]]
    later = depth + (1 - depth) * np.sort(rng.random(len(hidden.groups[0]) - 1))
    where = [depth, *later, *(place for group in places for place in group)]
    hidden_facts = [encode(tokenizer, fact) for group in hidden.groups for fact in group]
    # stable: at one place, a group keeps its order
    placed = sorted(zip(where, hidden_facts, strict=True), key=lambda fact: fact[0])
    ending = joined(tokenizer, hidden.question)
    n_filler = length - len(ending.ids) - sum(len(fact) for _, fact in placed)
    if n_filler < 0:
        raise ValueError(f"this {kind} document needs at least {length - n_filler} tokens, got {length}")
    sentences = [encode(tokenizer, [text]) for text in FILLER]          # in random order, the last one cut
    n_sentences = n_filler // min(map(len, sentences)) + 1              # enough even if all are the shortest
    order = rng.integers(len(FILLER), size=n_sentences)
    filler = [token for i in order for token in sentences[i]][:n_filler]
    ids, end = [tokenizer.eot], 0
    for place, fact in placed:
        start, end = end, round(place * n_filler)
        ids += [*filler[start:end], *fact]
    ids += [*filler[end:], *ending.ids[1:]]
    is_answer = np.concatenate((np.zeros(length - len(ending.ids), dtype=bool), ending.is_answer))
    return Made(np.array(ids), is_answer)


def shortest(kind: str, tokenizer: Tokenizer, rng: Generator) -> int:
    """Ids of the document that `retrieval` makes with this rng, if it has no filler."""
    hidden = RETRIEVAL[kind](rng)
    n_facts = len(encode(tokenizer, [piece for group in hidden.groups for fact in group for piece in fact]))
    return n_facts + len(joined(tokenizer, hidden.question).ids)


# -----------------------------------------------------------------------------------------------------------
# Algorithms: n symbols -> parts of a document of at most 4 n + 1 ids for n of at least 4


def of_letters(answer: Callable[[str], str], n: int, rng: Generator) -> list[Part]:
    """Letters and the answer that they determine: "hello=" "olleh."."""
    text = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=n))
    return [(text + "=", False), (answer(text) + ".", True)]


def addition(n: int, rng: Generator) -> list[Part]:
    """"321+987=" "8011." is 123 + 789 = 0912, from the lowest digit on; the sum has n + 1 digits."""
    digits = rng.integers(10, size=(2, n))
    a, b = ("".join(map(str, row)) for row in digits)
    total = int(a[::-1]) + int(b[::-1])
    return [(f"{a}+{b}=", False), (f"{total:0{n + 1}}"[::-1] + ".", True)]


def parity(n: int, rng: Generator) -> list[Part]:
    """"10110=" "1.": whether the number of ones is odd."""
    bits = rng.integers(2, size=n)
    return [("".join(map(str, bits)) + "=", False), (f"{bits.sum() % 2}.", True)]


def flip_flop(n: int, rng: Generator) -> list[Part]:
    """Instructions with a bit each: w1 writes, i0 does nothing, r1 reads; the bits that are read are answers.

    The first instruction writes, the last one reads, and of the others a share of READ_OR_WRITE does either.
    """
    shares = READ_OR_WRITE / 2, READ_OR_WRITE / 2, 1 - READ_OR_WRITE
    kinds = ["w", *rng.choice(list("wri"), size=max(0, n - 2), p=shares), "r"]
    written, parts = "", list[Part]()
    for kind, bit in zip(kinds, map(str, rng.integers(2, size=len(kinds))), strict=True):
        written = bit if kind == "w" else written
        parts += [(kind, False), (written if kind == "r" else bit, kind == "r")]
    return parts


ALGORITHMS: dict[str, Callable[[int, Generator], list[Part]]] = {
    "copying": partial(of_letters, lambda text: text),
    "reversal": partial(of_letters, lambda text: text[::-1]),
    "sorting": partial(of_letters, lambda text: "".join(sorted(text))),
    "addition": addition, "parity": parity, "flip_flop": flip_flop,
}


def n_symbols(length: int) -> int:
    """The most symbols of an algorithm in a window of `length` inputs: a quarter, so 8 windows have 8 n."""
    return length // 4


def algorithm(name: str, tokenizer: Tokenizer, n: int, rng: Generator) -> Made:
    """A document with n symbols, each encoded on its own."""
    return joined(tokenizer, ALGORITHMS[name](n, rng))


# -----------------------------------------------------------------------------------------------------------
# Documents to train on, each a function of its number


def padded(made: Made, length: int, tokenizer: Tokenizer) -> Made:
    """The document and separators, `length` ids in all."""
    rest = length - len(made.ids)
    return Made(np.append(made.ids, [tokenizer.eot] * rest), np.append(made.is_answer, [False] * rest))


def train_retrieval(kinds: Sequence[str], tokenizer: Tokenizer, length: int, number: int) -> Made:
    """The kinds in turn, with up to `length` inputs: half of the documents have as many, at any depth."""
    kind, most = kinds[number % len(kinds)], length + 1
    rng, facts_seed = np.random.default_rng([number, 2, 1]), [number, 3, 1]
    least = shortest(kind, tokenizer, np.random.default_rng(facts_seed))
    if least > most:
        raise ValueError(f"a {kind} document needs at least {least - 1} tokens, got --length {length}")
    size = most if rng.random() < 0.5 else int(rng.integers(least, most + 1))
    made = retrieval(kind, tokenizer, size, rng.random(), np.random.default_rng(facts_seed))
    return padded(made, most, tokenizer)


def train_algorithm(name: str, tokenizer: Tokenizer, length: int, number: int) -> Made:
    """1 ... n symbols, n being a quarter of `length`, and separators up to length + 1 ids."""
    if n_symbols(length) < 4:
        raise ValueError(f"needs --length 16 at least, got {length}")
    rng = np.random.default_rng([number, 2, 1])
    made = algorithm(name, tokenizer, int(rng.integers(1, n_symbols(length) + 1)), rng)
    return padded(made, length + 1, tokenizer)


def train_passkey(tokenizer: Tokenizer, length: int, number: int) -> Made:
    """In one document of four a key in 24 ... `length` + 1 tokens, otherwise a repeated string."""
    rng = np.random.default_rng([number, 1])
    if number % 4 == 0:
        size, depth = int(rng.integers(24, length + 1)), rng.random()
        return retrieval("passkey", tokenizer, size, depth, rng)
    string = encode(tokenizer, rng.choice(list(CHARACTERS), size=rng.integers(8, 40)))
    repeats = np.tile(string, 3)[:rng.integers(2 * len(string), 3 * len(string))]
    return Made(np.append(tokenizer.eot, repeats), np.ones(len(repeats) + 1, dtype=bool))


def train_repeats(tokenizer: Tokenizer, length: int, number: int) -> Made:
    """A window of strings of random ids, each repeated two to three times, with a separator before each.

    A string has 3 ... length / 4 ids; short ones are more frequent. Most of a text can be predicted without
    looking back; here only the first copy helps. If attention stays within a string and its copies
    (data.cross_documents = "mask"), a small model learns within hundreds of steps to look for the first copy,
    because there are few other tokens to see.
    """
    rng, ids = np.random.default_rng([number, 4]), list[int]()
    while len(ids) <= length:
        n = round(math.exp(rng.uniform(math.log(3), math.log(length / 4))))
        string = rng.integers(tokenizer.vocab_size - 1, size=n)
        string += string >= tokenizer.eot                               # any id but the separator
        ids += [tokenizer.eot, *np.tile(string, 3)[:rng.integers(2 * n, 3 * n + 1)].tolist()]
    return Made(np.array(ids[:length + 1]), np.ones(length + 1, dtype=bool))


class Task(NamedTuple):
    """A corpus of generated documents."""

    make: Callable[[Tokenizer, int, int], Made]     # tokenizer, length, number of the document
    length: int                                     # default of data/prepare.py --length
    has_windows: bool                               # a document is a window of `length` inputs
    has_mask: bool                                  # answers alone are targets
    protocols: tuple[str, ...]                      # of eval.py that test it


TASKS = {
    "repeats": Task(train_repeats, 128, True, False, ()),
    "passkey": Task(train_passkey, 128, False, False, ("passkey",)),
    "needles": Task(partial(train_retrieval, NEEDLES), 128, True, True, NEEDLES),
    "variables": Task(partial(train_retrieval, ("variables",)), 128, True, True, ("variables",)),
    **{name: Task(partial(train_algorithm, name), 64, True, True, (name,)) for name in ALGORITHMS},
}
