"""How reports show a protocol: a number of each place, computed from sums over windows or trials.

Loss in nats per token, L = train.seq_len.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from evaluation.results import perplexity


class Score(NamedTuple):
    """A number of which more is better: (plus - minus) / per. They are columns of the table, or "" for 0.

    `trials`, 1 in each row, is a column of reports alone.
    """

    plus: str
    minus: str
    per: str = "tokens"

    def total(self, columns: Mapping[str, Any]) -> Any:
        """The numerator, from the columns or from their sums."""
        plus = columns[self.plus] if self.plus else 0
        minus = columns[self.minus] if self.minus else 0
        return plus - minus


class Form(NamedTuple):
    """A number by length, position or distance, with its axes and its format."""

    x_label: str
    y_label: str
    form: str
    score: Score
    figure: Callable[[float], float] = float    # the number that is shown, from the score
    is_gain: bool = False                       # 0 says that nothing was gained


class Measure(NamedTuple):
    """A table of a report: the number, of one protocol, and what is said above the table."""

    key: str                                    # names its picture
    protocol: str
    title: str
    note: str
    form: Form


CONTEXT = "context (tokens)"
LOSS = Score("", "nll")
FOUND = Score("correct", "", "trials")
PERPLEXITY = Form(CONTEXT, "perplexity per token", "#.4g", LOSS, lambda score: perplexity(-score))
BY_POSITION = Form("position (tokens of context)", "loss (nats/token)", "z.3f", LOSS, lambda score: -score)
REPETITION = Form("distance (tokens)", "gain on the second copy (nats/token)", "z.3f",
                  Score("first_nll", "nll"), is_gain=True)
CONTROLLED = REPETITION._replace(y_label="gain over another passage (nats/token)",
                                 score=Score("control_nll", "nll"))
ANSWERS = Form(CONTEXT, "share correct", ".0%", FOUND)
GAIN = Form(CONTEXT, "gain over truncation (nats/token)", "+z.3f", Score("truncated_nll", "nll"),
            is_gain=True)
TRAINING = Form("tokens (millions)", "training loss (nats/token)", "z.3f", LOSS)
