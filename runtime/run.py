"""The folder of a run: config.toml, corpus.json, and summary.json, which marks the run as finished.

metrics.jsonl and checkpoints/ beside them are written by log.py and checkpoint.py.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config import Config, differences, load_config, to_toml
from data.bpe import FILE as TOKENIZER_FILE
from data.loader import Corpus, read_meta
from model import GPT
from runtime import checkpoint
from runtime.device import pick_dtype
from runtime.errors import UserError
from runtime.files import read_json, temporary_path, write_whole
from runtime.log import Log, shown
from runtime.parallel import Process


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
        unfinished = {path for name in ("corpus.json", TOKENIZER_FILE, "config.toml")
                      for path in (run_dir / name, temporary_path(run_dir / name))}
        if run_dir.exists() and (not run_dir.is_dir() or set(run_dir.iterdir()) - unfinished):
            raise UserError(f"run.dir {run_dir}: exists, is not empty and holds no run; give another run.dir")
        return False
    changes = differences(load_config(config_path), config, ignore=["run"])
    if changes:
        raise UserError(*(f"run {run_dir}: was started with another config: {change}; give another run.dir "
                          "or delete the folder" for change in changes))
    if read_meta(run_dir / "corpus.json") != corpus.meta:
        raise UserError(f"run {run_dir}: was started on another corpus than {config.data.dir} now holds; "
                        "prepare that one again, give another run.dir, or delete the folder")
    return (run_dir / "summary.json").exists()


def make_run(run_dir: Path, config: Config, corpus: Corpus) -> None:
    """Make the folder of a new run, with its corpus' meta.json and tokenizer, and its config."""
    if not (run_dir / "config.toml").exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "corpus.json", json.dumps(corpus.meta, indent=1))
        if (corpus.folder / TOKENIZER_FILE).exists():
            write_whole(run_dir / TOKENIZER_FILE, (corpus.folder / TOKENIZER_FILE).read_text())
        write_whole(run_dir / "config.toml", to_toml(config))   # last: it makes the folder a run


def describe(config: Config, corpus: Corpus, model: GPT, process: Process,
             is_compiled: bool) -> Iterator[str]:
    """Lines for the screen about what is going to be trained."""
    m, t = config.model, config.train
    n_tokens, n_corpus = t.steps * t.batch_size * t.seq_len, len(corpus.tokens["train"])
    yield (f"model     {m.n_layer} layers, {m.n_embd} wide, {m.n_head} heads, {model.n_parameters():,} "
           f"parameters, {model.flops_per_token(t.seq_len):,} FLOPs per token")
    options = type(config.position).model_fields
    changed = [f"{key} {value}" for key, value in config.position.model_dump(exclude={"encoding"}).items()
               if value != options[key].default]
    if m.window:
        changed.append(f"window {m.window}")
    yield "position  " + ", ".join([config.position.encoding, *changed, f"trained at L = {t.seq_len}"])
    warning = model.encoding.warning()
    if warning:
        yield f"warning: {warning}"
    yield (f"data      {corpus.folder}, {n_corpus:,} tokens; {n_tokens:,} to train on "
           f"({n_tokens / n_corpus:.2f} epochs)")
    machine = str(process.device)
    if process.world_size > 1:
        machine = f"{process.world_size} x {process.device.type} by {t.parallel}"
    dtype = str(pick_dtype(t, process.device)).removeprefix("torch.")
    yield f"machine   {machine}, {dtype}, compile {'on' if is_compiled else 'off'}, seed {t.seed}"


def write_summary(run_dir: Path, config: Config, model: GPT, metrics: dict[str, float], log: Log) -> None:
    """Write summary.json, which marks the run as finished."""
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
        "git_revision": git_revision(),
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
    """The commit of this code, with "-dirty" if tracked files differ; None without a checkout or git."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                              cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
