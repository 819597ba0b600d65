"""Cost of scoring a long text: token_losses of eval.py and a plain forward pass, in time and peak memory.

`python -m bench.evaluation [--encoding NAME] [--length T] [--preset small|gpt2-124m] [--device cpu|cuda]`
runs both on one random text, in turn and in fresh processes, with a vocabulary of 50257. The plain forward
pass is `model(tokens)`: all logits at once, and no loss. Memory is the peak of the process, PyTorch included
(Linux), or that of the GPU.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench.measuring import (
    add_device,
    check_device,
    check_names,
    fresh,
    machine,
    peak_bytes,
    preset_config,
    synchronize,
    write,
)
from evaluation.protocols import token_losses
from model import GPT
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.device import autocast, set_up_cpu

WAYS = ("plain forward", "token_losses")


@torch.no_grad()
def measure(way: str, encoding: str, length: int, preset: str, device: str) -> tuple[float, int]:
    """Seconds of one forward pass, and the peak memory of this process in bytes."""
    config = preset_config(preset, f"position.encoding={encoding}", "model.vocab_size=50257",
                           f"train.device={device}")
    set_up_cpu()
    model = GPT(config).to(device).eval()
    tokens = torch.randint(50_257, (1, length + 1), device=device)
    with autocast(config.train, torch.device(device)):
        if device == "cuda":        # its memory allocator and kernels warm up at the length itself
            token_losses(model, tokens[:, :-1], tokens[:, 1:])
        model(tokens[:, :64])
        synchronize(tokens.device)
        began = time.perf_counter()
        if way == "plain forward":
            model(tokens[:, :-1])
        else:
            token_losses(model, tokens[:, :-1], tokens[:, 1:])
        synchronize(tokens.device)
        seconds = time.perf_counter() - began
    return seconds, peak_bytes(device)


def main() -> None:
    parser = argument_parser(__doc__)
    add_device(parser, ("small", "gpt2-124m"))
    parser.add_argument("--encoding", default="rope", help="default %(default)s")
    parser.add_argument("--length", type=int, default=16_384, help="tokens (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="forward passes each way (default %(default)s)")
    args = parser.parse_args()
    check_device(args.device)
    check_names("--encoding", [args.encoding], ENCODINGS)
    rounds = [{way: fresh(measure, way, args.encoding, args.length, args.preset, args.device) for way in WAYS}
              for _ in range(args.rounds)]
    lines = []
    for way in WAYS:
        seconds = statistics.median(row[way][0] for row in rounds)
        peak = max(row[way][1] for row in rounds)
        lines.append(f"{way:14} {seconds:7.2f} s   {peak / 1e9:5.2f} GB")
    ratio = statistics.median(row[WAYS[1]][0] / row[WAYS[0]][0] for row in rounds)
    lines.append(f"token_losses / plain forward: {ratio:.2f} in time ({args.encoding}, T {args.length}, "
                 f"{machine(args.device)})")
    write(args.out, "\n".join(lines))


if __name__ == "__main__":
    run_command(main)
