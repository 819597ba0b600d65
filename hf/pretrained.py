"""Loading a Hugging Face folder: the commands and train.init_from accept one instead of a run.

The folder holds config.json, weights as safetensors in one or several files, and tokenizer.json. No pickle is
read and no code of the folder is run. hf/architectures.py lists what is supported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from base.errors import UserError
from base.files import read_json, sha256_of
from base.schema import Level
from config import Config, config_from, load_config
from data.tokenizer import Tokenizer
from hf.architectures import ARCHITECTURES, Architecture, Tables
from hf.rope_parameters import Fields
from hf.tokenizer import read_tokenizer
from model import GPT

WEIGHTS, PARTS = "model.safetensors", "model.safetensors.index.json"
# what our block lacks for a model of this type
INEXPRESSIBLE = {
    "gemma4_text": "values pass a norm of their own, and full layers have wider heads",
    "gpt_oss": "its MLPs are mixtures of experts"}
PULLED = ["*.json", "*.safetensors", "*.jinja"]         # no code, no pickles


def pulled(run: str) -> str:
    """The folder of a model: `run` itself, or models/ORG/NAME for hf:ORG/NAME, filled from the hub's cache.

    hf:ORG/NAME@REVISION goes to models/ORG/NAME@REVISION. The hub's cache holds what was downloaded. While
    the commit is the same, the folder stays as it is, with what was edited or evaluated there. Raises
    UserError.
    """
    if not run.startswith("hf:"):
        return run
    from huggingface_hub import snapshot_download  # here: it takes a second

    name, _, revision = run.removeprefix("hf:").partition("@")
    folder = Path("models", run.removeprefix("hf:"))
    try:    # it goes on with an interrupted download; with HF_HUB_OFFLINE=1 it takes what is in the cache
        cached = Path(snapshot_download(name, revision=revision or None, allow_patterns=PULLED,
                                        ignore_patterns=["*/*"]))       # the patterns fit subfolders, too
    except Exception as error:  # the client raises the exceptions of several HTTP libraries
        raise UserError(f"{run}: cannot be downloaded ({type(error).__name__}: {error}); check that it reads "
                        "hf:ORG/NAME, and the network, or log in with `hf auth login`") from error
    commit = folder / ".commit"
    if not commit.exists() or commit.read_text() != cached.name:
        for pattern in PULLED:                          # the commit before may have had other files
            for old in folder.glob(pattern):
                old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        for file in cached.iterdir():
            target = folder / file.name
            if target.suffix == ".safetensors" and os.name == "posix":
                target.symlink_to(file.resolve())      # large, and nobody edits it
            elif file.is_file():
                shutil.copyfile(file, target)
        commit.write_text(cached.name)
    return str(folder)


def is_pretrained(folder: str | Path) -> bool:
    """Whether this is a Hugging Face folder rather than a run."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / "config.toml").exists()


def pretrained_tables(folder: str | Path) -> Tables:
    """[model], [position] and train.seq_len of a run or a Hugging Face folder: an argument of `load_config`.

    position.drop_at is 0 after a run that drops its encoding. Raises UserError.
    """
    folder = Path(folder)
    if is_pretrained(folder):
        architecture, hf_config = read_config(folder)
        with problems_of(folder / "config.json"):
            return architecture.tables(hf_config)
    if str(folder).startswith("hf:"):
        name = str(folder).removeprefix("hf:").partition("@")[0]
        raise UserError(f"train.init_from {folder}: must be a folder; run `hf download {name} --local-dir "
                        f"models/{name}` and give models/{name}")
    if not (folder / "config.toml").is_file():
        raise UserError(f"train.init_from {folder}: neither a run nor a Hugging Face folder; give the folder "
                        "of one")
    config = load_config(folder / "config.toml")
    model, position = (part.model_dump(exclude_none=True) for part in (config.model, config.position))
    dropped = {"drop_at": 0.0} if config.position.drop_at < 1 else {}
    return {"train": {"seq_len": config.train.seq_len}, "model": model, "position": position | dropped}


def pretrained_config(folder: Path) -> Config:
    """The config of a folder, without a corpus. Raises UserError."""
    tables = {**pretrained_tables(folder), "run": {"dir": str(folder)}, "data": {"dir": ""}}
    place = f"in {folder}/config.json"
    return config_from([Level(place, tables)], place)


def load_pretrained(folder: Path) -> tuple[GPT, Config, Tokenizer]:
    """Model (fp32, on the CPU), config and tokenizer. Raises UserError if files are missing or do not fit.

    train.seq_len is the training length before any scaling, according to config.json.
    """
    (architecture, hf_config), config = read_config(folder), pretrained_config(folder)
    with torch.device("meta"):      # no initialisation and no memory: all weights come from the files
        model = GPT(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    with problems_of(folder):
        tensors: dict[str, Tensor] = {}
        for path in weight_files(folder):
            tensors |= load_file(path)
        weights = architecture.import_tensors(tensors, shapes, config, hf_config)
        model.load_state_dict(weights, assign=True)
        tokenizer = read_tokenizer(folder, hf_config)
        n_rows = len(model.embedding.weight)
        if tokenizer.vocab_size > n_rows:
            raise UserError(f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but the model has a "
                            f"vocabulary of {n_rows}; take both from the same model")
    return model, config, tokenizer


def read_config(folder: Path) -> tuple[Architecture, Fields]:
    """The architecture of a folder, and the content of config.json. Raises UserError for an unknown one."""
    path = folder / "config.json"
    with problems_of(path):
        hf_config = read_json(path)
        kind = hf_config.get("model_type")
        if kind not in ARCHITECTURES:
            named = ", ".join(hf_config.get("architectures") or [str(kind)])
            reason = f" ({INEXPRESSIBLE[kind]})" if kind in INEXPRESSIBLE else ""
            raise UserError(f"architecture {named} is not supported{reason}; supported are "
                            f"{', '.join(a.class_name for a in ARCHITECTURES.values())}")
        if hf_config.get("quantization_config"):
            raise UserError("its weights are quantised; use the model without quantisation")
        if hf_config.get("is_causal") is False:
            raise UserError("its attention is not causal (is_causal); use a causal model")
        return ARCHITECTURES[kind], hf_config


def files_sha256(folder: Path) -> str:
    """Checksum of config, weights and tokenizer: tells whether another model was put into the folder."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", folder / "tokenizer.json", *weight_files(folder)):
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """One file, or else the files that an index lists: the order in which transformers looks for them."""
    names = [WEIGHTS]
    if (folder / PARTS).is_file() and not (folder / WEIGHTS).is_file():
        names = sorted(set(read_json(folder / PARTS)["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; get the model as safetensors (no pickle is read)")
    return [folder / name for name in names]


@contextmanager
def problems_of(path: Path) -> Iterator[None]:
    """Put this folder or file before UserErrors; make a UserError of what a damaged or odd one raises."""
    try:
        yield
    except UserError as error:
        raise UserError(*(problem if str(path) in problem else f"{path}: {problem}"
                          for problem in error.problems)) from error
    except (SafetensorError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise UserError(f"{path}: damaged, or not supported ({type(error).__name__}: {error}); download it "
                        "again") from error
