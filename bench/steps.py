"""A training step of nanorope, of its peers and of each encoding, in the same run, interleaved.

`python -m bench.steps [CONTENDER ...] [section.key=value ...] [--shapes T,BATCH ...] [--sizes LAYERSxWIDTH]`

A contender is an encoding, `llama` (of transformers), `x-transformers`, or the path of the model.py in a
checkout of nanoGPT, with changes if you want: `rope+compile`, `rope+cudagraphs`,
`t5+model.flex=true+compile`. `encodings` stands for every encoding. A pair section.key=value changes all
contenders. The first one is what the others are divided by, in every shape (length and batch size) and size.

Each contender has a process of its own, some at a time, always with the first among them. They compile at the
same time, then take a step (forward, backward, optimizer, on random tokens) in turn, round after round, so
that a noisy machine disturbs all equally. The optimizer is train.optimizer, or AdamW of a peer. A cell has
the median of the ratios within a round, then the fastest and the median step. Memory is the peak of the
process minus what it held before it made the model, or the peak of what is allocated on the GPU; that of a
compiled model includes its compiling. Where a process ended, the cell has its exit code.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from base.command import argument_parser, run_command
from base.errors import UserError, did_you_mean
from config import Config, load_config
from model import GPT, hidden_width
from positions import ENCODINGS
from runtime.device import autocast, dtype_name, set_up_cpu
from runtime.optimizer import make_optimizer

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quick-adamw.toml"
DEFAULT = ["rope", "rope+compile", "none", "none+compile", "llama", "llama+compile", "x-transformers",
           "x-transformers+compile"]
# with CUDA graphs a step's kernels are launched as one
COMPILE_MODES = {"compile": "default", "cudagraphs": "reduce-overhead"}
CHANGE = re.compile(r"\w+\.\w+=")       # section.key=value
AT_A_TIME = {"cpu": 6, "cuda": 10}      # processes beside the first contender's


class WithLoss(nn.Module):
    """A peer's decoder as model(tokens, targets) -> loss, so that its loss is compiled as ours is."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.decoder(tokens)
        return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1).float(), targets.flatten())


class NanoGPT(nn.Module):
    """GPT-2 of a checkout of nanoGPT."""

    def __init__(self, path: str, config: Config) -> None:
        super().__init__()
        m, spec = config.model, spec_from_file_location("nanogpt", path)
        assert spec and spec.loader
        module = sys.modules["nanogpt"] = module_from_spec(spec)        # its dataclass looks there
        spec.loader.exec_module(module)
        self.decoder = module.GPT(module.GPTConfig(
            block_size=config.train.seq_len, vocab_size=m.vocab_size, n_layer=m.n_layer, n_head=m.n_head,
            n_embd=m.n_embd, dropout=0.0, bias=False))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.decoder(tokens, targets)[1]


def llama(config: Config) -> nn.Module:
    """Llama of transformers: the same block as nanorope's default."""
    from transformers import LlamaConfig, LlamaForCausalLM
    m = config.model
    assert m.vocab_size
    return WithLoss(LlamaForCausalLM(LlamaConfig(
        vocab_size=m.vocab_size, hidden_size=m.n_embd, intermediate_size=hidden_width(m),
        num_hidden_layers=m.n_layer, num_attention_heads=m.n_head, tie_word_embeddings=m.tied,
        max_position_embeddings=config.train.seq_len, use_cache=False)))


def x_transformers(config: Config) -> nn.Module:
    """x-transformers' decoder with flash attention, RoPE, and as many channels per head as the others."""
    from x_transformers import Decoder, TransformerWrapper
    m = config.model
    layers = Decoder(dim=m.n_embd, depth=m.n_layer, heads=m.n_head, attn_dim_head=m.head_width,
                     attn_flash=True, rotary_pos_emb=True)
    return WithLoss(TransformerWrapper(num_tokens=m.vocab_size, max_seq_len=config.train.seq_len,
                                       attn_layers=layers, use_abs_pos_emb=False))


PEERS = {"llama": llama, "x-transformers": x_transformers}


def expanded(contender: str) -> list[str]:
    """The contenders that `encodings`, also with changes, stands for."""
    name, plus, changes = contender.partition("+")
    return [encoding + plus + changes for encoding in ENCODINGS] if name == "encodings" else [contender]


def config_of(contender: str, overrides: Sequence[str]) -> Config:
    """The config that a contender is made from. Raises UserError for one that is not known."""
    name, *changes = contender.split("+")
    if name not in ENCODINGS and name not in PEERS and not Path(name).is_file():
        hint = did_you_mean(name, [*ENCODINGS, *PEERS])
        raise UserError(f"contender {name}: unknown{hint}; give encodings, {', '.join(PEERS)}, or the path "
                        "of nanoGPT's model.py")
    encoding = name if name in ENCODINGS else "rope"
    changes = [change for change in changes if change not in COMPILE_MODES]
    return load_config(CONFIG, [f"position.encoding={encoding}", "train.accumulate=1", "model.vocab_size=257",
                                *overrides, *changes])


# -----------------------------------------------------------------------------------------------------------
# The process of a contender


def serve(pipe: Any, contender: str, overrides: Sequence[str], device: torch.device) -> None:
    """Take two steps to get warm, then one at each request; send its seconds and the peak of memory."""
    config, name = config_of(contender, overrides), contender.partition("+")[0]
    make: Any = GPT if name in ENCODINGS else PEERS.get(name) or partial(NanoGPT, name)
    set_up_cpu()
    torch.manual_seed(0)
    with torch.device("meta"):
        make(config)                    # so that what it imports does not count
    before = peak_bytes(device)
    model = make(config).to(device)
    if isinstance(model, GPT):
        optimizer = make_optimizer(model, config)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    call: Any = model
    for change in contender.split("+"):
        if change in COMPILE_MODES:
            call = torch.compile(model, mode=COMPILE_MODES[change])
    assert config.model.vocab_size
    tokens = torch.randint(config.model.vocab_size, (config.train.batch_size, config.train.seq_len + 1),
                           device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for number in itertools.count():
        began = time.perf_counter()
        with autocast(config.train, device):
            loss = call(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number > 0:
            pipe.send((time.perf_counter() - began, peak_bytes(device) - before))
            pipe.recv()


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held (Linux), or allocated on the GPU.

    Not ru_maxrss: a child inherits that of its parent.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


class ContenderProcess:
    """A contender in a process of its own, its times and memory, and how the process ended if it has."""

    def __init__(self, *arguments: Any) -> None:
        self.problem, self.peak, self.seconds = "", 0, list[float]()
        context: Any = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=serve, args=(other_end, *arguments), daemon=True)
        self.process.start()
        other_end.close()

    def step(self, is_begun: bool = False) -> None:
        """Take a step, which the process may have begun by itself, and keep its numbers, unless it ends."""
        if self.problem:
            return
        try:
            if not is_begun:
                self.pipe.send(True)
            seconds, self.peak = self.pipe.recv()
            self.seconds.append(seconds)
        except (EOFError, OSError):
            self.process.join()
            self.problem = f"ended with code {self.process.exitcode}"


def measure(names: Sequence[str], overrides: Sequence[str], rounds: int,
            device: torch.device) -> dict[str, list[str]]:
    """Time and memory of these contenders relative to the first, as two cells each."""
    contenders = [ContenderProcess(name, overrides, device) for name in names]
    try:
        for contender in contenders:
            contender.step(is_begun=True)   # the last of two for warmth, which all take at the same time
            contender.seconds.clear()
        for number in range(rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                contender.step()
    finally:
        for contender in contenders:
            contender.process.kill()
            contender.process.join()
    base = contenders[0]
    if base.problem:
        raise UserError(f"{names[0]} {base.problem}: its last lines are above")
    cells = {}
    for name, x in zip(names, contenders, strict=True):
        cells[name] = [x.problem, ""]
        if not x.problem:
            ratio = statistics.median(a / b for a, b in zip(x.seconds, base.seconds, strict=True))
            fastest, median = 1e3 * min(x.seconds), 1e3 * statistics.median(x.seconds)
            cells[name] = [f"{ratio:.2f} ({fastest:.0f}, {median:.0f})",
                           f"{x.peak / base.peak:.2f} ({x.peak / 1e6:.0f})"]
    return cells


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"default {' '.join(DEFAULT)}")
    parser.add_argument("--shapes", nargs="+", default=["256,16"], metavar="T,BATCH", help="default 256,16")
    parser.add_argument("--sizes", nargs="+", default=["6x384"], metavar="LAYERSxWIDTH",
                        help="of models with heads of 64 channels (default 6x384)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the result to this file")
    args = parser.parse_intermixed_args()
    device = torch.device(args.device)
    changes = [text for text in args.contenders if CHANGE.match(text)]
    names = [text for text in args.contenders if text not in changes] or DEFAULT
    rows = {contender: [contender] for name in names for contender in expanded(name)}
    base, *others = rows
    cases: dict[str, list[str]] = {}            # what is measured -> its overrides
    dtypes: set[str] = set()
    for size, shape in itertools.product(args.sizes, args.shapes):
        (n_layer, n_embd), (T, batch_size) = size.split("x"), shape.split(",")
        n_head = int(n_embd) // 64
        overrides = [f"model.n_layer={n_layer}", f"model.n_embd={n_embd}", f"model.n_head={n_head}",
                     f"train.seq_len={T}", f"train.batch_size={batch_size}", *changes]
        cases[f"{size}, T {T}, batch {batch_size}"] = overrides
        for name in rows:                       # all mistakes before the first measurement
            dtypes.add(dtype_name(config_of(name, overrides).train, device))
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    heading = ["# A training step, measured", "", f"`python -m bench.steps {shlex.join(sys.argv[1:])}`", "",
               f"{machine}, torch {torch.__version__}, {' and '.join(sorted(dtypes))}", ""]
    columns = ["encoding"]
    for case, overrides in cases.items():
        columns += [f"{case}: step / {base}'s (fastest, median ms)", f"memory / {base}'s (MB)"]
        cells: dict[str, list[str]] = {}
        n = AT_A_TIME[args.device]
        for first in range(0, max(1, len(others)), n):
            cells |= measure([base, *others[first:first + n]], overrides, args.rounds, device)
        for name, row in rows.items():
            row += cells[name]
        text = "\n".join([*heading, f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1),
                          *(f"| {' | '.join(row)} |" for row in rows.values())])
        if args.out:                            # after each case: a `timeout` takes no more than one
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_command(main)
