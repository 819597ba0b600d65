"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--extend yarn]`.

There are several protocols, because the usual one flatters long contexts. All use the same
documents at every length, no window crosses a document, and sums and counts are kept, never means
of means. As in training, a window begins anywhere in a document, and no token is added before it.

"truncated" is the plain model's result on the targets of fixed, each predicted from its own last L
tokens, L being the training length: what a longer context must beat. gain = loss(truncated) - loss,
in nats per token: positive where more context helps, 0 where it is ignored, negative where it
breaks the model. At L it is near 0: of k targets in one window the first has only L - k + 1 tokens.

Each --extend METHOD[:key=value,...] measures the same model under a method that extends its
context; METHOD+METHOD applies both. `--extend all` measures every method that fits and needs no
options, at L, 2 L and 4 L unless --lengths says otherwise, and ends in a table: gain over
truncation, keys found, seconds. If the best method is a scaling of RoPE and beats truncation, it
prints what to write into config.json; `export.py RUN OUT --extend METHOD:factor=S` writes it.

Writes RUN/eval/DATA.parquet (the sums of each window), .json (sums, and of which checkpoint) and
.png (a picture); with --extend all DATA-extended. The first two are written after each length, so
the same command continues an interrupted evaluation. A second call adds what they lack; --replace
measures everything again. Both calls must have the same targets, model and code. The longest length
decides which documents and targets are used, so to add shorter lengths later, pass the earlier
longest one with --longest, and --protocol nonoverlap,fixed (position is of the longest alone).
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd

from base.command import integers, positive, run_command, run_parser
from base.errors import UserError, did_you_mean
from data.loader import read_meta
from data.tasks import TASKS
from evaluation import results
from evaluation.comparison import place_curves
from evaluation.estimates import estimates
from evaluation.extension import METHODS, describe_extension, open_extensions
from evaluation.figures import draw_evaluation, merge_positions
from evaluation.protocols import DEFAULT_PROTOCOLS, PROTOCOLS, measure, target_settings
from evaluation.results import BY_POSITION, GAIN, Results
from evaluation.scoring import MULTIPLES, Evaluation, Settings, Text, choose_lengths, open_text
from evaluation.show import choose_all, show
from hf.pretrained import pulled
from runtime.checkpoint import Opened, open_run
from runtime.device import dtype_name, set_up_cpu
from runtime.run import git_revision

TESTED_BY = {name: task.protocols for name, task in TASKS.items() if task.protocols}


# -----------------------------------------------------------------------------------------------------------
# The arguments


def parse_arguments() -> argparse.Namespace:
    names = [f"protocols: {', '.join(PROTOCOLS)}", f"methods of --extend: {', '.join(METHODS)}",
             "--help NAME explains one of them."]
    epilog = "\n".join(textwrap.fill(line, 98, subsequent_indent="  ") for line in names)
    parser = run_parser(__doc__, epilog, add_help=False)
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
    parser.add_argument("-h", "--help", action=Help, nargs="?", metavar="TOPIC",
                        help="print this page, or explain a protocol or a method")
    parser.add_argument("--lengths", type=integers, action="extend",
                        help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L, as far as "
                        "there are 8 documents, or fewer if the text has fewer)")
    parser.add_argument("--protocol", type=protocols, action="extend",
                        help=f"one or more of those below (default {','.join(DEFAULT_PROTOCOLS)}; for a run "
                        "trained on a task its own, with --extend all fixed,passkey)")
    parser.add_argument("--extend", action="append", default=[], metavar="METHOD",
                        help="also measure under a method that extends the context; may be repeated")
    parser.add_argument("--skip-unfit", action="store_true",
                        help="skip a method that does not fit the run, with one line instead of an error")
    parser.add_argument("--data", metavar="DIR_OR_FILE",
                        help="corpus or text file (default: the run's corpus; Hugging Face has none)")
    parser.add_argument("--train-length", type=positive, metavar="L",
                        help="take this as L, where config.json names more than the model was trained on")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"),
                        help="of matrix products (default: train.dtype; for a Hugging Face folder auto, "
                        "bfloat16 where it is faster)")
    parser.add_argument("--longest", type=positive, metavar="TOKENS",
                        help="use only documents with more tokens than this, and the same targets as at this "
                        "length (default and least: the longest of --lengths, and L for fixed)")
    parser.add_argument("--targets", type=positive, help="fixed: k, tokens scored (default min(32, L/4))")
    parser.add_argument("--windows", type=positive,
                        help="fixed, position, repeat, copy: number of windows; algorithms: number of "
                        "examples; retrieval: a quarter as many at each depth (default 32, --extend all: 8)")
    parser.add_argument("--tokens", type=positive, default=2**16,
                        help="nonoverlap, sliding: tokens scored (default 65536)")
    parser.add_argument("--stride", type=positive, help="sliding: S (default a quarter of each length)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows, the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file (default RUN/eval/DATA.json)")
    parser.add_argument("--replace", action="store_true", help="discard what the output file holds")
    # these have no flag: choose_all (evaluation/show.py) changes them for --extend all
    parser.set_defaults(multiples=MULTIPLES, suffix="", show=show)
    args = parser.parse_args()
    if args.json and args.json.suffix != ".json":       # .parquet and .png are written beside it
        raise UserError(f"--json {args.json}: must end in .json; give {args.json}.json")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be 0 or more")
    if "all" in args.extend:
        choose_all(args)
    return args


def protocols(text: str) -> list[str]:
    """The type of --protocol: names and commas, where a task stands for its own."""
    names: list[str] = []
    for name in text.split(","):
        if name not in PROTOCOLS and name not in TESTED_BY:
            hint = did_you_mean(name, [*PROTOCOLS, *TESTED_BY]) or f"; choose from {','.join(PROTOCOLS)}"
            raise argparse.ArgumentTypeError(f"{name} is unknown{hint}")
        names += TESTED_BY.get(name, [name])
    return names


class Help(argparse.Action):
    """--help [TOPIC]: prints the page of the command, of a protocol or of a method, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, topic: Any, _: Any = None) -> None:
        if topic is None:
            parser.print_help()
        elif topic in PROTOCOLS:
            protocol = PROTOCOLS[topic]
            print(textwrap.fill(f"{topic}: {protocol.title}. {protocol.note}", 98))
        elif topic in METHODS:
            print(describe_extension(topic))
        else:
            hint = did_you_mean(topic, [*PROTOCOLS, *METHODS]) or "; eval.py --help lists the topics"
            raise UserError(f"--help {topic}: neither a protocol nor a method{hint}")
        sys.exit()


def choose_settings(args: argparse.Namespace, names: list[str], L: int, text: Text) -> Settings:
    """The arguments with their defaults for this training length and text. Raises UserError."""
    chosen = [PROTOCOLS[name] for name in names]
    needed = [args.longest] if args.longest else []                     # tokens that a document must have
    if any(protocol.needs_L for protocol in chosen):
        needed.append(L)
    multiples = args.multiples
    if not any(protocol.needs_text for protocol in chosen):             # no text limits the lengths
        most = min(protocol.most_multiples for protocol in chosen)
        multiples = [n for n in multiples if n <= most]
        text = Text(text.name, [])
    lengths = choose_lengths(args.lengths, L, text, needed, multiples)
    targets = args.targets or max(1, min(32, L // 4))
    uses_targets = any("targets" in protocol.target_settings for protocol in chosen)
    if uses_targets and targets > min(lengths):
        raise UserError(f"--targets {targets}: must be at most the shortest length, {min(lengths)}")
    longest = max([*lengths, *needed])
    return Settings(names, lengths, longest, targets, args.windows or 32, args.tokens, args.stride, args.seed)


# -----------------------------------------------------------------------------------------------------------
# The evaluation


def open_evaluation(args: argparse.Namespace, run: Opened) -> Evaluation:
    """The run's model, the text, and what to measure. Raises UserError."""
    changes = {"seq_len": args.train_length, "dtype": args.dtype}
    changes = {key: value for key, value in changes.items() if value}
    config = run.config.model_copy(update={"train": run.config.train.model_copy(update=changes)})
    source = (run.meta or {}).get("source", "")         # of a task, its name
    names = list(dict.fromkeys(args.protocol or TESTED_BY.get(source, DEFAULT_PROTOCOLS)))
    # opened even if no protocol needs it: its name is that of the output file, its checksum is recorded
    if any(PROTOCOLS[name].needs_text for name in names) or args.data or config.data.dir:
        text = open_text(args.data, config.data.dir, run.tokenizer, run.meta)
    else:
        text = Text("tasks", [])
    if "trigram" in names:
        splits = run.meta and run.meta["splits"]["train"]
        if splits is None or splits != read_meta(Path(config.data.dir) / "meta.json")["splits"]["train"]:
            raise UserError("--protocol trigram: counts the run's training text, which is not in data.dir "
                            f"{config.data.dir or '(none)'}; prepare it there again, or leave trigram out")
    settings = choose_settings(args, names, config.train.seq_len, text)
    extends = open_extensions(args.extend, run.model, config, settings.lengths, args.skip_unfit)
    e = Evaluation(run.model, config, run.tokenizer, text, settings, extends, args.run)
    if not e.possible:
        raise UserError(f"--lengths {min(e.lengths)}: {config.position.encoding} ends at "
                        f"{run.model.active().max_length} positions; give a shorter one")
    return e


def head_of(run: Opened, e: Evaluation) -> dict[str, Any]:
    """What the JSON says of the run, the text and the settings."""
    return {"run": e.run, "encoding": e.config.position.encoding, "seq_len": e.L,
            "tokenizer": e.tokenizer.name, "data": e.text.name, "data_sha256": e.whole_text.sha256(),
            **run.origin(), "position": e.config.position.model_dump(mode="json"),
            "positions": e.config.train.positions,
            "position_range": e.config.train.position_range, "seed": e.settings.seed,
            "dtype": dtype_name(e.config.train, next(run.model.parameters()).device),
            "train_dtype": (run.state and run.state.dtype) or run.config.train.dtype,
            "commit": git_revision()[0], "settings": target_settings(e)}


def draw(table: pd.DataFrame, e: Evaluation, title: str, path: Path) -> bool:
    """The picture, with intervals over the text; False if what it shows was not measured."""
    label = e.config.position.encoding
    table = table.assign(label=label)
    is_beyond = (table.protocol == "fixed") & (table.length > e.L)
    by_position = merge_positions(table[table.protocol == "position"])
    no_gate, encodings = pd.Series({label: ""}), pd.Series({label: label})
    gains = place_curves(estimates(table[is_beyond], GAIN.score), no_gate, encodings)
    positions = place_curves(estimates(by_position, BY_POSITION.score), no_gate, encodings)
    if gains.empty and positions.empty:
        return False
    draw_evaluation(gains, positions, title, e.L).savefig(path, dpi=150)
    return True


def main() -> None:
    args = parse_arguments()
    args.run = str(pulled(args.run))
    run = open_run(args.run, args.checkpoint, args.device)
    e = open_evaluation(args, run)
    head = head_of(run, e)
    dropped = "dropped, " if run.model.is_dropped else ""
    title = f"{head['encoding']}, {dropped}trained at L = {e.L}"
    if head.get("step") not in (None, e.config.train.steps):
        title += f" (step {head['step']} of {e.config.train.steps})"
    measured = "generated documents"
    if any(PROTOCOLS[name].needs_text for name in e.settings.protocols):
        n_documents = len(e.text.documents)
        measured = f"{e.text.name}: {n_documents} documents of more than {e.settings.longest} tokens"
    print(f"{e.run}: {title}, on {measured}, in {head['dtype']}", flush=True)

    path = args.json or Path(e.run) / "eval" / f"{e.text.name}{args.suffix}.json"
    with results.lock(path):
        saved = results.read_mergeable(path, head, args.replace)
        e.table = saved.table
        head["settings"] = {**saved.head["settings"], **head["settings"]}
        for _ in measure(e):                    # after each length: an interruption loses no more
            results.write(path, Results(head, e.table))
            if not sys.stderr.isatty():         # a log has no progress bar
                print(f"{e.title}: {e.seconds:.1f} s", file=sys.stderr, flush=True)
    # of what the file holds, what this call asked for
    asked = e.table[e.table.extend.isin([extend.spec for extend in e.extends])]
    asked = asked[asked.length.isin(e.lengths) & asked.protocol.isin(e.settings.protocols)]
    missing = [name for name in e.settings.protocols if name not in {*asked.protocol}]
    notes = [f"{name}: nothing was measured; it needs {PROTOCOLS[name].needs}" for name in missing]
    if asked.empty:
        raise UserError(*notes)
    print(*args.show(asked, e), *notes, sep="\n")
    limit = run.model.active().max_length
    if limit and limit < max(e.lengths):
        print(f"{head['encoding']} is not defined beyond position {limit - 1}: longer lengths are left out")
    title += f", evaluated on {e.text.name}"
    is_drawn = draw(e.table, e, title, path.with_suffix(".png"))
    print(f"wrote {path}, .parquet and .png" if is_drawn else f"wrote {path} and .parquet")


if __name__ == "__main__":
    set_up_cpu()
    run_command(main)
