"""Probes: does the model use distant context? A flat perplexity may mean that the model ignores it.

`python eval.py RUN --protocol repeat,copy,needles`

  repeat   A passage of the text occurs twice, some distance apart: is the second copy predicted better than
           the first? It is if the model looks back that far.
  copy     The same with the text's tokens in random order, where only the first copy can help: induction.
  retrieval and algorithms   Generated documents (data/tasks.py) for a model that was trained on the task:
           configs/passkey.toml, configs/needles.toml, configs/algorithms.toml.

An answer is correct if each of its tokens ranks first, given the right tokens before it. Greedy decoding
would write the same answer, and no other.

Legend: B batch, T time, L = train.seq_len.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from config import TrainConfig
from model import GPT
from runtime.device import autocast

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)    # share of the filler before the first fact that is asked for


@torch.no_grad()
def losses_at(model: GPT, train: TrainConfig, tokens: np.ndarray,
              at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss in nats of the tokens (B, T) at indices `at` (n,), and whether each ranks first, (B, n)."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    with autocast(train, device):
        x = model.hidden(ids[:, :-1], last=ids.shape[1] - int(at.min()))        # what predicts at.min() on
        logits = model.logits(x[:, at - at.min()]).float()                      # (B, n, V)
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, at], reduction="none")
    return losses.double().cpu().numpy(), (logits.argmax(dim=-1) == ids[:, at]).cpu().numpy()


def distance(length: int, L: int) -> int | None:
    """Tokens from a passage of L / 4 to its copy in a window of this length; None if two do not fit."""
    quarter = L // 4
    return length - 2 * quarter if quarter >= 2 and length >= 3 * quarter else None


def repeated(stretches: Sequence[np.ndarray], length: int,
             L: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows (n, length) whose last L / 4 tokens repeat an earlier passage; the indices to score in both.

    A window is L / 4 tokens of context, the passage, the tokens that follow it in the stretch (which has at
    least `length`), and the passage again. Contexts and passages are the same at every length. The first half
    of a passage is not scored: it shows the model what is being repeated.
    """
    p = L // 4
    tokens = np.stack([np.concatenate((stretch[:length - p], stretch[p:2 * p])) for stretch in stretches])
    half = np.arange(p // 2, p)
    return tokens, p + half, length - p + half
