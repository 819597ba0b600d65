"""The folder of a run: config.toml, corpus.json, and summary.json, which marks the run as finished.

metrics.jsonl and checkpoints/ beside them are written by log.py and checkpoint.py.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from config import Config, ModelConfig, differences, load_config, to_toml
from data.bpe import FILE as TOKENIZER_FILE
from data.loader import Corpus, read_meta
from data.tokenizer import Tokenizer
from model import GATED, GPT, hidden_width
from positions import ENCODINGS
from runtime import checkpoint, parallel
from runtime.device import dtype_name
from runtime.errors import UserError
from runtime.files import flush, read_json, temporary_path, write_whole
from runtime.folder import LOCK
from runtime.log import Log, shown
from runtime.parallel import Process

SLOW_STEP = 1e14            # FLOPs: a quarter of an hour on one core


def open_corpus(config: Config) -> tuple[Config, Corpus]:
    """The corpus that [data] describes, and the config with its vocabulary size. Raises UserError."""
    d, steps = config.data, config.train.steps
    if d.mixture_only >= steps:
        raise UserError(f"data.mixture_only: must be below train.steps = {steps}, got {d.mixture_only}: no "
                        f"step would train on {d.dir}")
    corpus = Corpus(d.dir, d.cross_documents, d.mixture, bos=d.bos, mixture_only=d.mixture_only)
    return with_vocabulary(config, corpus), corpus


def with_vocabulary(config: Config, corpus: Corpus) -> Config:
    """The config with the vocabulary size of the corpus, unless it sets one that is at least as large."""
    needed = corpus.meta["vocab_size"]
    size = config.model.vocab_size or needed
    if size < needed:
        raise UserError(f"model.vocab_size: the corpus {config.data.dir} has {needed} tokens, got {size}; "
                        "remove the key or raise it")
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def is_finished(run_dir: Path, config: Config, corpus: Corpus) -> bool:
    """Whether this run has been trained to its end. Raises UserError if the folder holds anything else."""
    checkpoint.check_links(run_dir)
    config_path = run_dir / "config.toml"
    if not config_path.exists():
        # a kill may have left these in a folder that was being made
        unfinished = {path for name in ("corpus.json", TOKENIZER_FILE, "config.toml", LOCK)
                      for path in (run_dir / name, temporary_path(run_dir / name))}
        if run_dir.exists() and (not run_dir.is_dir() or set(run_dir.iterdir()) - unfinished):
            raise UserError(f"run.dir {run_dir}: exists, is not empty and holds no run; give another run.dir")
        return False
    changes = differences(load_config(config_path), config, ignore=["run"])
    if changes:
        remedy = "give another run.dir or delete the folder"
        if config.train.init_from:      # the change may be one of that folder
            remedy += f", or resume it as it was by `python train.py {config_path} run.dir={run_dir}`"
        raise UserError(*(f"run {run_dir}: was started with another config: {change}; {remedy}"
                          for change in changes))
    if read_meta(run_dir / "corpus.json") != corpus.meta:
        raise UserError(f"run {run_dir}: was started on another corpus than {config.data.dir} now holds; "
                        "prepare that one again, give another run.dir, or delete the folder")
    if not (run_dir / "summary.json").exists():
        return False
    checkpoint.check_checkpoints(run_dir, config, corpus.meta)      # the folder may be an edited copy
    return True


def make_run(run_dir: Path, config: Config, corpus: Corpus) -> None:
    """Make the folder of a new run, with its corpus' meta.json and tokenizer, and its config."""
    if not (run_dir / "config.toml").exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        flush(run_dir.parent)
        write_whole(run_dir / "corpus.json", json.dumps(corpus.meta, indent=1))
        if (corpus.folder / TOKENIZER_FILE).exists():
            tokenizer = (corpus.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            write_whole(run_dir / TOKENIZER_FILE, tokenizer)
        write_whole(run_dir / "config.toml", to_toml(config))   # last: it makes the folder a run


def resume(run_dir: Path, config: Config, corpus: Corpus, model: GPT, optimizer: Optimizer,
           tokenizer: Tokenizer, process: Process) -> dict[str, Any]:
    """Read the newest checkpoint, or start from train.init_from or from the initialisation; the state.

    Raises UserError if the checkpoint is of another run, or if another process found another one.
    """
    state = checkpoint.load_newest(run_dir, model, optimizer)
    revision = git_revision() or "unknown"      # now: the checkout may change while this process trains
    dtype = dtype_name(config.train, process.device)
    if state:
        checkpoint.check_identity(state, run_dir, config, corpus.meta)
        print(f"resuming {run_dir} at step {state['step']}")
        for what, before, now in (("dtype", state["dtype"], dtype),
                                  ("code", "".join(state["revisions"][-1:]), revision)):
            if before not in (None, "", now):
                print(f"warning: {run_dir} resumes with another {what}: {before} -> {now}", flush=True)
    else:
        state = {"step": 0, "wall_s": 0.0, "metrics": {}, "n_bad": 0, "revisions": []}
        if config.train.init_from:
            state["init_sha256"] = checkpoint.start_from(config.train.init_from, model, config, tokenizer)
    state["dtype"] = dtype
    if state["revisions"][-1:] != [revision]:
        state["revisions"] = [*state["revisions"], revision]
    parallel.require_agreement(process, {
        "code": revision, "dtype": dtype,
        "checkpoint": [state["step"], state.get("sha256"), state.get("init_sha256")]})
    return state


def describe(config: Config, corpus: Corpus, model: GPT, process: Process,
             is_compiled: bool) -> Iterator[str]:
    """Lines for the screen about what is going to be trained."""
    m, t = config.model, config.train
    n_tokens, n_corpus = t.steps * t.batch_size * t.seq_len, len(corpus.tokens["train"])
    yield (f"model     {m.n_layer} layers, {m.n_embd} wide, {m.n_head} heads, {model.n_parameters():,} "
           f"parameters, {model.flops_per_token(t.seq_len):,} FLOPs per token")
    defaults = {key: field.default for key, field in type(config.position).model_fields.items()}
    defaults["lr_scale"] = ENCODINGS[config.position.encoding].lr_scale
    changed = [f"{key} {value}" for key, value in config.position.model_dump(exclude={"encoding"}).items()
               if value != defaults[key]]
    changed += [f"{key} {value}" for key, value in (("window", m.window), ("chunk", m.chunk)) if value]
    if t.positions != "plain":
        changed.append(f"{t.positions} positions below {t.position_range}")
    yield "position  " + ", ".join([config.position.encoding, *changed, f"trained at L = {t.seq_len}"])
    warning = model.encoding.warning()
    if warning:
        yield f"warning: {warning}"
    yield (f"data      {corpus.folder}, {n_corpus:,} tokens; {n_tokens:,} to train on "
           f"({n_tokens / n_corpus:.2f} epochs)")
    yield from warn_about_size(config, model, process)
    machine = str(process.device)
    if process.world_size > 1:
        machine = f"{process.world_size} x {process.device.type} by {t.parallel}"
    yield (f"machine   {machine}, {dtype_name(t, process.device)}, compile {'on' if is_compiled else 'off'}, "
           f"seed {t.seed}")


def activation_bytes(config: ModelConfig, n_tokens: int) -> int:
    """About how much a forward pass of n_tokens in fp32 keeps for the backward pass, without T x T logits.

    A layer keeps 2 tensors of width C in each sublayer (3 with a norm after it), queries, keys and values as
    attention takes them, what it returns, and 3 of the MLP's width (2 without a gate).
    """
    of_heads = 4 * config.n_head * config.head_width
    of_mlp, of_sums = (3 if config.mlp in GATED else 2) * hidden_width(config), 6 if config.post_norm else 4
    return 4 * n_tokens * config.n_layer * (of_sums * config.n_embd + of_heads + of_mlp)


def warn_about_size(config: Config, model: GPT, process: Process) -> Iterator[str]:
    """A line if a step needs more memory than there is, or on a CPU more than about a quarter of an hour."""
    t = config.train
    n_tokens = t.batch_size // t.accumulate // process.world_size * t.seq_len
    needed = activation_bytes(config.model, n_tokens)
    flops = model.flops_per_token(t.seq_len) * t.batch_size * t.seq_len
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if process.device.type == "cuda":
        available = torch.cuda.get_device_properties(process.device).total_memory
    if needed > available or (process.device.type == "cpu" and flops > SLOW_STEP):
        yield (f"warning: a step of {t.batch_size} x {t.seq_len} tokens needs about "
               f"{needed / 2**30:,.1f} GiB of {available / 2**30:,.1f} for activations and {flops:.1g} FLOPs "
               "(a CPU core does 1e11 a second); set train.batch_size or train.seq_len lower, and "
               "train.accumulate higher for less memory; train.positions = pose trains far positions on "
               "short sequences")


def write_summary(run_dir: Path, config: Config, model: GPT, state: dict[str, Any], log: Log) -> None:
    """Write summary.json, which marks the run as finished."""
    metrics, revisions = state["metrics"], state["revisions"]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    n_tokens, wall_s = config.train.steps * log.tokens_per_step, log.wall_s()
    summary = {
        "steps": config.train.steps,
        "tokens": n_tokens,
        "wall_s": round(wall_s, 3),
        **{key: metrics.get(key) for key in ("loss", "val_loss", "val_bpb")},
        "tokens_per_s": round(n_tokens / wall_s),
        "peak_memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else rss,
        "parameters": model.n_parameters(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "numpy": np.__version__},
        "git_revision": revisions[-1],
        "git_revisions": revisions,             # of all starts: a run may be resumed by other code
        "git_dirty": any(revision.endswith("-dirty") for revision in revisions),
    }
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    log.to_wandb(lambda run: run.summary.update(summary))
    log.to_wandb(lambda run: run.finish())
    print(f"finished {run_dir}: {describe_summary(summary)}")


def read_summary(run_dir: Path) -> str:
    """The main results of a finished run, as text. Raises UserError if summary.json is damaged."""
    try:
        return describe_summary(read_json(run_dir / "summary.json"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_dir}/summary.json: damaged ({type(error).__name__}); delete this file, the "
                        "same command writes it again from the last checkpoint") from error


def describe_summary(summary: dict[str, Any]) -> str:
    """The main results in summary.json, as text."""
    return (f"validation loss {shown(summary['val_loss'])} nats/token, {shown(summary['val_bpb'])} "
            f"bits/byte; {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s, "
            f"{summary['tokens_per_s']:,}/s")


def git_revision() -> str | None:
    """The commit of this code, with "-dirty" if tracked files differ or Python files are not tracked.

    None without a checkout or git.
    """
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True,
                              text=True).stdout.strip()
    try:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=all")
    except FileNotFoundError:
        return None
    is_dirty = any(not line.startswith("??") or line.endswith(".py") for line in changes.splitlines())
    return f"{commit}-dirty" if commit and is_dirty else commit or None
