"""What the benches share: presets of model sizes, a training step, fresh processes, peak memory, a table."""

from __future__ import annotations

import multiprocessing
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config import Config, load_config
from model import GPT
from runtime.errors import UserError
from runtime.optimizer import make_optimizer

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PRESETS = {         # --preset -> a config, and what differs from it; peers are trained by AdamW, so are ours
    "quick": ("quick-adamw.toml", ()),
    "small": ("quick-adamw.toml", ("model.n_layer=6", "model.n_embd=384", "model.n_head=6")),
    "gpt2-124m": ("gpt2-124m.toml", ()),
}


def preset_config(preset: str, *overrides: str) -> Config:
    """The config of one of PRESETS."""
    file, own = PRESETS[preset]
    return load_config(CONFIGS / file, [*own, *overrides])


class Step:
    """Training steps of a model(tokens, targets) -> loss on random tokens: forward, backward, update."""

    def __init__(self, model: nn.Module, config: Config, device: str, dtype: torch.dtype,
                 is_compiled: bool) -> None:
        self.model, self.device, self.dtype = model.to(device), torch.device(device), dtype
        self.optimizer = (make_optimizer(model, config) if isinstance(model, GPT) else
                          torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True))
        self.call: Any = torch.compile(self.model) if is_compiled else self.model
        assert config.model.vocab_size
        shape = (config.train.batch_size, config.train.seq_len + 1)
        tokens = torch.randint(config.model.vocab_size, shape, device=device)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def seconds(self) -> float:
        """Take a step; return its wall time."""
        return seconds_of(self.take, self.device)

    def take(self) -> None:
        """A forward and a backward pass, and an update."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.call(self.x, self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """Wall time of a call, until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: str = "cpu") -> int:
    """The most memory in bytes that this process has held: on the CPU (Linux), or on the GPU.

    Not ru_maxrss: a child inherits that of its parent, which may hold every model.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    high_water = next(line for line in Path("/proc/self/status").read_text().splitlines()
                      if line.startswith("VmHWM:"))
    return 1024 * int(high_water.split()[1])


def matmul_flops(dtype: torch.dtype, device: str, n: int) -> float:
    """FLOP/s of the fastest of 8 products of n x n matrices, or of as many as take 5 s: a step's ceiling."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    while len(times) < 8 and sum(times) < 5:
        synchronize(a.device)
        began = time.perf_counter()
        a @ b
        synchronize(a.device)
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def machine(device: str) -> str:
    """The device and the versions that figures depend on."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


# -----------------------------------------------------------------------------------------------------------
# Fresh processes


class Ended(UserError):
    """A process ended before it sent a result."""

    def __init__(self, name: str, exit_code: int | None) -> None:
        super().__init__(f"{name}: the process ended with code {exit_code}; its last lines are above")
        self.exit_code = exit_code


class Process:
    """A function that runs in a fresh process, with a pipe as its first argument.

    "spawn" starts a new Python, as a user would; "fork" avoids the imports. It does not outlive its parent.
    """

    def __init__(self, function: Callable[..., None], *arguments: object, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self.name = " ".join(getattr(part, "__name__", str(part)) for part in arguments)
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=run, args=(other_end, function, arguments), daemon=True)
        self.process.start()
        other_end.close()

    def receive(self) -> Any:
        """What the function sends next. Raises Ended if it ended instead."""
        try:
            return self.pipe.recv()
        except EOFError as error:
            self.process.join()
            raise Ended(self.name, self.process.exitcode) from error

    def ask(self) -> Any:
        """Send a request and return the answer."""
        self.pipe.send(None)
        return self.receive()

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.join()


def run(pipe: Any, function: Callable[..., None], arguments: Sequence[object]) -> None:
    """Run a function in its process; Ctrl-C ends it at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    function(pipe, *arguments)


def send_result(pipe: Any, function: Callable[..., Any], *arguments: object) -> None:
    """Call a function and send what it returns."""
    pipe.send(function(*arguments))


def fresh(function: Callable[..., Any], *arguments: object, method: str = "spawn") -> Any:
    """What a function returns in a fresh process. Raises Ended if it returns nothing."""
    process = Process(send_result, function, *arguments, method=method)
    try:
        return process.receive()
    finally:
        process.end()


# -----------------------------------------------------------------------------------------------------------
# Command line and output


def add_device(parser: Any, presets: Sequence[str] = ()) -> None:
    """Add --device, --preset (the first is the default) and --out to a bench's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    if presets:
        parser.add_argument("--preset", choices=presets, default=presets[0], help="default %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the result to this file")


def check_device(device: str) -> None:
    """Raise UserError if there is no GPU to measure on."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device; leave it out to measure on the CPU")


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for names that are not known."""
    unknown = [name for name in names if name not in list(known)]
    if unknown:
        raise UserError(f"{option} {','.join(unknown)}: unknown; choose from {', '.join(known)}")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table: the first column is text, the others are figures."""
    return ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1),
            *("| " + " | ".join(cells) + " |" for cells in rows)]


def write(out: Path | None, text: str) -> None:
    """Print the result; with --out also write it to the file, below the command."""
    print(text)
    if out:
        command = f"python -m bench.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}"
        out.write_text(f"`{command}`\n\n{text}\n")
