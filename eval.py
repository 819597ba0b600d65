"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--protocol fixed] [--extend yarn]`.

There are several protocols, because the usual one flatters long contexts. All of them use the same documents
at every length, no window crosses a document, and sums and counts are kept, never means of means.
nonoverlap, rolling, sliding and fixed score each target once, and the targets are the same at every length.
As in training, a window begins anywhere in a document, and no token is added before it.

"truncated" is the plain model's result on the targets of fixed at L, the training length: what a longer
context must beat. gain = loss(truncated) - loss, in nats per token: positive where more context helps, 0
where it is ignored, negative where it breaks the model.

Each --extend METHOD[:key=value,...] adds a curve of the same model under a method that extends its context;
METHOD+METHOD applies both. `--extend all` measures every method that fits and needs no options, at L, 2 L and
4 L unless --lengths says otherwise, and ends in a table: loss against truncation, keys found, seconds. If the
best method beats truncation, it prints what to write into config.json (`python export.py RUN OUT --extend
METHOD` writes it). Every forward pass computes whole windows.

Writes RUN/eval/DATA.json (records, and of which checkpoint; with --extend all DATA-extended.json), .npz (sums
of each window) and .png (picture).
The first two are written after each length, so the same command continues an interrupted evaluation. A second
call adds to that file what it lacks; --replace measures everything again. Both calls must have the same
targets, model and code: otherwise eval.py refuses before it computes anything. The longest length decides
which documents and targets are used, so to add shorter lengths later, pass the earlier longest one with
--longest.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import argparse
from pathlib import Path

from base.command import positive, run_command, run_parser
from base.errors import UserError
from data.loader import read_meta
from data.tasks import ALGORITHMS, TASKS
from evaluation import results
from evaluation.extension import EXTENSIONS, describe_extensions
from evaluation.pictures import draw_evaluation
from evaluation.protocols import (
    DEFAULT_PROTOCOLS,
    PROTOCOLS,
    Evaluation,
    Settings,
    describe_protocols,
    open_extensions,
    spec_of,
)
from evaluation.results import EXTENDED, Results
from evaluation.show import advice, table
from evaluation.windows import MULTIPLES, Text, choose_lengths, open_text
from hf.pretrained import pulled
from runtime.checkpoint import open_run
from runtime.device import dtype_name, set_up_cpu
from runtime.run import code_changes, git_revision

TESTED_BY = {name: task.protocols for name, task in TASKS.items() if task.protocols}
# of --extend all: what needs no options
ALL = (*(name for name in EXTENSIONS if name not in ("base", "longrope")), "dual_chunk+yarn")
MOST_SYMBOLS = 8        # algorithms: the default lengths have up to as many times the symbols of training


def parse_arguments() -> argparse.Namespace:
    known = ",".join((*PROTOCOLS, "needles"))
    parser = run_parser(__doc__, f"{describe_protocols()}\n\n{describe_extensions()}")
    parser.add_argument("--lengths", action="append",
                        help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L, as far as "
                        "there are 8 documents)")
    parser.add_argument("--protocol", action="append",
                        help=f"from {known} (default {','.join(DEFAULT_PROTOCOLS)}; for a run "
                        "trained on a task its protocols, with --extend all fixed,passkey)")
    parser.add_argument("--extend", action="append", default=[], metavar="METHOD",
                        help="also measure under a method that extends the context; may be repeated")
    parser.add_argument("--skip-unfit", action="store_true",
                        help="skip a method that does not fit the run, with one line instead of an error")
    parser.add_argument("--data", metavar="DIR_OR_FILE",
                        help="corpus or text file (default: the run's corpus; a Hugging Face folder has "
                        "none)")
    parser.add_argument("--train-length", type=positive, metavar="L",
                        help="take this as L, where config.json names more than the model was trained on")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"),
                        help="of matrix products (default: train.dtype; for a Hugging Face folder auto, "
                        "bfloat16 where it is faster)")
    parser.add_argument("--longest", type=positive, metavar="TOKENS",
                        help="use only documents with more tokens than this, and the same targets as at this "
                        "length (default: the longest of --lengths, and L for fixed)")
    parser.add_argument("--targets", type=positive, help="fixed: k, tokens scored (default min(256, L/4))")
    parser.add_argument("--windows", type=positive,
                        help="fixed, position, repeat, copy: number of windows; algorithms: trials; passkey, "
                        "needles, variables: trials at each depth are a quarter of it (default 32, with "
                        "--extend all 8)")
    parser.add_argument("--tokens", type=positive, default=2**16,
                        help="nonoverlap, sliding: tokens scored (default 65536)")
    parser.add_argument("--stride", type=positive, help="sliding: S (default a quarter of each length)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows, the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file (default RUN/eval/DATA.json)")
    parser.add_argument("--replace", action="store_true", help="discard what the output file holds")
    args = parser.parse_args()
    for name in ("lengths", "protocol"):        # repeated ones combine
        setattr(args, name, ",".join(getattr(args, name) or []) or None)
    args.is_all = "all" in args.extend
    if args.is_all:
        args.extend = [*(spec for spec in args.extend if spec != "all"), *ALL]
        args.skip_unfit, args.protocol = True, args.protocol or "fixed,passkey"
        if "fixed" not in args.protocol.split(","):
            raise UserError(f"--protocol {args.protocol}: --extend all needs fixed among them; add it")
    for protocol in args.protocol.split(",") if args.protocol is not None else ():
        if protocol not in (*PROTOCOLS, *TESTED_BY):
            raise UserError(f"--protocol {protocol}: unknown; choose from {known}")
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
    if not any(PROTOCOLS[protocol].needs_text for protocol in protocols):
        generated = MOST_SYMBOLS if set(protocols) & set(ALGORITHMS) else MULTIPLES[-1]
    needs_L = "fixed" in protocols              # for truncated
    multiples = (1, 2, 4) if args.is_all else MULTIPLES
    lengths = choose_lengths(args.lengths, L, text, generated, needs_L, multiples)
    needed, available = max(*lengths, L * needs_L), max(map(len, text.documents), default=0) - 1
    longest = args.longest or needed
    if not generated and not needed <= longest <= available:
        raise UserError(f"--longest {longest}: must be in {needed} ... {available}, from the longest of "
                        f"--lengths{' and L' * needs_L} to the longest document of {text.name}")
    targets = args.targets or max(1, min(256, L // 4))
    uses_targets = any("targets" in PROTOCOLS[protocol].target_settings for protocol in protocols)
    if uses_targets and targets > min(lengths) or args.seed < 0:
        raise UserError(f"--targets {targets} --seed {args.seed}: --targets must be at most the shortest "
                        f"length, {min(lengths)}, and the seed at least 0")
    windows = args.windows or (8 if args.is_all else 32)
    return Settings(protocols, lengths, longest, targets, windows, args.tokens, args.stride, args.seed)


def main() -> None:
    args = parse_arguments()
    args.run = pulled(args.run)
    run = open_run(args.run, args.checkpoint, args.device)
    model, tokenizer = run.model, run.tokenizer
    config = run.config.model_copy(update={"train": run.config.train.model_copy(update={
        key: value for key, value in (("seq_len", args.train_length), ("dtype", args.dtype)) if value})})
    encoding, L = config.position.encoding, config.train.seq_len
    protocols = choose_protocols(args.protocol, args.run)
    needs_text = any(PROTOCOLS[protocol].needs_text for protocol in protocols)
    text = Text("tasks", []) if not (needs_text or args.data or config.data.dir) else \
        open_text(args.data, config.data.dir, tokenizer, run.corpus)
    if "trigram" in protocols and (run.corpus is None or run.corpus["splits"]["train"] != read_meta(
            Path(config.data.dir) / "meta.json")["splits"]["train"]):
        raise UserError("--protocol trigram: counts the run's training text, which is not in data.dir "
                        f"{config.data.dir or '(none)'}; prepare it there again, or leave trigram out")
    settings = choose_settings(args, protocols, L, text)
    extends = open_extensions(args.extend, model, config, settings.lengths, args.skip_unfit)
    evaluation = Evaluation(model, config, tokenizer, text, settings, extends)
    if not evaluation.possible:
        raise UserError(f"--lengths {args.lengths}: {encoding} ends at {model.active().max_length} "
                        "positions; give a shorter one")
    head = {"run": str(args.run), "encoding": encoding, "seq_len": L, "tokenizer": tokenizer.name,
            "data": text.name, "data_sha256": text.sha256(), **run.origin(),
            "position": config.position.model_dump(mode="json"), "positions": config.train.positions,
            "position_range": config.train.position_range, "seed": settings.seed,
            "dtype": dtype_name(config.train, next(model.parameters()).device),
            "train_dtype": (run.state and run.state.dtype) or run.config.train.dtype,
            "commit": git_revision(code_changes()),
            "settings": evaluation.target_settings()}
    title = f"{encoding}, {'dropped, ' * model.is_dropped}trained at L = {L}"
    measured = "generated documents"
    if needs_text:
        n_documents = len(evaluation.text.documents)
        measured = f"{text.name}: {n_documents} documents of more than {settings.longest} tokens"
    print(f"{args.run}: {title}, on {measured}, in {head['dtype']}", flush=True)
    path = args.json or Path(args.run) / "eval" / f"{text.name}{EXTENDED * args.is_all}.json"
    with results.lock(path):
        saved = results.read_mergeable(path, head, args.replace)
        for _ in evaluation.measure(saved):         # after each place: an interruption loses no more
            saved = results.combine(saved, Results(head, evaluation.records, evaluation.per_window))
            if saved.records:
                results.write(path, saved)
    wanted = [spec_of(extend) for extend in evaluation.extends]
    records = [r for r in saved.records if r["extend"] in wanted and r["length"] in evaluation.lengths
               and r["protocol"] in protocols]
    if not records:
        raise UserError(f"--lengths {','.join(map(str, evaluation.lengths))}: no window of "
                        f"{', '.join(protocols)} fits; give longer lengths or longer documents")
    print(*(advice(saved, evaluation) if args.is_all else table(records, evaluation.lengths, L)), sep="\n")
    limit = model.active().max_length
    if limit and limit < max(evaluation.lengths):
        print(f"{encoding} is not defined beyond position {limit - 1}: empty cells")
    title += f", evaluated on {text.name}"
    is_drawn = draw_evaluation(saved.records, title, L, path.with_suffix(".png"))
    print(f"wrote {path}, .npz and .png" if is_drawn else f"wrote {path} and .npz")


if __name__ == "__main__":
    set_up_cpu()
    run_command(main)
