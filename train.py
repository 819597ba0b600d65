"""Train a decoder: `python train.py CONFIG.toml [section.key=value ...]`.

The same command resumes an unfinished run exactly; for a finished run it prints the result. The run's folder
holds config.toml, corpus.json, metrics.jsonl, checkpoints/ and, at the end, summary.json.
`torchrun --nproc_per_node=N train.py CONFIG.toml` trains with N processes, each on its own device.
Exit codes: 0 done, 2 an error that one line explains (a wrong key, a full disk), 3 the loss diverged,
128 + n stopped by signal n after saving: 129 SIGHUP (a lost terminal), 130 Ctrl-C, 143 SIGTERM, 128 + SIGUSR1
(138 on Linux). Slurm can send a signal before its time limit: sbatch --signal=USR1@60. torchrun does not
forward USR1, and kills 30 s after SIGTERM unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise: see
docs/train.sbatch.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

from base.command import argument_parser, handled_signals, positive, run_command
from base.errors import UserError
from base.files import finite
from base.loss import IGNORED
from config import Config, TrainConfig, load_config, to_toml
from data.loader import Corpus
from data.tokenizer import Tokenizer, byte_lengths, tokenizer_of
from hf.pretrained import pretrained_tables
from model import GPT
from runtime import parallel
from runtime.device import autocast, dtype_name, set_up_cpu, should_compile
from runtime.dry_run import dry_run
from runtime.help import help_text
from runtime.log import Log, echo
from runtime.optimizer import make_optimizer
from runtime.parallel import Process
from runtime.run import (
    EarlyEnd,
    TrainingRun,
    describe,
    git_revision,
    is_by_other_code,
    make_run,
    open_corpus,
    require_same_run,
    start_or_resume,
    summary_line,
)

VAL_TOKENS = 16_384         # a validation batch has no more tokens, unless a single window does
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")       # training saves, then ends


def training_loop(run: TrainingRun) -> None:
    """Train from the step of the run to the end. Raises EarlyEnd after a signal or too many bad steps."""
    t, process = run.config.train, run.process
    model, optimizer, scaler = run.wrapped_model, run.optimizer, run.scaler     # run.model is the bare one
    mixed_precision = autocast(t, process.device)
    # PyTorch's mark of an optimizer whose step() reads found_inf on the device: if it is 1, nothing changes.
    # Muon and fused AdamW have it
    reads_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    parameters = [*model.parameters()]                                  # to list them takes a while
    model.train()
    for step in range(run.state.step, t.steps):         # step: how many came before it, skipped ones too
        lr = learning_rate(step, t)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # the batch and the seed of dropout depend on the step and the process, not on earlier steps: a
        # resumed run draws the same. Whatever else draws random numbers needs the seed too
        batch = run.corpus.batch(t, step, process.rank, process.world_size).to(process.device)
        if run.config.model.dropout:
            torch.manual_seed(dropout_seed(t.seed, step, process.rank))
        # forward and backward pass, in train.accumulate parts if the batch does not fit in memory: the
        # gradients of the parts add up to those of the mean loss of the whole batch
        losses = []
        for part_number, part in enumerate(batch.split(t.accumulate), start=1):
            if process.world_size > 1:
                # the processes average their gradients once, in the last backward pass
                parallel.sync_gradients(model, is_on=part_number == t.accumulate)
            with mixed_precision:                                       # matrix products in train.dtype
                loss_sum = model(part.inputs, part.targets, part.positions, documents=part.documents,
                                 reduction="sum")
            loss = loss_sum / batch.loss_divisor                        # the share of this part in the mean
            scaler.scale(loss).backward()           # larger in float16, so that small gradients are not 0
            losses.append(loss.detach())
        # all gradients are there: undo the scale, clip them by their norm (grad_clip 0: only measure it)
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(parameters, t.grad_clip or math.inf)
        # the metrics of the whole step, the mean over all processes: scalars that stay on the device. Add a
        # scalar tensor here, and metrics.jsonl has it under its name. The gradients are clipped already
        metrics = {"loss": torch.stack(losses).sum(), "grad_norm": grad_norm}
        if process.world_size > 1:
            metrics = parallel.mean_metrics(process, metrics)
        # update the weights, unless the step is not finite
        is_finite = (metrics["loss"] + metrics["grad_norm"]).isfinite()
        if reads_found_inf:             # step() decides on the device: the CPU need not wait for a GPU
            optimizer.found_inf = (~is_finite).float()                  # type: ignore[attr-defined]
            optimizer.step()
        elif is_finite:                 # waits for the GPU
            optimizer.step()
        scaler.update()                                                 # a smaller scale after an overflow
        optimizer.zero_grad(set_to_none=True)                           # None frees the memory for validation
        # log, `validate` (below), save, stop: see runtime/run.py, where summary.json is written too
        run.after_step(metrics)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """A number of 32 bits, a hash of all three: PyTorch's generator on a CPU uses no more bits of a seed."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def learning_rate(step: int, t: TrainConfig) -> float:
    """Linear warm-up to lr; then half a cosine to min_lr, or ("wsd") constant and a linear end to min_lr."""
    if step < t.warmup:
        return t.lr * (step + 1) / t.warmup
    if t.schedule == "cosine":
        progress = (step - t.warmup) / (t.steps - t.warmup)
        return t.min_lr + (t.lr - t.min_lr) * (1 + math.cos(math.pi * progress)) / 2
    n_decay = min(t.decay * t.steps, t.steps - t.warmup)                # not before the warm-up has ended
    left = (t.steps - step) / n_decay
    return t.min_lr + (t.lr - t.min_lr) * min(1.0, left)


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, tokenizer: Tokenizer, config: Config,
             process: Process) -> dict[str, float | None]:
    """Loss on the fixed windows: nats per token, and bits per byte, which compares across tokenizers.

    Each process takes every world_size-th batch. The sums of the batches are added in the same order for any
    number of processes.
    """
    t, device = config.train, process.device
    model.eval()
    # what a single process would train on at once, at most VAL_TOKENS tokens: it must not depend on
    # world_size, so that the sums come out equal
    batch_size = min(t.batch_size // t.accumulate, max(1, VAL_TOKENS // t.seq_len))
    batches = corpus.val_batches(t.seq_len, batch_size, t.val_windows)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64)            # nats, tokens, bytes
    for first in range(0, len(batches), process.world_size):
        batch_number = first + process.rank
        # under FSDP all processes must call the model, which gathers weights from all: a process that has no
        # batch left repeats the last one, which does not count
        batch = batches[min(batch_number, len(batches) - 1)].to(device)
        with autocast(t, device):
            loss = model(batch.inputs, batch.targets, documents=batch.documents)
        scored = batch.targets[batch.targets != IGNORED].cpu().numpy()
        if batch_number < len(batches) and len(scored):
            sums[batch_number, 0] = loss.item() * len(scored)
            sums[batch_number, 1] = len(scored)
            sums[batch_number, 2] = int(byte_lengths(tokenizer)[scored].sum())
    model.train()
    nll, n, n_bytes = parallel.all_reduce(process, sums).sum(dim=0).tolist()
    return {"val_loss": finite(nll / n) if n else None,
            "val_bpb": finite(nll / math.log(2) / n_bytes) if n_bytes else None}


def train(config: Config, signals: list[int]) -> int:
    """Train to the end, or until the number of a signal is in `signals`; return the exit code."""
    process = parallel.start(config.train)
    config, corpus = open_corpus(config)
    run_dir = Path(config.run.dir)
    require_same_run(run_dir, config, corpus)
    if (run_dir / "summary.json").exists():
        code = ", by other code than today's" if is_by_other_code(run_dir) else ""
        print(f"{run_dir} is finished{code}: {summary_line(run_dir)}; delete it to train again")
        return 0
    run_dir.mkdir(parents=True, exist_ok=True)
    lock: Any = nullcontext()
    if process.rank == 0:
        lock = FileLock(run_dir / ".lock", timeout=0)
    try:
        with lock:
            return train_locked(run_dir, config, corpus, process, signals)
    except Timeout as error:
        raise UserError(f"{run_dir}: another process trains it; stop it or give another run.dir") from error


def train_locked(run_dir: Path, config: Config, corpus: Corpus, process: Process, signals: list[int]) -> int:
    """Start or resume the run in its folder, which rank 0 has locked; return the exit code."""
    t = config.train
    dtype = dtype_name(t, process.device)
    # the model and its optimizer
    torch.manual_seed(t.seed)
    model = GPT(config)
    if process.world_size > 1:
        wrapped_model: Any = parallel.parallelize(model, config, process)
    else:
        wrapped_model = model.to(process.device)
    optimizer = make_optimizer(model, config)
    # read the newest checkpoint, if there is one; only then write the files of a new run
    tokenizer = tokenizer_of(corpus.meta, corpus.folder)
    revision, code_diff = git_revision()
    state = start_or_resume(config, model, optimizer, tokenizer, dtype, revision or "unknown")
    if process.world_size > 1:
        # every process waits here until all have read the folder: now it may change
        parallel.require_agreement(process, {
            "config": to_toml(config), "corpus": corpus.meta, "code": state.revisions, "dtype": dtype,
            "checkpoint": [state.step, state.sha256, state.init_sha256]})
    if process.rank == 0:
        make_run(run_dir, config, corpus, state.revisions[-1], code_diff)
    # compile the model if that pays; say what is going to be trained
    note = ""
    if should_compile(model, t, process.device):
        # under FSDP2 PyTorch compiles Block.forward again for each layer, and by default stops at 8
        torch._dynamo.config.recompile_limit = 2 * config.model.n_layer + 8     # type: ignore[attr-defined]
        wrapped_model = torch.compile(wrapped_model)
        note = ", compiled"
    echo(describe(config, corpus, model, process, note=f"{note}, seed {t.seed}"))
    scaler = torch.amp.GradScaler(process.device.type, enabled=dtype == "float16")
    if state.scaler:
        scaler.load_state_dict(state.scaler)
    log = Log(run_dir, config, state) if process.rank == 0 else None
    run = TrainingRun(
        config=config, corpus=corpus, model=model, wrapped_model=wrapped_model, optimizer=optimizer,
        process=process, validate=lambda: validate(model, corpus, tokenizer, config, process),
        state=state, signals=signals, log=log, scaler=scaler)
    try:
        # a signal is only noted: after_step saves first. A second one changes nothing
        with handled_signals(lambda number, frame: signals.append(number), *SIGNALS):
            training_loop(run)
    except EarlyEnd as end:
        code, message = end.args
        if code != 3:
            echo(message)
        elif process.rank == 0:
            print(message, file=sys.stderr)
        return code
    run.finish()
    return 0


def main() -> int:
    parser = argument_parser(__doc__, add_help=False)
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC",
                        help="print this page; or the keys of a section, encoding or scaling method; or all")
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="such as train.lr=1e-3")
    parser.add_argument("--dry-run", action="store_true",
                        help="check everything that training checks; print the config, size and cost; exit")
    parser.add_argument("--tokens-per-s", type=positive, metavar="N",
                        help="speed from which --dry-run computes the hours")
    args = parser.parse_intermixed_args()
    if args.help is not None:
        page = help_text(args.help) if args.help else f"{parser.format_help()}\n{help_text()}"
        print(page)
        return 0
    if args.config is None:
        raise UserError("CONFIG.toml: missing; give one of configs/, or see train.py --help")
    config = load_config(args.config, args.overrides, pretrained_tables)
    if args.dry_run:
        return dry_run(Path(args.config), config, args.tokens_per_s)
    return train(config, signals=[])


if __name__ == "__main__":
    set_up_cpu()
    run_command(main)
