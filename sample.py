"""Sample: `python sample.py RUN [--prompt TEXT] [--tokens N] [--temperature X] [--top-k N] [--seed N]`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

import torch
from torch import Tensor

from data.tokenizer import decode
from model import GPT
from runtime.checkpoint import load_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, n_tokens: int, temperature: float = 1.0, top_k: int | None = None,
             seed: int = 0) -> Tensor:
    """Continue tokens (1, T) by n_tokens, each fed once through a key-value cache. -> (1, T + n_tokens).

    Draws from softmax(logits / temperature) over the top_k likeliest; temperature 0 takes the likeliest. A
    function of its arguments.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = model.new_cache()
    fresh = tokens
    for _ in range(n_tokens):
        logits = model.logits(model.hidden(fresh, cache=cache)[:, -1]).float()          # (1, V)
        if temperature == 0:
            fresh = logits.argmax(dim=-1, keepdim=True)
        else:
            if top_k:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            fresh = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, fresh), dim=1)
    return tokens


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a folder that train.py made, or one of Hugging Face")
    parser.add_argument("--prompt", default="", help="text to go on from (default: a document's start)")
    parser.add_argument("--tokens", type=int, default=300, help="how many to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0: always the likeliest (default %(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest only (default: all)")
    parser.add_argument("--seed", type=int, default=0,
                        help="the same seed gives the same text (default %(default)s)")
    args = parser.parse_args()
    if args.tokens < 1 or args.temperature < 0 or (args.top_k is not None and args.top_k < 1):
        raise UserError("--tokens and --top-k must be at least 1 and --temperature at least 0, got "
                        f"{args.tokens}, {args.top_k} and {args.temperature}")
    model, config, tokenizer = load_run(args.run)
    prompt = [tokenizer.eot, *tokenizer.encode(args.prompt.encode()).tolist()]
    limit = model.encoding.max_length
    if limit and len(prompt) + args.tokens > limit + 1:     # the last token is drawn, not fed
        raise UserError(f"--tokens {args.tokens}: {config.position.encoding} ends at {limit} positions and "
                        f"the prompt takes {len(prompt)}; ask for at most {max(0, limit + 1 - len(prompt))}")
    device = next(model.parameters()).device
    tokens = generate(model, torch.tensor([prompt], device=device), args.tokens, args.temperature, args.top_k,
                      args.seed)
    print(decode(tokenizer, tokens[0].tolist()))


if __name__ == "__main__":
    run_command(main)
