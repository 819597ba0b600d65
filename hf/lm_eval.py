"""lm-evaluation-harness on any run: `python -m hf.lm_eval RUN --tasks TASK,... [--length N] [OPTION ...]`.

No Hugging Face architecture is needed: a run with any encoding gets the numbers of any task. Options that
are not listed below are those of the command lm_eval, such as --include_path, --limit, --num_fewshot and
--output_path. A run that can be exported gets the numbers that `lm_eval --model hf` gives for its export.
Prompts open as the tokenizer's template says: ours put nothing there, unless --bos is given. Texts of rolling
perplexity always open with the separator.
Text is decoded greedily. Computes in the train.dtype of the run.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from base.command import positive, run_command, run_parser
from base.errors import UserError
from data.tokenizer import decode
from evaluation.scoring import TOKENS_PER_FORWARD, losses_at
from hf.pretrained import is_pretrained, pulled
from hf.tokenizer import eos_ids, prefix_ids
from runtime.checkpoint import open_run
from sample import generate

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    print(f"error: {missing}; pip install lm-eval", file=sys.stderr)
    sys.exit(2)

TOGETHER = 32                                   # tokens that are decoded before stops are looked for
Request = tuple[Any, list[int], list[int]]      # strings, ids of the context, ids of the continuation


@register_model("nanorope")
class Nanorope(TemplateLM):     # type: ignore[misc]
    """A run or a Hugging Face folder as lm_eval calls models. Its base class splits texts into requests."""

    def __init__(self, run: str, checkpoint: str = "newest", device: str = "auto", bos: bool = False,
                 max_length: int | None = None, **_: Any) -> None:
        super().__init__()
        folder = Path(pulled(run))
        opened = open_run(folder, checkpoint, device)
        config, self.model, self.coder = opened.config, opened.model, opened.tokenizer
        self.train = config.train
        self.max_length = max_length or config.train.seq_len
        self.ends = {self.coder.separator, *(eos_ids(folder) if is_pretrained(folder) else ())}
        self.prefix = [self.coder.separator] if bos else prefix_ids(self.coder)

    @property
    def eot_token_id(self) -> int:
        return self.coder.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, after what opens a prompt unless add_special_tokens is False."""
        prefix = [] if add_special_tokens is False else self.prefix
        return prefix + self.coder.encode(string.encode(errors="replace")).tolist()

    def _loglikelihood_tokens(self, requests: list[Request], **_: Any) -> list[tuple[float, bool]]:
        """Of each continuation: its log-likelihood in nats, and whether greedy decoding would write it.

        Only rows of equal length share a forward pass: padding would change what depends on the length.
        """
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        rows: list[list[int]] = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(f"a continuation has {len(continuation)} tokens, more than the length "
                                f"{self.max_length}; give a larger --length")
            rows.append((context + continuation)[-self.max_length - 1:])
        longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for T, group in itertools.groupby(longest_first, lambda i: len(rows[i])):
            same_length = list(group)
            size = max(1, TOKENS_PER_FORWARD // T)
            for start in range(0, len(same_length), size):
                batch = same_length[start:start + size]
                n_scored = max(len(requests[i][2]) for i in batch)
                tokens = np.array([rows[i] for i in batch])                     # (B, T)
                losses, is_top = losses_at(self.model, self.train, tokens, np.arange(T - n_scored, T))
                for i, loss, top in zip(batch, losses, is_top, strict=True):
                    n = len(requests[i][2])
                    answers[i] = -float(loss[-n:].sum()), bool(top[-n:].all())
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each text: the log-likelihood of all its tokens, as our protocol `rolling`."""
        sums = []
        for (text,) in (request.args for request in requests):
            ids = prefix_ids(self.coder) + self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.coder.separator, self.max_length, context_len=1)
            pairs = map(make_disjoint_window, windows)
            answers = self._loglikelihood_tokens([(text, *pair) for pair in pairs])
            sums.append(sum(log_likelihood for log_likelihood, _ in answers))
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each prompt: its greedy continuation, up to a text of `until`, or to the end of the text."""
        texts = []
        for prompt, options in (request.args for request in requests):
            n_new = int(options.get("max_gen_toks", 256))
            if n_new >= self.max_length:
                raise UserError(f"a task asks for {n_new} new tokens, and the length is {self.max_length}; "
                                "give a larger --length, or --gen_kwargs max_gen_toks=N")
            if options.get("do_sample") and options.get("temperature") != 0:
                raise UserError("a task draws samples, and decoding is greedy here; give --gen_kwargs "
                                "do_sample=false")
            prompt_ids = self.tok_encode(prompt)[n_new - self.max_length:] or [self.coder.separator]
            stops = options.get("until") or []
            if isinstance(stops, str):
                stops = [stops]
            texts.append(self.continuation(prompt_ids, n_new, stops))
        return texts

    def continuation(self, prompt_ids: list[int], n_new: int, stops: list[str]) -> str:
        """At most n_new greedy tokens as text, cut before the first stop."""
        tokens = torch.tensor([prompt_ids], device=next(self.model.parameters()).device)
        n_prompt = len(prompt_ids)
        text = ""
        for done in range(0, n_new, TOGETHER):
            n_more = min(TOGETHER, n_new - done)
            tokens = generate(self.model, tokens, n_more, temperature=0, ends=self.ends)
            text = decode(self.coder, tokens[0, n_prompt:].tolist())
            has_ended = tokens.shape[1] < n_prompt + done + n_more
            if has_ended or any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.partition(stop)[0]
        return text


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--length", type=positive, help="longest context in tokens (default: train.seq_len)")
    parser.add_argument("--bos", action="store_true", help="prompts open with the separator, as in training")
    args, options = parser.parse_known_args()
    model = {"run": args.run, "checkpoint": args.checkpoint, "bos": args.bos, "max_length": args.length}
    sys.argv = ["lm_eval", "run", "--model", "nanorope", "--model_args", json.dumps(model),
                "--device", args.device, *options]
    cli_evaluate()


if __name__ == "__main__":
    run_command(main)
