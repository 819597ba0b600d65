"""A training run in memory: the metrics of its steps, the lines of its log, and its checkpoints.

The metrics of a step (loss and gradient norm) stay on the device until they are needed, so that the next
steps are launched on a GPU without waiting for them.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from config import Config
from data.loader import Corpus
from model import GPT
from runtime import checkpoint
from runtime.files import finite
from runtime.folder import RunFolder
from runtime.log import Log
from runtime.parallel import Process
from runtime.run import is_finished, make_run

SHOWN_WINDOWS = 8       # in the message of a divergence


class Diverged(Exception):
    """The loss or the gradient was not finite in too many steps in a row."""


@dataclass
class Run:
    """What the training loop works on."""

    config: Config
    corpus: Corpus
    byte_lengths: Tensor        # (V,) bytes of each token
    model: GPT
    parallel_model: Any         # the model that the loop calls: perhaps compiled, or inside DDP
    optimizer: torch.optim.Optimizer
    process: Process
    folder: RunFolder
    log: Log
    state: dict[str, Any]       # step (updates made), metrics, n_bad, as of the last metrics read
    saved_at: int               # the step of the newest checkpoint
    unread: list[tuple[float, Tensor]] = field(default_factory=list)    # of each step since: lr, (loss, norm)

    def read_metrics(self) -> None:
        """Wait for the steps since the last call: read their metrics, and log those that were skipped.

        Raises Diverged after train.max_bad_steps skipped steps in a row.
        """
        unread, self.unread = self.unread, []
        done = self.state["step"] + len(unread)
        for lr, values in unread:
            loss, grad_norm = values.tolist()
            step = self.state["step"] + 1
            n_bad = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else self.state["n_bad"] + 1
            if n_bad >= self.config.train.max_bad_steps:
                raise Diverged(self._describe_divergence(step, n_bad, loss, grad_norm, lr))
            self.state |= {"step": step, "n_bad": n_bad, "metrics": {
                "loss": finite(loss), "lr": lr, "grad_norm": finite(grad_norm)}}
            if n_bad and step < done:           # the loop logs the last one, perhaps after a resume
                self.write_line(done)

    def write_line(self, done: int) -> None:
        """Log the step of `state`, with its windows if it was skipped; `done` steps are complete."""
        step, n_bad, metrics = self.state["step"], self.state["n_bad"], self.state["metrics"]
        if n_bad:
            metrics = {**metrics, "n_bad": n_bad, "windows": self._windows(step)}
        self.find_folder()
        self.log.write(step, metrics, done)

    def save(self) -> None:
        """Write a checkpoint of the step of `state`, unless there is one.

        Raises UserError if a file of the corpus was overwritten: steps on that text are not saved.
        """
        self.find_folder()
        if self.state["step"] != self.saved_at:
            self.corpus.require_unchanged()
            self.saved_at = self.state["step"]
            if self.process.rank == 0:
                make_run(self.folder.path, self.config, self.corpus)    # of what somebody deleted
            self.log.sync()
            checkpoint.save(self.folder.path, self.model, self.optimizer, self.saved_at,
                            {**self.state, **checkpoint.identity(self.config, self.corpus.meta),
                             "wall_s": self.log.wall_s(), "lines": self.log.n_lines,
                             "threads": torch.get_num_threads()},
                            self.config.run.keep, is_writer=self.process.rank == 0)

    def find_folder(self) -> None:
        """Follow the run's folder if somebody renamed it, and make it again if somebody deleted it.

        Raises UserError if another run, or anything else, has been put in its place.
        """
        if not self.folder.find():
            self.folder.make_again()
            is_finished(self.folder.path, self.config, self.corpus)
            self.saved_at = 0
        self.log.path = self.folder.path / "metrics.jsonl"

    def describe_stop(self, number: int) -> str:
        """The last line of a training that a signal has stopped."""
        where = f"saved at step {self.saved_at} of {self.config.train.steps}" if self.saved_at else \
            "before the first step was done"
        return f"\nstopped by {signal.Signals(number).name}, {where}; the same command resumes the run"

    def _windows(self, step: int) -> list[str]:
        """CORPUS:FIRST_TOKEN of each window of step `step` (from 1): to inspect if its loss is NaN."""
        t = self.config.train
        return [f"{source.folder}:{start}"
                for source, start in self.corpus.places(t.seq_len, t.batch_size, t.seed, step - 1)]

    def _describe_divergence(self, step: int, n_bad: int, loss: float, grad_norm: float, lr: float) -> str:
        """The error line of a training that ends with code 3."""
        run_dir, windows = self.folder.path, self._windows(step)
        newest = checkpoint.newest(run_dir)
        more = f" and {len(windows) - SHOWN_WINDOWS} more" if len(windows) > SHOWN_WINDOWS else ""
        restart = f", from here by train.init_from={run_dir}" if newest else ""
        return (f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}, lr {lr:.3g}, "
                f"windows {', '.join(windows[:SHOWN_WINDOWS])}{more}; {n_bad} steps in a row "
                "(train.max_bad_steps), none was applied; last good checkpoint: "
                f"{newest or 'none yet'}; lower train.lr in another run.dir{restart}")
