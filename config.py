"""Configuration: one strict schema, TOML files that extend one another, and key=value overrides.

A config is data: it is parsed, never executed. The classes below declare each key with its type, default and
meaning; those in positions/ declare the keys of each encoding; `train.py --help TOPIC` prints them. Errors
are reported all at once. runtime/toml.py reads TOML; runtime/schema.py puts pydantic's errors into words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator, model_validator

from positions import ENCODINGS, Encoding, Options
from runtime import toml
from runtime.errors import UserError, did_you_mean, shortened
from runtime.files import is_run_dir
from runtime.schema import Section, checked, explain_all

MOST_LAYERS, MOST_CHANNELS, MOST_TOKENS = 10_000, 1_000_000, 100_000_000    # more are a typo
Pretrained = Callable[[str], toml.Tables | None]    # a run or Hugging Face folder -> its tables; else None


class RunConfig(Section):
    """The run's folder, and how often it logs, validates and saves."""

    dir: str = Field("", description="folder of the run, FOLDER/NAME (default: runs/<name of the config "
                                     "file>). NAME has 1 to 100 of A-Z a-z 0-9 . _ -; FOLDER has no '..' or "
                                     "'~'. Links that lead out of FOLDER are refused")
    log_every: int = Field(10, ge=1, description="steps between lines on the screen and in metrics.jsonl")
    eval_every: int = Field(250, ge=1, description="steps between validations")
    save_every: int = Field(250, ge=1, description="steps between checkpoints; the last step is saved too")
    keep: int = Field(2, ge=1, description="how many of the newest checkpoints are kept")
    wandb: bool = Field(False, description="also log to Weights & Biases; offline without a key or network")
    wandb_project: str = Field("nanorope", min_length=1, description="Weights & Biases project to log to")


class DataConfig(Section):
    """The corpora that the model is trained on."""

    dir: str = Field(description="a prepared corpus: what `python data/prepare.py SOURCE --out DIR` wrote")
    mixture: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(
        {}, description='shares of the training windows from other corpora, such as { "data/books" = 0.3 }; '
                        "data.dir provides the remaining share, and all validation windows")
    mixture_only: int = Field(
        0, ge=0, description="first steps, in which all windows come from the mixture's corpora alone")
    cross_documents: Literal["attend", "mask", "never"] = Field(
        "attend", description="windows with several documents. attend: attention crosses them (nanoGPT); "
                              "mask: it stays within each, positions continue; never: windows are within "
                              "one document, and documents shorter than seq_len + 1 are skipped")
    bos: bool = Field(False, description="the separator replaces the first input token of each window")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = {}
        if sum(self.mixture.values()) >= 1:
            broken["mixture"] = ("must add up to less than 1, since data.dir provides the remaining share, "
                                 f"got {sum(self.mixture.values()):g}")
        elif Path(self.dir).resolve() in {Path(name).resolve() for name in self.mixture}:
            broken["mixture"] = f"{self.dir} is data.dir, which provides the rest; name other corpora"
        if self.mixture_only and not self.mixture:
            broken["mixture_only"] = "needs other corpora; name them in data.mixture"
        return checked(self, broken)


class ModelConfig(Section):
    """The transformer: its size, its block and its attention."""

    n_layer: int = Field(4, ge=1, le=MOST_LAYERS, description="layers")
    n_head: int = Field(
        4, ge=1, le=MOST_CHANNELS, description="attention heads; must divide n_embd unless head_dim is set")
    n_kv_head: int | None = Field(
        None, ge=1, description="heads of keys and values, each shared by n_head / n_kv_head query heads "
                                "(grouped-query attention; 1: multi-query). Default: n_head")
    head_dim: int | None = Field(
        None, ge=1, le=MOST_CHANNELS, description="channels of a head (default: n_embd / n_head)")
    n_embd: int = Field(256, ge=1, le=MOST_CHANNELS, description="width of the residual stream")
    n_hidden: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="MLP width (default: 4 n_embd; for swiglu and geglu 8/3 "
                                                "n_embd, to a multiple of 64)")
    vocab_size: int | None = Field(None, ge=2, le=MOST_TOKENS, description="default: that of the corpus")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalisation before each sublayer")
    post_norm: bool = Field(False, description="a norm after each sublayer too, before its sum (Gemma 3)")
    norm_eps: float = Field(1e-5, gt=0, lt=1, description="added to the variance under the root")
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_exact", "relu2"] = Field(
        "swiglu", description="swiglu: Llama; geglu: Gemma; gelu: GPT-2; gelu_exact: MPT; relu2: relu(x)^2")
    bias: bool = Field(False, description="biases in linear layers and in layernorm")
    qkv_bias: bool = Field(False, description="biases of q, k and v even if bias is off (Qwen2)")
    tied: bool = Field(False, description="the output matrix is the token embedding")
    scaled_embedding: bool = Field(False, description="token embeddings times sqrt(n_embd) (Gemma)")
    window: int | None = Field(None, ge=1, description="keys a query sees, its own included (default: all)")
    chunk: int | None = Field(None, ge=1, description="a query sees only keys of its own chunk of as many "
                                                      "tokens (Llama 4: 8192; default: no chunks)")
    full_every: int = Field(
        0, ge=0, description="k: layers k, 2k, 3k ... (from 1) have no window, no chunks (Cohere2: 4). 0: no")
    flex: bool = Field(
        False, description="on CUDA, use FlexAttention for windows, packed documents, biases by distance and "
                           "position.scale_invariant; not with dropout or where train.positions is not plain")
    qk_norm: bool = Field(False, description="RMSNorm of each head's q and k before their product")
    dropout: float = Field(0.0, ge=0, lt=1, description="of embeddings, attention and sublayer outputs")

    @property
    def head_width(self) -> int:
        """D, the channels of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = {}
        if self.n_head % (self.n_kv_head or 1):
            broken["n_kv_head"] = f"must divide model.n_head = {self.n_head}, got {self.n_kv_head}"
        if self.head_dim is None and self.n_embd % self.n_head:
            broken["n_head"] = f"must divide model.n_embd = {self.n_embd}, got {self.n_head}; or set head_dim"
        if self.full_every and self.window is None and self.chunk is None:
            broken["full_every"] = "chooses the layers without a window; set model.window or model.chunk too"
        return checked(self, broken)


class TrainConfig(Section):
    """Length, batch, schedule, optimiser and device of the training."""

    steps: int = Field(1000, ge=1, description="optimiser steps in total")
    batch_size: int = Field(32, ge=1, le=10**6, description="sequences per step")
    accumulate: int = Field(1, ge=1, description="micro-batches per step, to save memory; divides batch_size")
    seq_len: int = Field(256, ge=2, le=MOST_TOKENS, description="tokens per sequence: the training length L")
    init_from: str = Field(
        "", description="a run or a Hugging Face folder whose weights initialise this run, such as "
                        "runs/quick. It also provides [model], [position] and seq_len where the config "
                        "does not set them; a longer seq_len fine-tunes the weights")
    positions: Literal["plain", "pose", "random", "rfs"] = Field(
        "plain", description="in training. plain: 0, 1, 2 ...; pose: each sequence skips some once (PoSE); "
                             "random: a random choice of integers (Ruoss 2023); rfs: random real numbers "
                             "(Shimizu 2026), and in evaluation equidistant ones")
    position_range: int = Field(
        0, ge=0, le=MOST_TOKENS, description="positions of pose, random and rfs are below it; at least "
                                             "seq_len, except for rfs: there it is 1 in the paper")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the initialisation, data order and dropout")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the matrices of the layers, AdamW for the rest; fewer, slower "
                             "steps. Its updates have the size of AdamW's: lr and weight_decay suit both")
    lr: float = Field(1e-3, gt=0, le=1e6, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end; at most lr")
    warmup: int = Field(100, ge=0, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="after the warm-up: cosine to min_lr, or wsd: constant, then linear to min_lr")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps in which lr decays")
    weight_decay: float = Field(0.1, ge=0, description="of matrices only, not of the encoding's")
    beta1: float = Field(0.9, ge=0, lt=1, description="of AdamW; Muon's momentum, in long runs often 0.95")
    beta2: float = Field(0.95, ge=0, lt=1, description="of AdamW")
    grad_clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: no limit")
    max_bad_steps: int = Field(
        5, ge=1, description="steps in a row with a NaN or infinite loss or gradient that end training")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if there is a GPU")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of matrix products (weights stay fp32). auto: bfloat16 where it is faster")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="torch.compile. auto: on CUDA, and on a CPU if the run is long enough")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="among the processes of torchrun. ddp: each holds the whole model. fsdp: each "
                           "holds a shard of it (FSDP2)")
    val_windows: int = Field(64, ge=0, description="validation windows of seq_len, evenly spaced; 0: all")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = {}
        if self.batch_size % self.accumulate:
            broken["accumulate"] = f"must divide train.batch_size = {self.batch_size}, got {self.accumulate}"
        least = {"plain": 0, "rfs": 1}.get(self.positions, self.seq_len)
        if self.position_range < least or self.position_range > least == 0:
            broken["position_range"] = (f"must be {f'at least {least}' if least else 'unset'} with "
                                        f"train.positions = {self.positions}, got {self.position_range}")
        if self.min_lr > self.lr:
            broken["min_lr"] = f"must be at most train.lr = {self.lr}, got {self.min_lr}"
        return checked(self, broken)


class Config(Section):
    """A complete and valid configuration."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    position: SerializeAsAny[Options]
    train: TrainConfig

    @field_validator("position", mode="before")
    @classmethod
    def _with_options_of_the_encoding(cls, keys: dict[str, Any], info: ValidationInfo) -> Options:
        encoding, model = keys.get("encoding"), info.data.get("model")
        if not isinstance(encoding, str):
            return Options.model_validate(keys)
        if encoding not in ENCODINGS:
            hint = did_you_mean(encoding, ENCODINGS) or f"; choose from {', '.join(ENCODINGS)}"
            return checked(keys, {"encoding": f"unknown encoding {shortened(encoding)}{hint}"})
        kind = ENCODINGS[encoding]
        position = kind.Options.model_validate({"lr_scale": kind.lr_scale} | keys)
        if model is None:       # [model] is invalid, so there is nothing to check against
            return position
        broken = position.problems(model.n_embd, model.head_width)
        if not kind.acts_in_layers():
            broken |= {key: f"{encoding} does not act in layers; remove this key"
                       for key in ("layers", "skip_every")
                       if getattr(position, key) != Options.model_fields[key].default}
        elif isinstance(position.layers, list) and not set(position.layers) <= set(range(model.n_layer)):
            broken["layers"] = (f"layers are 0 ... {model.n_layer - 1} (model.n_layer = {model.n_layer}), "
                                f"got {position.layers}")
        return checked(position, broken)


SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
# a change of encoding drops the old one's options, and lr_scale, which has a default for each encoding
KINDS = {"position": ("encoding", set(Options.model_fields) - {"lr_scale"})}


def load_config(path: str | Path, overrides: Sequence[str] = (),
                pretrained: Pretrained | None = None) -> Config:
    """Read a TOML file, the files that it extends, and overrides. Raises one UserError with all problems.

    If train.init_from names a run or a Hugging Face folder, the tables that `pretrained` returns for it are
    defaults that the config's own keys override. The config.toml of a run is complete and needs none.
    """
    problems: list[str] = []
    default: toml.Tables = {"run": {"dir": f"runs/{Path(path).name.removesuffix('.toml')}"}}
    layers = [toml.Layer("(default, after the config's file name)", default),
              *toml.read_layers(Path(path), problems), toml.read_overrides(overrides, problems)]
    if pretrained:
        layers = [_pretrained_layer(layers, pretrained, problems), *layers]
    tables, origin = toml.merge(layers, KINDS)
    run_dir = tables["run"]["dir"]
    if isinstance(run_dir, str) and not is_run_dir(run_dir):
        problems.append(f"run.dir {origin['run.dir']}: must be FOLDER/NAME without '..' or '~'; NAME has "
                        f"1 to 100 of A-Z a-z 0-9 . _ -, got {shortened(run_dir)}; try run.dir=runs/first")
    return _resolve(tables, origin, problems, f"in {path}")


def config_and_overrides(first: str | None, others: Sequence[str]) -> tuple[str, list[str]]:
    """The config file, which may stand anywhere, and the overrides of a command line. Raises UserError."""
    words = [first, *others] if first is not None else []
    path = next((word for word in words if not toml.OVERRIDE.match(word)), None)
    if path is None:
        raise UserError("CONFIG.toml: missing; give one of configs/, or see train.py --help")
    words.remove(path)
    return path, words


def config_from(tables: toml.Tables, where: str) -> Config:
    """A config from tables that were not read from TOML. Raises one UserError with all problems."""
    return _resolve(*toml.merge([toml.Layer(where, tables)], KINDS), [], where)


def _pretrained_layer(layers: list[toml.Layer], pretrained: Pretrained, problems: list[str]) -> toml.Layer:
    """The tables of the folder that train.init_from names; empty if it names none."""
    tables, origin = toml.merge(layers, KINDS)
    folder = tables.get("train", {}).get("init_from")
    if not isinstance(folder, str) or not folder:
        return toml.Layer("", {})
    if "encoding" not in tables.get("position", {}) and not Path(folder).is_dir():
        problems.append(f"train.init_from {origin['train.init_from']}: no folder {shortened(folder)}; give a "
                        "run or a Hugging Face folder")
    try:
        return toml.Layer(f"in {folder}", pretrained(folder) or {})
    except UserError as error:
        problems += error.problems
        return toml.Layer("", {})


def _resolve(tables: toml.Tables, origin: toml.Origin, problems: list[str], where: str) -> Config:
    """Check the tables against the schema. Raises one UserError with the earlier problems and its own."""
    toml.update_old_keys(tables, origin)
    toml.drop_large_values(tables, origin, problems)
    try:
        config = Config.model_validate({name: {} for name in SECTIONS} | tables)
    except ValidationError as error:
        options = ENCODINGS.get(str(tables.get("position", {}).get("encoding")), Encoding).Options
        # a key that seems to be missing may stand in a part that could not be read
        problems += explain_all(error, SECTIONS | {"position": options}, origin, where, bool(problems))
    if problems:
        raise UserError(*problems)
    return config


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that load_config reads back; unset keys are left out."""
    lines = []
    for section, keys in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {toml.as_toml(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> list[str]:
    """`section.key: old -> new` for each key that differs; of [position] only another encoding."""
    lines = []
    for section, before in old.model_dump(exclude=set(ignore)).items():
        after = new.model_dump()[section]
        keys = [key for key in before | after if before.get(key) != after.get(key)]
        lines += [f"{section}.{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
                  for key in (["encoding"] if "encoding" in keys else keys)]
    return lines
