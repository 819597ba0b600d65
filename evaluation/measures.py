"""What compare.py shows: a measure for each protocol, computed from sums over windows or trials.

Loss in nats per token, L = train.seq_len.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from data.tasks import ALGORITHMS, RETRIEVAL
from evaluation import results


class Score(NamedTuple):
    """A number of which more is better: (plus - minus) / per, named after columns of the .npz."""

    plus: str
    minus: str
    per: str

    def total(self, columns: Mapping[str, Any]) -> Any:
        """The numerator, from the columns or from their sums."""
        return (columns[self.plus] if self.plus else 0) - (columns[self.minus] if self.minus else 0)


class Measure(NamedTuple):
    """A number by length, position or distance."""

    protocol: str
    title: str
    note: str
    x_label: str
    y_label: str
    scale: str
    form: str
    score: Score
    figure: Callable[[float], float] = float    # the number that is shown, from the score
    place: str = ""     # of a probe: the second axis of its map, beside the length

    @property
    def shows_score(self) -> bool:
        """Whether the score itself is shown, not a function of it such as perplexity."""
        return self.figure is float

    def number(self, sums: Mapping[str, float]) -> float:
        """What is shown, from the sums of one place."""
        return self.figure(self.score.total(sums) / sums[self.score.per])


def loss(score: float) -> float:
    """Nats per token."""
    return -score


def perplexity(score: float) -> float:
    """exp(loss); infinite where that overflows."""
    return results.perplexity(-score)


CONTEXT = "context (tokens)"
LOSS, FOUND = Score("", "nll", "tokens"), Score("correct", "", "trials")
PERPLEXITY = (CONTEXT, "perplexity per token", "log", "#.4g", LOSS, perplexity)
REPETITION = ("distance (tokens)", "gain on the second copy (nats/token)", "linear", ".3f",
              Score("first_nll", "nll", "tokens"), float, "distance")
ANSWERS = (CONTEXT, "share correct", "linear", ".0%", FOUND, float)
GAIN = Measure(
    "fixed", "Gain over truncation, fixed targets",
    "Loss with the context truncated to L minus loss with all of it, on the same targets: positive where "
    "longer context helps, 0 where it is ignored, negative where it breaks the model.",
    CONTEXT, "gain (nats/token)", "asinh", "+.4f", Score("truncated_nll", "nll", "tokens"))
MEASURES = (
    Measure("nonoverlap", "Perplexity, nonoverlap", "Blocks of this length; every token is scored. Falls "
            "with length even for a model that ignores distant context.", *PERPLEXITY),
    Measure("sliding", "Perplexity, sliding", "A window of this length moves by a stride and only the new "
            "tokens are scored, so that every target has nearly all of the context.", *PERPLEXITY),
    Measure("fixed", "Perplexity, fixed targets", "The same tokens at every length, with more context to "
            "their left.", *PERPLEXITY),
    Measure("position", "Loss by position", "One forward over the longest windows.",
            "position (tokens of context)", "loss (nats/token)", "linear", ".3f", LOSS, loss),
    Measure("repeat", "Repeated text", "How much lower the loss of a passage of the text is at its second "
            "occurrence, by the distance between the two.", *REPETITION),
    Measure("copy", "Repeated random tokens", "The same on shuffled text, where only the first copy can "
            "help.", *REPETITION),
    Measure("passkey", "Passkey", "Share of the keys that are found in a text of this length, over all "
            "depths; the picture shows them by depth.", *ANSWERS, "depth"),
    *(Measure(kind, f"Retrieval, {kind.replace('_', ' ')}", "Share of the trials with the right answer to a "
              "question about facts in filler text of this length, over all depths (docs/probes.md).",
              *ANSWERS, "depth") for kind in RETRIEVAL if kind != "passkey"),
    *(Measure(name, f"Algorithm, {name.replace('_', ' ')}", "Share of the trials in which all of the answer "
              "is right. A window of this length has a quarter as many symbols (docs/probes.md).", *ANSWERS)
      for name in ALGORITHMS),
)
