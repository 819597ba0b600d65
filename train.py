"""Train a decoder: `python train.py CONFIG.toml [section.key=value ...]`.

The same command resumes an unfinished run exactly; for a finished run it prints the result. The run's folder
holds config.toml, corpus.json, metrics.jsonl, checkpoints/ and, at the end, summary.json.
`torchrun --nproc_per_node=N train.py CONFIG.toml` trains with N processes, each on its own device.
Exit codes: 0 done, 2 a mistake in the call, 3 the loss diverged, 128 + n stopped by signal n after saving:
129 SIGHUP (a lost terminal), 130 Ctrl-C, 131 SIGQUIT, 138 SIGUSR1, 140 SIGUSR2, 143 SIGTERM, 152 SIGXCPU.
Slurm can send a signal before its time limit: sbatch --signal=USR1@60; TERM@60 under torchrun, which does not
forward USR1.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent))    # `python -P` leaves it out

import numpy as np
import torch
from torch import Tensor, nn

from config import Config, TrainConfig, config_and_overrides, to_toml
from data.loader import Corpus, number_documents
from data.tokenizer import byte_lengths, tokenizer_of
from data.training_positions import training_positions
from hf.pretrained import resolve_config
from model import GPT, is_dropped
from runtime import checkpoint, parallel
from runtime.command import argument_parser, run_command
from runtime.device import autocast, make_model, pick_device, set_up_cpu, should_compile, to_device
from runtime.errors import UserError
from runtime.files import finite
from runtime.folder import RunFolder, claimed
from runtime.help import help_text
from runtime.log import Log
from runtime.loss import IGNORED
from runtime.optimizer import make_optimizer, set_learning_rate, skips_on_device
from runtime.parallel import Process
from runtime.progress import Diverged, Run
from runtime.run import describe, is_finished, make_run, open_corpus, read_summary, resume, write_summary
from runtime.signals import Stopped, deferred_signals

VAL_TOKENS = 16_384         # most tokens in a validation batch


def training_loop(run: Run, stop: Sequence[int]) -> None:
    """Train to the end. Raises Stopped after a signal, and Diverged after too many bad steps in a row."""
    config, t, process = run.config, run.config.train, run.process
    model, optimizer = run.parallel_model, run.optimizer
    intervals = config.run.eval_every, config.run.log_every, config.run.save_every
    runs_ahead = skips_on_device(process.device)
    for step in range(run.state["step"], t.steps + 1):          # the number of updates made so far
        run.model.is_dropped = is_dropped(config, step)
        signal_number = parallel.any_signal(process, stop)
        is_eval, is_log, is_save = (is_due(step, every, t) for every in intervals)
        # state["step"] lags behind `step` while a GPU runs ahead; a resume may owe the line of a skipped step
        is_owed = run.state["n_bad"] > 0
        if is_eval or is_log or is_save or is_owed or signal_number or not runs_ahead:
            run.read_metrics()                  # waits for a GPU, as nothing else does until a signal
            metrics = run.state["metrics"]
            if is_eval and "val_loss" not in metrics and not run.log.has_line(step):
                metrics |= validate(run.model, run.corpus, run.byte_lengths, config, process, stop)
            if is_log or "val_loss" in metrics or run.state["n_bad"]:
                run.write_line(step)
            if is_save:
                run.save()
        if step == t.steps:
            break
        if signal_number:
            raise Stopped(signal_number)

        lr = learning_rate(step, t)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(t.seed * 2**32 + step * process.world_size + process.rank)    # for dropout
        model.train()
        optimizer.zero_grad(set_to_none=True)
        losses = []
        batch = enumerate(micro_batches(run.corpus, config, process, step))
        for part, (x, y, positions, documents, n_parts) in batch:
            if process.world_size == 1 and stop:                # several would have to agree on it
                run.read_metrics()
                raise Stopped(stop[0])
            parallel.sync_gradients(model, is_on=part == t.accumulate - 1)
            with autocast(t, process.device):
                loss = model(x, y, positions, documents=documents) / n_parts
            loss.backward()
            losses.append(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf)
        gathered = parallel.all_gather(process, torch.stack(losses).sum(), parallel.unshard(grad_norm))
        is_good = gathered.isfinite().all()                     # otherwise the step is skipped:
        if runs_ahead:                                          # by the optimizer, as with GradScaler,
            optimizer.found_inf = (~is_good).float()            # type: ignore[attr-defined]
            optimizer.step()
        elif is_good:                                           # or here
            optimizer.step()
        run.unread.append((lr, torch.stack((gathered[:, 0].mean(), gathered[:, 1].max()))))


def is_due(step: int, every: int, t: TrainConfig) -> bool:
    """Whether `step` is a multiple of `every`, or the last step."""
    return step > 0 and (step % every == 0 or step == t.steps)


def micro_batches(corpus: Corpus, config: Config, process: Process,
                  step: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]]:
    """The batch of a step in train.accumulate parts: inputs, targets (b, T), positions, documents, n_parts.

    Positions are None if they are plain; documents are None unless attention has to stay within them.
    With several processes these are the sequences of this one. Mean losses of parts, each over its n_parts
    (train.accumulate, unless a mask leaves out targets), add up to that of the batch.
    """
    t, positions = config.train, None
    batch = corpus.batch(t.seq_len, t.batch_size, t.seed, step, process.rank, process.world_size)
    n_scored = corpus.n_scored(t.seq_len, t.batch_size, t.seed, step) / process.world_size
    n_own = [np.count_nonzero(y.numpy() != IGNORED) for y in batch[1].chunk(t.accumulate)]
    inputs, targets = (to_device(x, process.device).chunk(t.accumulate) for x in batch)
    drawn = training_positions(t, step)
    if drawn is not None:
        positions = to_device(process.shard(drawn), process.device).chunk(t.accumulate)
    for part, (x, y, n) in enumerate(zip(inputs, targets, n_own, strict=True)):
        y, n_parts = (y, n_scored / n) if n else (x, math.inf)  # not the mean over no target, which is NaN
        yield x, y, positions[part] if positions else None, packed_documents(x, config, corpus), n_parts


def packed_documents(tokens: Tensor, config: Config, corpus: Corpus) -> Tensor | None:
    """The document number of each token (B, T) if attention must stay within documents, else None."""
    return number_documents(tokens, corpus.meta["eot"]) if config.data.cross_documents == "mask" else None


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, n_bytes_of: Tensor, config: Config, process: Process,
             stop: Sequence[int] = ()) -> dict[str, float | None]:
    """Loss on the fixed windows: nats per token, and bits per byte, which compares across tokenizers.

    n_bytes_of (V,) has the bytes of each token. Each process takes every world_size-th batch. The sums of the
    batches are added in the same order for any number of processes. Raises Stopped between two batches.
    """
    t, device = config.train, process.device
    model.eval()
    # at most a training micro-batch, and small enough that its logits do not fill a GPU
    batch_size = min(t.batch_size // t.accumulate, max(1, VAL_TOKENS // t.seq_len))
    batches = corpus.val_batches(t.seq_len, batch_size, t.val_windows)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=device)     # nats, tokens, bytes
    for first in range(0, len(batches), process.world_size):
        signal_number = parallel.any_signal(process, stop)
        if signal_number:
            raise Stopped(signal_number)
        number = first + process.rank
        # FSDP gathers weights in all processes: one without a batch left repeats the last, uncounted
        inputs, targets = (x.to(device) for x in batches[min(number, len(batches) - 1)])
        with autocast(t, device):
            loss = model(inputs, targets, documents=packed_documents(inputs, config, corpus))
        scored = targets[targets != IGNORED]
        if number < len(batches) and scored.numel():
            sums[number, 0] = loss.double() * scored.numel()
            sums[number, 1], sums[number, 2] = scored.numel(), n_bytes_of[scored].sum()
    nll, n, n_bytes = parallel.all_reduce(process, sums).sum(dim=0).tolist()
    return {"val_loss": finite(nll / max(1, n)), "val_bpb": finite(nll / math.log(2) / max(1, n_bytes))}


def learning_rate(step: int, t: TrainConfig) -> float:
    """Linear warm-up to lr; then half a cosine to min_lr, or ("wsd") constant and a linear end to min_lr."""
    if step < t.warmup:
        return t.lr * (step + 1) / t.warmup
    if t.schedule == "cosine":
        progress = (step - t.warmup) / max(1, t.steps - t.warmup)
        return t.min_lr + (t.lr - t.min_lr) * (1 + math.cos(math.pi * progress)) / 2
    left = (t.steps - step) / max(1, t.decay * t.steps)
    return t.min_lr + (t.lr - t.min_lr) * min(1.0, left)


def train(config: Config, stop: list[int]) -> int:
    """Train to the end, or until a signal number appears in `stop`; return the exit code."""
    process = parallel.start(config.train)
    config, corpus = open_corpus(config)
    run_dir, is_writer = Path(config.run.dir), process.rank == 0
    parallel.require_agreement(process, {
        "config": to_toml(config), "corpus": json.dumps(corpus.meta, indent=1)})     # with those of a mixture
    if not is_finished(run_dir, config, corpus):
        corpus.require_windows(config.train.seq_len)
        with claimed(run_dir, is_writer) as folder:
            if not is_finished(run_dir, config, corpus):        # by a process that had the folder until now
                return train_in(folder, config, corpus, process, stop)
    print(f"{run_dir} is finished: {read_summary(run_dir)}; delete it to train again")
    return 0


def train_in(folder: RunFolder, config: Config, corpus: Corpus, process: Process, stop: list[int]) -> int:
    """Start or resume the run in its folder; return the exit code."""
    run_dir, is_writer = folder.path, process.rank == 0
    parallel.barrier(process)                   # rank 0 has the lock, or all of them end here
    torch.manual_seed(config.train.seed)
    model = make_model(config)
    check_positions(model, config)
    parallel_model = parallel.parallelize(model, config, process)
    optimizer = make_optimizer(model, config)
    tokenizer = tokenizer_of(corpus.meta, corpus.folder)
    state = resume(run_dir, config, corpus, model, optimizer, tokenizer, process)
    is_compiled = should_compile(model, config.train, process.device)
    parallel.barrier(process)                   # every process has read the folder: now it may change
    if is_writer:
        make_run(run_dir, config, corpus)
        checkpoint.prune(run_dir, state["step"], config.run.keep)
    for line in describe(config, corpus, model, process, is_compiled):
        print(line, flush=True)
    run = Run(config, corpus, torch.from_numpy(byte_lengths(tokenizer)).to(process.device), model,
              torch.compile(parallel_model) if is_compiled else parallel_model, optimizer, process, folder,
              Log(run_dir, config, state, is_writer), state, saved_at=state["step"])
    with deferred_signals(stop):
        try:
            training_loop(run, stop)
        except Stopped as stopped:
            run.save()
            print(run.describe_stop(stopped.args[0]))
            return 128 + stopped.args[0]
        except Diverged as error:
            if is_writer:
                print(f"error: {error}", file=sys.stderr)
            return 3
    if is_writer:
        write_summary(folder.path, config, model, run.state, run.log)
    return 0


def check_positions(model: GPT, config: Config) -> None:
    """Raise UserError if train.positions has some that the encoding does not have."""
    limit, t, name = model.encoding.max_length, config.train, config.position.encoding
    if limit and t.position_range and t.position_range > limit:
        raise UserError(f"train.position_range {t.position_range}: {name} ends at position {limit}; use "
                        "train.positions=plain or choose another encoding")


def dry_run(config: Config) -> None:
    """Check the corpus and the run's folder; print the config as TOML, and the model's size as comments."""
    try:
        config, corpus = open_corpus(config)
    except UserError:
        print(to_toml(config), end="", flush=True)      # this much is known without a corpus
        raise
    corpus.require_windows(config.train.seq_len)
    tokenizer_of(corpus.meta, corpus.folder)
    process = Process(pick_device(config.train))
    with torch.device("meta"):                  # shapes without memory
        model = GPT(config)
    check_positions(model, config)
    is_finished(Path(config.run.dir), config, corpus)
    if config.train.init_from:
        checkpoint.load_run(config.train.init_from)
    is_compiled = should_compile(model, config.train, process.device)
    for line in describe(config, corpus, model, process, is_compiled):
        print(f"# {line}")
    print(to_toml(config), end="")


def main() -> int:
    parser = argument_parser(__doc__, add_help=False)
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC",
                        help="print this page; or the keys of a section, encoding or scaling method; or all")
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="such as train.lr=1e-3; in any order")
    parser.add_argument("--dry-run", action="store_true",
                        help="check config and corpus, print them and the model's size, and exit")
    args = parser.parse_intermixed_args()
    if args.help is not None:
        print(help_text(args.help) if args.help else f"{parser.format_help()}\n{help_text()}")
        return 0
    config = resolve_config(*config_and_overrides(args.config, args.overrides))
    if args.dry_run:
        dry_run(config)
        return 0
    return train(config, [])


if __name__ == "__main__":
    set_up_cpu()
    run_command(main)
