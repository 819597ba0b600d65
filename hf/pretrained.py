"""Loading a Hugging Face folder: eval.py, sample.py and train.init_from accept one instead of a run.

The folder holds config.json, weights as safetensors in one or several files, and tokenizer.json. No pickle is
read, no code of the folder is run, and nothing is downloaded. hf/architectures.py lists what is supported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from config import Config, config_from, load_config
from data.tokenizer import Tokenizer
from hf.architectures import ARCHITECTURES, Architecture
from hf.tokenizer import read_object, read_tokenizer
from model import GPT
from runtime.errors import UserError, shortened
from runtime.toml import Tables

WEIGHTS, PARTS = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(folder: str | Path) -> bool:
    """Whether this is a Hugging Face folder rather than a run."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / "config.toml").exists()


def read_tables(folder: str | Path) -> Tables:
    """The tables [model], [position] and train.seq_len of a folder. Raises UserError."""
    return tables_of(folder, *read_config(Path(folder)))


def pretrained_tables(folder: str | Path) -> Tables | None:
    """[model], [position] and train.seq_len of a run or a Hugging Face folder: an argument of `load_config`.

    position.drop_at is 0 after a run that drops its encoding. None for any other folder. Raises UserError.
    """
    if not (Path(folder) / "config.toml").is_file():
        return read_tables(folder) if is_pretrained(folder) else None
    config = load_config(Path(folder) / "config.toml")
    model, position = (part.model_dump(exclude_none=True) for part in (config.model, config.position))
    dropped = {"drop_at": 0.0} if config.position.drop_at < 1 else {}
    return {"train": {"seq_len": config.train.seq_len}, "model": model, "position": position | dropped}


def resolve_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a command line; a Hugging Face folder in train.init_from provides what it leaves unset.

    The config.toml of a run is complete: it is read without that folder, which may have changed since.
    """
    is_of_run = Path(path).name == "config.toml" and (Path(path).parent / "corpus.json").exists()
    return load_config(path, overrides, None if is_of_run else pretrained_tables)


def tables_of(folder: str | Path, architecture: Architecture, hf_config: dict[str, Any]) -> Tables:
    """The same from the content of config.json."""
    try:
        return architecture.tables(hf_config)
    except UserError as error:
        raise UserError(*(f"{folder}: {problem}" for problem in error.problems)) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:  # a list, a 0 ...
        raise UserError(f"{folder}: config.json: a value that {architecture.class_name} cannot have "
                        f"({error}); get it again") from error


def pretrained_config(folder: Path) -> Config:
    """The config of a folder, without a corpus. Raises UserError."""
    tables = {**read_tables(folder), "run": {"dir": str(folder)}, "data": {"dir": ""}}
    return config_from(tables, f"in {folder}/config.json")


def load_pretrained(folder: Path) -> tuple[GPT, Config, Tokenizer]:
    """Model (fp32, on the CPU), config and tokenizer. Raises UserError if files are missing or do not fit.

    train.seq_len is the training length before any scaling, according to config.json. The config names no
    corpus.
    """
    (architecture, hf_config), config = read_config(folder), pretrained_config(folder)
    with torch.device("meta"):      # no initialisation and no memory: all weights come from the files
        model = GPT(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    try:
        weights = architecture.import_tensors(_read_weights(folder), shapes)
        tokenizer = read_tokenizer(folder, hf_config)
    except UserError as error:
        raise UserError(*(f"{folder}: {problem}" for problem in error.problems)) from error
    model.load_state_dict(weights, assign=True)
    if config.model.vocab_size and tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"{folder}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but the model "
                        f"has a vocabulary of {config.model.vocab_size}; take both from the same model")
    return model, config, tokenizer


def read_config(folder: Path) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a folder, and the content of config.json. Raises UserError for an unknown one."""
    hf_config = read_object(folder / "config.json")
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        names = hf_config.get("architectures")
        named = ", ".join(map(str, names)) if names and isinstance(names, list) else shortened(kind)
        raise UserError(f"{folder}: architecture {named} is not supported; supported are "
                        f"{', '.join(a.class_name for a in ARCHITECTURES.values())}")
    if hf_config.get("quantization_config"):
        raise UserError(f"{folder}: its weights are quantised; use the model without quantisation")
    return ARCHITECTURES[kind], hf_config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path.name}: damaged ({error}); get it again") from error
    return tensors


def files_sha256(folder: Path) -> str:
    """Checksum of config, weights and tokenizer: tells whether another model was put into the folder."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", folder / "tokenizer.json", *_weight_files(folder)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """One file, or else the files that an index lists: the order in which transformers looks for them."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / PARTS).is_file():
        index = read_object(folder / PARTS).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else [""]
    elif not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"only {pickles[0]}, a pickle, which is not read" if pickles else "no weights at all"
        raise UserError(f"no {WEIGHTS}, {found}; save the model again as safetensors")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{PARTS} lists {name}, which is missing; download the whole folder again")
    return [folder / name for name in names]
