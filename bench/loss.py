"""The loss over a large vocabulary, at once and in chunks: CPU time and peak memory, forward and backward.

`python -m bench.loss [--shape N,C,V] [--dtype bfloat16|float32]`: N targets, C = n_embd, V vocabulary. Each
measurement is of a fresh process: memory above that of the inputs, time of the second of two passes on one
thread.
"""

from __future__ import annotations

import time

import torch

from bench.measuring import fresh, peak_bytes, table
from runtime import loss
from runtime.command import argument_parser, run_command


def measure(shape: str, dtype: str, is_chunked: bool) -> tuple[str, ...]:
    """A row of the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    N, C, V = map(int, shape.split(","))
    if not is_chunked:
        loss.MAX_LOGITS = N * V
    x, head = torch.randn(N, C, requires_grad=True), torch.nn.Linear(C, V, bias=False).weight
    targets, before = torch.randint(V, (N,)), peak_bytes()
    for _ in range(2):
        x.grad = head.grad = None
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss.mean_loss(x, head, targets)
        value.backward()
        seconds = time.process_time() - began
    how = f"in chunks of {loss.chunk_rows(N, V)} rows" if is_chunked else "at once"
    return how, f"{value.item():.6f}", f"{seconds:.1f}", f"{(peak_bytes() - before) / 1e9:.2f}"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="16384,768,50257", help="N, C, V (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="of the products (default %(default)s)")
    args = parser.parse_args()
    rows = [fresh(measure, args.shape, args.dtype, is_chunked) for is_chunked in (False, True)]
    print(f"torch {torch.__version__}, N, C, V = {args.shape}, {args.dtype}\n")
    print("\n".join(table(("logits", "loss", "CPU s", "peak GB"), rows)))


if __name__ == "__main__":
    run_command(main)
