"""Tasks: generated documents with answers that only the text before them can tell.

`python data/prepare.py TASK` makes a corpus to train on, `eval.py --protocol NAME` tests a run on new ones.

Retrieval: facts are hidden in filler text, and the end of the document asks for some of them.
  passkey      one key of five digits: a short form of Mohtashami and Jaggi 2023, arXiv:2305.16300
  needle       one fact, a word and its number
  multi_key    one of several facts; the others distract
  multi_query  several of these facts, in another order
  multi_value  all numbers of one word, in their order
  variables    all variables that hold a number, by chains of assignments
The last five are those of RULER, Hsieh et al. 2024, arXiv:2404.06654, section 3, in short forms that a small
model can learn at a small training length.
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

from base.errors import UserError
from data.tokenizer import Tokenizer

FILLER = (" The mill stands by the river.", " A cart waits at the gate.", " It may rain before dusk.",
          " Two crows sit on the wall.", " Smoke rises from a chimney.", " Nobody is on the road.")
WORDS = ("apple", "horse", "stone", "paper", "glass", "table", "water", "cloud", "music", "green", "north",
         "queen", "light", "bread", "money", "garden", "letter", "winter", "summer", "doctor", "silver",
         "mother", "corner", "island")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LETTERS_AND_DIGITS = LETTERS + LETTERS.upper() + "0123456789"
N_FACTS, N_ASKED, N_VALUES = 4, 2, 2    # multi_key and multi_query; multi_query; multi_value
N_CHAINS, CHAIN_LENGTH = 2, 3           # variables: chains, and variables in each
MIN_LENGTH = 24                         # of documents; needles need more, which depends on the tokenizer
# repeats: with this, RoPE at L = 256 learned to look back in 140 steps of 4,096 tokens; with 64 not in 200
LONGEST_STRING = 32
READ_OR_WRITE = 0.2                     # flip_flop: share of these instructions, as in Liu et al. 2023


class TaskDocument(NamedTuple):
    """A document: its ids, the separator first, and which of them are answers, both (n,)."""

    ids: np.ndarray
    is_answer: np.ndarray


# pieces of text, each encoded on its own; whether they are an answer. A str stands for its letters
Segment = tuple[Sequence[str], bool]


@lru_cache(maxsize=4096)
def piece_ids(tokenizer: Tokenizer, piece: str) -> tuple[int, ...]:
    """Ids of a piece of text."""
    return tuple(tokenizer.encode(piece.encode(), continues=True).tolist())


def encode(tokenizer: Tokenizer, pieces: Iterable[str]) -> list[int]:
    """Ids of pieces, each encoded on its own: BPE would merge some numbers into fewer tokens than others."""
    return [token for piece in pieces for token in piece_ids(tokenizer, piece)]     # type: ignore[arg-type]


def join(tokenizer: Tokenizer, segments: Iterable[Segment]) -> TaskDocument:
    """A document of the separator and these segments."""
    ids = [tokenizer.separator]
    is_answer = [False]
    for pieces, is_segment_answer in segments:
        segment_ids = encode(tokenizer, pieces)
        ids += segment_ids
        is_answer += [is_segment_answer] * len(segment_ids)
    return TaskDocument(np.array(ids), np.array(is_answer))


# -----------------------------------------------------------------------------------------------------------
# Retrieval


class Hidden(NamedTuple):
    """Hidden groups of facts that stay in their order; the end of the document asks for the first."""

    groups: list[list[list[str]]]       # facts in pieces
    question: Sequence[Segment]


def draw_words(rng: Generator, n: int) -> list[str]:
    """Different random words."""
    return [f" {WORDS[i]}" for i in rng.choice(len(WORDS), size=n, replace=False)]


def numbers(rng: Generator, n: int) -> list[list[str]]:
    """Different random numbers, as lists of three digits."""
    return [list(f"{x:03}") for x in rng.choice(1000, size=n, replace=False)]


def passkey(rng: Generator) -> Hidden:
    """The fact " key=48213." and the question " key="."""
    key = [*map(str, rng.integers(10, size=5)), "."]
    return Hidden([[[" key=", *key]]], [([" key="], False), (key, True)])


def facts(rng: Generator, n: int, n_asked: int) -> Hidden:
    """Facts such as " apple=482.", of which n_asked are asked for, in random order."""
    words = draw_words(rng, n)
    values = numbers(rng, n)
    hidden_facts = [[word, "=", *value, "."] for word, value in zip(words, values, strict=True)]

    question: list[Segment] = []
    for i in rng.permutation(n_asked):
        fact = hidden_facts[i]
        question += [(fact[:2], False), (fact[2:], True)]
    return Hidden([[fact] for fact in hidden_facts], question)


def multi_value(rng: Generator) -> Hidden:
    """Words with several numbers: " apple=482." ... " apple=913." The question " apple=": "482,913."."""
    asked, distractor = draw_words(rng, 2)
    values = numbers(rng, 2 * N_VALUES)
    asked_facts = [[asked, "=", *number, "."] for number in values[:N_VALUES]]
    distracting_facts = [[distractor, "=", *number, "."] for number in values[N_VALUES:]]

    answer: list[str] = []
    for number in values[:N_VALUES]:
        answer += [*number, ","]
    answer[-1] = "."
    return Hidden([asked_facts, distracting_facts], [([asked, "="], False), (answer, True)])


def variables(rng: Generator) -> Hidden:
    """Chains such as " A=482." " B= A." " C= B." The question " 482:" has the answer " A B C."."""
    names = [f" {letter}" for letter in rng.permutation(list(LETTERS.upper()))[:N_CHAINS * CHAIN_LENGTH]]
    chains = [names[i:i + CHAIN_LENGTH] for i in range(0, len(names), CHAIN_LENGTH)]
    values = numbers(rng, N_CHAINS)
    groups = []
    for chain, value in zip(chains, values, strict=True):
        assignments = [[chain[0], "=", *value, "."]]
        assignments += [[variable, "=", before, "."] for before, variable in pairwise(chain)]
        groups.append(assignments)
    return Hidden(groups, [([" ", *values[0], ":"], False), ([*chains[0], "."], True)])


RETRIEVAL: dict[str, Callable[[Generator], Hidden]] = {
    "passkey": passkey,
    "needle": partial(facts, n=1, n_asked=1),
    "multi_key": partial(facts, n=N_FACTS, n_asked=1),
    "multi_query": partial(facts, n=N_FACTS, n_asked=N_ASKED),
    "multi_value": multi_value,
    "variables": variables,
}
NEEDLES = ("needle", "multi_key", "multi_query", "multi_value")


def retrieval(kind: str, tokenizer: Tokenizer, length: int, depth: float,
              rng: Generator) -> TaskDocument:
    """A document of `length` ids: the separator, filler with hidden facts, and the question with its answer.

    `depth` is the share of the filler before the first fact of the group that is asked for: 0 puts it at the
    start, 1 right before the question. The rest of this group follows it anywhere; other groups are anywhere.
    The same rng gives the same facts at every length and depth. If they need more than `length` ids, the
    document has them and no filler.
    """
    hidden = RETRIEVAL[kind](rng)
    asked_group, *distracting_groups = hidden.groups

    # each fact's place, as a share of the filler before it
    distracting_places = [np.sort(rng.random(len(group))) for group in distracting_groups]
    later_places = depth + (1 - depth) * np.sort(rng.random(len(asked_group) - 1))
    places = np.concatenate(([depth], later_places, *distracting_places))

    # the facts in the order of their places; stable: at one place, a group keeps its order
    fact_ids = [encode(tokenizer, fact) for group in hidden.groups for fact in group]
    placed_facts = sorted(zip(places, fact_ids, strict=True), key=lambda placed: placed[0])

    # what is left of the length is filler: sentences in random order, the last one cut
    ending = join(tokenizer, hidden.question)
    n_filler = max(0, length - len(ending.ids) - sum(map(len, fact_ids)))
    sentences = [encode(tokenizer, [text]) for text in FILLER]
    n_sentences = n_filler // min(map(len, sentences)) + 1              # enough even if all are the shortest
    filler: list[int] = []
    for i in rng.integers(len(FILLER), size=n_sentences):
        filler += sentences[i]
    filler = filler[:n_filler]

    # filler up to each fact's place, and the fact; then the rest, and the question
    ids = [tokenizer.separator]
    start = 0
    for place, fact in placed_facts:
        end = round(place * n_filler)
        ids += filler[start:end]
        ids += fact
        start = end
    ids += filler[start:]
    ids += ending.ids[1:].tolist()
    is_answer = np.zeros(len(ids), dtype=bool)
    is_answer[-len(ending.ids):] = ending.is_answer
    return TaskDocument(np.array(ids), is_answer)


def shortest(kind: str, tokenizer: Tokenizer, rng: Generator) -> int:
    """Ids of the document that `retrieval` makes with this rng, if it has no filler."""
    return len(retrieval(kind, tokenizer, 0, 0, rng).ids)


# -----------------------------------------------------------------------------------------------------------
# Algorithms: n symbols -> segments of a document of at most 4 n + 1 ids for n of at least 4


def letters(answer: Callable[[str], str], n: int, rng: Generator) -> list[Segment]:
    """Letters and the answer that they determine: "hello=" "olleh."."""
    text = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=n))
    return [(text + "=", False), (answer(text) + ".", True)]


def addition(n: int, rng: Generator) -> list[Segment]:
    """The text "321+987=" "2190." is 123 + 789 = 0912, from the lowest digit on; the sum has n + 1 digits."""
    digits = rng.integers(10, size=(2, n))
    a, b = ("".join(map(str, row)) for row in digits)
    total = int(a[::-1]) + int(b[::-1])
    total_digits = f"{total:0{n + 1}}"
    return [(f"{a}+{b}=", False), (total_digits[::-1] + ".", True)]


def parity(n: int, rng: Generator) -> list[Segment]:
    """Whether the number of ones is odd: "10110=" "1."."""
    bits = rng.integers(2, size=n)
    text = "".join(map(str, bits))
    return [(text + "=", False), (f"{bits.sum() % 2}.", True)]


def flip_flop(n: int, rng: Generator) -> list[Segment]:
    """Instructions with a bit each: w1 writes, i0 does nothing, r1 reads; the bits that are read are answers.

    The first instruction writes, the last one reads, and of the others a share of READ_OR_WRITE does either.
    """
    shares = READ_OR_WRITE / 2, READ_OR_WRITE / 2, 1 - READ_OR_WRITE
    kinds = ["w", *rng.choice(list("wri"), size=max(0, n - 2), p=shares), "r"]
    bits = rng.integers(2, size=len(kinds))
    segments: list[Segment] = []
    written = ""
    for kind, bit in zip(kinds, map(str, bits), strict=True):
        segments.append((kind, False))
        if kind == "w":
            written = bit
        if kind == "r":
            segments.append((written, True))
        else:
            segments.append((bit, False))
    return segments


ALGORITHMS: dict[str, Callable[[int, Generator], list[Segment]]] = {
    "copying": partial(letters, str),
    "reversal": partial(letters, lambda text: text[::-1]),
    "sorting": partial(letters, lambda text: "".join(sorted(text))),
    "addition": addition,
    "parity": parity,
    "flip_flop": flip_flop,
}


def n_symbols(length: int) -> int:
    """The most symbols of an algorithm in `length` inputs, so that at 8 L it has 8 times as many as at L."""
    return length // 4


def algorithm(name: str, tokenizer: Tokenizer, n: int, rng: Generator) -> TaskDocument:
    """A document with n symbols, each encoded on its own."""
    return join(tokenizer, ALGORITHMS[name](n, rng))


# -----------------------------------------------------------------------------------------------------------
# Documents to train on, each a function of its number


def pad(document: TaskDocument, length: int, tokenizer: Tokenizer) -> TaskDocument:
    """The document and separators, `length` ids in all."""
    n_missing = length - len(document.ids)
    ids = np.pad(document.ids, (0, n_missing), constant_values=tokenizer.separator)
    return TaskDocument(ids, np.pad(document.is_answer, (0, n_missing)))


def train_retrieval(kinds: Sequence[str], tokenizer: Tokenizer, length: int,
                    number: int) -> TaskDocument:
    """The kinds in turn, with up to `length` inputs: half of the documents have as many, at any depth."""
    kind = kinds[number % len(kinds)]
    rng = np.random.default_rng([number, 2, 1])
    facts_seed = [number, 3, 1]
    least = shortest(kind, tokenizer, np.random.default_rng(facts_seed))
    size = length + 1
    if least > size:
        raise UserError(f"--length {length}: too short for {kind}; give --length {least - 1} or more")
    if rng.random() >= 0.5:
        size = int(rng.integers(least, length + 2))
    document = retrieval(kind, tokenizer, size, rng.random(), np.random.default_rng(facts_seed))
    return pad(document, length + 1, tokenizer)


def train_algorithm(name: str, tokenizer: Tokenizer, length: int, number: int) -> TaskDocument:
    """1 ... n symbols, n being a quarter of `length`, and separators up to length + 1 ids."""
    rng = np.random.default_rng([number, 2, 1])
    n = int(rng.integers(1, n_symbols(length) + 1))
    return pad(algorithm(name, tokenizer, n, rng), length + 1, tokenizer)


def train_passkey(tokenizer: Tokenizer, length: int, number: int) -> TaskDocument:
    """In one document of four a key in 24 ... `length` tokens, otherwise a repeated string."""
    rng = np.random.default_rng([number, 1])
    if number % 4 == 0:
        size = int(rng.integers(24, length + 1))
        return retrieval("passkey", tokenizer, size, rng.random(), rng)
    string = encode(tokenizer, rng.choice(list(LETTERS_AND_DIGITS), size=rng.integers(8, 40)))
    n = rng.integers(2 * len(string), 3 * len(string))
    return all_answers([tokenizer.separator, *(string * 3)[:n]])


def train_repeats(tokenizer: Tokenizer, length: int, number: int) -> TaskDocument:
    """A window of strings of random ids, each repeated two to three times, with a separator before each.

    A string has 3 ... 32 ids, at most length / 4; short ones are more frequent. Most of a text can be
    predicted without looking back; here only the first copy helps. If attention stays within a string and
    its copies (data.cross_documents = "mask"), a small model learns within hundreds of steps to look for the
    first copy, because there are few other tokens to see.
    """
    rng = np.random.default_rng([number, 4])
    longest = min(LONGEST_STRING, length / 4)
    ids: list[int] = []
    while len(ids) <= length:
        n = round(math.exp(rng.uniform(math.log(3), math.log(longest))))
        string = rng.integers(tokenizer.vocab_size - 1, size=n)
        string += string >= tokenizer.separator                               # any id but the separator
        n_repeated = rng.integers(2 * n, 3 * n + 1)
        ids += [tokenizer.separator, *np.tile(string, 3)[:n_repeated].tolist()]
    return all_answers(ids[:length + 1])


def all_answers(ids: list[int]) -> TaskDocument:
    """A document of a corpus without a mask."""
    return TaskDocument(np.array(ids), np.ones(len(ids), dtype=bool))


class Task(NamedTuple):
    """A corpus of generated documents."""

    make: Callable[[Tokenizer, int, int], TaskDocument]     # tokenizer, length, number of the document
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
