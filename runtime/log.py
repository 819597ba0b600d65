"""Progress of a run: on the screen, in metrics.jsonl, and on W&B if the config asks for it."""

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
from runtime.files import flush, name_in_errors, write_whole


class Log:
    """Progress on the screen, in metrics.jsonl, and on W&B if the config asks for it."""

    def __init__(self, run_dir: Path, config: Config, state: dict[str, Any], is_writer: bool) -> None:
        self.config, self.is_writer = config, is_writer
        self.path = run_dir / "metrics.jsonl"
        self.tokens_per_step = config.train.batch_size * config.train.seq_len
        self.first_step = self.last_step = state["step"]
        self.first_time = self.last_time = time.perf_counter()
        self.wall_before = state["wall_s"]
        # tokens per second since the last line, and since this start (at first: as in the checkpoint)
        self.speed = self.mean_speed = state["step"] * self.tokens_per_step / max(state["wall_s"], 1e-9)
        lines = self._lines_up_to(self.first_step)      # read by every process: all must agree on the next
        self.n_lines = len(lines)
        if is_writer and self.n_lines < state.get("lines", 0):
            print(f"warning: {self.path}: has only {self.n_lines} of the {state['lines']} lines up to step "
                  f"{self.first_step}; the others are lost, but weights and moments are complete", flush=True)
        self.has_first_line = bool(lines) and step_of(lines[-1]) == self.first_step
        if is_writer and self.path.exists():
            write_whole(self.path, "".join(f"{line}\n" for line in lines))
        self.wandb = start_wandb(run_dir, config) if config.run.wandb and is_writer else None

    def wall_s(self) -> float:
        """Seconds spent in the loop, including those before a resume."""
        return self.wall_before + time.perf_counter() - self.first_time

    def has_line(self, step: int) -> bool:
        """Whether an earlier start has written the line of this step."""
        return step == self.first_step and self.has_first_line

    def write(self, step: int, metrics: dict[str, Any], done: int) -> None:
        """Write the line of a step everywhere, unless a resume finds it written. `done` steps are complete.

        A GPU may have completed several steps by the time the metrics of one are read.
        """
        if not self.is_writer or self.has_line(step):
            return
        if done > self.last_step:
            now = time.perf_counter()
            self.speed = (done - self.last_step) * self.tokens_per_step / (now - self.last_time)
            self.mean_speed = (done - self.first_step) * self.tokens_per_step / (now - self.first_time)
            self.last_step, self.last_time = done, now
        line = {"step": step, "tokens": step * self.tokens_per_step, **metrics,
                "tokens_per_s": round(self.speed), "wall_s": round(self.wall_s(), 3)}
        with name_in_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.n_lines += 1
        self.to_wandb(lambda run: run.log(line, step=step))
        steps = self.config.train.steps
        eta = (steps - step) * self.tokens_per_step / self.mean_speed
        text = (f"step {step}/{steps}  loss {shown(metrics['loss'])}  lr {metrics['lr']:.2e}  grad "
                f"{shown(metrics['grad_norm'], '.2f')}  {self.speed:,.0f} tokens/s  ETA {eta // 60:.0f}m"
                f"{eta % 60:02.0f}s")
        if "n_bad" in metrics:
            text += f"  NOT APPLIED, {metrics['n_bad']} in a row"
        if "val_loss" in metrics:
            text += f"  val {shown(metrics['val_loss'])} nats/token  {shown(metrics['val_bpb'])} bits/byte"
        stays = {"val_loss", "n_bad"} & set(metrics) or not sys.stdout.isatty()
        print(f"\r{text:<110}" if sys.stdout.isatty() else text, end="\n" if stays else "", flush=True)

    def sync(self) -> None:
        """Flush metrics.jsonl to disk: before a checkpoint, which a resume does not go behind."""
        if self.is_writer and self.path.exists():
            flush(self.path)
            flush(self.path.parent)

    def to_wandb(self, send: Callable[[Any], None]) -> None:
        """Pass the W&B run to `send`; if that fails, warn once and continue without W&B."""
        try:
            if self.wandb:
                send(self.wandb)
        except Exception as error:  # a failing logger must not end a training run
            print(f"warning: W&B failed and is off from here: {without_key(error)}")
            self.wandb = None

    def _lines_up_to(self, step: int) -> list[str]:
        """The lines of steps that a resume does not repeat, one for each; torn lines are left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        of_steps: dict[int, str] = {}
        for line in lines:                  # a step has two if two processes once wrote them
            of_steps.setdefault(step_of(line), line)
        return [line for n, line in of_steps.items() if 0 < n <= step]


def step_of(line: str) -> int:
    """The step of a line of metrics.jsonl; 0 if the line is torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def without_key(error: Exception) -> str:
    """The message of W&B's error, on one line, without the API key that it may quote."""
    return describe_exception(error, os.environ.get("WANDB_API_KEY"))


def start_wandb(run_dir: Path, config: Config) -> Any:
    """A W&B run, offline without a key or network; None if even that fails: training continues without it."""
    has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
    if os.environ.get("WANDB_MODE", "" if has_key else "offline") == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")         # it looks up its host even offline
    try:
        import wandb
        options: dict[str, Any] = {
            "project": config.run.wandb_project, "name": run_dir.name, "dir": str(run_dir),
            "config": config.model_dump(), "settings": wandb.Settings(init_timeout=30)}
        reason = "no API key (run `wandb login`)"
        if "WANDB_MODE" in os.environ or has_key:
            try:
                return wandb.init(**options)
            except wandb.errors.Error as error:
                reason = without_key(error)
        print(f"warning: W&B: {reason}; logging offline to {run_dir}/wandb, upload it with `wandb sync`")
        return wandb.init(**options, mode="offline")
    except Exception as error:  # see Log.to_wandb
        print(f"warning: W&B is off: {without_key(error)}")
        return None


def shown(number: float | None, form: str = ".4f") -> str:
    """A measured number for the screen; "nan" for one that was not finite."""
    return "nan" if number is None else format(number, form)
