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
import pandas as pd


class Order:
    """The n-grams of one length with their counts."""

    def __init__(self, counts: pd.Series, V: int) -> None:
        self.counts = counts                                            # by n-gram
        self.V = V
        # a context is an n-gram without its last token: its total, and how many tokens follow it
        contexts = counts.groupby(counts.index // V)
        self.contexts = contexts.agg(["sum", "size"])
        # what is taken from each count, for the n-grams that never occurred
        n1 = (counts == 1).sum()
        n2 = (counts == 2).sum()
        self.discount = n1 / (n1 + 2 * n2) if n1 else 0.5

    def mix(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of the last token of each n-gram after the others, given that of one order less."""
        count = self.counts.reindex(grams, fill_value=0).to_numpy()
        total, n_grams = self.contexts.reindex(grams // self.V, fill_value=0).to_numpy().T
        discounted = np.maximum(count - self.discount, 0)
        # what the discounts took from a context is shared out as the lower order says
        taken = self.discount * n_grams
        mixed = (discounted + taken * lower) / np.maximum(total, 1)
        return np.where(total > 0, mixed, lower)                        # of an unknown context: the lower one


class Trigram:
    """The model of a text, given as token ids (n,). An n-gram is a number with its tokens as digits."""

    def __init__(self, ids: np.ndarray, V: int) -> None:
        self.V = V
        grams = self.trigrams(ids)
        self.orders: list[Order] = []
        for n in (3, 2, 1):
            # in a lower order, an n-gram counts once for each different token before it
            counts = pd.Series(grams % V**n).value_counts()
            self.orders.insert(0, Order(counts, V))
            grams = counts.index

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
