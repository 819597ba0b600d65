"""Compare runs: `python compare.py RUN [RUN ...] [--label NAME] [--baseline NAME] [--data NAME] [--out DIR]`.

RUN is the folder of a run, a folder of runs, or DIR, what compare.py wrote; logs and reports among the runs
are passed over. A curve is named after its folder. Runs NAME-seed0, NAME-seed1, ..., which differ only in
train.seed and, if they began from runs, in the seed of those, become one curve. Each method of
`eval.py --extend` is a separate curve. Each protocol has a table. There is also the lead over the baseline on
identical targets (nats per token; for probes the difference of their numbers), with a 95 % interval that
covers how seeds and text vary. With one seed it covers the text alone. Documents are the units of text if
there are at least 5, because windows of one document are alike; otherwise windows are. Nothing is marked as
better without `eval.py --protocol fixed,trigram,repeat`. docs/comparing.md explains gate and intervals.

Writes DIR/report.html (one page, opens offline), its figures as SVG, PDF and PNG, estimates.csv (what its
tables show: minus losses in nats per token, gains and shares, with p before Holm's correction), and all that
was read: table.parquet (each window and example), training.parquet (losses in training) and runs.json
(configs and what was evaluated). So DIR can be compared again when the runs are gone.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from base.command import argument_parser, run_command
from base.errors import UserError
from base.files import write_whole
from evaluation.comparison import label_runs, make_sections, remarks, table_of
from evaluation.estimates import gates
from evaluation.figures import draw_measure, draw_training, save
from evaluation.report import Section, describe_curves, html, make_table, signs, summarize
from evaluation.results import GAIN, NO_METHOD, TRAINING
from evaluation.runs import Run, check_comparable, read_runs, write_runs

# columns of estimates.csv; values are minus losses in nats per token, gains, or shares: more is better
NUMBERS = ["name", "key", "length", "place", "baseline", "value", "low", "high", "p", "is_better", "seed_low",
           "seed_high", "n_seeds", "unit", "n_units"]
# keys of a run's config and of its evaluation that every report shows
SHOWN = {"position.encoding", "model.n_layer", "model.n_embd", "seq_len", "data"}


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
    runs = label_runs(read_runs(args.runs, args.data), args.label)
    check_complete(runs)
    check_comparable(runs)
    labels = list(dict.fromkeys(run.label for run in runs))
    baseline = args.baseline or labels[0]
    if baseline not in labels:
        raise UserError(f"--baseline {baseline}: no such curve; choose from {', '.join(labels)}")
    runs.sort(key=lambda run: run.label != baseline)                    # it comes first: a stable sort

    # tables and figures
    L = runs[0].head["seq_len"]
    text = runs[0].head["data"]
    gate = gates(table_of(runs), L)
    sections = make_sections(runs, baseline, gate)
    write_runs(args.out, runs)
    sections = draw_sections(sections, runs, args.out)
    rows = pd.concat([section.curves for section in sections])
    training = training_section(runs, gate, args.out)

    # what is said of them
    curves = rows.drop_duplicates("name")
    n_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    title = f"{n_runs}, trained at L = {L}, evaluated on {text}"
    notes = remarks(runs)
    sentences = list(summarize(curves, rows, text, L))
    page = html(title, notes, sentences, signs(rows, baseline), describe_curves(curves, gate),
                sections + training, L)
    write_whole(args.out / "report.html", page)
    write_whole(args.out / "estimates.csv", rows[NUMBERS].to_csv(index=False))
    print(f"{title}: {len(curves)} curves, compared with {baseline}", *notes, *sentences, sep="\n")
    for section in sections:
        if section.key == "fixed":
            print(f"\n{section.title}", make_table(section, L, is_text=True).to_string(), "", sep="\n")
    print(f"wrote {args.out}/report.html, estimates.csv, table.parquet and figures (SVG, PDF, PNG)")


def check_complete(runs: Sequence[Run]) -> None:
    """Raise UserError if a report needs what older versions of compare.py did not write."""
    for run in runs:
        missing = SHOWN - {*run.config, *run.head}
        if missing:
            raise UserError(f"{run.name}: an older compare.py wrote its record, without "
                            f"{', '.join(sorted(missing))}; compare the run itself, evaluated again")


def draw_sections(sections: Sequence[Section], runs: Sequence[Run], out: Path) -> list[Section]:
    """The sections with their figures, which are written too."""
    L = runs[0].head["seq_len"]
    drawn = []
    for section in sections:
        curves = section.curves
        if section.form is GAIN:
            curves = curves[curves["x"] > L]            # at L it is near 0
        if section.is_drawn and len(curves):
            title = f"{section.title} on {runs[0].head['data']}: {describe_model(runs)}"
            figure = draw_measure(curves, section.form, title, L)
            section = section._replace(figure=save(figure, out / section.key))
        drawn.append(section)
    return drawn


def training_section(runs: Sequence[Run], gate: pd.DataFrame, out: Path) -> list[Section]:
    """The training curves; none of Hugging Face folders."""
    training = pd.concat([run.training.assign(
        run=run.name, name=run.label, encoding=run.config["position.encoding"], extend=NO_METHOD,
        state=gate.loc[run.label, "state"], text="") for run in runs])
    if training["loss"].isna().all():
        return []
    figure = draw_training(training, f"Training: {describe_model(runs)}", runs[0].head["seq_len"])
    note = "Loss on the training batches, a mean of nearby steps; bands are the range of seeds."
    return [Section("training", "Training", note, TRAINING, training, figure=save(figure, out / "training"))]


def describe_model(runs: Sequence[Run]) -> str:
    """Size and L, for titles."""
    sizes = {f"{run.config['model.n_layer']} layers, {run.config['model.n_embd']} channels" for run in runs}
    size = sizes.pop() if len(sizes) == 1 else "models of several sizes"
    return f"{size}, L = {runs[0].head['seq_len']}"


if __name__ == "__main__":
    run_command(main)
