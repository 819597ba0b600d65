"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--protocol fixed] [--extend yarn]`.

There are several protocols, because the usual one flatters long contexts. All of them use the same documents
at every length, no window crosses a document, and sums and counts are kept, never means of means.
nonoverlap, rolling, sliding and fixed score each target once, and the targets are the same at every length.
As in training, a window begins anywhere in a document, and no token is added before it.

  nonoverlap  Cut the text into blocks of the length and score every token (the ALiBi paper's protocol).
              Longer blocks have fewer tokens with little context, so perplexity falls even for a model that
              ignores distant context.
  rolling     nonoverlap over every token of the documents. The tokens left at the end of a document are
              scored at the end of a full window. This is loglikelihood_rolling of lm-evaluation-harness.
  sliding     Move the window by a stride S and score only the new tokens: each target has at least length - S
              tokens before it. S = 1 is exact, and costs a forward pass per token.
  fixed       Windows of every length end at the same place, and only the last k tokens are scored: the same
              targets, with more context to their left. "truncated" is the plain model's result at L, the
              training length: what a longer context must beat. gain = loss(truncated) - loss, in nats per
              token: positive where more context helps, 0 where it is ignored, negative where it breaks the
              model. Kazemnejad et al. 2023, arXiv:2305.19466, appendix F.
  position    Loss by position in one forward pass over the longest windows: shows where the model breaks.
  repeat, copy   Probes: does the model use distant context, or only survive it? A passage of the text, or of
              shuffled tokens, occurs twice.
  passkey, needle, multi_key, multi_query, multi_value, variables   Probes of a model that was trained to
              answer: facts are hidden in filler text, and asked for. "needles" stands for the middle four.
  copying, reversal, sorting, addition, parity, flip_flop   Probes of a model that was trained on up to L/4
              symbols, with a quarter of each length. An answer is correct if each of its tokens ranks first,
              given the right tokens before it. docs/probes.md describes all of these.

Each --extend METHOD[:key=value,...] adds a curve of the same model under a method that extends its context;
METHOD+METHOD applies both. Every forward pass computes the whole window; no keys are cached.
`torchrun --nproc_per_node=N eval.py RUN ...` divides the windows among N processes; the sums stay the same.

Writes RUN/eval/DATA.json (records, and of which checkpoint), .npz (sums of each window) and .png (picture).
The first two are written after each length, so the same command continues an interrupted evaluation. A second
call adds to that file what it lacks, and does not measure again what it holds; --replace does. Both calls
must have the same targets: the same text, checkpoint, dtype and --seed and, for each protocol that both
measure, the same --longest, --targets, --windows, --tokens and --stride where the protocol depends on them.
Otherwise eval.py refuses before it computes anything: give --json FILE to write another file, or --replace.
Files of these names that something else wrote are never replaced.
The longest length decides which documents and targets are used, so to add shorter lengths later, pass the
earlier longest one with --longest.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent))    # `python -P` leaves it out

from config import Config
from data.loader import read_meta
from data.tasks import ALGORITHMS, RETRIEVAL, TASKS
from evaluation import advice, results
from evaluation.extension import describe_extensions
from evaluation.pictures import draw_evaluation
from evaluation.protocols import (
    DEFAULT_PROTOCOLS,
    PROBES,
    PROTOCOLS,
    Evaluation,
    Settings,
    open_extensions,
    spec_of,
)
from evaluation.show import table
from evaluation.windows import MULTIPLES, Text, choose_lengths, open_text
from hf.export import export, write_extended
from hf.pretrained import is_pretrained, pulled
from runtime import parallel
from runtime.checkpoint import Opened, open_run, weights_sha256
from runtime.command import argument_parser, run_command
from runtime.device import dtype_name, set_up_cpu
from runtime.errors import UserError
from runtime.parallel import Process

TESTED_BY = {name: task.protocols for name, task in TASKS.items() if task.protocols}
MOST_WINDOWS = 1_000_000
MOST_SYMBOLS = 8        # algorithms: the default lengths have up to as many times the symbols of training


def parse_arguments() -> argparse.Namespace:
    known = ",".join((*PROTOCOLS, *PROBES, "needles"))
    parser = argument_parser(__doc__ or "", describe_extensions())
    parser.add_argument("run", metavar="RUN", help="a folder made by train.py, a Hugging Face folder, or "
                        "hf:ORG/NAME of the hub")
    parser.add_argument("--lengths", help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L)")
    parser.add_argument("--protocol", help=f"from {known} (default {','.join(DEFAULT_PROTOCOLS)}; for a run "
                        "that was trained on a task, the protocols of that task)")
    parser.add_argument("--extend", action="append", default=[], metavar="METHOD",
                        help="also measure under a method that extends the context; may be repeated")
    parser.add_argument("--skip-unfit", action="store_true",
                        help="skip a method that does not fit the run, with one line instead of an error")
    parser.add_argument("--data", metavar="DIR_OR_FILE",
                        help="corpus or text file (default: the run's corpus; a Hugging Face folder has "
                        "none)")
    parser.add_argument("--advise", action="store_true",
                        help=f"measure those of {', '.join(advice.METHODS)} that fit, at L, 2 L and 4 L "
                        "(fixed targets and passkey; --extend, --lengths and --windows change that), and end "
                        "in a table of what to use")
    parser.add_argument("--write", type=Path, metavar="OUT",
                        help="with --advise: write the model as a Hugging Face folder whose config.json has "
                        "the method that has the lowest loss at the longest length")
    parser.add_argument("--train-length", type=int, metavar="L",
                        help="take this as L, where config.json names more than the model was trained on")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"),
                        help="of matrix products (default: train.dtype; for a Hugging Face folder auto, "
                        "bfloat16 where it is faster)")
    parser.add_argument("--longest", type=int, metavar="TOKENS",
                        help="use only documents with more tokens than this, and targets with at least this "
                        "many tokens before them (default: the longest of --lengths, and L for fixed)")
    parser.add_argument("--targets", type=int, help="fixed: k, tokens scored (default min(256, L/4))")
    parser.add_argument("--windows", type=int,
                        help="fixed, position, repeat, copy: number of windows; algorithms: trials; passkey, "
                        "needles, variables: trials at each depth are a quarter of it (default 32, or 8 with "
                        "--advise)")
    parser.add_argument("--tokens", type=int, default=2**16,
                        help="nonoverlap, sliding: tokens scored (default 65536)")
    parser.add_argument("--stride", type=int, help="sliding: S in tokens (default a quarter of each length)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows, the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file (default RUN/eval/DATA.json)")
    parser.add_argument("--replace", action="store_true", help="discard what the output file holds")
    args = parser.parse_args()
    args.windows = args.windows if args.windows is not None else advice.WINDOWS if args.advise else 32
    if args.advise:
        args.protocol = args.protocol or ",".join(advice.PROTOCOLS)
        args.skip_unfit, args.extend = not args.extend, args.extend or list(advice.METHODS)
        if "fixed" not in args.protocol.split(","):
            raise UserError(f"--advise --protocol {args.protocol}: needs fixed among them; add it")
    if args.write and (not args.advise or args.write.exists()):
        raise UserError(f"--write {args.write}: " + ("exists; give a new folder" if args.advise else
                                                     "needs --advise; add it"))
    for protocol in args.protocol.split(",") if args.protocol is not None else ():
        if protocol not in (*PROTOCOLS, *PROBES, *TESTED_BY):
            raise UserError(f"--protocol {protocol}: unknown; choose from {known}")
    if args.train_length is not None and args.train_length < 1:
        raise UserError(f"--train-length {args.train_length}: must be at least 1")
    if args.json and args.json.suffix != ".json":       # .npz and .png are written beside it
        raise UserError(f"--json {args.json}: must end in .json, such as {args.json}.json")
    return args


def choose_protocols(wanted: str | None, run: str) -> list[str]:
    """The protocols of --protocol, where a task stands for its own; or the default for this run."""
    meta = Path(run) / "corpus.json"
    task = (read_meta(meta).get("task") or {}).get("name") if wanted is None and meta.exists() else None
    names = wanted.split(",") if wanted else [task] if task in TESTED_BY else DEFAULT_PROTOCOLS
    return list(dict.fromkeys(protocol for name in names for protocol in TESTED_BY.get(name, [name])))


def choose_settings(args: argparse.Namespace, protocols: list[str], L: int, text: Text) -> Settings:
    """The arguments with their defaults for this training length and text. Raises UserError."""
    generated = 0                               # if no protocol needs the text: the largest multiple of L
    if set(protocols) <= {*RETRIEVAL, *ALGORITHMS}:
        generated = MOST_SYMBOLS if set(protocols) & set(ALGORITHMS) else MULTIPLES[-1]
    needs_L = "fixed" in protocols              # for its control, truncated
    lengths = choose_lengths(args.lengths, L, text, generated, needs_L)
    needed, available = max(*lengths, L * needs_L), max(map(len, text.documents), default=0) - 1
    longest = needed if args.longest is None else args.longest
    if not generated and not needed <= longest <= available:
        raise UserError(f"--longest {longest}: must be in {needed} ... {available}, from the longest of "
                        f"--lengths{' and L' * needs_L} to the longest document of {text.name}")
    targets = max(1, min(256, L // 4)) if args.targets is None else args.targets
    counts = [n for n in (args.windows, args.tokens, args.stride, args.seed + 1) if n is not None]
    if not 0 < targets <= min(lengths) or min(counts) < 1:
        raise UserError(f"--targets {targets} --windows {args.windows} --tokens {args.tokens} --stride "
                        f"{args.stride} --seed {args.seed}: must be positive, the seed at least 0, and "
                        f"--targets at most the shortest length, {min(lengths)}")
    if args.windows > MOST_WINDOWS:
        raise UserError(f"--windows {args.windows}: must be at most {MOST_WINDOWS}")
    return Settings(protocols, lengths, longest, targets, args.windows, args.tokens,
                    args.stride, args.seed)


def length_before(config: Config) -> int | None:
    """The training length before the context was extended, if a scaling names one other than L."""
    L = getattr(getattr(config.position, "scaling", None), "original_length", None)
    return None if config.train.seq_len == L else L


def main() -> None:
    args = parse_arguments()
    process = parallel.start_evaluation()
    args.run = pulled(args.run)
    run = open_run(args.run)
    model, config, tokenizer = run[:3]
    config = config.model_copy(update={"train": config.train.model_copy(update={
        key: value for key, value in (("seq_len", args.train_length), ("dtype", args.dtype)) if value})})
    encoding, L = config.position.encoding, config.train.seq_len
    protocols = choose_protocols(args.protocol, args.run)
    needs_text = not set(protocols) <= {*RETRIEVAL, *ALGORITHMS}
    text = Text("tasks", []) if not (needs_text or args.data or config.data.dir) else \
        open_text(args.data, config.data.dir, tokenizer, run.corpus)
    if args.advise and not args.lengths:
        longest = max(map(len, text.documents)) - 1
        args.lengths = ",".join(str(m * L) for m in advice.MULTIPLES if m * L <= longest)
    settings = choose_settings(args, protocols, L, text)
    extends = open_extensions(args.extend, model, config, settings.lengths, args.skip_unfit)
    evaluation = Evaluation(model, config, tokenizer, text, settings, extends, process)
    if not evaluation.possible:
        raise UserError(f"--lengths {args.lengths}: {encoding} ends at {model.active().max_length} "
                        "positions; give a shorter one")
    path = args.json or Path(args.run) / "eval" / f"{text.name}.json"
    head = {"run": str(args.run), "encoding": encoding, "seq_len": L, "tokenizer": tokenizer.name,
            "before_extension": length_before(config), "data": text.name, "data_sha256": text.sha256(),
            "weights_sha256": weights_sha256(model),
            **run.origin(), "position": config.position.model_dump(mode="json"),
            "positions": config.train.positions, "position_range": config.train.position_range,
            "dtype": dtype_name(config.train, next(model.parameters()).device), "seed": settings.seed,
            "settings": evaluation.deciding()}
    # such as another checkpoint, while the run is being trained
    parallel.require_agreement(process, {**head, "lengths": settings.lengths, "extend": args.extend})
    measured = "generated documents"
    if needs_text:
        n_documents = len(evaluation.text.documents)
        measured = f"{text.name}: {n_documents} documents of more than {settings.longest} tokens"
    with nullcontext() if process.rank else results.claimed(path):
        measure(args, path, head, evaluation, process, text, measured)
        if args.advise and not process.rank:
            advise(args, run, evaluation, results.read(path))


def measure(args: argparse.Namespace, path: Path, head: dict[str, Any], evaluation: Evaluation,
            process: Process, text: Text, measured: str) -> None:
    """Evaluate what `measured` says; print the table and write the files, merged with what they hold."""
    encoding, L, name = head["encoding"], head["seq_len"], head["data"]
    earlier = results.read_mergeable(path, head, args.replace)
    trained = f"{encoding}, {'dropped, ' if evaluation.model.is_dropped else ''}trained at L = {L}"
    if head["before_extension"]:
        trained += f" after L = {head['before_extension']} before its extension"
    if head["positions"] != "plain":
        trained += f" and {head['positions']} positions below {head['position_range']}"
    print(f"{args.run}: {trained}, on {measured}, in {head['dtype']}", flush=True)
    if head["positions"] != "plain":
        print("evaluated at positions 0, 1, 2 ...")
    for extend in evaluation.extends[1:]:
        same = [length for length in evaluation.possible if evaluation.is_as_without(extend, length)]
        if same:
            print(f"--extend {extend.spec}: as without it at {', '.join(map(str, same))}"
                  + f"; give lengths beyond L, such as --lengths {L},{2 * L},{4 * L}"
                  * (same == evaluation.possible))
    parallel.barrier(process)                       # all have read what rank 0 is going to write
    found = None
    for _ in evaluation.measure(results.reusable(earlier, head)):
        if text.sha256() != head["data_sha256"]:
            raise UserError(f"data {name}: was overwritten during the evaluation; nothing was written since, "
                            "evaluate again")
        found = results.Results(head, evaluation.records, evaluation.per_window)
        if not process.rank and found.records:
            found = results.merge(earlier, found) if earlier else found
            results.write(path, found)              # after each place: an interruption loses no more
    if process.rank:
        return
    specs, settings = [spec_of(extend) for extend in evaluation.extends], evaluation.settings
    records = [r for r in evaluation.records if r["extend"] in specs and r["length"] in evaluation.lengths
               and r["protocol"] in settings.protocols]
    if not records:
        raise UserError(f"--lengths {','.join(map(str, evaluation.lengths))}: too short for "
                        f"{', '.join(settings.protocols)}; nothing was measured, give longer ones")
    print("\n".join(table(records, evaluation.lengths, L)))
    limit = evaluation.model.active().max_length
    if limit and limit < max(evaluation.lengths):
        print(f"{encoding} is not defined beyond position {limit - 1}: empty cells")
    if found and earlier:
        print(f"added to the {len(earlier.records)} records of {path}")
    elif not found:
        print(f"{path} holds all of this already; --replace measures it again")
    everything = found.records if found else records
    is_drawn = draw_evaluation(everything, f"{trained}, evaluated on {name}", L, path.with_suffix(".png"))
    print(f"wrote {path}, .npz and .png" if is_drawn else f"wrote {path} and .npz")


def advise(args: argparse.Namespace, run: Opened, evaluation: Evaluation, found: results.Results) -> None:
    """Print which method to use, and write the model with it."""
    rows = advice.rows(found, evaluation.extends, evaluation.possible, run.model, evaluation.config)
    if not rows:
        raise UserError("--advise: no length is beyond L; give a longer text, or --lengths beyond L")
    print("\n".join(advice.table(rows, evaluation.L)))
    if not args.write:
        return
    row = advice.to_write(rows)
    if row is None or row.fields is None:
        raise UserError(f"--write {args.write}: config.json has no form for any of these methods; nothing "
                        "was written")
    source = Path(args.run)
    if is_pretrained(source):
        write_extended(source, args.write, row.fields)
    else:
        position = run.config.position.model_copy(update={"scaling": row.scaling})
        export(source, args.write, run.model, run.config.model_copy(update={"position": position}),
               run.tokenizer, run.state, row.fields["max_position_embeddings"])
    print(f"wrote {args.write}: {row.name} for {row.length} tokens")


if __name__ == "__main__":
    set_up_cpu()
    run_command(main)
