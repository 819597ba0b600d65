"""Speed on one GPU: GPT-2 124 M against transformers', each encoding over RoPE, evaluation of a long text.

`python -m bench.gpu_speed gpt2|encodings|evaluation [NAME ...] [--warm] [--eager NAME;NAME] [--smoke]`, as
bench/gpu.py calls it; prints a JSON object a line. --warm takes a step of each and times nothing: compilers
keep what they made on disk, so that the timed call need not wait for it. --smoke: toy size, on the CPU.

Steps are those of train.py (bf16 autocast, compiled, clipped gradients, fused AdamW) on random tokens. What
is compared takes steps in turn, round after round; medians, and medians of ratios within a round, are given.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu_parity import FLEXIBLE
from config import Config, load_config
from evaluation.protocols import token_losses
from model import GPT, autocast
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.errors import UserError, one_line
from runtime.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parent.parent

OURS, BASE = "nanorope, learned (GPT-2's block)", "rope"
Row = dict[str, Any]


class Size(NamedTuple):
    """What is measured: at full size on a GPU, or as a toy on the CPU."""

    device: str
    model: list[str]                # overrides of configs/gpt2-124m*.toml
    T: int
    batch_sizes: tuple[int, ...]    # GPT-2: the largest that all contenders have memory for
    n_layer: int                    # encodings: fewer than 12, for each costs time to compile
    batch_size: int                 # encodings
    rounds: int
    long_T: int                     # evaluation
    matmul: int                     # rows and columns of the product that measures the ceiling
    backend: str                    # of torch.compile; "": eager


FULL = Size("cuda", [], 1024, (64, 32, 16, 8), 4, 16, 12, 65_536, 8192, "inductor")
SMOKE = Size("cpu", ["model.vocab_size=512", "model.n_layer=2", "model.n_head=2", "model.n_embd=64"], 64,
             (4, 2), 1, 2, 2, 512, 256, "eager")      # traced, which is what may fail; no minutes of C++
WAYS = {**{name: [f"position.encoding={name}"] for name in ENCODINGS},
        **{f"{name}, flex": [f"position.encoding={name}", "model.flex=true"] for name in FLEXIBLE}}
# no bias, one that folds into the kernel, one that does not, by each way that it has
EVALUATED = tuple(name for name in ("rope", "alibi", "t5", "t5, flex") if name in WAYS)
SMALL_VOCABULARY = 512      # encodings: a large output, the same for all, would hide differences


def gpt2_config(name: str, size: Size, *overrides: str) -> Config:
    """One of configs/gpt2-124m*.toml at this size."""
    return load_config(ROOT / "configs" / f"{name}.toml",
                       [*size.model, f"train.seq_len={size.T}", f"train.device={size.device}", *overrides])


class Step:
    """Training steps of a model on random tokens."""

    def __init__(self, model: nn.Module, config: Config, batch_size: int, backend: str | None) -> None:
        self.device, self.train = torch.device(config.train.device), config.train
        reset_peak(self.device)
        before = allocated(self.device)
        self.model = model.to(self.device)
        self.optimizer = (make_optimizer(model, config.train) if isinstance(model, GPT) else
                          torch.optim.AdamW(model.parameters(), lr=config.train.lr, fused=True))
        self.call: Any = (torch.compile(self.model, dynamic=False, backend=backend) if backend else
                          self.model)
        assert config.model.vocab_size
        tokens = torch.randint(config.model.vocab_size, (batch_size, config.train.seq_len + 1),
                               device=self.device)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.n_tokens = self.x.numel()
        reset_peak(self.device)
        for _ in range(2):
            self.seconds()                                              # compiles, and warms up
        self.peak = peak(self.device) - before

    def loss(self) -> Tensor:
        """Mean loss: by the model itself if it is ours, else of its logits."""
        if isinstance(self.model, GPT):
            return self.call(self.x, self.y)
        return F.cross_entropy(self.call(self.x).logits.flatten(0, 1).float(), self.y.flatten())

    def seconds(self) -> float:
        """Take a step, return its wall time."""
        synchronize(self.device)
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.train, self.device):
            loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        synchronize(self.device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    """Bytes in use on the device; 0 for a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`; 0 for a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Give back what nothing holds any more (compiled models go in circles), and count from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def matmul_rate(n: int, device: torch.device) -> float:
    """FLOP/s of a product of two random n x n matrices in bf16: the ceiling. Mean of ten, after three."""
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(device)
    return 10 * 2 * n**3 / (time.perf_counter() - began)


# -----------------------------------------------------------------------------------------------------------
# GPT-2 124 M against transformers'


def transformers_gpt2(config: Config) -> nn.Module:
    """GPT-2 of transformers in the same shape. Raises ImportError where it is not installed."""
    from transformers import GPT2Config, GPT2LMHeadModel
    m = config.model
    assert m.vocab_size
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=m.vocab_size, n_positions=config.train.seq_len, n_embd=m.n_embd, n_layer=m.n_layer,
        n_head=m.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_implementation="sdpa"))  # type: ignore[call-arg]


CONTENDERS: dict[str, tuple[str, Callable[[Config], nn.Module]]] = {
    OURS: ("gpt2-124m-learned", GPT),
    "nanorope, RoPE (Llama's block)": ("gpt2-124m", GPT),
    "transformers GPT-2": ("gpt2-124m-learned", transformers_gpt2),
}


def make_contender(name: str, size: Size, batch_size: int) -> Step:
    """One of CONTENDERS, which has taken its first steps."""
    config_name, make = CONTENDERS[name]
    config = gpt2_config(config_name, size)
    torch.manual_seed(0)
    return Step(make(config), config, batch_size, size.backend)


def make_contenders(names: Sequence[str], size: Size, batch_size: int) -> tuple[dict[str, Step], list[Row]]:
    """All that can be had, and a row for each peer that cannot."""
    steps, problems = {}, []
    for name in names:
        try:
            steps[name] = make_contender(name, size, batch_size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a peer that is not installed, or of another version than we know
            if CONTENDERS[name][1] is GPT:
                raise
            problems.append({"section": "gpt2", "name": name,
                             "problem": one_line(f"{type(error).__name__}: {error}")[:120]})
    return steps, problems


def gpt2(names: Sequence[str], size: Size) -> Iterator[Row]:
    """Tokens/s and MFU of each, at the largest batch for which there is memory."""
    steps: dict[str, Step] = {}
    problems: list[Row] = []
    for batch_size in size.batch_sizes:
        try:
            steps, problems = make_contenders(names, size, batch_size)
            break
        except torch.OutOfMemoryError:
            torch._dynamo.reset()
    if not steps:
        raise UserError(f"no memory for a batch of {min(size.batch_sizes)} sequences; free the device")
    yield from problems
    device = torch.device(size.device)
    table: list[dict[str, float]] = []
    rates = []
    for _ in range(size.rounds):
        table.append({name: step.seconds() for name, step in steps.items()})
        rates.append(matmul_rate(size.matmul, device))                  # beside the steps: clocks change
    rate = statistics.median(rates)
    yield {"section": "matmul", "n": size.matmul, "flops": rate, "least": min(rates), "most": max(rates)}
    for name, step in steps.items():
        seconds = statistics.median(row[name] for row in table)
        causal, full = flops_per_token(gpt2_config(CONTENDERS[name][0], size), size.T)
        per_s = step.n_tokens / seconds
        yield {"section": "gpt2", "name": name, "batch_size": step.n_tokens // size.T, "ms": 1e3 * seconds,
               "tokens_per_s": per_s, "mfu": per_s * causal / rate, "mfu_full": per_s * full / rate,
               "speed": statistics.median(row[OURS] / row[name] for row in table), "peak": step.peak,
               "parameters": sum(p.numel() for p in step.model.parameters())}


def flops_per_token(config: Config, T: int) -> tuple[int, int]:
    """FLOPs of a training step per token: with the half of attention that is not masked, and with all of it.

    The first is model.flops_per_token, the second PaLM's and nanoGPT's convention, from which theirs follow.
    """
    with torch.device("meta"):
        causal = GPT(config).flops_per_token(T)
    return causal, causal + 6 * config.model.n_layer * config.model.n_head * config.model.head_width * (T - 1)


# -----------------------------------------------------------------------------------------------------------
# Encodings over RoPE


def encoding_step(name: str, size: Size, is_compiled: bool) -> Step:
    """A step of one of WAYS in GPT-2's width and heads, with few layers and a small vocabulary."""
    config = gpt2_config("gpt2-124m", size, *WAYS[name], f"model.n_layer={size.n_layer}",
                         f"model.vocab_size={SMALL_VOCABULARY}")
    torch.manual_seed(0)
    return Step(GPT(config), config, size.batch_size, size.backend if is_compiled else None)


def encodings(names: Sequence[str], size: Size, eager: Sequence[str] = ()) -> Iterator[Row]:
    """Each encoding's step over RoPE's, taken in turn; eager over eager for those that are not to compile."""
    bases: dict[bool, Step] = {}
    for name in names:
        is_compiled = name not in eager
        row = {"section": "encodings", "name": name, "way": "compiled" if is_compiled else "eager",
               "changes_logits": changes_logits(name)}
        try:
            if is_compiled not in bases:
                bases[is_compiled] = encoding_step(BASE, size, is_compiled)
            yield row | over_base(bases[is_compiled], name, size, is_compiled)
        except Exception as error:  # no memory, or what a compiler throws: costs this row, not the others
            yield row | {"problem": one_line(f"{type(error).__name__}: {error}")[:160]}


def changes_logits(name: str) -> bool:
    """Whether the encoding of one of WAYS does: such have a goal."""
    return ENCODINGS[name.partition(",")[0]].has_scores()


def over_base(base: Step, name: str, size: Size, is_compiled: bool) -> Row:
    """An encoding's step in turn with another's."""
    step = encoding_step(name, size, is_compiled)
    rounds = [(base.seconds(), step.seconds()) for _ in range(size.rounds)]
    ratios = [other / own for own, other in rounds]
    return {"ms": 1e3 * statistics.median(other for _, other in rounds), "peak": step.peak,
            "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
            "peak_ratio": step.peak / base.peak if base.peak else None}


# -----------------------------------------------------------------------------------------------------------
# Evaluation of a long text


@torch.no_grad()
def evaluation(names: Sequence[str], size: Size) -> Iterator[Row]:
    """Seconds that eval.py's token_losses takes for one text of long_T tokens, 124 M parameters."""
    for name in names:
        config = gpt2_config("gpt2-124m", size, *WAYS[name])
        assert config.model.vocab_size
        device = torch.device(size.device)
        model = GPT(config).to(device).eval()
        tokens = torch.randint(config.model.vocab_size, (1, size.long_T + 1), device=device)
        times: list[float] = []
        reset_peak(device)
        while len(times) < 4 and sum(times) < 10:                       # the first warms up
            synchronize(device)
            began = time.perf_counter()
            with autocast(config.train, device):
                token_losses(model, tokens[:, :-1], tokens[:, 1:])
            synchronize(device)
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:] or times)
        yield {"section": "evaluation", "name": name, "T": size.long_T, "seconds": seconds,
               "tokens_per_s": size.long_T / seconds, "peak": peak(device)}


SECTIONS: dict[str, tuple[Callable[[Sequence[str], Size], Iterator[Row]], tuple[str, ...]]] = {
    "gpt2": (gpt2, tuple(CONTENDERS)),
    "encodings": (encodings, tuple(WAYS)),
    "evaluation": (evaluation, EVALUATED),
}


def warm(section: str, names: Sequence[str], size: Size) -> Iterator[Row]:
    """Compile what the section will measure, drop it, and tell how long that took."""
    for name in names:
        began = time.perf_counter()
        if section == "gpt2":
            make_contender(name, size, size.batch_sizes[0])
        else:
            encoding_step(name, size, True)
        torch._dynamo.reset()
        yield {"section": "warm", "name": name, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("section", choices=tuple(SECTIONS))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the section (default: all)")
    parser.add_argument("--warm", action="store_true", help="only compile")
    parser.add_argument("--eager", metavar="NAME;NAME", help="encodings: not to compile")
    parser.add_argument("--smoke", action="store_true", help="toy size, on the CPU")
    args = parser.parse_args()
    run, default = SECTIONS[args.section]
    known = CONTENDERS if args.section == "gpt2" else WAYS
    unknown = [name for name in args.names if name not in known]
    if unknown:
        raise UserError(f"NAME {'; '.join(unknown)}: unknown; choose from {'; '.join(known)}")
    names, size = args.names or default, SMOKE if args.smoke else FULL
    if args.warm:
        rows = warm(args.section, names, size)
    elif args.eager:
        rows = encodings(names, size, args.eager.split(";"))
    else:
        rows = run(names, size)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run_command(main)
