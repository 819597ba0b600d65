"""A training step of ours and of the peers that pip brings, in the same run, interleaved.

`python -m bench.training [--rounds N] [--shape T,B] [--only NAME,NAME] [--out FILE.md]`. All are decoders of
6 layers, 384 wide, 6 heads, 256 tokens in the vocabulary. Each has a process of its own, as its user would
start it, and they take a step (forward, backward, AdamW) in turn, round after round, so that a noisy machine
disturbs all alike; ratios are medians of those within a round. Peers get what we get: bfloat16 autocast,
torch.compile or eager, the fused optimiser.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.memory import peak_bytes
from config import load_config
from model import GPT
from runtime.command import argument_parser, run_command
from runtime.device import keep_freed_memory
from runtime.errors import UserError
from runtime.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parent.parent

N_LAYER, N_EMBD, N_HEAD, VOCAB_SIZE = 6, 384, 6, 256
OURS, NONE = "nanorope rope", "nanorope none"
OUR_PLAIN, PLAIN = "nanorope rope (fp32 eager)", "transformers GPT-2 (fp32 eager)"


def ours(encoding: str, T: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Our decoder and its optimiser, in a process that keeps its memory as train.py's does."""
    keep_freed_memory()
    config = load_config(ROOT / "configs" / "quick.toml", [
        f"position.encoding={encoding}", f"model.vocab_size={VOCAB_SIZE}", f"model.n_layer={N_LAYER}",
        f"model.n_embd={N_EMBD}", f"model.n_head={N_HEAD}", f"train.seq_len={T}"])
    model = GPT(config)
    return model, make_optimizer(model, config.train)


def llama(T: int) -> nn.Module:
    """Llama of transformers: the same block as our default."""
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=N_EMBD, intermediate_size=64 * math.ceil(N_EMBD / 24),
        num_hidden_layers=N_LAYER, num_attention_heads=N_HEAD, max_position_embeddings=T,
        use_cache=False))


def gpt2(T: int) -> nn.Module:
    """GPT-2 of transformers: nanoGPT's block."""
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=T, n_embd=N_EMBD, n_layer=N_LAYER, n_head=N_HEAD, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def x_transformers(T: int, **encoding: bool) -> nn.Module:
    """x-transformers' decoder, flash attention, 64 channels a head as the others have."""
    from x_transformers import Decoder, TransformerWrapper
    layers = Decoder(dim=N_EMBD, depth=N_LAYER, heads=N_HEAD, attn_dim_head=N_EMBD // N_HEAD, attn_flash=True,
                     **encoding)
    return TransformerWrapper(num_tokens=VOCAB_SIZE, max_seq_len=T, attn_layers=layers, use_abs_pos_emb=False)


def theirs(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A peer's model with the optimiser that ours has."""
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


class Contender(NamedTuple):
    """How to make a model with its optimiser for T tokens, and how it steps."""

    make: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]
    dtype: torch.dtype = torch.bfloat16
    is_compiled: bool = True


CONTENDERS = {
    OURS: Contender(lambda T: ours("rope", T)),
    NONE: Contender(lambda T: ours("none", T)),
    "nanorope alibi": Contender(lambda T: ours("alibi", T)),
    "transformers Llama": Contender(lambda T: theirs(llama(T))),
    "transformers GPT-2": Contender(lambda T: theirs(gpt2(T))),
    "x-transformers rotary": Contender(lambda T: theirs(x_transformers(T, rotary_pos_emb=True))),
    "x-transformers ALiBi": Contender(lambda T: theirs(x_transformers(T, alibi_pos_bias=True))),
    "nanorope rope (eager)": Contender(lambda T: ours("rope", T), is_compiled=False),
    "nanorope none (eager)": Contender(lambda T: ours("none", T), is_compiled=False),
    "transformers Llama (eager)": Contender(lambda T: theirs(llama(T)), is_compiled=False),
    "transformers GPT-2 (eager)": Contender(lambda T: theirs(gpt2(T)), is_compiled=False),
    "x-transformers rotary (eager)": Contender(
        lambda T: theirs(x_transformers(T, rotary_pos_emb=True)), is_compiled=False),
    OUR_PLAIN: Contender(lambda T: ours("rope", T), torch.float32, is_compiled=False),
    PLAIN: Contender(lambda T: theirs(gpt2(T)), torch.float32, is_compiled=False),
}


class Step:
    """Training steps of one contender on random tokens."""

    def __init__(self, name: str, T: int, batch_size: int) -> None:
        torch.manual_seed(0)
        contender = CONTENDERS[name]
        self.model, self.optimizer = contender.make(T)
        self.call: Any = torch.compile(self.model) if contender.is_compiled else self.model
        self.dtype = contender.dtype
        tokens = torch.randint(VOCAB_SIZE, (batch_size, T + 1))
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self) -> Tensor:
        """Mean loss: by the model itself if it is ours, else of its logits."""
        if isinstance(self.model, GPT):
            return self.call(self.x, self.y)
        out = self.call(self.x)
        return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1).float(), self.y.flatten())

    def seconds(self) -> float:
        """Take a step, return its wall time."""
        began = time.perf_counter()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began


def serve(name: str, T: int, batch_size: int) -> None:
    """What a contender's process does: take a step for each line that comes, and answer with a line."""
    step = Step(name, T, batch_size)
    print(json.dumps(sum(p.numel() for p in step.model.parameters())), flush=True)
    for _ in sys.stdin:
        print(json.dumps((step.seconds(), peak_bytes() / 1e6)), flush=True)


class Process:
    """A contender in a process of its own, and what is known of it."""

    def __init__(self, name: str, T: int, batch_size: int) -> None:
        began = time.perf_counter()
        self.command = [sys.executable, __file__, "--serve", name, str(T), str(batch_size)]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.n_parameters: int = self.answer()
        self.start_s = time.perf_counter() - began
        first, *others = (self.seconds() for _ in range(3))             # the first compiles
        self.compile_s = max(0.0, first - min(others))

    def answer(self) -> Any:
        """The next line it says."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.command}: ended; run it by hand to see why")
        return json.loads(line)

    def seconds(self) -> float:
        """Have it take a step; its wall time."""
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        seconds, self.peak_mb = self.answer()
        return seconds


def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Most FLOP/s that this machine reaches in a square product: the ceiling of a step."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def take_turns(processes: dict[str, Process], rounds: int) -> list[dict[str, float]]:
    """Seconds of a step of each in each round; every other round goes backwards."""
    names, table = list(processes), []
    for n in range(rounds):
        order = names if n % 2 == 0 else names[::-1]
        table.append({name: processes[name].seconds() for name in order})
    for process in processes.values():
        process.process.communicate()
    return table


def report(names: list[str], T: int, batch_size: int, rounds: int) -> str:
    """The table as Markdown, and how ours stands to the best peer, to plain fp32, and to no encoding."""
    with tempfile.TemporaryDirectory() as empty:        # a cache of other runs hides what compiling takes
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        torch.compile(torch.sin)(torch.ones(64))        # compiles the headers, once for all
        processes = {name: Process(name, T, batch_size) for name in names}
        table = take_turns(processes, rounds)
    ceilings = {dtype: matmul_flops(dtype) for dtype in (torch.bfloat16, torch.float32)}
    flops = ours("rope", T)[0].flops_per_token(T) * T * batch_size  # type: ignore[operator]
    rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in ceilings.items())
    lines = [f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, T {T}, batch {batch_size}, "
             f"{rounds} rounds; {flops / 1e9:.0f} GFLOP a step by our formula; ceilings, of a product of "
             f"matrices: {rates}", "",
             f"| | parameters | ms a step, median (least ... most) | tokens/s | step / {names[0]}'s | of the "
             "ceiling | start s | compile s | peak MB |", "|---|" + "---:|" * 8]

    def ratio(name: str, base: str) -> float:
        return statistics.median(row[name] / row[base] for row in table)

    medians = {name: statistics.median(row[name] for row in table) for name in names}
    for name, process in processes.items():
        times = [row[name] for row in table]
        share = flops / medians[name] / ceilings[CONTENDERS[name].dtype]
        cells = (f"{process.n_parameters / 1e6:.1f} M",
                 f"{1e3 * medians[name]:.0f} ({1e3 * min(times):.0f} ... {1e3 * max(times):.0f})",
                 f"{T * batch_size / medians[name]:,.0f}", f"{ratio(name, names[0]):.2f}", f"{share:.0%}",
                 f"{process.start_s:.1f}", f"{process.compile_s:.0f}", f"{process.peak_mb:.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    peers = [name for name in names if not name.startswith("nanorope")]
    if OURS in names and peers:
        best = min(peers, key=lambda name: ratio(name, OURS))
        against = [f"{ratio(best, OURS):.2f} times as fast as the best peer configuration here ({best})"]
        against += [f"{ratio(name, OURS):.2f} as {name}" for name in (PLAIN, OUR_PLAIN) if name in names]
        against += [f"{ratio(OURS, NONE):.3f} of {NONE}'s step"] if NONE in names else []
        lines += ["", f"{OURS}: {', '.join(against)}."]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], *map(int, sys.argv[3:5]))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--only", help=f"of {', '.join(CONTENDERS)}; commas between (default: all)")
    parser.add_argument("--shape", default="256,16", help="T, batch size (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each (default %(default)s)")
    parser.add_argument("--out", type=Path, help="Markdown file to write besides the screen")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise UserError(f"--only {','.join(unknown)}: unknown; choose from {', '.join(CONTENDERS)}")
    T, batch_size = map(int, args.shape.split(","))
    text = report(names, T, batch_size, args.rounds)
    print(text)
    if args.out:
        command = f"python -m bench.training --rounds {args.rounds} --shape {args.shape}"
        args.out.write_text(f"`{command}`\n\n{text}\n")


if __name__ == "__main__":
    run_command(main)
