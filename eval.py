"""Perplexity at longer contexts: `python eval.py RUN [--lengths 128,256] [--protocol fixed] [--extend yarn]`.

Several protocols, because the usual number flatters. In all of them no window crosses a document, the same
documents are used at every length, and sums and counts are kept, never means of means; in nonoverlap,
rolling, sliding and fixed each target is scored once, and the targets are the same at every length. Windows
begin wherever they fall, as in training: nothing is put in front of them.

  nonoverlap  The text is cut into blocks of the length and every token is scored (the ALiBi paper's number).
              Longer blocks have fewer tokens with little context, so it falls even for a model that ignores
              far context.
  rolling     nonoverlap over every token of the documents. What is left over at a document's end is scored at
              the end of a whole window. It is lm-evaluation-harness' loglikelihood_rolling.
  sliding     The window moves by a stride S and only what is new is scored: each target has at least
              length - S tokens before it. S = 1 is exact, and costs length forwards a token.
  fixed       Windows of every length end at the same place and only the last k tokens are scored: the same
              targets, with more context to their left. truncated is that figure at L, the training length,
              where nothing is new to the model: what a longer context must beat. gain = loss(truncated) -
              loss, nats a token: positive where more context helps, 0 where it is ignored, negative where it
              breaks the model. Kazemnejad et al. 2023, arXiv:2305.19466, appendix F.
  position    Loss by position in one forward over the longest windows: shows where it breaks.
  repeat, copy, passkey   Probes: is far context used, not merely survived? See probes.py.

Each --extend METHOD[:key=value,...] adds a curve of the same model under a method that stretches its context
(positions/extension.py); METHOD+METHOD applies both. Forwards are full ones, no key is cached.
`torchrun --nproc_per_node=N eval.py RUN ...` shares them out over N processes, a GPU each, to the same sums.

Writes RUN/eval/DATA.json (records), .npz (sums for each window) and .png (the picture).

Legend: B batch, T time, C = n_embd, V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

import numpy as np

from evaluation.extension import describe_extensions
from evaluation.protocols import (
    DEFAULT_PROTOCOLS,
    PROBES,
    PROTOCOLS,
    Evaluation,
    choose_lengths,
    is_of_another_text,
    open_extensions,
    open_text,
)
from evaluation.show import plot, table
from runtime import parallel
from runtime.checkpoint import load_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError
from runtime.files import name_in_errors, write_whole


def main() -> None:
    parser = argument_parser(__doc__ or "", describe_extensions())
    parser.add_argument("run", metavar="RUN", help="a folder that train.py made, or one of Hugging Face")
    parser.add_argument("--lengths", help="contexts in tokens, such as 256,512 (default L/2, L, 2L ... 64L)")
    parser.add_argument("--protocol", default=",".join(DEFAULT_PROTOCOLS),
                        help=f"from {','.join((*PROTOCOLS, *PROBES))} (default %(default)s)")
    parser.add_argument("--extend", action="append", default=[], metavar="METHOD",
                        help="also under a method that stretches the context; may be given several times")
    parser.add_argument("--data", metavar="DIR_OR_FILE", help="corpus or text (default: the run's corpus; "
                        "a folder of Hugging Face has none)")
    parser.add_argument("--targets", type=int, help="fixed: k, tokens scored (default min(256, L/4))")
    parser.add_argument("--windows", type=int, default=32,
                        help="fixed, position, repeat, copy: windows; passkey: a quarter of it (default 32)")
    parser.add_argument("--tokens", type=int, default=2**16,
                        help="nonoverlap, sliding: tokens scored (default 65536)")
    parser.add_argument("--stride", type=int, help="sliding: S, tokens (default a quarter of each length)")
    parser.add_argument("--seed", type=int, default=0, help="chooses windows; the same for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written (default RUN/eval/DATA.json)")
    args = parser.parse_args()
    protocols = args.protocol.split(",")
    for protocol in protocols:
        if protocol not in (*PROTOCOLS, *PROBES):
            raise UserError(f"--protocol {protocol}: unknown; choose from {','.join((*PROTOCOLS, *PROBES))}")
    world = parallel.join_to_evaluate()
    model, config, tokenizer = load_run(args.run)
    L = config.train.seq_len
    text = open_text(args.data, config.data.dir, tokenizer)
    lengths = choose_lengths(args.lengths, L, text)
    n_scored = max(1, min(256, L // 4)) if args.targets is None else args.targets
    counts = [n for n in (args.windows, args.tokens, args.stride, args.seed + 1) if n is not None]
    if not 0 < n_scored <= min(lengths) or min(counts) < 1:
        raise UserError(f"--targets {n_scored} --windows {args.windows} --tokens {args.tokens} --stride "
                        f"{args.stride} --seed {args.seed}: must be positive, the seed at least 0, and "
                        f"--targets at most the shortest length, {min(lengths)}")
    extends = open_extensions(args.extend, model, config, lengths)
    evaluation = Evaluation(model, text, tokenizer, config, protocols, lengths, n_scored, args.windows,
                            args.tokens, args.seed, extends, args.stride, world)
    if not evaluation.possible:
        raise UserError(f"--lengths {args.lengths}: {config.position.encoding} ends at "
                        f"{model.encoding.max_length} positions; give a shorter one")
    print(f"{args.run}: {config.position.encoding}, trained at L = {L}, on {text.name}: "
          f"{len(evaluation.text.documents)} documents of more than {evaluation.longest} tokens")
    path = args.json or Path(args.run) / "eval" / f"{text.name}.json"
    if is_of_another_text(path, text):
        print(f"warning: {path}: is of another text of that name, and will be overwritten; --json FILE keeps "
              "both", flush=True)
    records = evaluation.run()
    parallel.leave()
    if world.rank:
        return
    print("\n".join(table(records, evaluation.lengths, L)))
    limit = model.encoding.max_length
    if limit and max(lengths) > limit:
        print(f"{config.position.encoding} is not defined beyond position {limit - 1}: empty cells")
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"run": str(args.run), "encoding": config.position.encoding, "seq_len": L,
            "tokenizer": tokenizer.name, "data": text.name, "data_sha256": text.sha256(), "seed": args.seed}
    temporary = path.with_suffix(".tmp.npz")
    try:
        with name_in_errors(temporary):
            np.savez(temporary, **evaluation.per_window)  # type: ignore[arg-type]
        write_whole(path, json.dumps({**head, "records": records}, indent=1) + "\n")
        temporary.replace(path.with_suffix(".npz"))
    finally:
        temporary.unlink(missing_ok=True)
    title = f"{config.position.encoding}, trained at L = {L}, evaluated on {text.name}"
    plot(records, title, L, path.with_suffix(".png"))
    print(f"wrote {path}, .npz and .png")


if __name__ == "__main__":
    run_command(main)
