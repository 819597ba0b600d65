"""Compare runs: `python compare.py RUN [RUN ...] [--label NAME] [--baseline NAME] [--data NAME] [--out DIR]`.

Runs that differ only in train.seed become one curve, with mean and standard deviation over seeds; runs with
train.init_from do if the runs they began from differ only in this, too. Each method of `eval.py --extend` is
a separate curve. A curve is named after its encoding; if several curves have the same encoding, the config
keys that differ follow, or the folder. Each protocol has a table and a picture.
There is also the gain over the baseline on identical targets (nats per token; for probes the difference of
their numbers), with a 95 % interval that covers how seeds and text vary. Runs of the same seed are paired.
With one seed the interval covers the text alone. Documents are the units of text if there are at least 5,
because windows of one document are alike; otherwise windows are. docs/comparing.md explains the intervals.

Writes DIR/report.md, report.html (one file, opens offline), report.csv (every record) and the pictures. A
report.md that was edited, or that something else wrote, is not overwritten.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent))    # `python -P` leaves it out

from evaluation.comparison import make_curves, make_tables, probe_map, remarks, with_seeds, write_csv
from evaluation.measures import MEASURES
from evaluation.pictures import draw
from evaluation.report import check_replaceable, html, markdown, signed, to_wandb
from evaluation.runs import check_comparable, read_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError
from runtime.files import write_whole


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path,
                        help="folders of train.py, or Hugging Face folders, evaluated")
    parser.add_argument("--label", metavar="NAME", action="append", default=[],
                        help="name of a run's curve; give one for each run, in the same order")
    parser.add_argument("--baseline", metavar="NAME", help="curve to compare with (default: the first)")
    parser.add_argument("--data", metavar="NAME", help="use eval/NAME.json (default: the only one)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/report"),
                        help="default %(default)s")
    parser.add_argument("--wandb", action="store_true", help="also log tables and pictures to W&B")
    args = parser.parse_args()
    runs = [read_run(path, args.data) for path in args.runs]
    check_comparable(runs)
    curves = make_curves(runs, args.label)
    by_label = {curve.label: curve for curve in curves}
    if args.baseline not in (None, *by_label):
        raise UserError(f"--baseline {args.baseline}: no such curve; choose from {', '.join(by_label)}")
    place = list(by_label).index(args.baseline) if args.baseline else 0
    curves = with_seeds(curves)
    baseline = curves[place]
    curves.sort(key=lambda curve: (curve is not baseline, curve.extend is not None))    # a stable sort
    L = runs[0].head["seq_len"]
    tables = make_tables(curves, baseline, L)
    maps = [probe_map(measure, curves) for measure in MEASURES if measure.place]
    notes = remarks(curves, baseline, L)

    check_replaceable(args.out, [*(table.key for table in tables), *(m.key for m in maps)])
    args.out.mkdir(parents=True, exist_ok=True)
    # ours from now on, so that the next call may replace what a killed one leaves
    write_whole(args.out / "report.md", signed("compare.py has not finished this report: call it again"))
    n_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    title = f"{n_runs}, trained at L = {L}, evaluated on {runs[0].head['data']}"
    about = {curve.label: [curve.runs[0].config.position.encoding, curve.extend or "",
                           ", ".join(run.seed for run in curve.runs),
                           ", ".join(run.name for run in curve.runs)] for curve in curves}
    pictures = draw(tables, [m for m in maps if m.cells], list(about), args.out)
    write_csv(curves, args.out / "report.csv")
    write_whole(args.out / "report.html", html(title, notes, about, tables, pictures))
    write_whole(args.out / "report.md", markdown(title, notes, about, tables, pictures))
    if args.wandb:
        to_wandb(args.out, baseline.runs[0].config, tables, pictures)
    print(f"{title}: {len(curves)} curves, compared with {baseline.label}", *notes, sep="\n")
    print(f"wrote {args.out}/report.md, report.html, report.csv and {len(pictures)} pictures")


if __name__ == "__main__":
    run_command(main)
