"""Compare runs: `python compare.py RUN [RUN ...] [--label NAME] [--baseline NAME] [--data NAME] [--out DIR]`.

RUN is the folder of a run, a folder of runs, or DIR, what compare.py wrote; logs and reports among the runs
are passed over. A curve is named after its folder. Runs NAME-seed0, NAME-seed1, ..., which differ only in
train.seed and, if they began from runs, in the seed of those, become one curve, with mean and standard
deviation over seeds. Each method of `eval.py --extend` is a separate curve. Each protocol has a table and a
picture. There is also the gain over the baseline on identical targets (nats per token; for probes the
difference of their numbers), with a 95 % interval that covers how seeds and text vary. With one seed it
covers the text alone. Documents are the units of text if there are at least 5, because windows of one
document are alike; otherwise windows are. docs/comparing.md explains the intervals.

Writes DIR/report.html (one page, opens offline), the pictures as SVG and PDF, and all that was read:
table.parquet (each window and trial), training.parquet (losses in training) and runs.json (configs and what
was evaluated). So DIR can be compared again when the runs are gone.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import math
from pathlib import Path

import pandas as pd

from base.command import argument_parser, run_command
from base.errors import UserError
from base.files import write_whole
from evaluation.comparison import frame_of, gate_of, make_curves, make_tables, remarks
from evaluation.pictures import draw
from evaluation.report import html
from evaluation.results import NO_METHOD
from evaluation.runs import check_comparable, read_runs, save


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path,
                        help="evaluated folders of train.py or Hugging Face, folders of them, or what "
                        "compare.py wrote")
    parser.add_argument("--label", metavar="NAME", action="append", default=[],
                        help="name of a run's curve; give one for each run, in the same order")
    parser.add_argument("--baseline", metavar="NAME", help="curve to compare with (default: the first)")
    parser.add_argument("--data", metavar="NAME", help="use eval/NAME.json (default: the only one)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/report"),
                        help="default %(default)s")
    args = parser.parse_args()
    runs = read_runs(args.runs, args.data)
    check_comparable(runs)
    curves = make_curves(runs, args.label)
    labels = [curve.label for curve in curves]
    if args.baseline not in (None, *labels):
        raise UserError(f"--baseline {args.baseline}: no such curve; choose from {', '.join(labels)}")
    baseline = curves[labels.index(args.baseline) if args.baseline else 0]
    curves.sort(key=lambda curve: (curve is not baseline, curve.extend != NO_METHOD))    # a stable sort
    L = runs[0].head["seq_len"]
    frame = frame_of(curves)
    notes = remarks(curves)
    gates = {curve.label: gate_of(curve, L) for curve in curves}
    failed = [label for label, gate in gates.items() if gate.is_failed]
    tables = make_tables(curves, baseline, frame, L, failed)

    n_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    title = f"{n_runs}, trained at L = {L}, evaluated on {runs[0].head['data']}"
    about = pd.DataFrame({curve.label: {
        "encoding": curve.runs[0].config["position.encoding"], "extend": curve.extend,
        "seeds": f"{len(curve.runs)}: {', '.join(run.seed for run in curve.runs)}",
        "gate at L": str(gates[curve.label]),
        "runs": ", ".join(run.title for run in curve.runs)} for curve in curves}).T
    save(args.out, list({run.name: run for curve in curves for run in curve.runs}.values()))
    pictures = draw(tables, list(about.index), args.out)
    write_whole(args.out / "report.html", html(title, notes, about, tables, pictures))
    print(f"{title}: {len(curves)} curves, compared with {baseline.label}", *notes, sep="\n")
    for table in tables:
        if table.key == "fixed":
            here = frame[(frame.protocol == "fixed") & (frame.length == L)]
            sums = here.groupby("label")[["nll", "bytes"]].sum()
            at_L = (sums.nll / sums.bytes / math.log(2)).rename("bits/byte at L").map("{:.3f}".format)
            means = table.frame(only_means=True).join(at_L)
            print(f"\n{table.title}, means over seeds", means.to_string(), "", sep="\n")
    print(f"wrote {args.out}/report.html, table.parquet and {len(pictures)} pictures (SVG, PDF)")


if __name__ == "__main__":
    run_command(main)
