"""Sample: `python sample.py RUN [--prompt TEXT] [--tokens N] [--temperature X] [--top-k N] [--seed N]`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import chain, takewhile
from pathlib import Path

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from hf.pretrained import is_pretrained, pulled
from hf.tokenizer import eos_ids
from model import GPT
from runtime.checkpoint import load_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


@torch.no_grad()
def stream(model: GPT, tokens: Tensor, n_tokens: int, temperature: float = 1.0, top_k: int | None = None,
           seed: int = 0) -> Iterator[Tensor]:
    """Continue tokens (1, T) by n_tokens: yield each one, (1, 1), then decode it with a key-value cache.

    Draws from softmax(logits / temperature) over the top_k most likely; temperature 0 takes the most likely.
    Raises UserError if weights or logits are not finite.
    """
    # PyTorch's kernel gives 0 for queries of NaN, so finite logits do not show that the weights are
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise UserError("weights of the model are NaN or infinite; give a run that did not diverge")
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = model.new_cache()
    for _ in range(n_tokens):
        logits = model.logits(model.hidden(tokens, cache=cache, last=1)[:, -1]).float()     # (1, V)
        if not logits.isfinite().all():
            raise UserError("the model's logits are NaN or infinite; give a run that did not diverge")
        if temperature == 0:
            tokens = logits.argmax(dim=-1, keepdim=True)
        else:
            if top_k:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            tokens = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        yield tokens


def generate(model: GPT, tokens: Tensor, n_tokens: int, temperature: float = 1.0, top_k: int | None = None,
             seed: int = 0) -> Tensor:
    """Tokens (1, T) and their continuation by `stream`. -> (1, T + n_tokens)."""
    return torch.cat((tokens, *stream(model, tokens, n_tokens, temperature, top_k, seed)), dim=1)


def text_of(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of ids, in pieces of whole characters. Bytes that are not UTF-8 become U+FFFD.

    Separators have no text, nor do ids beyond the tokenizer's vocabulary, if the model's is rounded up.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token < tokenizer.vocab_size:
            yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a folder that train.py made, a Hugging Face folder, or "
                        "hf:ORG/NAME of the hub")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=300, help="how many to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0: always the most likely token (default %(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default %(default)s)")
    args = parser.parse_args()
    if args.tokens < 1 or (args.top_k is not None and args.top_k < 1) or not 0 <= args.seed < 2**63:
        raise UserError(f"--tokens {args.tokens} --top-k {args.top_k} --seed {args.seed}: must be positive, "
                        "the seed at least 0")
    if args.temperature and not 1e-4 <= args.temperature <= 1e4:        # NaN fails too
        raise UserError(f"--temperature {args.temperature}: must be 0, or 0.0001 ... 10000")
    folder = Path(pulled(args.run))
    model, config, tokenizer = load_run(folder)
    prompt = [tokenizer.eot, *tokenizer.encode(args.prompt.encode()).tolist()]
    ends = eos_ids(folder) if is_pretrained(folder) else set()
    limit = model.active().max_length
    if limit and len(prompt) + args.tokens > limit + 1:     # the last token is drawn, but not fed
        raise UserError(f"--tokens {args.tokens}: {config.position.encoding} ends at {limit} positions and "
                        f"the prompt takes {len(prompt)}; ask for at most {max(0, limit + 1 - len(prompt))}")
    start = torch.tensor([prompt], device=next(model.parameters()).device)
    drawn = stream(model, start, args.tokens, args.temperature, args.top_k, args.seed)
    written = takewhile(lambda token: token not in ends, map(int, drawn))
    for text in text_of(tokenizer, chain(prompt, written)):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    run_command(main)
