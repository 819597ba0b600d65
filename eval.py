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
  repeat, copy, passkey   Probes: does the model use distant context, or only survive it? A passage of the
              text, or of shuffled tokens, occurs twice; or five digits are hidden in filler and asked for.

Each --extend METHOD[:key=value,...] adds a curve of the same model under a method that extends its context;
METHOD+METHOD applies both. Every forward pass computes the whole window; no keys are cached.
`torchrun --nproc_per_node=N eval.py RUN ...` divides the windows among N processes; the sums stay the same.

Writes RUN/eval/DATA.json (records), .npz (sums of each window) and .png (picture). A second call adds its
records to that file, or replaces those of the same method, protocol and length. Both must have the same
targets: the same text, checkpoint and --seed and, for each protocol that both measure, the same --longest,
--targets, --windows, --tokens and --stride where the protocol depends on them. Otherwise eval.py refuses
before it computes anything: give --json FILE to write another file, or --replace. The longest length decides
which documents and targets are used, so to add shorter lengths later, pass the earlier longest one with
--longest.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

from evaluation import results
from evaluation.extension import describe_extensions
from evaluation.pictures import draw_evaluation
from evaluation.protocols import DEFAULT_PROTOCOLS, PROBES, PROTOCOLS, Evaluation, Settings, open_extensions
from evaluation.show import table
from evaluation.windows import Text, choose_lengths, open_text
from runtime import parallel
from runtime.checkpoint import load_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


def parse_arguments() -> argparse.Namespace:
    known = ",".join((*PROTOCOLS, *PROBES))
    parser = argument_parser(__doc__ or "", describe_extensions())
    parser.add_argument("run", metavar="RUN", help="a folder made by train.py, or a Hugging Face folder")
    parser.add_argument("--lengths", help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L)")
    parser.add_argument("--protocol", default=",".join(DEFAULT_PROTOCOLS),
                        help=f"from {known} (default %(default)s)")
    parser.add_argument("--extend", action="append", default=[], metavar="METHOD",
                        help="also measure under a method that extends the context; may be repeated")
    parser.add_argument("--skip-unfit", action="store_true",
                        help="skip a method that does not fit the run, with one line instead of an error")
    parser.add_argument("--data", metavar="DIR_OR_FILE",
                        help="corpus or text file (default: the run's corpus; a Hugging Face folder has "
                        "none)")
    parser.add_argument("--longest", type=int, metavar="TOKENS",
                        help="use only documents with more tokens than this, and targets with at least this "
                        "many tokens before them (default: the longest of --lengths and L)")
    parser.add_argument("--targets", type=int, help="fixed: k, tokens scored (default min(256, L/4))")
    parser.add_argument("--windows", type=int, default=32,
                        help="fixed, position, repeat, copy: number of windows; passkey: a quarter of it "
                        "(default 32)")
    parser.add_argument("--tokens", type=int, default=2**16,
                        help="nonoverlap, sliding: tokens scored (default 65536)")
    parser.add_argument("--stride", type=int, help="sliding: S in tokens (default a quarter of each length)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows, the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="output file (default RUN/eval/DATA.json)")
    parser.add_argument("--replace", action="store_true", help="discard what the output file holds")
    args = parser.parse_args()
    for protocol in args.protocol.split(","):
        if protocol not in (*PROTOCOLS, *PROBES):
            raise UserError(f"--protocol {protocol}: unknown; choose from {known}")
    return args


def choose_settings(args: argparse.Namespace, L: int, text: Text) -> Settings:
    """The arguments with their defaults for this training length and text. Raises UserError."""
    lengths = choose_lengths(args.lengths, L, text)
    needed, available = max(*lengths, L), max(map(len, text.documents)) - 1
    longest = needed if args.longest is None else args.longest
    if not needed <= longest <= available:
        raise UserError(f"--longest {longest}: must be in {needed} ... {available}, from the longest of "
                        f"--lengths and L to the longest document of {text.name}")
    targets = max(1, min(256, L // 4)) if args.targets is None else args.targets
    counts = [n for n in (args.windows, args.tokens, args.stride, args.seed + 1) if n is not None]
    if not 0 < targets <= min(lengths) or min(counts) < 1:
        raise UserError(f"--targets {targets} --windows {args.windows} --tokens {args.tokens} --stride "
                        f"{args.stride} --seed {args.seed}: must be positive, the seed at least 0, and "
                        f"--targets at most the shortest length, {min(lengths)}")
    return Settings(args.protocol.split(","), lengths, longest, targets, args.windows, args.tokens,
                    args.stride, args.seed)


def main() -> None:
    args = parse_arguments()
    process = parallel.start_evaluation()
    model, config, tokenizer = load_run(args.run)
    encoding, L = config.position.encoding, config.train.seq_len
    text = open_text(args.data, config.data.dir, tokenizer)
    settings = choose_settings(args, L, text)
    extends = open_extensions(args.extend, model, config, settings.lengths, args.skip_unfit)
    evaluation = Evaluation(model, config, tokenizer, text, settings, extends, process)
    if not evaluation.possible:
        raise UserError(f"--lengths {args.lengths}: {encoding} ends at {model.encoding.max_length} "
                        "positions; give a shorter one")
    path = args.json or Path(args.run) / "eval" / f"{text.name}.json"
    head = {"run": str(args.run), "encoding": encoding, "seq_len": L, "tokenizer": tokenizer.name,
            "data": text.name, "data_sha256": text.sha256(), "weights_sha256": results.weights_sha256(model),
            "seed": settings.seed, "settings": evaluation.deciding()}
    earlier = None if args.replace else results.read_mergeable(path, head)
    print(f"{args.run}: {encoding}, trained at L = {L}, on {text.name}: {len(evaluation.text.documents)} "
          f"documents of more than {settings.longest} tokens", flush=True)
    records = evaluation.run()
    parallel.shut_down()
    if process.rank:
        return
    print("\n".join(table(records, evaluation.lengths, L)))
    limit = model.encoding.max_length
    if limit and limit < max(evaluation.lengths):
        print(f"{encoding} is not defined beyond position {limit - 1}: empty cells")
    found = results.Results(head, records, evaluation.per_window)
    if earlier:
        print(f"added to the {len(earlier.records)} records of {path}")
        found = results.merge(earlier, found)
    results.write(path, found)
    title = f"{encoding}, trained at L = {L}, evaluated on {text.name}"
    draw_evaluation(found.records, title, L, path.with_suffix(".png"))
    print(f"wrote {path}, .npz and .png")


if __name__ == "__main__":
    run_command(main)
