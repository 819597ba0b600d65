"""Progress of a run: on the screen, in metrics.jsonl, and on W&B if the config asks for it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from base.files import write_whole
from config import Config
from runtime.checkpoint import State


class Log:
    """Writes the lines of a run. Rank 0 alone has one."""

    def __init__(self, run_dir: Path, config: Config, state: State) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.steps = config.train.steps
        self.tokens_per_step = config.train.batch_size * config.train.seq_len
        self.wall_before = state.wall_s
        if self.path.exists():
            # a resume repeats the steps after its checkpoint: their lines go, and so does one cut by a kill
            lines = [json.dumps(line) + "\n" for line in read_log(self.path) if line["step"] <= state.step]
            write_whole(self.path, "".join(lines))
        self.path.touch()
        self.wandb: Any = None
        if config.run.wandb:
            import wandb  # here: few runs need it
            id_file = run_dir / "wandb_id"                  # a resumed run goes on as the same run of W&B
            wandb_id = id_file.read_text() if id_file.exists() else None
            self.wandb = wandb.init(project=config.run.wandb_project, name=run_dir.name, dir=str(run_dir),
                                    config=config.model_dump(), resume="allow", id=wandb_id)
            id_file.write_text(str(self.wandb.id))
        now = (state.step, time.perf_counter())                      # a step, and when it was done
        self.start = now
        self.last = now
        self.speed = 0                                               # tokens per second

    def wall_s(self) -> float:
        """Seconds of training, including those before a resume."""
        return self.wall_before + time.perf_counter() - self.start[1]

    def measure_speed(self, step: int) -> None:
        """Measure the speed since `continue_from`; all lines until the next call report it."""
        last_step, last_time = self.last
        self.speed = round(self.tokens_per_step * (step - last_step) / (time.perf_counter() - last_time))

    def continue_from(self, step: int) -> None:
        """The next step begins now, after a validation or a checkpoint: their time does not count."""
        self.last = step, time.perf_counter()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the line of a step everywhere."""
        line = {"step": step, "tokens": step * self.tokens_per_step, **metrics,
                "tokens_per_s": self.speed, "wall_s": round(self.wall_s(), 3)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb:
            self.wandb.log(line, step=step)
        text = (f"step {step}/{self.steps}  loss {format_number(metrics['loss'])}  lr {metrics['lr']:.2e}  "
                f"grad {format_number(metrics['grad_norm'], '.2f')}  {self.speed:,} tokens/s")
        if metrics["loss"] is None or metrics["grad_norm"] is None:
            text += "  NOT APPLIED"
        first_step, start_time = self.start
        seconds = round((self.steps - step) * (time.perf_counter() - start_time) / (step - first_step))
        echo(f"{text}  ETA {seconds // 60}m{seconds % 60:02}s")
        if "val_loss" in metrics:
            echo(f"  validation {format_number(metrics['val_loss'])} nats/token, "
                 f"{format_number(metrics['val_bpb'])} bits/byte")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without one that a kill has cut. Damaged ones are named and left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not text.endswith("\n"):
            continue
        try:
            line = json.loads(text)
            line["step"] = int(line["step"])
            lines.append(line)
        except (ValueError, TypeError, KeyError):
            echo(f"warning: {path} has a damaged line, which is left out: {text[:40]!r}")
    return lines


def echo(text: str) -> None:
    """Print, and train on in silence once the terminal or pipe is gone."""
    with suppress(OSError):
        print(text, flush=True)


def format_number(number: float | None, form: str = ".4f") -> str:
    """A measured number for the screen; "nan" for one that was not finite."""
    return "nan" if number is None else format(number, form)
