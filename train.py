"""Train a decoder: `python train.py CONFIG.toml [section.key=value ...]`.

The same command again goes on where an unfinished run stopped, exactly; a finished run says so. The run's
folder holds config.toml, corpus.json, metrics.jsonl, checkpoints/ and, at the end, summary.json.
`torchrun --nproc_per_node=N train.py CONFIG.toml` spreads it over N processes, a device each (parallel.py).
Exit codes: 0 done, 2 a mistake in the call, 3 the loss diverged, 128 + n stopped by signal n after saving:
130 Ctrl-C, 143 SIGTERM, 138 SIGUSR1. Slurm can send one before a time limit: sbatch --signal=USR1@60; TERM@60
under torchrun, which hands only that on.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

import numpy as np
import torch
from torch import nn

from config import Config, TrainConfig, differences, help_text, load_config, to_toml
from data.bpe import FILE as TOKENIZER_FILE
from data.loader import Corpus, number_documents, read_meta
from data.tokenizer import byte_lengths, tokenizer_of
from hf.pretrained import pretrained_tables
from model import GPT, autocast, pick_dtype
from runtime import checkpoint, parallel
from runtime.command import argument_parser, interrupt, run_command
from runtime.errors import UserError
from runtime.files import finite, read_json, temporary_path, write_whole
from runtime.log import Log, figure
from runtime.optimizer import make_optimizer
from runtime.parallel import World

# On two CPU cores compiling takes 20 to 60 s and then saves a fifth of a step: it pays after 5 minutes or so.
COMPILE_WORTH_FLOPS = 1e14
VAL_TOKENS = 16_384         # in a batch of the validation, at most
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """A signal came, and this is a place to stop at: the state of training is whole."""


class Diverged(Exception):
    """Too many steps in a row had no finite loss or gradient."""


class Queued(NamedTuple):
    """A step that the device may still be at."""

    lr: float
    said: torch.Tensor              # (processes, 3) loss, gradient's norm, signal; there once `ready`
    ready: torch.cuda.Event | None


def train(config: Config, stop: list[int]) -> int:
    """Train to the end, or until a signal number appears in `stop`; return the exit code."""
    world = parallel.join(config.train)
    device, is_writer = world.device, world.rank == 0
    corpus = Corpus(config.data.dir, config.data.cross_documents, config.data.mixture)
    config = with_vocabulary(config, corpus)
    run_dir = Path(config.run.dir)
    if is_finished(run_dir, config, corpus):
        print(f"{run_dir} is finished: {read_summary(run_dir)}; delete it to train again")
        return 0
    corpus.require_windows(config.train.seq_len)
    torch.manual_seed(config.train.seed)
    model = GPT(config)
    spread_model = parallel.spread(model, config.train, world)
    optimizer = make_optimizer(model, config.train)
    tokenizer = tokenizer_of(corpus.meta, corpus.folder)
    state = checkpoint.load_newest(run_dir, model, optimizer)
    if state:
        print(f"resuming {run_dir} at step {state['step']}")
    else:
        state = {"step": 0, "wall_s": 0.0, "metrics": {}, "n_bad": 0, "is_half_done": False}
        if config.train.init_from:
            checkpoint.start_from(config.train.init_from, model, config, tokenizer)
    is_compiled = worth_compiling(model, config.train, device)
    step_model: Any = torch.compile(spread_model) if is_compiled else spread_model
    lengths = torch.from_numpy(byte_lengths(tokenizer)).to(device)
    if config.train.pose_length and config.train.pose_length > (model.encoding.max_length or math.inf):
        raise UserError(f"train.pose_length {config.train.pose_length}: {config.position.encoding} ends at "
                        f"position {model.encoding.max_length}; leave it out or take another encoding")
    parallel.wait_for_all(world)                # all have read what is there: now it may change
    if is_writer:
        make_run(run_dir, config, corpus)
        checkpoint.prune(run_dir, state["step"], config.run.keep)
    for line in describe(config, corpus, model, world, is_compiled):
        print(line, flush=True)
    log = Log(run_dir, config, state, is_writer)
    let_signals_wait(stop)

    run, steps, saved_at = config.run, config.train.steps, state["step"]
    queue: list[Queued] = []                    # begun after state["step"]
    n_ahead, signalled = 2 if runs_ahead(optimizer, device) else 1, 0

    def save() -> None:
        nonlocal saved_at
        if state["step"] != saved_at:           # one of this step need not be replaced, nothing of it is lost
            saved_at = state["step"]
            checkpoint.save(run_dir, model, optimizer, saved_at, {**state, "wall_s": log.wall_s()}, run.keep,
                            is_writer)

    try:
        while state["step"] < steps or state["is_half_done"]:
            if not state["is_half_done"]:
                signalled = take_step(step_model, optimizer, corpus, config, state, world, stop, queue,
                                      1 if signalled else n_ahead) or signalled
            done, metrics = state["step"], state["metrics"]
            if done % run.eval_every == 0 or done == steps:
                metrics |= validate(model, corpus, lengths, config, world, stop)
            if done % run.log_every == 0 or "val_loss" in metrics or state["n_bad"]:
                log.write(done, metrics | about_bad_step(state, corpus, config.train))
            state["is_half_done"] = False
            if done % run.save_every == 0 or done == steps:
                save()
            if signalled and not queue and done < steps:
                raise Stopped(signalled)
    except Stopped as stopped:
        save()
        number = stopped.args[0]
        where = f"saved at step {saved_at} of {steps}" if saved_at else "before the first step was done"
        print(f"\nstopped by {signal.Signals(number).name}, {where}; the same command goes on from there")
        return 128 + number
    except Diverged as error:
        if is_writer:
            print(f"error: {error}", file=sys.stderr)
        return 3
    if is_writer:
        write_summary(run_dir, config, model, state["metrics"], log)
    return 0


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, config: Config,
              state: dict[str, Any], world: World, stop: list[int], queue: list[Queued], n_ahead: int) -> int:
    """One update; or none, where loss or gradient is not finite. The step is half done then: not yet logged.

    With n_ahead = 2 the step after it is queued before this one's figures are read, so that a GPU waits
    neither for them nor for a batch; but never beyond a step at which the state is looked at.

    Returns the number of a signal that came, else 0. Raises Stopped, and Diverged after train.max_bad_steps
    without an update in a row.
    """
    t, step = config.train, state["step"]
    while not queue or (len(queue) < n_ahead and not is_looked_at(step + len(queue), config)):
        queue.append(queue_step(model, optimizer, corpus, config, step + len(queue), world, stop, not queue))
    lr, said, ready = queue.pop(0)
    if ready:
        ready.synchronize()
    loss, grad_norm, signalled = float(said[:, 0].mean()), float(said[:, 1].max()), int(said[:, 2].max())
    n_bad = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else state["n_bad"] + 1
    if n_bad >= t.max_bad_steps:
        raise Diverged(describe_divergence(config, corpus, step, n_bad, loss, grad_norm))
    state |= {"step": step + 1, "n_bad": n_bad, "is_half_done": True,
              "metrics": {"loss": finite(loss), "lr": lr, "grad_norm": finite(grad_norm)}}
    return signalled


def is_looked_at(done: int, config: Config) -> bool:
    """Whether a line, a validation or a checkpoint follows so many steps."""
    run = config.run
    return done == config.train.steps or not (done % run.log_every and done % run.eval_every
                                              and done % run.save_every)


def queue_step(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, config: Config, step: int,
               world: World, stop: list[int], may_stop: bool) -> Queued:
    """Begin a step: on a GPU this returns before it is done, and nothing here waits for it."""
    lr = learning_rate(step, config.train)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, grad_norm = update(model, optimizer, corpus, config, step, world, stop if may_stop else ())
    said = parallel.tell(world, loss, grad_norm, stop[0] if stop else 0)    # asked once a step
    apply_where(said[:, :2].isfinite().all(), optimizer)
    if not said.is_cuda:
        return Queued(lr, said, None)
    said = said.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Queued(lr, said, ready)


def apply_where(is_good: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights, or leave them and their moments as they are, as a value on the device says."""
    if runs_ahead(optimizer, is_good.device):
        optimizer.found_inf = (~is_good).float()    # type: ignore[attr-defined]    # as GradScaler has it
        optimizer.step()
    elif is_good:
        optimizer.step()


def runs_ahead(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether steps are queued without waiting. Of optimisers, fused AdamW alone can skip one by itself."""
    return device.type == "cuda" and isinstance(optimizer, torch.optim.AdamW)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, config: Config, step: int,
           world: World, stop: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of one batch, in train.accumulate parts, clipped; return the loss and the gradient's norm.

    With several processes the loss is that of this one's share of the batch, the gradient that of all of it.
    Raises Stopped between parts where there is one process: several would have to agree on it at each.
    """
    t, device = config.train, world.device
    torch.manual_seed(t.seed * 2**32 + step * world.size + world.rank)     # dropout: a function of these
    batch = corpus.batch(t.seq_len, t.batch_size, t.seed, step, world.rank, world.size)
    inputs, targets = (to_device(x, device) for x in batch)
    positions: Any = [None] * t.accumulate
    if t.pose_length:
        positions = to_device(world.share(skipping_positions(t, step)), device).chunk(t.accumulate)
    model.train()
    optimizer.zero_grad(set_to_none=True)
    losses = []
    parts = zip(inputs.chunk(t.accumulate), targets.chunk(t.accumulate), positions, strict=True)
    for part, (x, y, at) in enumerate(parts):
        if stop and world.size == 1:
            raise Stopped(stop[0])
        parallel.sync_gradients(model, is_on=part == t.accumulate - 1)
        with autocast(t, device):
            loss = model(x, y, at, documents=packed(x, config, corpus)) / t.accumulate
        loss.backward()
        losses.append(loss.detach())
    grad_norm = parallel.whole(nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf))
    return torch.stack(losses).sum(), grad_norm


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a GPU by way of memory from which it copies by itself: nothing waits."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def packed(tokens: torch.Tensor, config: Config, corpus: Corpus) -> torch.Tensor | None:
    """The documents (B, T) within which attention shall stay; None where it need not."""
    return number_documents(tokens, corpus.meta["eot"]) if config.data.cross_documents == "mask" else None


def skipping_positions(t: TrainConfig, step: int) -> torch.Tensor:
    """PoSE: 0 ... u - 1, then on from u + s, (B, T), so that short sequences visit long distances.

    u in 1 ... (T + 1) / 2 and s in 0 ... pose_length - T, uniform for each sequence. Zhu et al. 2023,
    arXiv:2309.10400, section 3.2, with two chunks.
    """
    rng = np.random.default_rng([t.seed, step])
    assert t.pose_length
    first = rng.integers(1, (t.seq_len + 1) // 2 + 1, size=(t.batch_size, 1))
    skip = rng.integers(t.pose_length - t.seq_len + 1, size=(t.batch_size, 1))
    index = np.arange(t.seq_len)
    return torch.from_numpy(index + (index >= first) * skip)


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, byte_lengths: torch.Tensor, config: Config, world: World,
             stop: Sequence[int] = ()) -> dict[str, float | None]:
    """Loss on the fixed windows: nats per token, and bits per byte, which compares across tokenizers.

    Processes take turns at the batches, whose sums are added in the same order whatever their number. Raises
    Stopped between two batches.
    """
    t = config.train
    model.eval()
    # not above what a step takes, and not so large that the logits of one process' whole batch fill a GPU
    batch_size = min(t.batch_size // t.accumulate, max(1, VAL_TOKENS // t.seq_len))
    batches = corpus.val_batches(t.seq_len, batch_size, t.val_windows)
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=world.device)   # nats, tokens, bytes
    for first in range(0, len(batches), world.size):
        signalled = parallel.agree(world, stop[0] if stop else 0)
        if signalled:
            raise Stopped(signalled)
        number = first + world.rank
        # FSDP gathers weights together: who has no batch left runs the last one, uncounted
        inputs, targets = (x.to(world.device) for x in batches[min(number, len(batches) - 1)])
        with autocast(t, world.device):
            loss = model(inputs, targets, documents=packed(inputs, config, corpus))
        if number < len(batches):
            sums[number, 0] = loss.double() * targets.numel()
            sums[number, 1], sums[number, 2] = targets.numel(), byte_lengths[targets].sum()
    nll, n_tokens, n_bytes = parallel.add_up(world, sums).sum(dim=0).tolist()
    return {"val_loss": finite(nll / n_tokens), "val_bpb": finite(nll / math.log(2) / n_bytes)}


def about_bad_step(state: dict[str, Any], corpus: Corpus, t: TrainConfig) -> dict[str, Any]:
    """What metrics.jsonl says more of a step that was not applied: how many in a row, and on what text."""
    n_bad = state["n_bad"]
    return {"n_bad": n_bad, "windows": window_names(corpus, t, state["step"] - 1)} if n_bad else {}


def window_names(corpus: Corpus, t: TrainConfig, step: int) -> list[str]:
    """CORPUS:FIRST_TOKEN of each window of a batch: what to look at when its loss is not finite."""
    return [f"{source.folder}:{start}"
            for source, start in corpus.places(t.seq_len, t.batch_size, t.seed, step)]


def describe_divergence(config: Config, corpus: Corpus, step: int, n_bad: int, loss: float,
                        grad_norm: float) -> str:
    """What is known when training ends with code 3."""
    run_dir, windows = Path(config.run.dir), window_names(corpus, config.train, step)
    newest = checkpoint.newest(run_dir)
    more = f" and {len(windows) - 8} more" if len(windows) > 8 else ""
    from_here = f", from here by train.init_from={run_dir}" if newest else ""
    return (f"training diverged at step {step + 1}: loss {loss}, gradient norm {grad_norm}, lr "
            f"{learning_rate(step, config.train):.3g}, windows {', '.join(windows[:8])}{more}; {n_bad} steps "
            "in a row (train.max_bad_steps), none was applied; last good checkpoint: "
            f"{newest or 'none yet'}; lower train.lr in another run.dir{from_here}")


def learning_rate(step: int, t: TrainConfig) -> float:
    """Linear warm-up to lr; then half a cosine to min_lr, or ("wsd") constant and a linear end to min_lr."""
    if step < t.warmup:
        return t.lr * (step + 1) / t.warmup
    if t.schedule == "cosine":
        progress = (step - t.warmup) / max(1, t.steps - t.warmup)
        return t.min_lr + (t.lr - t.min_lr) * (1 + math.cos(math.pi * progress)) / 2
    left = (t.steps - step) / max(1, t.decay * t.steps)
    return t.min_lr + (t.lr - t.min_lr) * min(1.0, left)


def keep_freed_memory() -> None:
    """Have glibc keep blocks of up to 1 GB that are freed, rather than give each back to the system.

    A step takes and frees the same ones as the last; mapped anew, page by page, they cost a tenth of it on a
    CPU. Other C libraries have no such switch.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def worth_compiling(model: GPT, t: TrainConfig, device: torch.device) -> bool:
    """Whether torch.compile pays: a function of config and machine, so that a resumed run decides alike."""
    if t.compile != "auto" or device.type == "cuda":
        return t.compile != "off"
    total_flops = model.flops_per_token(t.seq_len) * t.seq_len * t.batch_size * t.steps
    return total_flops > COMPILE_WORTH_FLOPS and shutil.which(os.environ.get("CXX", "g++")) is not None


# -----------------------------------------------------------------------------------------------------------
# The run's folder


def with_vocabulary(config: Config, corpus: Corpus) -> Config:
    """The config with the corpus' vocabulary size, unless it names one at least as large."""
    needed = corpus.meta["vocab_size"]
    size = config.model.vocab_size or needed
    if size < needed:
        raise UserError(f"model.vocab_size: the corpus {config.data.dir} has {needed} tokens, got {size}; "
                        "leave it out or raise it")
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def is_finished(run_dir: Path, config: Config, corpus: Corpus) -> bool:
    """Whether the run is there to its end. Raises UserError for a folder of anything but this run."""
    checkpoint.check_links(run_dir)
    config_path, corpus_path = run_dir / "config.toml", run_dir / "corpus.json"
    if not config_path.exists():
        # what a kill may have left of a new one
        half_made = {path for name in ("corpus.json", TOKENIZER_FILE, "config.toml")
                     for path in (run_dir / name, temporary_path(run_dir / name))} - {config_path}
        if run_dir.exists() and (not run_dir.is_dir() or set(run_dir.iterdir()) - half_made):
            raise UserError(f"run.dir {run_dir}: exists, is not empty and holds no run; give another run.dir")
        return False
    changes = differences(load_config(config_path), config, ignore=["run"])
    if changes:
        raise UserError(*(f"run {run_dir}: was started with another config: {change}; give another run.dir "
                          "or delete the folder" for change in changes))
    if read_meta(corpus_path) != corpus.meta:
        raise UserError(f"run {run_dir}: was started on another corpus than {config.data.dir} now holds; "
                        "prepare that one again, give another run.dir, or delete the folder")
    return (run_dir / "summary.json").exists()


def make_run(run_dir: Path, config: Config, corpus: Corpus) -> None:
    """The run's folder with its corpus and config, where it is new."""
    if not (run_dir / "config.toml").exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "corpus.json", json.dumps(corpus.meta, indent=1))
        if (corpus.folder / TOKENIZER_FILE).exists():
            write_whole(run_dir / TOKENIZER_FILE, (corpus.folder / TOKENIZER_FILE).read_text())
        write_whole(run_dir / "config.toml", to_toml(config))   # last: it makes the folder a run


def describe(config: Config, corpus: Corpus, model: GPT, world: World, is_compiled: bool) -> Iterator[str]:
    """What is about to be trained, for the screen."""
    m, t = config.model, config.train
    n_tokens = t.steps * t.batch_size * t.seq_len
    dtype = str(pick_dtype(t, world.device)).removeprefix("torch.")
    machine = f"{world.size} x {world.device.type} by {t.parallel}" if world.size > 1 else str(world.device)
    yield (f"model     {m.n_layer} layers, {m.n_embd} wide, {m.n_head} heads, {model.n_parameters():,} "
           f"parameters, {model.flops_per_token(t.seq_len):,} FLOPs a token")
    options = type(config.position).model_fields
    said = [f"{key} {value}" for key, value in config.position.model_dump(exclude={"encoding"}).items()
            if value != options[key].default]
    if m.window:
        said.append(f"window {m.window}")
    yield "position  " + ", ".join([config.position.encoding, *said, f"trained at L = {t.seq_len}"])
    warning = model.encoding.warning()
    if warning:
        yield f"warning: {warning}"
    yield (f"data      {corpus.folder}, {len(corpus.tokens['train']):,} tokens; {n_tokens:,} to train on "
           f"({n_tokens / len(corpus.tokens['train']):.2f} epochs)")
    yield f"machine   {machine}, {dtype}, compile {'on' if is_compiled else 'off'}, seed {t.seed}"


def write_summary(run_dir: Path, config: Config, model: GPT, metrics: dict[str, float], log: Log) -> None:
    """Write summary.json, which marks the run as finished."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    summary = {
        "steps": config.train.steps,
        "tokens": config.train.steps * log.tokens_per_step,
        "wall_s": round(log.wall_s(), 3),
        **{key: metrics.get(key) for key in ("loss", "val_loss", "val_bpb")},
        "tokens_per_s": round(config.train.steps * log.tokens_per_step / log.wall_s()),
        "peak_memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else rss,
        "parameters": model.n_parameters(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "numpy": np.__version__},
        "git_revision": git_revision(),
    }
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    log.to_wandb(lambda run: run.summary.update(summary))
    log.to_wandb(lambda run: run.finish())
    print(f"finished {run_dir}: {describe_summary(summary)}")


def read_summary(run_dir: Path) -> str:
    """What the summary of a finished run says. Raises UserError where it is damaged."""
    try:
        return describe_summary(read_json(run_dir / "summary.json"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_dir}/summary.json: damaged ({type(error).__name__}); delete this file, the "
                        "same command writes it again from the last checkpoint") from error


def describe_summary(summary: dict[str, Any]) -> str:
    """The figures that one looks for first."""
    return (f"validation loss {figure(summary['val_loss'])} nats/token, {figure(summary['val_bpb'])} "
            f"bits/byte; {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s, "
            f"{summary['tokens_per_s']:,}/s")


def git_revision() -> str | None:
    """The commit of this code; None outside a checkout, or without git."""
    try:
        done = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=Path(__file__).parent,
                              capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def let_signals_wait(stop: list[int]) -> None:
    """Make the first signal wait in `stop` for the next place to stop at; where main has set them up."""
    def note(number: int, frame: Any) -> None:
        if stop:
            interrupt(number, frame)            # the second one, at once
        stop.append(number)

    for number in SIGNALS:
        if signal.getsignal(number) is interrupt:
            signal.signal(number, note)


def main() -> int:
    parser = argument_parser(__doc__, help_text(None))
    parser.add_argument("config", metavar="CONFIG.toml", help="see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as train.lr=1e-3")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and exit")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides, pretrained_tables)
    if args.dry_run:
        print(to_toml(config), end="")
        return 0
    for number in SIGNALS:
        signal.signal(number, interrupt)        # while nothing is there to save, at once
    keep_freed_memory()
    code = train(config, [])
    parallel.leave()
    return code


if __name__ == "__main__":
    run_command(main)
