"""A training step of ours and of the peers that pip brings, in the same run, interleaved.

`python bench/training.py [--rounds N] [--shape T,B] [--only NAME,NAME] [--out FILE.md]`. All are decoders of
6 layers, 384 wide, 6 heads, 256 tokens in the vocabulary, and take a step (forward, backward, AdamW) in turn,
round after round, so that a noisy machine disturbs all alike; medians of the ratios within a round are
printed. Peers get what we get: bfloat16 autocast, torch.compile and the fused optimiser. Start-up, compile
time and peak memory are those of a fresh process each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))       # `python bench/training.py` finds the root's modules

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from bench.memory import peak_bytes  # noqa: E402
from command import UserError, argument_parser, run_command  # noqa: E402
from config import load_config  # noqa: E402
from model import GPT  # noqa: E402
from train import make_optimizer  # noqa: E402

N_LAYER, N_EMBD, N_HEAD, VOCAB_SIZE = 6, 384, 6, 256
OURS = "nanorope rope"


def ours(encoding: str, T: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Our decoder and its optimiser."""
    config = load_config(ROOT / "configs" / "quick.toml", [
        f"position.encoding={encoding}", f"model.vocab_size={VOCAB_SIZE}", f"model.n_layer={N_LAYER}",
        f"model.n_embd={N_EMBD}", f"model.n_head={N_HEAD}", f"train.seq_len={T}"])
    model = GPT(config)
    return model, make_optimizer(model, config.train)


def llama(T: int) -> nn.Module:
    """Llama of transformers: the same block as our default."""
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=N_EMBD, intermediate_size=1024, num_hidden_layers=N_LAYER,
        num_attention_heads=N_HEAD, max_position_embeddings=T, use_cache=False))


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
    "nanorope none": Contender(lambda T: ours("none", T)),
    "nanorope alibi": Contender(lambda T: ours("alibi", T)),
    "transformers Llama": Contender(lambda T: theirs(llama(T))),
    "transformers GPT-2": Contender(lambda T: theirs(gpt2(T))),
    "x-transformers rotary": Contender(lambda T: theirs(x_transformers(T, rotary_pos_emb=True))),
    "x-transformers ALiBi": Contender(lambda T: theirs(x_transformers(T, alibi_pos_bias=True))),
    "nanorope rope (eager)": Contender(lambda T: ours("rope", T), is_compiled=False),
    "nanorope rope (fp32 eager)": Contender(lambda T: ours("rope", T), torch.float32, is_compiled=False),
    "transformers GPT-2 (fp32 eager)": Contender(lambda T: theirs(gpt2(T)), torch.float32, is_compiled=False),
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


def alone(name: str, T: int, batch_size: int) -> dict[str, float]:
    """Of a fresh process: seconds to build the model and to take the first step, and peak memory after 3."""
    began = time.perf_counter()
    step = Step(name, T, batch_size)
    built = time.perf_counter() - began
    first = step.seconds()
    steady = min(step.seconds() for _ in range(2))
    return {"build_s": built, "compile_s": first - steady, "peak_mb": peak_bytes() / 1e6}


def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Most FLOP/s that this machine reaches in a square product: the ceiling of a step."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def report(names: list[str], T: int, batch_size: int, rounds: int) -> str:
    """The table as Markdown."""
    steps = {name: Step(name, T, batch_size) for name in names}
    for step in steps.values():
        for _ in range(2):
            step.seconds()                                              # compiles, and warms up
    table = [{name: step.seconds() for name, step in steps.items()} for _ in range(rounds)]
    ceilings = {dtype: matmul_flops(dtype) for dtype in (torch.bfloat16, torch.float32)}
    flops = ours("rope", T)[0].flops_per_token(T) * T * batch_size  # type: ignore[operator]
    parameters = {name: sum(p.numel() for p in step.model.parameters()) for name, step in steps.items()}
    rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in ceilings.items())
    lines = [f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, T {T}, batch {batch_size}, "
             f"{rounds} rounds; {flops / 1e9:.0f} GFLOP a step by our formula; ceilings, of a product of "
             f"matrices: {rates}", "",
             "| | parameters | ms a step, median (least ... most) | tokens/s | over ours | of the ceiling | "
             "build s | compile s | peak MB |", "|---|" + "---:|" * 8]
    del steps
    for name in names:
        times = [row[name] for row in table]
        median = statistics.median(times)
        ratio = statistics.median(row[name] / row[names[0]] for row in table)
        command = [sys.executable, __file__, "--alone", name, str(T), str(batch_size)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        fresh = json.loads(done.stdout.splitlines()[-1])
        share = flops / median / ceilings[CONTENDERS[name].dtype]
        cells = (f"{parameters[name] / 1e6:.1f} M",
                 f"{1e3 * median:.0f} ({1e3 * min(times):.0f} ... {1e3 * max(times):.0f})",
                 f"{T * batch_size / median:,.0f}", f"{ratio:.2f}", f"{share:.0%}", f"{fresh['build_s']:.1f}",
                 f"{fresh['compile_s']:.0f}", f"{fresh['peak_mb']:.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(alone(sys.argv[2], *map(int, sys.argv[3:5]))))
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
        command = f"python bench/training.py --rounds {args.rounds} --shape {args.shape}"
        args.out.write_text(f"`{command}`\n\n{text}\n")


if __name__ == "__main__":
    run_command(main)
