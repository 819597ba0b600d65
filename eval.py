"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--protocol nonoverlap,fixed]`.

Three protocols, because the usual number flatters. In all of them each target is scored once, no window
crosses a document, the same documents and targets are used at every length, and sums and counts are kept,
never means of means. Windows begin wherever they fall, as in training: nothing is put in front of them.

  nonoverlap  The text is cut into blocks of the length and every token is scored (the ALiBi paper's number).
              Longer blocks have fewer tokens with little context, so it falls even for a model that ignores
              far context.
  fixed       Windows of every length end at the same place and only the last k tokens are scored: the same
              targets, with more context to their left. truncated is that figure at L, the training length,
              where nothing is new to the model: what a longer context must beat. gain = loss(truncated) -
              loss, nats a token: positive where more context helps, 0 where it is ignored, negative where it
              breaks the model. Kazemnejad et al. 2023, arXiv:2305.19466, appendix F.
  position    Loss by position in one forward over the longest windows: shows where it breaks.

Writes RUN/eval/DATA.json (records), .npz (sums for each window) and .png (the picture).

Legend: B batch, T time, C = n_embd, V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import load_run
from config import Train, UserError, argument_parser, run_command
from data.loader import Corpus
from data.prepare import Document, read
from data.tokenizer import Tokenizer, byte_lengths
from model import GPT, autocast

PROTOCOLS = ("nonoverlap", "fixed", "position")
MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32, 64)      # of L, the default lengths
CHUNK = 1024                                    # positions whose logits exist at a time
TOKENS_PER_FORWARD = 16_384                     # short windows share a forward


class Window(NamedTuple):
    """Inputs document[start:end] and the targets one token further on, of which the last n_scored count."""

    document: int
    start: int
    end: int
    n_scored: int


class Text(NamedTuple):
    """Documents to evaluate on, ids that open with the separator."""

    name: str
    documents: list[np.ndarray]


# -----------------------------------------------------------------------------------------------------------
# Which tokens are scored: functions of text, lengths and the evaluation seed alone, never of the model


def nonoverlap_windows(text: Text, longest: int, lengths: Sequence[int], max_tokens: int,
                       seed: int) -> dict[int, list[Window]]:
    """Length -> blocks that tile the same targets: whole stretches of `longest`, until max_tokens of them."""
    stretches = [(d, start) for d, document in enumerate(text.documents)
                 for start in range(0, (len(document) - 1) // longest * longest, longest)]
    order = np.random.default_rng(seed).permutation(len(stretches))
    chosen = sorted(stretches[i] for i in order[:max(1, max_tokens // longest)])
    windows: dict[int, list[Window]] = {}
    for length in lengths:
        windows[length] = []
        for document, start in chosen:
            for block in range(start, start + longest, length):
                end = min(block + length, start + longest)              # the last block is shorter if need be
                windows[length].append(Window(document, block, end, end - block))
    return windows


def fixed_ends(text: Text, longest: int, n_scored: int, n_windows: int, seed: int) -> list[tuple[int, int]]:
    """(document, end) of windows of up to `longest` inputs; no token is a scored target twice.

    Documents take turns, so that a few long ones do not decide the figure; places inside one are drawn at
    random.
    """
    rng = np.random.default_rng(seed)
    turns = []
    for d, document in enumerate(text.documents):
        ends = np.arange(longest, len(document), n_scored)              # n_scored apart: no target twice
        turns += [(turn, d, int(end)) for turn, end in enumerate(rng.permutation(ends))]
    return sorted((d, end) for _, d, end in sorted(turns)[:n_windows])


def ended_windows(ends: Sequence[tuple[int, int]], length: int, n_scored: int) -> list[Window]:
    """The windows of one length that end at these (document, end) places."""
    return [Window(document, end - length, end, n_scored) for document, end in ends]


# -----------------------------------------------------------------------------------------------------------
# Scoring


@torch.no_grad()
def token_losses(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of the last targets (B, n) given inputs (B, T), n <= T, in nats, fp32, (B, n).

    Logits are made only for the targets, CHUNK positions at a time: (T, V) of them would take gigabytes.
    """
    x = model.hidden(inputs)[:, -targets.shape[1]:]                     # (B, n, C)
    losses = []
    for x_chunk, target_chunk in zip(x.split(CHUNK, dim=1), targets.split(CHUNK, dim=1), strict=True):
        logits = model.logits(x_chunk).float()                          # (B, CHUNK, V)
        losses.append(F.cross_entropy(logits.transpose(1, 2), target_chunk, reduction="none"))
    return torch.cat(losses, dim=1)


def score(model: GPT, text: Text, windows: Sequence[Window], train: Train) -> Iterator[np.ndarray]:
    """Losses of each window's targets (n_scored,), fp64, in order. Windows of one shape share a forward."""
    device = next(model.parameters()).device
    for (length, n_scored), alike in itertools.groupby(windows, lambda w: (w.end - w.start, w.n_scored)):
        for batch in batched(list(alike), max(1, TOKENS_PER_FORWARD // length)):
            rows = np.stack([text.documents[w.document][w.start:w.end + 1] for w in batch])
            tokens = torch.from_numpy(rows.astype(np.int64)).to(device)     # (B, length + 1)
            with autocast(train, device):
                losses = token_losses(model, tokens[:, :-1], tokens[:, -n_scored:])
            yield from losses.double().cpu().numpy()


def batched(windows: list[Window], size: int) -> Iterator[list[Window]]:
    """Consecutive parts of at most this size."""
    for start in range(0, len(windows), size):
        yield windows[start:start + size]


def record(protocol: str, length: int, nll: np.ndarray, n_tokens: int, n_bytes: int, documents: set[int],
           seconds: float, **more: Any) -> dict[str, Any]:
    """One line of the JSON: perplexity exp(nll / tokens), and bits per byte nll / ln 2 / bytes."""
    nll_sum = float(nll.sum())
    return {"extend": None, "protocol": protocol, "length": length, "nll_sum": nll_sum, "tokens": n_tokens,
            "bytes": n_bytes, "documents": len(documents), "ppl": math.exp(nll_sum / n_tokens),
            "bpb": nll_sum / math.log(2) / n_bytes, "seconds": round(seconds, 3), **more}


class Evaluation:
    """One model on one text under some protocols: the lengths it can take, and its records."""

    def __init__(self, model: GPT, text: Text, tokenizer: Tokenizer, train: Train, protocols: Sequence[str],
                 lengths: Sequence[int], n_scored: int, n_windows: int, max_tokens: int, seed: int) -> None:
        self.model, self.train, self.protocols = model, train, protocols
        self.max_tokens, self.seed = max_tokens, seed
        self.L, self.lengths, self.n_scored = train.seq_len, sorted(set(lengths)), n_scored
        self.longest = max(*self.lengths, self.L)       # truncated needs L tokens even if no length does
        self.text = Text(text.name, [document for document in text.documents if len(document) > self.longest])
        limit = model.encoding.max_length
        self.possible = [length for length in self.lengths if not limit or length <= limit]
        self.byte_lengths = byte_lengths(tokenizer)
        self.ends = fixed_ends(self.text, self.longest, n_scored, n_windows, seed)
        self.per_window: dict[str, np.ndarray] = {}     # "protocol/length/what" -> one number a window
        self._ended: dict[int, tuple[list[np.ndarray], float]] = {}

    def run(self) -> list[dict[str, Any]]:
        """All records, in the order of the protocols."""
        if not self.possible:
            return []
        return [line for protocol in self.protocols for line in getattr(self, protocol)()]

    def nonoverlap(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length."""
        windows = nonoverlap_windows(self.text, self.longest, self.lengths, self.max_tokens, self.seed)
        for length in self.possible:
            losses, seconds = self._score("nonoverlap", windows[length])
            yield self._record("nonoverlap", length, windows[length], losses, seconds)

    def fixed(self) -> Iterator[dict[str, Any]]:
        """A record for each possible length, with the truncated control and the gain over it."""
        k = self.n_scored
        truncated = float(sum(losses[-k:].sum() for losses in self._score_ended(self.L)[0]))
        for length in self.possible:
            losses, seconds = self._score_ended(length)
            losses = [x[-k:] for x in losses]
            gain = (truncated - float(sum(x.sum() for x in losses))) / (len(self.ends) * k)
            windows = ended_windows(self.ends, length, k)
            yield self._record("fixed", length, windows, losses, seconds, truncated_nll_sum=truncated,
                               gain=gain)

    def position(self) -> Iterator[dict[str, Any]]:
        """A record for each bucket of positions in the longest windows."""
        longest = max(self.possible)
        losses, seconds = self._score_ended(longest)
        windows = ended_windows(self.ends, longest, longest)
        n_bytes = np.array([self._bytes(window) for window in windows]).sum(axis=0)     # (longest,)
        documents = {w.document for w in windows}
        for start, end in position_buckets(longest):
            nll = np.array([x[start:end] for x in losses])              # (windows, bucket)
            yield record("position", longest, nll, nll.size, int(n_bytes[start:end].sum()), documents,
                         seconds, bucket=[start, end])

    def _score_ended(self, length: int) -> tuple[list[np.ndarray], float]:
        """Losses of the windows that end at self.ends, and the seconds they took: the last n_scored at least.

        All positions of the longest ones where `position` is wanted too, so that both share these forwards.
        """
        if length not in self._ended:
            share = "position" in self.protocols and length == max(self.possible)
            windows = ended_windows(self.ends, length, length if share else self.n_scored)
            self._ended[length] = self._score("fixed", windows)
        return self._ended[length]

    def _score(self, protocol: str, windows: Sequence[Window]) -> tuple[list[np.ndarray], float]:
        from tqdm import tqdm

        began = time.perf_counter()
        bar = tqdm(score(self.model, self.text, windows, self.train), total=len(windows), unit="window",
                   desc=f"{protocol} {windows[0].end - windows[0].start}", delay=3, leave=False,
                   disable=None)
        return list(bar), time.perf_counter() - began

    def _bytes(self, window: Window) -> np.ndarray:
        """Bytes of each scored target (n_scored,)."""
        tokens = self.text.documents[window.document]
        return self.byte_lengths[tokens[window.end + 1 - window.n_scored:window.end + 1]]

    def _record(self, protocol: str, length: int, windows: Sequence[Window], losses: Sequence[np.ndarray],
                seconds: float, **more: Any) -> dict[str, Any]:
        nll = np.array([x.sum() for x in losses])                       # (windows,)
        n_bytes = np.array([self._bytes(window).sum() for window in windows])
        columns = {"nll": nll, "tokens": [w.n_scored for w in windows], "bytes": n_bytes,
                   "document": [w.document for w in windows], "end": [w.end for w in windows]}
        for name, column in columns.items():
            self.per_window[f"{protocol}/{length}/{name}"] = np.array(column)
        return record(protocol, length, nll, sum(w.n_scored for w in windows), int(n_bytes.sum()),
                      {w.document for w in windows}, seconds, **more)


def position_buckets(longest: int) -> list[tuple[int, int]]:
    """[from, to) of positions, two to an octave from 4 on; position i has i + 1 tokens of context."""
    steps = (round(2 ** (i / 2)) for i in range(4, 2 * longest.bit_length()))
    return list(itertools.pairwise(sorted({0, longest, *(step for step in steps if step < longest)})))


# -----------------------------------------------------------------------------------------------------------
# Showing


def table(records: Sequence[dict[str, Any]], lengths: Sequence[int], L: int) -> Iterator[str]:
    """The figures by length, for the screen; "-" where the encoding cannot go."""
    cells = {(r["protocol"], r["length"]): r for r in records if "bucket" not in r}
    yield "           |      nonoverlap      |               fixed targets"
    yield " length  xL|        ppl  bits/byte |        ppl  bits/byte   truncated ppl    gain (nats/token)"
    for length in lengths:
        plain, fixed = cells.get(("nonoverlap", length)), cells.get(("fixed", length))
        line = f"{length:7} {length / L:4g}|{_cell(plain, 'ppl')} {_cell(plain, 'bpb')} |"
        line += f"{_cell(fixed, 'ppl')} {_cell(fixed, 'bpb')}"
        if fixed:
            truncated = math.exp(fixed["truncated_nll_sum"] / fixed["tokens"])
            line += f"     {truncated:11.4g}    {fixed['gain']:+17.4f}"
        yield line + ("   <- training length" if length == L else "")


def _cell(line: dict[str, Any] | None, key: str) -> str:
    return f"{line[key]:11.4g}" if line else f"{'-':>11}"


def plot(records: Sequence[dict[str, Any]], title: str, L: int, path: Path) -> None:
    """Perplexity against context, and loss against position, with the training length marked."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for protocol, style, color in (("nonoverlap", "o--", "#0072b2"), ("fixed", "s-", "#d55e00")):
        lines = [r for r in records if r["protocol"] == protocol]
        left.plot([r["length"] for r in lines], [r["ppl"] for r in lines], style, color=color, label=protocol)
    fixed = [r for r in records if r["protocol"] == "fixed"]
    if fixed:
        truncated = math.exp(fixed[0]["truncated_nll_sum"] / fixed[0]["tokens"])
        left.axhline(truncated, color="black", linestyle=":", label="fixed, truncated to L")
    left.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="perplexity per token",
             title="perplexity against context")
    by_position = [r for r in records if r["protocol"] == "position"]
    right.plot([math.sqrt((r["bucket"][0] + 1) * r["bucket"][1]) for r in by_position],
               [math.log(r["ppl"]) for r in by_position], ".-", color="#009e73")
    right.set(xscale="log", xlabel="position in the window (tokens of context)",
              ylabel="loss (nats per token)", title="loss by position")
    ticks = sorted({r["length"] for r in records if r["protocol"] != "position"}) or [L]
    left.set_xticks(ticks, [str(t) for t in ticks])
    left.minorticks_off()
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    left.yaxis.set_major_formatter(ScalarFormatter())
    for axis in (left, right):
        axis.axvline(L, color="grey", linewidth=1)
        axis.annotate(f" L = {L}", (L, 0), xycoords=("data", "axes fraction"), va="bottom", color="grey")
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -----------------------------------------------------------------------------------------------------------
# Command


def open_text(source: str | None, data_dir: str, tokenizer: Tokenizer) -> Text:
    """Validation documents of a prepared corpus (default: the run's own), or a text file as one document."""
    path = Path(source or data_dir)
    if path.is_file():
        return Text(path.stem, [read(Document(path), tokenizer)])
    corpus = Corpus(path)
    theirs = corpus.meta["tokenizer"]
    if theirs != {"name": tokenizer.name, "sha256": tokenizer.sha256}:
        raise UserError(f"--data {path}: tokenizer {theirs['name']}, but the run was trained with "
                        f"{tokenizer.name}; prepare it with --tokenizer {tokenizer.name}")
    return Text(path.name, [corpus.tokens["val"][a:b] for a, b in itertools.pairwise(corpus.offsets["val"])])


def choose_lengths(wanted: str | None, L: int, text: Text) -> list[int]:
    """The lengths asked for, or L/2 ... 64 L as far as documents go. Raises UserError for the impossible."""
    longest = max(len(document) for document in text.documents) - 1
    if wanted is None:
        lengths = [int(m * L) for m in MULTIPLES if m * L <= longest]
        if L not in lengths:
            raise UserError(f"data {text.name}: its longest document has {longest} tokens, fewer than the "
                            f"training length {L}; give longer text with --data")
        return lengths
    try:
        lengths = [int(part) for part in wanted.split(",")]
    except ValueError as error:
        raise UserError(f"--lengths {wanted}: must be integers and commas, such as 256,512") from error
    if min(lengths) < 1 or max(*lengths, L) > longest:
        raise UserError(f"--lengths {wanted}: these and the training length {L} must lie in 1 ... {longest}, "
                        f"the longest document of {text.name}")
    return lengths


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a folder that train.py made")
    parser.add_argument("--lengths", help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L)")
    parser.add_argument("--protocol", default=",".join(PROTOCOLS), help="default %(default)s")
    parser.add_argument("--data", metavar="DIR_OR_FILE", help="corpus or text (default: the run's corpus)")
    parser.add_argument("--targets", type=int, help="fixed: k, tokens scored (default min(256, L/4))")
    parser.add_argument("--windows", type=int, default=32, help="fixed, position: windows (default 32)")
    parser.add_argument("--tokens", type=int, default=2**16, help="nonoverlap: tokens scored (default 65536)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows; the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written (default RUN/eval/DATA.json)")
    args = parser.parse_args()
    protocols = args.protocol.split(",")
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise UserError(f"--protocol {protocol}: unknown; choose from {','.join(PROTOCOLS)}")
    model, config, tokenizer = load_run(args.run)
    L = config.train.seq_len
    text = open_text(args.data, config.data.dir, tokenizer)
    lengths = choose_lengths(args.lengths, L, text)
    n_scored = args.targets or max(1, min(256, L // 4))
    if not 0 < n_scored <= min(lengths) or args.windows < 1 or args.tokens < 1:
        raise UserError(f"--targets {n_scored} --windows {args.windows} --tokens {args.tokens}: must be "
                        f"positive, and --targets at most the shortest length, {min(lengths)}")
    evaluation = Evaluation(model, text, tokenizer, config.train, protocols, lengths, n_scored, args.windows,
                            args.tokens, args.seed)
    print(f"{args.run}: {config.position.encoding}, trained at L = {L}, on {text.name}: "
          f"{len(evaluation.text.documents)} documents of more than {evaluation.longest} tokens")
    records = evaluation.run()
    print("\n".join(table(records, evaluation.lengths, L)))
    limit = model.encoding.max_length
    if limit and max(lengths) > limit:
        print(f"{config.position.encoding} is not defined beyond position {limit - 1}: empty cells")
    path = args.json or Path(args.run) / "eval" / f"{text.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"run": str(args.run), "encoding": config.position.encoding, "seq_len": L,
            "tokenizer": tokenizer.name, "data": text.name, "seed": args.seed}
    path.write_text(json.dumps({**head, "records": records}, indent=1) + "\n")
    np.savez(path.with_suffix(".npz"), **evaluation.per_window)  # type: ignore[arg-type]
    title = f"{config.position.encoding}, trained at L = {L}, evaluated on {text.name}"
    plot(records, title, L, path.with_suffix(".png"))
    print(f"wrote {path}, .npz and .png")


if __name__ == "__main__":
    run_command(main)
