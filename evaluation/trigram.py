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


class Counts:
    """Of one order: counts of n-grams, and of each context its total and its number of n-grams."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, V: int) -> None:
        self.grams, self.counts, self.V = grams, counts, V
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        self.discount = ones / (ones + 2 * twos) if ones else 0.5
        self.contexts, first = np.unique(grams // V, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        self.kinds = np.diff(first, append=len(grams))

    def mix(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of the last token of each n-gram after the others, given that of one order less."""
        def found(keys: np.ndarray, wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
            place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
            return np.where(keys[place] == wanted, values[place], 0)

        total = found(self.contexts, grams // self.V, self.totals)
        own = np.maximum(found(self.grams, grams, self.counts) - self.discount, 0)
        left = self.discount * found(self.contexts, grams // self.V, self.kinds)
        return np.where(total > 0, (own + left * lower) / np.maximum(total, 1), lower)


class Trigram:
    """The model of a text, given as token ids (n,)."""

    def __init__(self, ids: np.ndarray, V: int) -> None:
        self.V = V
        grams, counts = np.unique(self.grams(ids), return_counts=True)
        self.orders = [Counts(grams, counts, V)]
        for n in (2, 1):            # of a lower order, each longer n-gram that ends in it counts once
            grams, counts = np.unique(grams % V**n, return_counts=True)
            self.orders.insert(0, Counts(grams, counts, V))

    def grams(self, ids: np.ndarray) -> np.ndarray:
        """Each three neighbours of ids (n,) as one number, (n - 2,)."""
        ids = ids.astype(np.int64)
        return (ids[:-2] * self.V + ids[1:-1]) * self.V + ids[2:]

    def losses(self, ids: np.ndarray) -> np.ndarray:
        """Loss in nats of ids (n,) from the third on, (n - 2,)."""
        grams = self.grams(ids)
        p = np.full(len(grams), 1 / self.V)
        for n, order in enumerate(self.orders, 1):
            p = order.mix(grams % self.V**n, p)
        return -np.log(p)
