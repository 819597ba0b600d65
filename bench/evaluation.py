"""Cost of scoring a long text: eval.py's token_losses against a plain forward, in time and peak memory.

`python -m bench.evaluation [--encoding NAME] [--length T] [--rounds N]` gives every token of one random text
to either, in turn and in fresh processes, with 6 layers, C = 384 and a vocabulary of 50257. The plain forward
is `model(tokens)`: all logits at once, and no loss. Memory is the process' peak, PyTorch included (Linux).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.memory import peak_bytes
from config import load_config
from evaluation.protocols import token_losses
from model import GPT, autocast
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

SHAPE = ["model.n_layer=6", "model.n_head=6", "model.n_embd=384", "model.vocab_size=50257",
         "train.device=cpu"]


@torch.no_grad()
def measure(way: str, encoding: str, length: int) -> None:
    """Print the seconds of one forward, and this process' peak memory in bytes."""
    config = load_config(ROOT / "configs" / "quick.toml", [f"position.encoding={encoding}", *SHAPE])
    model = GPT(config).eval()
    tokens = torch.randint(50_257, (1, length + 1))
    with autocast(config.train, torch.device("cpu")):
        model(tokens[:, :64])                                           # warm-up
        began = time.perf_counter()
        if way == "plain":
            model(tokens[:, :-1])
        else:
            token_losses(model, tokens[:, :-1], tokens[:, 1:])
        seconds = time.perf_counter() - began
    print(seconds, peak_bytes())


def fresh(way: str, encoding: str, length: int) -> tuple[float, float]:
    """`measure` in a process of its own."""
    arguments = [sys.executable, __file__, "--measure", way, encoding, str(length)]
    output = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, peak = map(float, output.split())
    return seconds, peak


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--encoding", default="rope", help="default %(default)s")
    parser.add_argument("--length", type=int, default=16_384, help="tokens (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="forwards each way (default %(default)s)")
    args = parser.parse_args()
    if args.encoding not in ENCODINGS:
        raise UserError(f"--encoding {args.encoding}: unknown; choose from {', '.join(ENCODINGS)}")
    rounds = [[fresh(way, args.encoding, args.length) for way in ("plain", "scored")]
              for _ in range(args.rounds)]
    for way, name in enumerate(("plain forward", "token_losses")):
        seconds = statistics.median(both[way][0] for both in rounds)
        peak = max(both[way][1] for both in rounds)
        print(f"{name:14} {seconds:7.2f} s   {peak / 1e9:5.2f} GB")
    ratio = statistics.median(scored[0] / plain[0] for plain, scored in rounds)
    print(f"token_losses / plain forward: {ratio:.2f} in time ({args.encoding}, T {args.length}, "
          f"{torch.get_num_threads()} threads)")


if __name__ == "__main__":
    run_command(main)
