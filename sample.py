"""Sample: `python sample.py RUN [--prompt TEXT] [--tokens N] [--temperature X] [--top-k N] [--seed N]`."""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import sys
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from base.command import positive, run_command, run_parser
from base.errors import UserError, warn
from data.tokenizer import decode, to_utf8
from hf.pretrained import is_pretrained, pulled
from hf.tokenizer import eos_ids
from model import GPT
from runtime.checkpoint import open_run


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, n_tokens: int, temperature: float = 1.0, top_k: int | None = None,
             seed: int = 0, ends: Collection[int] = ()) -> Tensor:
    """Tokens (1, T) and up to n_tokens more, (1, T + n), decoded with a key-value cache.

    Draws from softmax(logits / temperature) over the top_k most likely; temperature 0 takes the most likely.
    Stops before an id of `ends`.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache, new = model.new_cache(), tokens
    for _ in range(n_tokens):
        logits = model.logits(model.hidden(new, cache=cache, last=1)[:, -1]).float()        # (1, V)
        if temperature == 0:
            new = logits.argmax(dim=-1, keepdim=True)                   # (1, 1)
        else:
            if top_k:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            new = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        if int(new) in ends:
            break
        tokens = torch.cat((tokens, new), dim=1)
    return tokens


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--tokens", type=positive,
                        help="how many to add (default 300, or as many as a learned table has positions for)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0: always the most likely token (default %(default)s)")
    parser.add_argument("--top-k", type=positive, help="draw from the k most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default %(default)s)")
    args = parser.parse_args()
    if not args.temperature >= 0:                                       # NaN fails too
        raise UserError(f"--temperature {args.temperature}: must be 0 or more")
    folder = Path(pulled(args.run))
    model, _, tokenizer, *_ = open_run(folder, args.checkpoint, args.device)
    text, n_surrogates = to_utf8(args.prompt)
    if n_surrogates:
        warn(f"--prompt is not UTF-8: {n_surrogates} bytes became U+FFFD")
    prompt = [tokenizer.separator, *tokenizer.encode(text).tolist()]
    ends = eos_ids(folder) if is_pretrained(folder) else {tokenizer.separator}
    start = torch.tensor([prompt], device=next(model.parameters()).device)
    room = (model.active().max_length or sys.maxsize) - len(prompt)     # before a learned table ends
    n_tokens = args.tokens or max(1, min(300, room))
    tokens = generate(model, start, n_tokens, args.temperature, args.top_k, args.seed, ends)
    print(decode(tokenizer, tokens[0].tolist()))


if __name__ == "__main__":
    run_command(main)
