"""Configuration: one strict schema, TOML files that extend one another, and key=value overrides.

A config is data: it is parsed, never executed. The classes below declare each key with its type, default and
meaning; those in positions/ declare the keys of each encoding; `train.py --help TOPIC` prints them. Errors
are reported all at once; base/schema.py reads TOML and puts pydantic's errors into words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
)

from base.errors import UserError, did_you_mean
from base.schema import Level, Origin, Section, Tables, explain, read_levels, read_overrides
from positions import ENCODINGS, Encoding, Options
from positions.contract import NoPE

BelowOne = Annotated[float, Field(ge=0, lt=1)]
MIX = 1000      # windows in which each corpus of data.mixture has its share exactly (data/loader.py)


class RunConfig(Section):
    """The run's folder, and how often it logs, validates and saves."""

    dir: str = ""
    """folder of the run (default: runs/<name of the config file>)"""
    log_every: PositiveInt = 10
    """steps between lines on the screen and in metrics.jsonl"""
    eval_every: PositiveInt = 250
    """steps between validations"""
    save_every: PositiveInt = 250
    """steps between checkpoints; the last step is saved too"""
    keep: PositiveInt = 2
    """how many of the newest checkpoints are kept"""
    keep_best: bool = False
    """also keep the checkpoint with the lowest validation loss: --checkpoint best of eval.py and others"""
    wandb: bool = False
    """also log to Weights & Biases, as its own variables say: WANDB_MODE=offline"""
    wandb_project: str = Field("nanorope", min_length=1)
    """Weights & Biases project to log to"""


class DataConfig(Section):
    """The corpora that the model is trained on."""

    dir: str
    """a prepared corpus: what `python data/prepare.py SOURCE --out DIR` wrote"""
    mixture: dict[str, Annotated[float, Field(ge=1 / MIX, lt=1)]] = {}
    """shares of the training windows from other corpora, such as { "data/books" = 0.3 }, to a thousandth;
    data.dir provides the rest, and all validation windows"""
    mixture_only: NonNegativeInt = 0
    """first steps, in which all windows come from the mixture's corpora alone"""
    cross_documents: Literal["attend", "mask", "never"] = "attend"
    """windows with several documents. attend: attention crosses them (nanoGPT); mask: it stays within each;
    never: windows are within one document, shorter documents are skipped"""
    positions: Literal["row", "document"] = "row"
    """document, the default under cross_documents = "mask": positions restart in each document, as if it were
    alone; row: they continue"""
    bos: bool = False
    """the separator replaces the first input token of each window"""


class ModelConfig(Section):
    """The transformer: its size, its block and its attention."""

    n_layer: PositiveInt = 4
    """layers"""
    n_head: PositiveInt = 4
    """attention heads; must divide n_embd unless head_dim is set"""
    n_kv_head: PositiveInt | None = None
    """heads of keys and values, fewer for grouped-query attention, 1 for multi-query (default: n_head)"""
    head_dim: PositiveInt | None = None
    """channels of a head (default: n_embd / n_head)"""
    n_embd: PositiveInt = 256
    """width of the residual stream"""
    n_hidden: PositiveInt | None = None
    """MLP width (default: 4 n_embd; for swiglu and geglu 8/3 n_embd, to a multiple of 64)"""
    vocab_size: int | None = Field(None, ge=2)
    """default: that of the corpus, rounded up to a multiple of 64 if it is above 4,096"""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """normalisation of sublayers, and of the last output"""
    pre_norm: bool = True
    """a norm before each sublayer (OLMo 2: false)"""
    post_norm: bool = False
    """a norm after each sublayer, before its sum (Gemma 3, OLMo 2)"""
    parallel: bool = False
    """attention and MLP both read the input of the block (GPT-NeoX)"""
    norm_eps: float = Field(1e-5, gt=0, lt=1)
    """added to the variance under the root"""
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_exact", "relu2"] = "swiglu"
    """swiglu: Llama; geglu: Gemma; gelu: GPT-2; gelu_exact: MPT; relu2: relu(x)^2"""
    bias: bool = False
    """biases in linear layers and in layernorm"""
    qkv_bias: bool = False
    """biases of q, k and v even if bias is off (Qwen2)"""
    tied: bool = False
    """the output matrix is the token embedding"""
    scaled_embedding: bool = False
    """token embeddings times sqrt(n_embd) (Gemma)"""
    window: PositiveInt | None = None
    """keys a query sees, its own included (default: all)"""
    chunk: PositiveInt | None = None
    """a query sees only keys of its own chunk of as many tokens (Llama 4: 8192; default: no chunks)"""
    full_every: NonNegativeInt = 0
    """k: layers k, 2k, 3k ... (from 1) have no window, no chunks (Cohere2: 4). 0: no"""
    flex: bool = False
    """on CUDA, use FlexAttention for windows, chunks, packed documents, a sink, biases by distance and
    position.scale_invariant; not with dropout, heads of less than 16 channels, or where train.positions is
    not plain"""
    qk_norm: bool | Literal["whole"] = False
    """RMSNorm of each head's q and k before their product; "whole": of all heads together (OLMo 2)"""
    sink: Literal["none", "head"] = "none"
    """head: one more logit in each softmax, learned by head, for a key of zero value (gpt-oss). It takes what
    would otherwise go to the first tokens"""
    gate: bool = False
    """attention's result times sigmoid(W x), by channel, before its output matrix (Qwen3-Next)"""
    dropout: BelowOne = 0.0
    """dropout of embeddings, attention and sublayer outputs"""

    @property
    def head_width(self) -> int:
        """D, the channels of a head."""
        return self.head_dim or self.n_embd // self.n_head


class TrainConfig(Section):
    """Length, batch, schedule, optimiser and device of the training."""

    steps: PositiveInt = 1000
    """optimiser steps in total"""
    batch_size: PositiveInt = 32
    """sequences per step"""
    accumulate: PositiveInt = 1
    """micro-batches per step, to save memory; divides batch_size"""
    seq_len: int = Field(256, ge=2)
    """tokens per sequence: the training length L"""
    init_from: str = ""
    """a run or a Hugging Face folder whose weights initialise this run. It also provides [model], [position]
    and seq_len where the config does not set them; a longer seq_len fine-tunes the weights"""
    positions: Literal["plain", "pose", "random"] = "plain"
    """plain: 0, 1, 2 ...; pose: each sequence skips some once (PoSE); random: a random choice (Ruoss 2023)"""
    position_range: NonNegativeInt = 0
    """positions of pose and random are below it; at least seq_len"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the initialisation, data order and dropout"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the layers, AdamW for the rest; one lr and weight_decay suit both"""
    lr: PositiveFloat = 1e-3
    """peak learning rate"""
    min_lr: NonNegativeFloat = 0.0
    """learning rate that the schedule would reach one step after the last; at most lr"""
    warmup: NonNegativeInt = 100
    """steps of linear warm-up"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """after the warm-up: cosine to min_lr, or wsd: constant, then linear to min_lr"""
    decay: float = Field(0.2, gt=0, le=1)
    """wsd: share of the steps in which lr decays, at most those after the warm-up"""
    weight_decay: NonNegativeFloat = 0.1
    """decay of matrices only, not of the encoding's"""
    beta1: BelowOne = 0.9
    """AdamW's average of gradients; Muon's momentum, in long runs often 0.95"""
    beta2: BelowOne = 0.95
    """AdamW's average of squared gradients"""
    grad_clip: NonNegativeFloat = 1.0
    """largest gradient norm; 0: no limit"""
    max_bad_steps: PositiveInt = 5
    """steps in a row with a NaN or infinite loss or gradient that end training"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA, else MPS (Apple), else the CPU"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of matrix products (weights stay fp32). auto: bfloat16 where it is faster; on GPUs without it float16,
    whose loss is scaled so that small gradients survive"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile, where there is a compiler. auto: on CUDA, and on a CPU if the run is long enough"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """of torchrun's processes each holds the whole model (ddp) or a shard of it (fsdp, FSDP2)"""
    val_windows: NonNegativeInt = 64
    """validation windows of seq_len, evenly spaced; 0: all"""


class Config(Section):
    """A complete and valid configuration."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    position: SerializeAsAny[Options]       # those of the encoding
    train: TrainConfig


# what may differ between two configs: section, for all of its keys, or section.key
MAY_DIFFER: dict[str, tuple[str, ...]] = {
    # runtime/run.py, to resume a run: its folder and intervals, the machine, the place of the corpus
    "resume": ("run", "train.device", "train.compile", "data.dir"),
    # runtime/checkpoint.py, to begin with the weights of another run. Where one of these adds or reshapes
    # weights (temperature = "ssmax", a table of seq_len rows), loading refuses them
    "init_from": (
        "run", "data", "train",
        "model.dropout", "model.flex", "model.window", "model.chunk", "model.full_every",
        "position.scaling", "position.base", "position.layers", "position.skip_every", "position.temperature",
        "position.temperature_layers", "position.scale_invariant", "position.drop_at", "position.lr_scale"),
    # evaluation/comparison.py, to be seeds of one curve; the runs that they began from may also be two seeds
    "seeds": ("run", "train.seed", "train.init_from", "train.device", "train.compile", "data.dir"),
    # evaluation/comparison.py, to be compared as tuned encodings, without a warning
    "tuned": ("run", "position"),
}
# what must be the same
MUST_AGREE: dict[str, tuple[str, ...]] = {
    # evaluation/trials.py, in all trials of a config: tokens, their order, the loss. These are beginnings of
    # section.key: train.position stands for positions and position_range
    "trials": ("data", "run", "train.steps", "train.batch_size", "train.seq_len", "train.seed",
               "train.val_windows", "train.init_from", "train.position"),
    # evaluation/results.py, to merge two evaluations: keys of the JSON
    "merge": ("checkpoint_sha256", "data_sha256", "tokenizer", "encoding", "seq_len", "position", "seed",
              "dtype", "train_dtype", "commit"),
    # evaluation/runs.py, to compare two runs: keys of the JSON
    "compare": ("seq_len", "tokenizer", "data", "data_sha256", "seed"),
    # evaluation/runs.py, to compare two runs: columns of the table, which name the targets
    "targets": ("document", "end", "tokens", "bytes"),
}
SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}


def load_config(path: str | Path, overrides: Sequence[str] = (),
                pretrained: Callable[[str], Tables] | None = None) -> Config:
    """Read a TOML file, the files that it extends, and overrides. Raises UserError, all wrong keys at once.

    If train.init_from names a run or a Hugging Face folder, the tables that `pretrained` returns for it are
    defaults that the config's own keys override. The config.toml of a run is complete: it is read without
    that folder, which may have changed since.
    """
    path = Path(path)
    default: Tables = {"run": {"dir": f"runs/{path.name.removesuffix('.toml')}"}}
    is_of_run = path.name == "config.toml" and (path.parent / "corpus.json").exists()
    levels = [Level("(default)", default), *read_levels(path), read_overrides(overrides, SECTIONS)]
    folder = merge(levels)[0].get("train", {}).get("init_from")
    if pretrained and folder and not is_of_run:
        levels.insert(0, Level(f"in {folder}", pretrained(str(folder))))
    return config_from(levels, f"in {path}")


def config_from(levels: Sequence[Level], place: str) -> Config:
    """Check tables against the schema; `place` is where keys are missing. Raises one UserError for all."""
    tables, origin = merge(levels)
    name = str(tables.setdefault("position", {}).get("encoding", ""))
    kind = ENCODINGS.get(name, Encoding)
    schemas = SECTIONS | {"position": kind.Options}
    problems: list[str] = []
    if tables.get("data", {}).get("cross_documents") == "mask":
        tables["data"].setdefault("positions", "document")
    if "position.encoding" in origin and name not in ENCODINGS:
        hint = did_you_mean(name, ENCODINGS) or f"; choose from {', '.join(ENCODINGS)}"
        problems.append(f"position.encoding {origin['position.encoding']}: unknown encoding {name!r}{hint}")
        tables["position"] = {"encoding": name}     # which other keys there are depends on the encoding
    tables["position"].setdefault("lr_scale", kind.lr_scale)
    parts: dict[str, Any] = {}
    for section, schema in schemas.items():
        try:
            parts[section] = schema.model_validate(tables.pop(section, {}))
        except ValidationError as error:
            problems += explain(error, section, schema, origin, place)
    for section in tables:          # what is left belongs to none of the sections
        hint = did_you_mean(section, [*SECTIONS, "extends"])
        problems.append(f"[{section}] {origin[section]}: unknown section{hint}")
    if not problems:
        config = Config(**parts)
        problems = [f"{key} {origin.get(key, '(default)')}: {rule}" for key, rule in broken_rules(config)]
    if problems:
        raise UserError(*problems)
    return config


def merge(levels: Sequence[Level]) -> tuple[Tables, Origin]:
    """The tables of all levels in one, and for each section and section.key where it was set."""
    tables: Tables = {}
    origin: Origin = {}
    for where, level in levels:
        for section, keys in level.items():
            table = tables.setdefault(section, {})
            if "encoding" in keys and keys["encoding"] != table.get("encoding"):
                # the options of the earlier encoding go, and lr_scale, which has a default for each encoding
                for key in [*table]:
                    if key == "lr_scale" or key not in Options.model_fields:
                        del table[key]
            table |= keys
            origin |= dict.fromkeys([section, *(f"{section}.{key}" for key in keys)], where)
    return tables, origin


def broken_rules(config: Config) -> list[tuple[str, str]]:
    """Rules between keys that the config breaks: section.key, and the rule."""
    d, m, p, t = config.data, config.model, config.position, config.train
    kind = ENCODINGS[p.encoding]
    kinds = {"encoded" if p.is_encoded(layer) else "unencoded" for layer in range(m.n_layer)}
    if issubclass(kind, NoPE):
        kinds = {"unencoded"}
    counts = [round(MIX * share) for share in d.mixture.values()]       # as the loader rounds them
    rules = [
        ("data", "mixture", sum(counts) >= MIX or d.dir in d.mixture,
         "shares must add up to less than 1, and data.dir must not be among them: it provides the rest"),
        ("data", "mixture_only", d.mixture_only and not (d.mixture and d.mixture_only < t.steps),
         f"needs data.mixture and must be below train.steps = {t.steps}"),
        ("data", "positions", d.positions == "document" and d.cross_documents != "mask",
         'needs data.cross_documents = "mask"'),
        ("model", "full_every", m.full_every > 0 and m.window is None and m.chunk is None,
         "has no effect without model.window or model.chunk"),
        ("model", "n_kv_head", m.n_head % (m.n_kv_head or 1), f"must divide model.n_head = {m.n_head}"),
        ("model", "n_head", m.head_dim is None and m.n_embd % m.n_head,
         f"must divide model.n_embd = {m.n_embd}, unless head_dim is set"),
        ("train", "position_range", t.positions == "plain" and t.position_range > 0,
         "has no effect with train.positions = plain; set train.position_range=0"),
        ("train", "position_range", t.positions != "plain" and t.position_range < t.seq_len,
         f"must be at least {t.seq_len} with train.positions = {t.positions}"),
        ("train", "min_lr", t.min_lr > t.lr, f"must be at most train.lr = {t.lr}"),
        ("position", "layers", isinstance(p.layers, list) and not set(p.layers) <= set(range(m.n_layer)),
         f"layers are 0 ... {m.n_layer - 1} (model.n_layer = {m.n_layer})"),
        ("position", "layers", p.layers == [], 'is no layer at all; use encoding = "none"'),
        ("position", "skip_every", p.skip_every and kind.acts_in_layers() and "encoded" not in kinds,
         'leaves no layer; use encoding = "none"'),
        ("position", "temperature_layers", p.temperature_layers not in ("all", *kinds),
         "no layer is of this kind; see position.layers and skip_every"),
        ("position", "layers", p.layers != "all" and not kind.acts_in_layers(),
         f"{p.encoding} does not act in layers; set position.layers=all"),
        ("position", "skip_every", p.skip_every > 0 and not kind.acts_in_layers(),
         f"{p.encoding} does not act in layers; set position.skip_every=0")]
    broken = [(f"{section}.{key}", f"{rule} (got {getattr(getattr(config, section), key)})")
              for section, key, is_broken, rule in rules if is_broken]
    if not broken:
        broken = [(f"position.{key}", rule) for key, rule in p.problems(config).items()]
    return broken


def toml_value(value: object) -> str:
    """A string, number, list or table as TOML: JSON without escaped surrogates, and `=` in tables."""
    if isinstance(value, dict):
        pairs = [f"{toml_value(name)} = {toml_value(inner)}" for name, inner in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    return json.dumps(value, ensure_ascii=False)


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that load_config reads back; unset keys are left out."""
    lines = []
    for section, keys in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def flatten(config: Config) -> dict[str, Any]:
    """A config in one table: "section.key" -> value, as JSON can hold it."""
    tables = config.model_dump(mode="json")
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def differing_keys(old: dict[str, Any], new: dict[str, Any], ignore: Sequence[str]) -> list[str]:
    """`section.key: old -> new` for each key that differs between two flattened configs.

    If the encodings differ, no other key of [position] is listed. `ignore` names sections, or keys as
    section.key.
    """
    lines = []
    is_other_encoding = old.get("position.encoding") != new.get("position.encoding")
    for key in old | new:
        section = key.partition(".")[0]
        if key in ignore or section in ignore or old.get(key) == new.get(key):
            continue
        if section == "position" and is_other_encoding and key != "position.encoding":
            continue                            # its options follow from it
        lines.append(f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}")
    return lines
