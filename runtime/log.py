"""What a run tells while it trains: the screen, metrics.jsonl, and W&B where asked for."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import Config
from runtime.errors import describe_exception
from runtime.files import name_in_errors, write_whole


class Log:
    """Progress to the screen, metrics.jsonl, and W&B where asked for."""

    def __init__(self, run_dir: Path, config: Config, state: dict[str, Any], is_writer: bool) -> None:
        self.config, self.is_writer = config, is_writer
        self.path = run_dir / "metrics.jsonl"
        self.tokens_per_step = config.train.batch_size * config.train.seq_len
        self.first_step = self.last_step = state["step"] - state["is_half_done"]   # its line is to come
        self.first_time = self.last_time = time.perf_counter()
        self.wall_before = state["wall_s"]
        if is_writer:
            self._drop_lines_after(self.first_step)
        self.wandb = start_wandb(run_dir, config) if config.run.wandb and is_writer else None

    def wall_s(self) -> float:
        """Seconds spent in the loop, those before a resume included."""
        return self.wall_before + time.perf_counter() - self.first_time

    def tokens_per_s(self) -> float:
        """Mean since this start, validation and checkpoints included."""
        return (self.last_step - self.first_step) * self.tokens_per_step / (self.last_time - self.first_time)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """A line for step (updates done) in each place."""
        if not self.is_writer:
            return
        now = time.perf_counter()
        speed = (step - self.last_step) * self.tokens_per_step / (now - self.last_time)
        self.last_step, self.last_time = step, now
        line = {"step": step, "tokens": step * self.tokens_per_step, **metrics, "tokens_per_s": round(speed),
                "wall_s": round(self.wall_s(), 3)}
        with name_in_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.to_wandb(lambda run: run.log(line, step=step))
        steps = self.config.train.steps
        eta = (steps - step) * self.tokens_per_step / self.tokens_per_s()
        text = (f"step {step}/{steps}  loss {figure(metrics['loss'])}  lr {metrics['lr']:.2e}  grad "
                f"{figure(metrics['grad_norm'], '.2f')}  {speed:,.0f} tokens/s  ETA {eta // 60:.0f}m"
                f"{eta % 60:02.0f}s")
        if "n_bad" in metrics:
            text += f"  NOT APPLIED, {metrics['n_bad']} in a row"
        if "val_loss" in metrics:
            text += f"  val {figure(metrics['val_loss'])} nats/token  {figure(metrics['val_bpb'])} bits/byte"
        stays = {"val_loss", "n_bad"} & set(metrics) or not sys.stdout.isatty()
        print(f"\r{text:<110}" if sys.stdout.isatty() else text, end="\n" if stays else "", flush=True)

    def to_wandb(self, send: Callable[[Any], None]) -> None:
        """Hand the W&B run to `send`; if that fails, warn once and go on without W&B."""
        try:
            if self.wandb:
                send(self.wandb)
        except Exception as error:  # a logger's fault, whatever it is, must not cost a training run
            print(f"warning: W&B failed and is off from here: {without_key(error)}")
            self.wandb = None

    def _drop_lines_after(self, step: int) -> None:
        """Lines of steps that a resume repeats, and lines that a crash tore, go: each step stands once."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        write_whole(self.path, "".join(f"{line}\n" for line in lines if 0 < step_of(line) <= step))


def step_of(line: str) -> int:
    """Of a line of metrics.jsonl; 0 for one that is torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0


def without_key(error: Exception) -> str:
    """What W&B says is wrong, on one line, without the key that it may quote."""
    return describe_exception(error, os.environ.get("WANDB_API_KEY"))


def start_wandb(run_dir: Path, config: Config) -> Any:
    """A W&B run, offline where there is no key or network; None where even that fails. Training goes on."""
    try:
        import wandb
        options: dict[str, Any] = {
            "project": config.run.wandb_project, "name": run_dir.name, "dir": str(run_dir),
            "config": config.model_dump(), "settings": wandb.Settings(init_timeout=30)}
        reason = "no API key (run `wandb login`)"
        if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists():
            try:
                return wandb.init(**options)
            except wandb.errors.Error as error:
                reason = without_key(error)
        print(f"warning: W&B: {reason}; logging offline to {run_dir}/wandb, upload it with `wandb sync`")
        return wandb.init(**options, mode="offline")
    except Exception as error:  # as in Log.to_wandb
        print(f"warning: W&B is off: {without_key(error)}")
        return None


def figure(number: float | None, form: str = ".4f") -> str:
    """A measured number for the screen; nan for one that was not finite."""
    return "nan" if number is None else format(number, form)
