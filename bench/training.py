"""A training step of nanorope and of other libraries' models, in the same run, interleaved.

`python -m bench.training [--preset small|gpt2-124m] [--device cpu|cuda] [--shape T,B] [--rounds N]`. small:
decoders of 6 layers, 384 wide, 6 heads, a vocabulary of 256; gpt2-124m: the size of GPT-2 at T 1024. Each
model runs in a separate process, and the processes take a step (forward, backward, AdamW) in turn, round
after round, so that a noisy machine disturbs all equally; ratios are medians of the ratios within a round.
All multiply in the dtype that train.dtype = "auto" chooses here and have the fused optimiser, compiled or
eager, their loss included. A step's share of the ceiling is its model FLOPs utilisation (MFU) relative to a
dense product that is measured in the same run, with the FLOPs of nanorope's RoPE in every row. On a GPU all
start, and compile, at the same time.
`--nanogpt FOLDER` adds the model.py in a checkout of nanoGPT.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measuring import (
    Ended,
    Process,
    Step,
    add_device,
    check_device,
    check_names,
    machine,
    matmul_flops,
    peak_bytes,
    preset_config,
    table,
    write,
)
from config import Config
from model import GPT
from runtime import loss
from runtime.command import argument_parser, run_command
from runtime.device import dtype_name, fast_dtype, set_up_cpu
from runtime.errors import UserError

NANOROPE, NONE = "nanorope rope", "nanorope none"
NANOROPE_FP32, GPT2_FP32 = "nanorope rope (fp32 eager)", "transformers GPT-2 (fp32 eager)"
SHAPES = {"small": "256,16", "gpt2-124m": "1024,16"}
MATMUL = {"cpu": 2048, "cuda": 8192}


def nanorope(config: Config) -> nn.Module:
    """Our decoder, in a process that is set up as train.py does it."""
    set_up_cpu()
    return GPT(config)


class WithLoss(nn.Module):
    """A peer's decoder as model(tokens, targets) -> loss, so that its loss is compiled as ours is."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.decoder(tokens)
        return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1).float(), targets.flatten())


def in_one_piece(config: Config) -> nn.Module:
    """Our decoder with the loss of all rows at once, as the peers have it."""
    loss.MAX_LOGITS = 2**62
    return nanorope(config)


class NanoGPT(nn.Module):
    """GPT-2 of nanoGPT, from the model.py in the folder that the environment variable NANOGPT names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m, spec = config.model, spec_from_file_location("nanogpt", Path(os.environ["NANOGPT"]) / "model.py")
        assert spec and spec.loader
        module = module_from_spec(spec)
        sys.modules["nanogpt"] = module                                 # its dataclass looks there
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
        vocab_size=m.vocab_size, hidden_size=m.n_embd, intermediate_size=64 * math.ceil(m.n_embd / 24),
        num_hidden_layers=m.n_layer, num_attention_heads=m.n_head, tie_word_embeddings=m.tied,
        max_position_embeddings=config.train.seq_len, use_cache=False)))


def gpt2(config: Config) -> nn.Module:
    """GPT-2 of transformers: nanoGPT's block."""
    from transformers import GPT2Config, GPT2LMHeadModel
    m = config.model
    assert m.vocab_size
    return WithLoss(GPT2LMHeadModel(GPT2Config(
        vocab_size=m.vocab_size, n_positions=config.train.seq_len, n_embd=m.n_embd, n_layer=m.n_layer,
        n_head=m.n_head, use_cache=False, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0)))


def x_transformers(config: Config, **encoding: bool) -> nn.Module:
    """x-transformers' decoder with flash attention and as many channels per head as the others."""
    from x_transformers import Decoder, TransformerWrapper
    m = config.model
    layers = Decoder(dim=m.n_embd, depth=m.n_layer, heads=m.n_head, attn_dim_head=m.head_width,
                     attn_flash=True, **encoding)
    return WithLoss(TransformerWrapper(num_tokens=m.vocab_size, max_seq_len=config.train.seq_len,
                                       attn_layers=layers, use_abs_pos_emb=False))


class Contender(NamedTuple):
    """How a model is made from a config, what differs from the preset, and how it takes a step."""

    make: Callable[[Config], nn.Module]
    overrides: tuple[str, ...] = ()
    dtype: torch.dtype | None = None    # None: the faster one here, as train.dtype = "auto" chooses it
    is_compiled: bool = True

    def dtype_on(self, device: str) -> torch.dtype:
        """The dtype of its matrix products on this machine."""
        return self.dtype or fast_dtype(torch.device(device))


GPT2_BLOCK = ("model.norm=layernorm", "model.mlp=gelu", "model.bias=true", "position.encoding=learned")
COMPILED = {
    NANOROPE: Contender(nanorope),
    NONE: Contender(nanorope, ("position.encoding=none",)),
    "nanorope alibi": Contender(nanorope, ("position.encoding=alibi",)),
    "nanorope t5": Contender(nanorope, ("position.encoding=t5",)),
    "nanorope GPT-2 block": Contender(nanorope, GPT2_BLOCK),
    "transformers Llama": Contender(llama),
    "transformers GPT-2": Contender(gpt2),
    "x-transformers rotary": Contender(lambda config: x_transformers(config, rotary_pos_emb=True)),
    "x-transformers ALiBi": Contender(lambda config: x_transformers(config, alibi_pos_bias=True)),
}
EAGER = {f"{name} (eager)": contender._replace(is_compiled=False) for name, contender in COMPILED.items()}
CONTENDERS = {
    **COMPILED, **EAGER,
    "nanorope, loss in one piece": Contender(in_one_piece),
    "nanoGPT": Contender(NanoGPT),
    NANOROPE_FP32: Contender(nanorope, (), torch.float32, is_compiled=False),
    GPT2_FP32: Contender(gpt2, (), torch.float32, is_compiled=False),
}
ONLY_ON_REQUEST = {"nanorope GPT-2 block", "nanorope GPT-2 block (eager)", "nanorope t5",
                   "nanorope t5 (eager)", "nanorope alibi (eager)", "x-transformers ALiBi (eager)",
                   "nanorope, loss in one piece", "nanoGPT"}
DEFAULT = {
    "small": [name for name in CONTENDERS if name not in ONLY_ON_REQUEST],
    "gpt2-124m": [NANOROPE, "nanorope, loss in one piece", "nanorope GPT-2 block", "transformers Llama",
                  "transformers GPT-2"],
}


def contender_config(name: str, preset: str, T: int, batch_size: int, *overrides: str) -> Config:
    """The preset at this shape, as this contender takes it."""
    vocabulary = ["model.vocab_size=256"] if preset == "small" else []
    return preset_config(preset, *vocabulary, *CONTENDERS[name].overrides, f"train.seq_len={T}",
                         f"train.batch_size={batch_size}", "train.accumulate=1", *overrides)


def make_step(name: str, config: Config, device: str) -> Step:
    """A contender's training steps."""
    contender = CONTENDERS[name]
    torch.manual_seed(0)
    return Step(contender.make(config), config, device, contender.dtype_on(device), contender.is_compiled)


def step_of(name: str, preset: str, T: int, batch_size: int, device: str) -> Step:
    """A contender's training steps at this shape of the preset."""
    return make_step(name, contender_config(name, preset, T, batch_size), device)


def serve(pipe: Any, make: Callable[..., Step], *arguments: object) -> None:
    """What the process of a contender does: take a step at each request, until the pipe is closed."""
    step = make(*arguments)
    pipe.send(sum(p.numel() for p in step.model.parameters()))
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send((step.seconds(), peak_bytes(step.device.type)))


class Contestant:
    """A function that makes a contender's steps, in a process, and what is known about them."""

    def __init__(self, name: str, make: Callable[..., Step], *arguments: object) -> None:
        self.name, self.problem, self.peak, self.n_parameters = name, "", 0, 0
        self.start_s = self.compile_s = 0.0
        began = time.perf_counter()
        self.process = Process(serve, make, *arguments)
        try:
            self.n_parameters = self.process.receive()
            self.start_s = time.perf_counter() - began
            first, *others = (self.seconds() for _ in range(3))         # the first one compiles
            self.compile_s = max(0.0, first - min(others))
        except Ended as ended:
            self.problem = f"ended with code {ended.exit_code}"

    def seconds(self) -> float:
        """Let it take a step; return the step's wall time."""
        seconds, self.peak = self.process.ask()
        return seconds


@contextmanager
def contestants(calls: Mapping[str, Sequence[Any]], device: str) -> Iterator[list[Contestant]]:
    """Contestant(name, *arguments) of each name, warm; on a GPU all start at once. Those that failed too."""
    with ThreadPoolExecutor(1 if device == "cpu" else len(calls)) as pool:
        started = list(pool.map(lambda name: Contestant(name, *calls[name]), calls))
    try:
        yield started
    finally:
        for each in started:
            each.process.end()


def take_turns(those: Sequence[Contestant], rounds: int) -> list[dict[str, float]]:
    """Seconds of each one's step in each round; every second round goes backwards."""
    return [{each.name: each.seconds() for each in (those if n % 2 == 0 else those[::-1])}
            for n in range(rounds)]


def report(names: list[str], preset: str, T: int, batch_size: int, rounds: int, device: str) -> str:
    """The table as Markdown, and how nanorope compares to the best peer, to plain fp32, to no encoding."""
    with tempfile.TemporaryDirectory() as empty:                        # a cache would hide the compile time
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        torch.compile(torch.sin)(torch.ones(64, device=device))         # compiles the headers, once for all
        calls = {name: (step_of, name, preset, T, batch_size, device) for name in names}
        with contestants(calls, device) as started:
            failed = [f"{each.name} {each.problem}" for each in started if each.problem]
            if failed:
                raise UserError(f"{', '.join(failed)}: its last lines are above; leave it out by --only")
            rows = take_turns(started, rounds)
        ceilings = {dtype: matmul_flops(dtype, device, MATMUL[device])
                    for dtype in (torch.bfloat16, torch.float32)}
    config = contender_config(NANOROPE, preset, T, batch_size)
    with torch.device("meta"):
        model = GPT(config)
    flops = model.flops_per_token(T) * T * batch_size
    rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in ceilings.items())

    def ratio(name: str, base: str) -> float:
        return statistics.median(row[name] / row[base] for row in rows)

    cells = []
    for contestant in started:
        times = [row[name := contestant.name] for row in rows]
        median = statistics.median(times)
        cells.append((name, f"{contestant.n_parameters / 1e6:.1f} M",
                      f"{1e3 * median:.0f} ({1e3 * min(times):.0f} ... {1e3 * max(times):.0f})",
                      f"{T * batch_size / median:,.0f}", f"{ratio(name, names[0]):.2f}",
                      f"{flops / median / ceilings[CONTENDERS[name].dtype_on(device)]:.0%}",
                      f"{contestant.start_s:.1f}", f"{contestant.compile_s:.0f}",
                      f"{contestant.peak / 1e6:.0f}"))
    dtype = dtype_name(config.train, torch.device(device))
    lines = [f"{machine(device)}, {dtype}, T {T}, batch {batch_size}, {rounds} rounds; "
             f"{flops / 1e9:.0f} GFLOP/step by nanorope's formula; ceilings, measured in a product of "
             f"matrices: {rates}", "",
             *table(("", "parameters", "ms per step, median (min ... max)", "tokens/s",
                     f"step / {names[0]}'s", "of the ceiling", "start s", "compile s", "peak MB"), cells)]
    peers = [name for name in names if not name.startswith("nanorope")]
    if NANOROPE in names and peers:
        best = min(peers, key=lambda name: ratio(name, NANOROPE))
        against = [f"{ratio(best, NANOROPE):.2f} times as fast as the fastest peer here ({best})"]
        against += [f"{ratio(name, NANOROPE):.2f} times as fast as {name}"
                    for name in (GPT2_FP32, NANOROPE_FP32) if name in names]
        against += [f"{ratio(NANOROPE, NONE):.3f} times the step of {NONE}"] if NONE in names else []
        lines += ["", f"{NANOROPE}: {', '.join(against)}."]
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(__doc__)
    add_device(parser, tuple(SHAPES))
    parser.add_argument("--only", help=f"some of {', '.join(CONTENDERS)}; commas between (default: "
                                       "what suits the preset)")
    parser.add_argument("--shape", help="T, batch size (default 256,16; gpt2-124m: 1024,16)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each (default %(default)s)")
    parser.add_argument("--nanogpt", metavar="FOLDER", type=Path, help="a checkout of nanoGPT")
    args = parser.parse_args()
    check_device(args.device)
    names = args.only.split(",") if args.only else [*DEFAULT[args.preset], *["nanoGPT"][:bool(args.nanogpt)]]
    check_names("--only", names, CONTENDERS)
    if "nanoGPT" in names and not (args.nanogpt and (args.nanogpt / "model.py").is_file()):
        raise UserError(f"--nanogpt {args.nanogpt}: no model.py there; give a checkout of nanoGPT")
    os.environ["NANOGPT"] = str(args.nanogpt)
    shape = args.shape or SHAPES[args.preset]
    T, batch_size = map(int, shape.split(","))
    text = report(names, args.preset, T, batch_size, args.rounds, args.device)
    write(args.out, text)


if __name__ == "__main__":
    run_command(main)
