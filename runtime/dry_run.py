"""`train.py --dry-run`: refuses what training refuses, and prints the run's size and cost; writes nothing."""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path

import torch

from attention import EXPLICIT, RECOMPUTE_FROM
from base.errors import UserError
from base.loss import MAX_LOGITS
from base.schema import read_levels
from config import Config, to_toml
from data.loader import Corpus
from data.tokenizer import Tokenizer, size_of, tokenizer_of
from model import GPT, hidden_width
from runtime import parallel
from runtime.checkpoint import start_from
from runtime.device import dtype_name
from runtime.parallel import Process
from runtime.run import describe, open_corpus, require_same_run, with_vocabulary


def dry_run(path: Path, config: Config, tokens_per_s: float | None) -> int:
    """Print what train.py would say about this config, what the run costs, and the config as TOML.

    The corpus may be missing if a comment of the config says how to prepare it. Raises UserError as training
    would: other processes of torchrun print nothing.
    """
    process = parallel.start(config.train)
    corpus: Corpus | None = None
    tokenizer: Tokenizer | None = None
    data = ""
    command = prepare_command(path, config.data.dir)
    if command and not Path(config.data.dir, "meta.json").exists():
        data = f"{config.data.dir} is not there yet: {command}"
        config = with_vocabulary(config, vocabulary_of(command, config))
    else:
        config, corpus = open_corpus(config)
        tokenizer = tokenizer_of(corpus.meta, corpus.folder)
        require_same_run(Path(config.run.dir), config, corpus)
    with torch.device("meta"):                              # shapes without memory
        model = GPT(config)
    if config.train.init_from and not Path(config.run.dir, "checkpoints").exists():
        with warnings.catch_warnings(action="ignore"):      # PyTorch: nothing is copied to shapes
            start_from(config.train.init_from, model, config, tokenizer)
    lines = describe(config, corpus, model, process, data)
    t = config.train
    n_tokens = t.steps * t.batch_size * t.seq_len
    mflop = flops_per_token(config, model) / 1e6
    n_bytes = training_bytes(config, model, process, is_explicit=EXPLICIT in lines)
    hours = "give --tokens-per-s N to see it, the speed that a run logs"
    if tokens_per_s:
        hours = f"{n_tokens / tokens_per_s / 3600:,.2f} hours at {tokens_per_s:,} tokens/s"
    lines += (f"\ncompute   {n_tokens:,} tokens x {mflop:,.1f} MFLOP = {n_tokens * mflop * 1e6:.2g} FLOP"
              f"\nmemory    about {n_bytes / 1e9:.1f} GB on each device; the formula is in runtime/dry_run.py"
              f"\ntime      {hours}")
    print(textwrap.indent(lines, "# "))
    print(to_toml(config), end="")
    return 0


def prepare_command(path: Path, data_dir: str) -> str | None:
    """The `python data/prepare.py` line for this corpus in a comment of a config, or of those it extends."""
    for level in reversed(read_levels(path)):
        text = Path(level.where.removeprefix("in ")).read_text(encoding="utf-8")
        text = text.replace("\\\n#", " ")                   # a line that goes on in the next one
        for command in re.findall(r"^# *(python data/prepare\.py .*)", text, re.M):
            # the corpus is named by --out DIR, or after the source
            if Path(data_dir).name in re.split("[ /]", command):
                return " ".join(command.split())
    return None


def vocabulary_of(command: str, config: Config) -> int:
    """The number of tokens of the corpus that this command would write. Raises UserError if it is unknown."""
    match = re.search(r"--tokenizer (\S+)", command)
    name = match[1] if match else "byte"
    size = {"byte": 257, "gpt2": 50_257}.get(name) or size_of(name) or config.model.vocab_size
    if not size:
        raise UserError(f"model.vocab_size: unknown before {config.data.dir} is there; set it, or run "
                        f"{command}")
    return size


def flops_per_token(config: Config, model: GPT) -> float:
    """Floating-point operations of training on a token: 6 per weight, 6 H D (T + 1) per layer's attention.

    2 forward and 4 backward for each weight that is multiplied, so not for an untied embedding: Kaplan et al.
    2020, arXiv:2001.08361, section 2.1. A query sees (T + 1) / 2 keys on average; windows are not subtracted.
    """
    m, T = config.model, config.train.seq_len
    n_weights = model.n_parameters()
    if not m.tied:
        n_weights -= model.embedding.weight.numel()
    return 6 * n_weights + 6 * m.n_layer * m.n_head * m.head_width * (T + 1)


def training_bytes(config: Config, model: GPT, process: Process, is_explicit: bool) -> float:
    """About the most memory that a step holds on a device, uncompiled: state + kept + logits, in bytes.

    state   16 for each parameter: weight, gradient and two moments in fp32. FSDP2 shards it
    kept    for the backward pass, for each token of a micro-batch and layer: 4 (12 C + 4 W) in float32,
            32 C + 8 W in 16 bits; C = n_embd, W the width of the MLP. This is Llama's block with fused
            attention. An explicit softmax of fewer than 2048 queries adds its weights, 4 H T or 2 H T
    logits  12 for each token of a micro-batch and entry of the vocabulary, up to MAX_LOGITS at a time

    Half as much again on a CPU, where the process keeps freed blocks and products have buffers.
    Checked once by bench.steps: 20.3 GB, where an H200 allocated 19.7 (and 17.0 compiled), for 12 x 768, T
    1024, batch 32, V 50,304 in bfloat16; 1.56 GB, where a CPU held 1.52, for 6 x 384, T 256, batch 16, V 257
    in float32.
    """
    t, m = config.train, config.model
    state = 16 * model.n_parameters()
    if t.parallel == "fsdp":
        state //= process.world_size
    C, W, H, T = m.n_embd, hidden_width(m), m.n_head, t.seq_len
    is_fp32 = dtype_name(t, process.device) == "float32"
    of_layer = 4 * (12 * C + 4 * W) if is_fp32 else 32 * C + 8 * W
    if is_explicit and T < RECOMPUTE_FROM:
        of_layer += (4 if is_fp32 else 2) * H * T
    n_tokens = t.batch_size // t.accumulate // process.world_size * T
    logits = 12 * min(n_tokens * model.embedding.num_embeddings, MAX_LOGITS)
    n_bytes = state + n_tokens * m.n_layer * of_layer + logits
    return 1.5 * n_bytes if process.device.type == "cpu" else n_bytes
