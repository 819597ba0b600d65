"""Configuration: TOML files that extend one another, key=value overrides, one strict schema.

A config is data: it is parsed, never executed. Every key, its type, default and meaning stands in the classes
below (and, for [position], in those of positions/), and `--help` prints them. All problems of a config are
reported at once.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError

from positions import ENCODINGS, Options
from positions.scaling import SCALINGS, Scaling
from runtime.errors import UserError, did_you_mean, shortened
from runtime.files import read_text
from runtime.schema import describe_choice, describe_fields, explain

LIMIT = 2**17           # bytes of a config file; the largest of ours has a few hundred
DEEPEST = 20            # files that extend one another
LARGEST = 2**53         # of integers: what a float still holds exactly
RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Section(BaseModel):
    """One table of the config; unknown keys and wrong types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """Where the run's files go, and how often it logs, validates and saves."""

    dir: str = Field("", description="folder of the run, FOLDER/NAME (default: runs/<config's file name>). "
                                     "NAME: 1 to 100 of A-Z a-z 0-9 . _ -; FOLDER: any, without '..'. No "
                                     "link inside is followed out of FOLDER")
    log_every: int = Field(10, ge=1, description="steps between lines on the screen and in metrics.jsonl")
    eval_every: int = Field(250, ge=1, description="steps between validations")
    save_every: int = Field(250, ge=1, description="steps between checkpoints; the last step is saved too")
    keep: int = Field(2, ge=1, description="how many of the newest checkpoints stay")
    wandb: bool = Field(False, description="log to Weights & Biases too; offline without a key or network")
    wandb_project: str = Field("nanorope", min_length=1, description="project to log to")


class DataConfig(Section):
    """The corpora to train on."""

    dir: str = Field(description="a prepared corpus: what `python data/prepare.py SOURCE --out DIR` wrote")
    mixture: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(
        {}, description='shares of the training windows from other corpora, such as { "data/books" = 0.3 }; '
                        "data.dir gives the rest, and the validation")
    cross_documents: Literal["attend", "mask", "never"] = Field(
        "attend", description="where a window crosses into another document: attend: as if it were one "
                              "(nanoGPT, GPT-2); mask: attention stays within documents, positions run on; "
                              "never: no window does, so documents shorter than seq_len + 1 are left out")


class ModelConfig(Section):
    """The transformer: its size, block and attention window."""

    n_layer: int = Field(4, ge=1, description="layers")
    n_head: int = Field(4, ge=1, description="attention heads; divides n_embd, unless head_dim is set")
    n_kv_head: int | None = Field(
        None, ge=1, description="heads of keys and values, each shared by n_head / n_kv_head queries' heads "
                                "(grouped-query attention; 1: multi-query). Default: n_head")
    head_dim: int | None = Field(
        None, ge=1, description="channels of a head (default: n_embd / n_head); Qwen3 has its own")
    n_embd: int = Field(256, ge=1, description="width of the residual stream")
    n_hidden: int | None = Field(
        None, ge=1, description="width inside the MLP (default: 4 n_embd; for swiglu 8/3 n_embd, rounded up "
                                "to a multiple of 64, which has as many parameters)")
    vocab_size: int | None = Field(None, ge=2, description="tokens in the vocabulary (default: the corpus')")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalisation before each sublayer")
    norm_eps: float = Field(1e-5, gt=0, lt=1, description="added to the variance under the root")
    mlp: Literal["swiglu", "gelu", "gelu_exact", "relu2"] = Field(
        "swiglu", description="activation: swiglu (Llama), gelu (GPT-2, tanh form), gelu_exact (MPT), relu2 "
                              "(squared ReLU)")
    bias: bool = Field(False, description="biases in linear layers, and in layernorm")
    qkv_bias: bool = Field(False, description="biases of q, k and v (Qwen2), where bias is off")
    tied: bool = Field(False, description="the output matrix is the token embedding")
    window: int | None = Field(
        None, ge=1, description="keys that a query sees, its own among them (default: all up to its own)")
    full_every: int = Field(
        0, ge=0, description="k: every k-th layer has no window, from the k-th on (Cohere2: 4); 0: none")
    flex: bool = Field(
        False, description="FlexAttention, on CUDA, for windows, packed documents and biases by distance, in "
                           "place of masks and blocks; not with dropout or train.pose_length")
    qk_norm: bool = Field(False, description="RMSNorm of each head's q and k before their product")
    dropout: float = Field(0.0, ge=0, lt=1, description="on embeddings, attention weights, sublayer outputs")

    @property
    def head_width(self) -> int:
        """D, the channels of a head."""
        return self.head_dim or self.n_embd // self.n_head


class TrainConfig(Section):
    """Length, batch, schedule, optimiser and device of the training."""

    steps: int = Field(1000, ge=1, description="updates in all")
    batch_size: int = Field(32, ge=1, description="sequences an update")
    accumulate: int = Field(1, ge=1, description="parts of a batch, one at a time to save memory; divides it")
    seq_len: int = Field(256, ge=2, description="tokens a sequence: the training length L")
    init_from: str = Field("", description="a run to start from in place of random weights, such as "
                                           "runs/quick; with a longer seq_len, to fine-tune it there. Or a "
                                           "folder of Hugging Face, which gives [model], [position] and "
                                           "seq_len where the config does not")
    pose_length: int | None = Field(
        None, ge=2, description="PoSE: each sequence skips ahead once, so that its seq_len tokens stand "
                                "anywhere in so many positions (default: no skip). At least seq_len")
    seed: int = Field(0, ge=0, lt=2**31, description="initialisation, data order, dropout follow from it")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw; or muon for the matrices of the layers and AdamW for all else: fewer "
                             "steps to a loss, each a little slower. Muon's updates are as large as AdamW's, "
                             "so that lr and weight_decay hold for both")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end")
    warmup: int = Field(100, ge=0, description="steps of linear warm-up")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="after the warm-up: cosine to min_lr, or wsd: constant, then linear to min_lr")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps that decays")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW; and Muon's momentum, often 0.95 in long runs")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    grad_clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: no limit")
    max_bad_steps: int = Field(
        5, ge=1, description="steps in a row without a finite loss and gradient that end the training; "
                             "none of them is applied. One batch may be odd, five are a broken model")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of matrix products (weights stay fp32). auto: bfloat16 where the chip has it")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="torch.compile. auto: on CUDA, and on a CPU when the run is long enough to win "
                            "the time back")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="among the processes of torchrun: ddp, each holds the whole model; fsdp, a share "
                           "of it (FSDP2), for models that one GPU cannot hold")
    val_windows: int = Field(
        64, ge=0, description="validation windows of seq_len, evenly spaced, always the same; 0: all")


class Config(Section):
    """A resolved, valid configuration."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    position: SerializeAsAny[Options]
    train: TrainConfig


SECTIONS: dict[str, type[BaseModel]] = {
    "run": RunConfig, "data": DataConfig, "model": ModelConfig, "position": Options, "train": TrainConfig}
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")                        # TOML asks for quotes around others
Raw = dict[str, dict[str, Any]]     # section -> key -> value
Pretrained = Callable[[str], Raw | None]    # a Hugging Face folder -> its tables; None for any other folder
Origin = dict[str, str]             # "section.key" -> where it was said


def load_config(path: str | Path, overrides: Sequence[str] = (),
                pretrained: Pretrained | None = None) -> Config:
    """Read a TOML file, the files that it extends, and overrides. Raises one UserError with all problems.

    Where train.init_from names a Hugging Face folder, the tables that `pretrained` returns for it lie below
    the config's own keys. The config.toml of a run is complete: it is read without `pretrained`.
    """
    problems: list[str] = []
    raw, origin = _read(Path(path), problems, ())
    is_whole = not problems     # else a missing key may stand in the part that could not be read
    _apply_overrides(raw, origin, overrides, problems)
    if pretrained:
        raw, origin = _on_pretrained(raw, origin, problems, pretrained)
    keys = raw.setdefault("run", {})
    where = origin.get("run.dir", "")
    if keys.get("dir", "") == "":
        keys["dir"], where = str(Path("runs") / Path(path).stem), "(default, after the config's file name)"
    problems += _run_dir_problems(keys["dir"], where)
    return _resolve(raw, origin, problems, str(path), is_whole)


def config_from(tables: Raw, where: str) -> Config:
    """A config of tables that were not read from TOML. Raises one UserError with all problems."""
    return _resolve(tables, _said(tables, where), [], where, True)


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that load_config reads back; unset keys are left out."""
    lines = []
    for section, keys in config.model_dump(exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def differences(old: Config, new: Config, ignore: Sequence[str] = ()) -> list[str]:
    """`section.key: old -> new` for each key whose value differs; sections in `ignore` are not compared."""
    before, after = _flat(old), _flat(new)
    return [f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
            for key in dict.fromkeys([*before, *after])
            if before.get(key) != after.get(key) and key.split(".")[0] not in ignore]


def help_text(topic: str | None = None) -> str:
    """What `train.py --help [TOPIC]` prints; a topic is a section, encoding, scaling method or "all"."""
    topics = [*SECTIONS, *ENCODINGS, *SCALINGS, "all"]
    if topic is None:
        return "\n".join(_overview())
    if topic in SECTIONS:
        return "\n".join(_section_help(topic))
    if topic in ENCODINGS:
        lines = describe_choice(topic, ENCODINGS[topic], ENCODINGS[topic].Options, Options.model_fields)
        return "\n".join([*lines[1:], "", "The keys that every encoding has: --help position"])
    if topic in SCALINGS:
        lines = describe_choice(topic, SCALINGS[topic], SCALINGS[topic], ["method"])
        return "\n".join([*lines[1:], "", f'In a config: [position] scaling = {{ method = "{topic}", ... }}'])
    if topic != "all":
        hint = did_you_mean(topic, topics) or "; --help lists the topics"
        raise UserError(f"--help {shortened(topic)}: unknown topic{hint}")
    lines = ["configuration keys (in CONFIG.toml, or as section.key=value on the command line):"]
    for name in SECTIONS:
        lines += ["", *_section_help(name)]
    lines += ["", "encodings, and the keys that each adds to [position]:"]
    for name, encoding in ENCODINGS.items():
        lines += describe_choice(name, encoding, encoding.Options, Options.model_fields)
    lines += ["", "scaling methods, and the keys of position.scaling = { method = ... }, of all and of each:",
              *describe_fields(Scaling.model_fields)]
    for name, scaling in SCALINGS.items():
        lines += describe_choice(name, scaling, scaling, Scaling.model_fields)
    return "\n".join(lines)


def _overview() -> Iterator[str]:
    yield "sections of a config (a key is set in CONFIG.toml, or as section.key=value on the command line):"
    for name, schema in SECTIONS.items():
        yield f"  {name:10} {(schema.__doc__ or '').splitlines()[0]}"
    for title, names in (("encodings (position.encoding):", ENCODINGS),
                         ("scaling methods of rotary encodings (position.scaling):", SCALINGS)):
        yield from ("", title, *textwrap.wrap(", ".join(names), 100, initial_indent="  ",
                                              subsequent_indent="  ", break_on_hyphens=False))
    yield from ("", "more: --help SECTION, --help ENCODING, --help METHOD, or --help all; "
                    "for example --help train, --help rope, --help yarn")


def _section_help(name: str) -> Iterator[str]:
    yield f"[{name}] {(SECTIONS[name].__doc__ or '').splitlines()[0]}"
    yield from describe_fields(SECTIONS[name].model_fields)


# -----------------------------------------------------------------------------------------------------------
# Reading


def _read(path: Path, problems: list[str], seen: tuple[Path, ...]) -> tuple[Raw, Origin]:
    """The tables of a file on top of those it extends, and where each key was said."""
    try:
        if path.resolve() in seen or len(seen) > DEEPEST:
            problems.append(f"extends in {seen[-1]}: {path} extends itself in a circle, or more than "
                            f"{DEEPEST} others; remove one of the links")
            return {}, {}
        text = tomllib.loads(read_text(path, LIMIT))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else "; give the path of a .toml file"
        problems.append(f"config {path}: no such file{hint}")
        return {}, {}
    except OSError as error:
        reason = (error.strerror or "").lower()
        problems.append(f"config {path}: {reason}; give the path of a readable .toml file")
        return {}, {}
    except (ValueError, RuntimeError) as error:     # tomllib's; no text, too large or deep; links in a circle
        problems.append(f"config {path}: not valid TOML: {error}; see https://toml.io")
        return {}, {}
    raw: Raw = {}
    origin: Origin = {}
    parent = text.pop("extends", None)
    if isinstance(parent, str):
        raw, origin = _read(path.parent / parent, problems, (*seen, path.resolve()))
    elif parent is not None:
        problems.append(f'extends in {path}: must be a file name such as "quick.toml", '
                        f"got {shortened(parent)}")
    for section, keys in text.items():
        if section not in SECTIONS:
            hint = did_you_mean(section, SECTIONS)
            problems.append(f"[{section}] in {path}: unknown section or key{hint}")
        elif not isinstance(keys, dict):
            problems.append(f"{section} in {path}: must be a table, got {shortened(keys)}; write [{section}] "
                            "and its keys below")
        else:
            _merge(raw, origin, section, keys, f"in {path}")
    return raw, origin


def _on_pretrained(raw: Raw, origin: Origin, problems: list[str],
                   pretrained: Pretrained) -> tuple[Raw, Origin]:
    """The config's own keys on top of model, encoding and length of a Hugging Face folder to start from."""
    folder = raw.get("train", {}).get("init_from")
    if not isinstance(folder, str) or not folder:
        return raw, origin
    is_needed = "encoding" not in raw.get("position", {})               # it was to come from there
    if is_needed and not Path(folder).is_dir():
        problems.append(f"train.init_from {origin['train.init_from']}: no folder {shortened(folder)}; give a "
                        "run, or a folder of Hugging Face")
    try:
        tables = pretrained(folder)
    except UserError as error:
        problems += error.problems
        return raw, origin
    if tables is None:
        return raw, origin
    origin = _said(tables, f"in {folder}/config.json") | origin
    for section, keys in raw.items():
        _merge(tables, {}, section, keys, "")
    return tables, origin


def _said(tables: Raw, where: str) -> Origin:
    return {f"{section}.{key}": where for section, keys in tables.items() for key in keys}


def _resolve(raw: Raw, origin: Origin, problems: list[str], where: str, is_whole: bool) -> Config:
    """The tables against the schema. Raises one UserError with these and the problems so far."""
    sections = {name: _validate(name, raw.get(name, {}), origin, problems, where, is_whole)
                for name in SECTIONS}
    problems += _cross_checks(sections, origin)
    if problems:
        raise UserError(*problems)
    return Config(**sections)


def _merge(raw: Raw, origin: Origin, section: str, keys: dict[str, Any], where: str) -> None:
    old = raw.setdefault(section, {})
    if section == "position" and keys.get("encoding", old.get("encoding")) != old.get("encoding"):
        for key in set(old) - set(Options.model_fields):
            del old[key]    # another encoding: the parent's own options went with its encoding
    old.update(keys)
    origin.update({f"{section}.{key}": where for key in keys})


def _apply_overrides(raw: Raw, origin: Origin, overrides: Sequence[str], problems: list[str]) -> None:
    said: Raw = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, *names = key.strip().split(".")
        if not equals or not names or not all((section, *names)):
            problems.append(f"override {shortened(text)}: must read section.key=value, such as train.lr=1e-3")
        elif section not in SECTIONS:
            hint = did_you_mean(section, SECTIONS)
            problems.append(f"override {shortened(text)}: unknown section {shortened(section)}{hint}")
        elif len(names) > 1:
            problems.append(f"override {shortened(text)}: {section}.{names[0]} is set as a whole; "
                            f"write {section}.{names[0]}=...")
        else:
            said.setdefault(section, {})[names[0]] = _parse_value(value.strip())
    for section, keys in said.items():
        _merge(raw, origin, section, keys, "on the command line")


def _parse_value(text: str) -> Any:
    """A TOML value; a bare word is a string, so that quotes need no quoting in a shell."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):    # tomllib's own, an integer of thousands of digits, deep nesting
        return text
    return parsed["value"] if len(parsed) == 1 else text


# -----------------------------------------------------------------------------------------------------------
# Checking


def _validate(name: str, keys: dict[str, Any], origin: Origin, problems: list[str], path: str,
              is_whole: bool) -> Any:
    """The section's model, or None after adding what is wrong with it to problems."""
    schema = SECTIONS[name]
    if name == "position":
        encoding = keys.get("encoding")
        if isinstance(encoding, str) and encoding not in ENCODINGS:
            where = origin["position.encoding"]
            hint = did_you_mean(encoding, ENCODINGS) or f"; choose from {', '.join(ENCODINGS)}"
            problems.append(f"position.encoding {where}: unknown encoding {shortened(encoding)}{hint}")
            return None
        schema = ENCODINGS[encoding].Options if isinstance(encoding, str) else Options
    too_large = [key for key, value in keys.items() if not _is_small(value)]
    if too_large:
        problems += [f"{name}.{key} {origin[f'{name}.{key}']}: must hold no integer beyond 2^53 and no deep "
                     "nesting; --help says what it takes"
                     for key in too_large]
        return None
    try:
        return schema.model_validate(keys)
    except ValidationError as errors:
        by_key: dict[tuple[Any, ...], list[Any]] = {}
        for error in errors.errors():
            if error["type"] == "missing" and not is_whole:
                continue
            by_key.setdefault(error["loc"][:3 if error["loc"][0] == "scaling" else 1], []).append(error)
        for (key, *inner), found in by_key.items():
            where = origin.get(f"{name}.{key}", f"in {path}")
            homes = {key: f"{section}.{key}" for section, s in SECTIONS.items() for key in s.model_fields}
            if inner:
                method, key = inner
                problems.append(explain(f"{name}.scaling.{key}", found, where, SCALINGS[method],
                                        "position.scaling with this method"))
            else:
                owner = "[position] with this encoding" if name == "position" else f"[{name}]"
                problems.append(explain(f"{name}.{key}", found, where, schema, owner, homes))
    return None


def _is_small(value: Any, depth: int = 0) -> bool:
    """Whether it is not nested deeply and all integers in it can be computed with, as any kind of number."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth < DEEPEST and all(_is_small(part, depth + 1) for part in parts)
    return not isinstance(value, int) or abs(value) <= LARGEST


def _cross_checks(sections: dict[str, Any], origin: Origin) -> Iterator[str]:
    """Rules between keys; those of a section with errors of its own are left until these are mended."""
    data, model, position, train = (sections[name] for name in ("data", "model", "position", "train"))

    def at(key: str) -> str:
        return f"{key} {origin[key]}" if key in origin else f"{key} (default)"

    if data and sum(data.mixture.values()) >= 1:
        yield (f"{at('data.mixture')}: must add up to less than 1, the rest being data.dir's, "
               f"got {sum(data.mixture.values()):g}")
    if data and Path(data.dir).resolve() in {Path(name).resolve() for name in data.mixture}:
        yield f"{at('data.mixture')}: {data.dir} is data.dir, which has the rest anyway; name other corpora"
    if train:
        if train.batch_size % train.accumulate:
            yield (f"{at('train.accumulate')}: must divide train.batch_size = {train.batch_size}, "
                   f"got {train.accumulate}")
        if train.pose_length and train.pose_length < train.seq_len:
            yield (f"{at('train.pose_length')}: must be at least train.seq_len = {train.seq_len}, "
                   f"got {train.pose_length}")
        if train.min_lr > train.lr:
            yield f"{at('train.min_lr')}: must be at most train.lr = {train.lr}, got {train.min_lr}"
    if model and model.n_head % (model.n_kv_head or 1):
        yield f"{at('model.n_kv_head')}: must divide model.n_head = {model.n_head}, got {model.n_kv_head}"
    if model and model.head_dim is None and model.n_embd % model.n_head:
        yield (f"{at('model.n_head')}: must divide model.n_embd = {model.n_embd}, got {model.n_head}; or set "
               "model.head_dim")
    elif model and position:
        for key, problem in position.problems(model.n_embd, model.head_width).items():
            yield f"{at(f'position.{key}')}: {problem}"
    if model and model.full_every and model.window is None:
        yield f"{at('model.full_every')}: says which layers have no window; set model.window"
    if not model or not position:
        return
    if not ENCODINGS[position.encoding].acts_in_layers():
        for key, default in (("layers", "all"), ("skip_every", 0)):
            if getattr(position, key) != default:
                yield f"{at(f'position.{key}')}: {position.encoding} does not act in layers; remove this key"
    elif isinstance(position.layers, list) and not all(0 <= i < model.n_layer for i in position.layers):
        yield (f"{at('position.layers')}: layers are 0 ... {model.n_layer - 1} "
               f"(model.n_layer = {model.n_layer}), got {position.layers}")


def _run_dir_problems(run_dir: Any, where: str) -> Iterator[str]:
    if not isinstance(run_dir, str):
        return                  # said by the schema
    path = Path(run_dir)
    if not RUN_NAME.fullmatch(path.name) or ".." in path.parts or "\0" in run_dir:
        yield (f"run.dir {where}: must be FOLDER/NAME without '..', NAME being 1 to 100 of A-Z a-z 0-9 . _ "
               f"-, got {shortened(run_dir)}; give such as run.dir=runs/first")


# -----------------------------------------------------------------------------------------------------------
# Writing


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.model_dump().items()
            for key, value in keys.items()}


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{key if BARE_KEY.fullmatch(key) else _toml_value(key)} = {_toml_value(inner)}"
                 for key, inner in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    # JSON's strings, numbers, booleans and lists are TOML's, but for this one character
    return json.dumps(value).replace("\x7f", "\\u007f")
