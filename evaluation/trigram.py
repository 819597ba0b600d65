"""An interpolated Kneser-Ney trigram: what a model must beat before its loss says anything.

    p3(w | u v) = max(c(u v w) - D3, 0) / c(u v) + D3 n(u v) / c(u v) p2(w | v)
    p2(w | v)   = the same of N(v w), the number of different tokens before v w, and p1(w)
    p1(w)       = the same of N(w), the number of different tokens before w, and 1 / V

c counts n-grams, n(u v) the different tokens after u v, D = n1 / (n1 + 2 n2) with n1 and n2 the numbers of
n-grams with count 1 and 2. Kneser and Ney 1995; Chen and Goodman 1999, Computer Speech and Language 13, 359,
equations 24 to 27 with one discount per order. V is the vocabulary's size, at most 2^21.
"""

from __future__ import annotations

import numpy as np


class Order:
    """N-grams of one length, sorted, with their counts; and each context's total and number of n-grams."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, V: int) -> None:
        self.grams = grams
        self.counts = counts
        self.V = V
        # a context is an n-gram without its last token; the n-grams of one context are neighbours
        self.contexts, first = np.unique(grams // V, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        self.n_grams = np.diff(first, append=len(grams))
        # what is taken from each count, for the n-grams that never occurred
        n1 = (counts == 1).sum()
        n2 = (counts == 2).sum()
        self.discount = n1 / (n1 + 2 * n2) if n1 else 0.5

    def mix(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of the last token of each n-gram after the others, given that of one order less."""
        contexts = grams // self.V
        total = look_up(self.contexts, self.totals, contexts)
        n_grams = look_up(self.contexts, self.n_grams, contexts)
        count = look_up(self.grams, self.counts, grams)
        discounted = np.maximum(count - self.discount, 0)
        # what the discounts took from a context is shared out as the lower order says
        taken = self.discount * n_grams
        mixed = (discounted + taken * lower) / np.maximum(total, 1)
        return np.where(total > 0, mixed, lower)                        # of an unknown context: the lower one


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


class Trigram:
    """The model of a text, given as token ids (n,). An n-gram is a number with its tokens as digits."""

    def __init__(self, ids: np.ndarray, V: int) -> None:
        self.V = V
        grams, counts = np.unique(self.trigrams(ids), return_counts=True)
        trigrams = Order(grams, counts, V)
        # in a lower order, an n-gram counts once for each different token before it
        grams, counts = np.unique(grams % V**2, return_counts=True)
        bigrams = Order(grams, counts, V)
        grams, counts = np.unique(grams % V, return_counts=True)
        self.orders = [Order(grams, counts, V), bigrams, trigrams]

    def trigrams(self, ids: np.ndarray) -> np.ndarray:
        """Each three neighbours of ids (n,) as one number, (n - 2,)."""
        ids = ids.astype(np.int64)
        contexts = ids[:-2] * self.V + ids[1:-1]
        return contexts * self.V + ids[2:]

    def losses(self, ids: np.ndarray) -> np.ndarray:
        """Loss in nats of ids (n,) from the third on, (n - 2,)."""
        trigrams = self.trigrams(ids)
        p = np.full(len(trigrams), 1 / self.V)
        for n, order in enumerate(self.orders, start=1):
            p = order.mix(trigrams % self.V**n, p)
        return -np.log(p)
