"""A run: its folder (config.toml, corpus.json, summary.json), and what happens between its steps."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import Mask, describe_paths
from base.errors import UserError
from base.files import flush, read_json, write_whole
from config import Config, differences, load_config, to_toml
from data.loader import Corpus, read_meta
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import GPT
from runtime import checkpoint, parallel
from runtime.device import pick_device, pick_dtype
from runtime.log import Log, say, shown
from runtime.parallel import Process

# what may change while a run is trained: its folder and intervals, the machine, the place of the corpus
NO_PART_OF_A_RUN = ("run", "train.device", "train.compile", "data.dir")
RUNS_AHEAD = ("cuda", "mps")        # devices that are not waited for at each step


class Ended(Exception):
    """Training ends before its last step; the arguments are the exit code and the message."""


@dataclass
class Run:
    """What the training loop works on."""

    config: Config
    corpus: Corpus
    model: GPT
    parallel_model: Any         # the model that the loop calls: perhaps compiled, or inside DDP
    optimizer: torch.optim.Optimizer
    process: Process
    validate: Callable[[], dict[str, float | None]]
    state: dict[str, Any]       # step (updates made), metrics, n_bad (steps skipped in a row), revisions ...
    stop: list[int]             # numbers of the signals that arrived
    log: Log | None             # rank 0 writes
    scaler: torch.amp.GradScaler        # of float16; else it does nothing
    unread: list[tuple[float, Tensor]] = field(default_factory=list)    # of the steps since: lr, (loss, norm)

    def after_step(self, loss_and_norm: Tensor) -> None:
        """Log, validate and save where it is due. Raises Ended after a signal or too many bad steps in a row.

        loss_and_norm (2,) stays on the device until a line is written, so that a GPU need not be waited for.
        """
        r, steps = self.config.run, self.config.train.steps
        self.unread.append((self.optimizer.param_groups[0]["lr"], loss_and_norm))
        step = self.state["step"] + len(self.unread)
        self.model.set_step(step)
        is_log, is_eval, is_save = (step % every == 0 or step == steps
                                    for every in (r.log_every, r.eval_every, r.save_every))
        number = self.stop[0] if self.stop else 0
        if self.process.world_size > 1:
            number = parallel.any_signal(number)
        if self.process.device.type in RUNS_AHEAD and not (is_log or is_eval or is_save or number):
            return
        self.read_metrics()
        if is_eval:
            self.state["metrics"] |= self.validate()
            loss, best = self.state["metrics"]["val_loss"], self.state.get("best", (0, math.inf))
            if r.keep_best and loss is not None and loss < best[1] and not self.state["n_bad"]:
                self.state["best"], is_save = (step, loss), True
        if is_log or is_eval or self.state["n_bad"]:
            self.write_line()
        # while steps are bad the weights may be spoilt: no checkpoint from before is given up for them
        if step == steps or number or (is_save and not self.state["n_bad"]):
            self.save()
        if number and step < steps:
            raise Ended(128 + number, f"stopped by {signal.Signals(number).name}, saved at step {step} of "
                                      f"{steps}; the same command resumes the run")

    def read_metrics(self) -> None:
        """Wait for the steps since the last call; log those that were skipped, except for the last step."""
        unread, self.unread = self.unread, []
        for left, (lr, loss_and_norm) in zip(reversed(range(len(unread))), unread, strict=True):
            loss, grad_norm = (x if math.isfinite(x) else None for x in loss_and_norm.tolist())
            # in float16 gradients may overflow: the scale of the loss is then halved, until it is 1
            is_bad = loss is None or grad_norm is None and self.scaler.get_scale() <= 1
            self.state["step"] += 1
            self.state["n_bad"] = self.state["n_bad"] + 1 if is_bad else 0
            self.state["metrics"] = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
            if self.state["n_bad"] >= self.config.train.max_bad_steps:
                newest = checkpoint.checkpoints(Path(self.config.run.dir))[-1:]
                raise Ended(3, f"error: training diverged at step {self.state['step']}: loss {shown(loss)}, "
                               f"gradient norm {shown(grad_norm)}, lr {lr:.3g}; train.max_bad_steps in a row "
                               f"were not applied; last good checkpoint: {newest[0] if newest else 'none'}; "
                               "lower train.lr in another run.dir")
            if is_bad and left:
                self.write_line()

    def write_line(self) -> None:
        """Log the newest step, and whether it was skipped."""
        if self.log:
            n_bad = {"n_bad": self.state["n_bad"]} if self.state["n_bad"] else {}
            self.log.write(self.state["step"], self.state["metrics"] | n_bad)

    def save(self) -> None:
        """Write a checkpoint; delete older ones, unless the last step was bad."""
        if self.log:
            self.state["wall_s"] = self.log.wall_s()
            self.state["scaler"] = self.scaler.state_dict()
            flush(self.log.path)            # a resume does not write the lines before its checkpoint again
        checkpoint.save(Path(self.config.run.dir), self.model, self.optimizer, self.state["step"], self.state,
                        keep=None if self.state["n_bad"] else self.config.run.keep, is_writer=bool(self.log))

    def finish(self) -> None:
        """Write summary.json, which marks the run as finished."""
        if not self.log:
            return
        n_tokens, wall_s = self.config.train.steps * self.log.tokens_per_step, self.log.wall_s()
        revisions, run_dir = self.state["revisions"], Path(self.config.run.dir)
        summary = {
            "steps": self.config.train.steps, "tokens": n_tokens, "wall_s": round(wall_s, 3),
            **{key: self.state["metrics"].get(key) for key in ("loss", "val_loss", "val_bpb")},
            "tokens_per_s": round(n_tokens / wall_s),
            "parameters": self.model.n_parameters(), "dtype": self.state["dtype"],
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            # of the last start, and of all: a run may be resumed by other code
            "git_revision": revisions[-1], "git_revisions": revisions}
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        if self.log.wandb:
            self.log.wandb.summary.update(summary)
            self.log.wandb.finish()
        say(f"finished {run_dir}: {read_summary(run_dir)}")


def open_corpus(config: Config) -> tuple[Config, Corpus]:
    """The corpus that [data] describes, and the config with its vocabulary size. Raises UserError."""
    d = config.data
    corpus = Corpus(d.dir, d.cross_documents, d.mixture, bos=d.bos, mixture_only=d.mixture_only)
    corpus.require_windows(config.train.seq_len)
    needed = corpus.meta["vocab_size"]
    # a multiple of 64 makes a large vocabulary's products faster on GPUs: 50,304 for GPT-2's 50,257
    size = config.model.vocab_size or (-needed % 64 + needed if needed > 2**12 else needed)
    if size < needed:
        raise UserError(f"model.vocab_size: the corpus {d.dir} has {needed} tokens (got {size}); "
                        "remove the key")
    model = config.model.model_copy(update={"vocab_size": size})
    return config.model_copy(update={"model": model}), corpus


def is_finished(run_dir: Path, config: Config, corpus: Corpus) -> bool:
    """Whether this run has been trained to its end. Raises UserError if the folder holds anything else."""
    if not (run_dir / "config.toml").exists():
        # a kill may have left hidden files and these in a folder that was being made
        found = {path.name for path in run_dir.glob("[!.]*")} - {"corpus.json", TOKENIZER_FILE, "code.diff"}
        if found:
            raise UserError(f"run.dir {run_dir}: exists, is not empty and holds no run; give another run.dir")
        return False
    changes = differences(load_config(run_dir / "config.toml"), config, NO_PART_OF_A_RUN)
    if content_of(read_meta(run_dir / "corpus.json")) != content_of(corpus.meta):
        changes.append(f"another corpus than {config.data.dir} now holds")
    longer = f"; to train it further, give another run.dir and train.init_from={run_dir}" if any(
        change.startswith("train.steps") for change in changes) else ""
    if changes:
        raise UserError(*(f"run {run_dir}: was started with another config: {change}; give another run.dir "
                          f"or delete the folder{longer}" for change in changes))
    return (run_dir / "summary.json").exists()


def content_of(meta: dict[str, Any]) -> list[Any]:
    """What a corpus is, wherever it lies: the checksums of its tokenizer and files, and of a mixture's."""
    mixture = {name: content_of(other) for name, other in meta.get("mixture", {}).items()}
    return [meta["tokenizer"]["sha256"], {name: s["sha256"] for name, s in meta["splits"].items()}, mixture]


def make_run(run_dir: Path, config: Config, corpus: Corpus) -> None:
    """Write the config of a new run, and its corpus' meta.json and tokenizer."""
    if not (run_dir / "config.toml").exists():
        write_whole(run_dir / "corpus.json", json.dumps(corpus.meta, indent=1))
        if (corpus.folder / TOKENIZER_FILE).exists():
            tokenizer = (corpus.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            write_whole(run_dir / TOKENIZER_FILE, tokenizer)
        if changes := code_changes():
            write_whole(run_dir / "code.diff", changes.decode(errors="replace"))
        write_whole(run_dir / "config.toml", to_toml(config))   # last: it makes the folder a run


def resume(config: Config, model: GPT, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer,
           dtype: str) -> dict[str, Any]:
    """The state of the newest checkpoint, or of a start from the initialisation or train.init_from."""
    run_dir, revision = Path(config.run.dir), git_revision() or "unknown"
    state = checkpoint.load_newest(run_dir, model, optimizer) if (run_dir / "checkpoints").exists() else None
    if state is None:
        state = {"step": 0, "wall_s": 0.0, "metrics": {}, "n_bad": 0, "revisions": [], "dtype": dtype,
                 "init_sha256": None, "sha256": None}
        if config.train.init_from:
            state["init_sha256"] = checkpoint.start_from(config.train.init_from, model, config, tokenizer)
    else:
        say(f"resuming {run_dir} at step {state['step']}")
        model.set_step(state["step"])
    revisions = state["revisions"] + [revision] * (state["revisions"][-1:] != [revision])
    if state["dtype"] not in (None, dtype) or len(revisions) > len(state["revisions"]) > 0:
        say(f"warning: resumed with another dtype or other code: {state['dtype']} -> {dtype}, {revisions}")
    return state | {"dtype": dtype, "revisions": revisions}


def describe(config: Config, corpus: Corpus, model: GPT, machine: str) -> str:
    """Lines for the screen about what is going to be trained."""
    m, p, t = config.model, config.position, config.train
    n_tokens, n_corpus = t.steps * t.batch_size * t.seq_len, len(corpus.tokens["train"])
    share = corpus.counts[0] / sum(corpus.counts) * (1 - corpus.mixture_only / t.steps)     # of a mixture
    options = p.model_dump(exclude_defaults=True, exclude={"encoding"})
    device = pick_device(t.device)
    is_packed = config.data.cross_documents == "mask"
    documents = torch.zeros(1, t.seq_len, dtype=torch.long, device=device) if is_packed else None
    mask = Mask(documents=documents, in_order=t.positions == "plain")
    paths = describe_paths(model, mask, t.seq_len, pick_dtype(t.dtype, device), device)
    return "\n".join([
        f"model     {m.n_layer} layers, {m.n_embd} wide, {m.n_head} heads, {model.n_parameters():,} "
        "parameters",
        f"position  {p.encoding}, {''.join(f'{key} {value}, ' for key, value in options.items())}trained at "
        f"L = {t.seq_len}",
        f"attention {paths}",
        f"data      {corpus.folder}, {n_corpus:,} tokens; {n_tokens:,} to train on "
        f"({n_tokens * share / n_corpus:.2f} epochs)",
        f"machine   {machine}"])


def read_summary(run_dir: Path) -> str:
    """The main results in summary.json, as text."""
    summary = read_json(run_dir / "summary.json")
    return (f"validation loss {shown(summary['val_loss'])} nats/token, {shown(summary['val_bpb'])} "
            f"bits/byte; {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s, "
            f"{summary['tokens_per_s']:,}/s")


def git(*arguments: str) -> bytes:
    """What a git command prints in this checkout; nothing without git or a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True).stdout
    except OSError:
        return b""


def code_changes() -> bytes:
    """`git diff HEAD`, and as a patch the Python files that git does not track."""
    untracked = git("ls-files", "-z", "--others", "--exclude-standard", "*.py").decode().split("\0")[:-1]
    new = [git("diff", "--no-index", os.devnull, name) for name in untracked]
    return b"".join([git("diff", "HEAD"), *new])


def git_revision() -> str | None:
    """The commit of this code, or with changes "COMMIT-dirty-HASH8". None without a checkout or git."""
    commit, changes = git("rev-parse", "HEAD").decode().strip(), code_changes()
    return (f"{commit}-dirty-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit) or None
