"""A run: its folder (config.toml, corpus.json, summary.json), and what happens between its steps."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import Mask, describe_paths
from base.errors import UserError
from base.files import finite, flush, read_json, write_whole
from config import MAY_DIFFER, Config, differing_keys, flatten, load_config, to_toml
from data.loader import Corpus, Mixture, read_meta
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import GPT
from runtime import checkpoint, parallel
from runtime.checkpoint import State
from runtime.device import dtype_name, pick_dtype
from runtime.log import Log, echo, format_number
from runtime.parallel import Process

ROOT = Path(__file__).resolve().parent.parent
# what `git apply` reads, whatever is set
DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--src-prefix=a/",
        "--dst-prefix=b/")
CODE = ("*.py", ":!tests")          # what decides the numbers of a run, as paths for git


class EarlyEnd(Exception):
    """Training ends before its last step; the arguments are the exit code and the message."""


@dataclass
class TrainingRun:
    """What the training loop works on, and what happens after each of its steps."""

    config: Config
    corpus: Corpus
    model: GPT                  # for state_dict, set_step and n_parameters
    wrapped_model: Any          # what the loop calls: `model` itself, or in DDP, or compiled
    optimizer: torch.optim.Optimizer
    process: Process
    validate: Callable[[], dict[str, float | None]]
    state: State                # what a checkpoint remembers besides weights and moments
    signals: list[int]          # numbers of the signals that arrived: a handler appends, after_step reads
    log: Log | None             # rank 0 writes
    scaler: torch.amp.GradScaler        # does nothing unless training is in float16
    # (lr, metrics) of each step since the device was last waited for
    unread: list[tuple[float, dict[str, Tensor]]] = field(default_factory=list)

    def after_step(self, metrics: dict[str, Tensor]) -> None:
        """Log, validate and save where it is due. Raises EarlyEnd after a signal or too many bad steps.

        `metrics` has loss and grad_norm, and any others, each a tensor of one number: all are written to
        metrics.jsonl and W&B under their names. They stay on the device until a line is written, so that a
        GPU need not be waited for.
        """
        r, state, steps = self.config.run, self.state, self.config.train.steps
        metrics = {name: x.detach() for name, x in metrics.items()}     # without what backward would need
        if self.scaler.is_enabled():
            metrics["loss_scale"] = self.scaler.scale(torch.ones((), device=self.process.device))
        self.unread.append((self.optimizer.param_groups[0]["lr"], metrics))
        step = state.step + len(self.unread)
        self.model.set_step(step)
        # what is due
        is_last = step == steps
        is_log = is_last or step % r.log_every == 0
        is_eval = is_last or step % r.eval_every == 0
        is_save = is_last or step % r.save_every == 0
        signal_number = self.signals[0] if self.signals else 0
        if self.process.world_size > 1:
            signal_number = parallel.any_signal(signal_number)
        if not (is_log or is_eval or is_save or signal_number):
            return
        # from here on a GPU is waited for
        self.read_metrics()
        if is_eval and (is_last or not state.n_bad):
            state.metrics |= self.validate()
            val_loss = state.metrics["val_loss"]
            is_best = val_loss is not None and (state.best is None or val_loss < state.best[1])
            if r.keep_best and is_best and not state.n_bad:
                state.best = (step, val_loss)
                is_save = True
        if (is_log or is_eval) and not state.n_bad:
            self.write_line()
        # while steps are bad the weights may be spoilt: no checkpoint from before is given up for them
        if is_last or signal_number or (is_save and not state.n_bad):
            self.save()
        if self.log:
            self.log.continue_from(step)
        if signal_number and not is_last:
            if self.process.world_size > 1:
                parallel.wait_for_all()         # for the save: torchrun kills all once one has ended
            name = signal.Signals(signal_number).name
            message = f"stopped by {name}, saved at step {step} of {steps}; the same command resumes the run"
            raise EarlyEnd(128 + signal_number, message)

    def read_metrics(self) -> None:
        """Wait for the steps since the last call; log the bad ones."""
        state, unread = self.state, self.unread
        self.unread = []
        read = [(lr, {name: finite(float(x)) for name, x in metrics.items()}) for lr, metrics in unread]
        if self.log:
            self.log.measure_speed(state.step + len(read))
        for lr, metrics in read:
            loss = metrics["loss"]
            grad_norm = metrics["grad_norm"]
            # in float16 a large loss_scale lets gradients overflow: it has been halved, so later steps are
            # fine. At 1 and below the scale is not to blame
            loss_scale = metrics.get("loss_scale") or 0
            is_overflow = grad_norm is None and loss_scale > 1
            is_bad = loss is None or (grad_norm is None and not is_overflow)
            state.step += 1
            state.n_bad = state.n_bad + 1 if is_bad else 0
            state.metrics = {**metrics, "lr": lr}
            if is_bad:
                state.metrics["n_bad"] = state.n_bad
                self.write_line()
            if state.n_bad >= self.config.train.max_bad_steps:
                saved = checkpoint.checkpoints(Path(self.config.run.dir))
                remedy = "lower train.lr in another run.dir"
                if state.n_bad == state.step:
                    remedy = f"no step was finite: try pytest -k {self.config.position.encoding}"
                raise EarlyEnd(3, f"error: training diverged at step {state.step}, lr {lr:.3g}: "
                                  f"{state.n_bad} steps in a row had no finite loss or gradient and were not "
                                  "applied (train.max_bad_steps); last good checkpoint: "
                                  f"{saved[-1] if saved else 'none'}; {remedy}")

    def write_line(self) -> None:
        """Log the newest step read."""
        if self.log:
            self.log.write(self.state.step, self.state.metrics)

    def save(self) -> None:
        """Write a checkpoint; delete older ones, unless the last step was bad."""
        run_dir = Path(self.config.run.dir)
        if self.log:
            self.state.wall_s = self.log.wall_s()
            self.state.scaler = self.scaler.state_dict()
            flush(self.log.path)            # a resume does not write the lines before its checkpoint again
        keep = None if self.state.n_bad else self.config.run.keep
        checkpoint.save(run_dir, self.model, self.optimizer, self.state, keep, is_writer=bool(self.log))

    def finish(self) -> None:
        """Write summary.json, which marks the run as finished."""
        if not self.log:
            return
        run_dir, state = Path(self.config.run.dir), self.state
        n_tokens = state.step * self.log.tokens_per_step
        wall_s = self.log.wall_s()
        summary = {
            "steps": state.step, "tokens": n_tokens, "wall_s": round(wall_s, 3),
            **{key: state.metrics.get(key) for key in ("loss", "val_loss", "val_bpb")},
            "tokens_per_s": round(n_tokens / wall_s),
            "parameters": self.model.n_parameters(), "dtype": state.dtype,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            # the code of the last start, and of all starts: a run may be resumed by other code
            "git_revision": state.revisions[-1], "git_revisions": state.revisions}
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        if self.log.wandb:
            self.log.wandb.summary.update(summary)
            self.log.wandb.finish()
        echo(f"finished {run_dir}: {summary_line(run_dir)}")


def open_corpus(config: Config) -> tuple[Config, Corpus]:
    """The corpus that [data] describes, and the config with its vocabulary size. Raises UserError."""
    d = config.data
    if not d.mixture:
        corpus = Corpus(d.dir, d.cross_documents, d.bos)
    else:
        corpus = Mixture(d.dir, d.mixture, d.cross_documents, d.bos, d.mixture_only)
    corpus.require_windows(config.train.seq_len)
    return with_vocabulary(config, corpus.meta["vocab_size"]), corpus


def with_vocabulary(config: Config, needed: int) -> Config:
    """The config with model.vocab_size, for a corpus of `needed` tokens. Raises UserError if it has less."""
    padded = needed
    if needed > 2**12:      # a multiple of 64 is faster on GPUs: 50,304 for GPT-2's 50,257
        padded = 64 * math.ceil(needed / 64)
    size = config.model.vocab_size or padded
    if size < needed:
        raise UserError(f"model.vocab_size: {size}, but {config.data.dir} has {needed} tokens; remove the "
                        f"key, or prepare the text with --tokenizer {config.train.init_from or 'RUN'}")
    model = config.model.model_copy(update={"vocab_size": size})
    return config.model_copy(update={"model": model})


def require_same_run(run_dir: Path, config: Config, corpus: Corpus) -> None:
    """Raise UserError if the folder holds anything else than this run, at whatever step."""
    if not (run_dir / "config.toml").exists():
        # a kill leaves corpus.json and hidden files in a folder that was being made
        is_being_made = (run_dir / "corpus.json").exists()
        if not is_being_made and list(run_dir.glob("[!.]*")):
            raise UserError(f"run.dir {run_dir}: exists, is not empty and holds no run; give another run.dir")
        return
    before = load_config(run_dir / "config.toml")
    changes = differing_keys(flatten(before), flatten(config), MAY_DIFFER["resume"])
    if content_of(read_meta(run_dir / "corpus.json")) != content_of(corpus.meta):
        changes.append(f"another corpus than {config.data.dir} now holds")
    if changes:
        raise UserError(*(f"run {run_dir}: was started with another config: {change}; give another run.dir "
                          f"(with train.init_from={run_dir} to train it further) or delete the folder"
                          for change in changes))


def content_of(meta: dict[str, Any]) -> list[Any]:
    """What a corpus is, wherever it lies: the checksums of its tokenizer and files, and of a mixture's."""
    checksums = [meta["tokenizer"]["sha256"], *(about["sha256"] for about in meta["splits"].values())]
    for corpus in meta.get("mixture", {}).values():
        checksums += content_of(corpus)
    return checksums


def make_run(run_dir: Path, config: Config, corpus: Corpus, revision: str, code_diff: bytes) -> None:
    """Write config, meta.json of the corpus and tokenizer of a new run; at each start, changes of code."""
    if not (run_dir / "config.toml").exists():
        write_whole(run_dir / "corpus.json", json.dumps(corpus.meta, indent=1))
        if (corpus.folder / TOKENIZER_FILE).exists():
            tokenizer = (corpus.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            write_whole(run_dir / TOKENIZER_FILE, tokenizer)
        write_whole(run_dir / "config.toml", to_toml(config))   # last: it makes the folder a run
    if code_diff:
        write_whole(run_dir / f"code-{revision[-8:]}.diff", code_diff.decode(errors="replace"))


def start_or_resume(config: Config, model: GPT, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer,
                    dtype: str, revision: str) -> State:
    """The state of the newest checkpoint, or of a start from the initialisation or train.init_from."""
    run_dir = Path(config.run.dir)
    state = checkpoint.load_checkpoint(run_dir, model, optimizer)
    if state is None:
        state = State(dtype=dtype)
        if config.train.init_from:
            state.init_sha256 = checkpoint.start_from(config.train.init_from, model, config, tokenizer)
    else:
        echo(f"resuming {run_dir} at step {state.step}")
        model.set_step(state.step)
    is_first = not state.revisions
    is_other_code = not is_first and state.revisions[-1] != revision
    is_other_dtype = state.dtype not in (None, dtype)       # None: a checkpoint of older code
    if is_first or is_other_code:
        state.revisions = [*state.revisions, revision]
    if is_other_code:
        echo(f"warning: resumed by other code: {', then '.join(map(str, state.revisions))}")
    if is_other_dtype:
        echo(f"warning: resumed in {dtype}, after {state.dtype}")
    state.dtype = dtype
    return state


def describe(config: Config, corpus: Corpus | None, model: GPT, process: Process, data: str = "",
             note: str = "") -> str:
    """Lines for the screen about what is going to be trained; `data` stands for a corpus that is missing."""
    m, p, t = config.model, config.position, config.train
    n_tokens = t.steps * t.batch_size * t.seq_len
    keys = p.model_dump(exclude_defaults=True, exclude={"encoding"})
    options = "".join(f"{key} {value}, " for key, value in keys.items())
    # which documents there are has no part in the choice of a path
    documents = torch.zeros(1, t.seq_len) if config.data.cross_documents == "mask" else None
    mask = Mask(documents=documents, has_plain_positions=t.positions == "plain")
    dtype = pick_dtype(t.dtype, process.device)
    paths = describe_paths(model, mask, t.seq_len, dtype, process.device)
    if corpus:
        data = (f"{corpus.folder}, {len(corpus.tokens['train']):,} tokens; {n_tokens:,} to train on "
                f"({corpus.n_epochs(t):.2f} epochs)")
    lines = [
        f"model     {m.n_layer} layers, {m.n_embd} wide, {m.n_head} heads, {model.n_parameters():,} "
        "parameters",
        f"position  {p.encoding}, {options}trained at L = {t.seq_len}",
        f"attention {paths}",
        f"data      {data}",
        f"machine   {process.world_size} x {process.device.type}, {dtype_name(t, process.device)}{note}"]
    if t.steps < t.warmup:
        lines.append(f"warning: train.steps = {t.steps} end within train.warmup = {t.warmup}; the learning "
                     "rate will not reach train.lr")
    return "\n".join(lines)


def summary_line(run_dir: Path) -> str:
    """The main results in summary.json, as text."""
    summary = read_json(run_dir / "summary.json")
    return (f"validation loss {format_number(summary['val_loss'])} nats/token, "
            f"{format_number(summary['val_bpb'])} bits/byte; {summary['tokens']:,} tokens in "
            f"{summary['wall_s']:.0f} s, {summary['tokens_per_s']:,}/s")


def is_by_other_code(run_dir: Path) -> bool:
    """Whether a finished run was trained by other code than today's."""
    return read_json(run_dir / "summary.json").get("git_revision") != (git_revision()[0] or "unknown")


def git(*arguments: str) -> bytes:
    """What a git command prints in this checkout; nothing without git or a checkout."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True).stdout
    except OSError:
        return b""


def git_revision() -> tuple[str | None, bytes]:
    """The last commit of the code, with changes "COMMIT-dirty-HASH8", and the changes; None without git.

    Code is Python besides tests. The changes are its `git diff HEAD`, and the files that git does not track.
    At the root these count if they are loaded: a script that draws a picture may lie there, too.
    """
    revision = git("log", "-1", "--format=%H", "--", *CODE).decode().strip()
    diff = git(*DIFF, "HEAD", "--", *CODE)
    untracked = git("ls-files", "-z", "--others", "--exclude-standard", "--", *CODE).decode().split("\0")[:-1]
    files = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    loaded = {Path(file).resolve() for file in files if os.path.basename(file) in untracked}
    for name in untracked:
        if "/" in name or ROOT / name in loaded:
            diff += git(*DIFF, "--no-index", os.devnull, name)
    if diff:
        revision += f"-dirty-{hashlib.sha256(diff).hexdigest()[:8]}"
    return revision or None, diff
