"""A folder of Hugging Face as a model of ours: eval.py, sample.py and train.init_from take one like a run.

It holds config.json, weights as safetensors, whole or in parts, and tokenizer.json. No pickle is read, no
code of the folder is run, and nothing is fetched. What is supported stands in architectures.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from config import Config, config_from
from runtime.errors import UserError
from runtime.files import read_json
from runtime.toml import Tables

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from hf.architectures import Architecture
    from model import GPT

WEIGHTS, PARTS = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(folder: str | Path) -> bool:
    """Whether it is a folder of Hugging Face, and no run of ours."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / "config.toml").exists()


def read_tables(folder: str | Path) -> Tables:
    """[model], [position] and train.seq_len of a folder. Raises UserError."""
    return tables_of(folder, *read_config(Path(folder)))


def pretrained_tables(folder: str | Path) -> Tables | None:
    """`read_tables` of a Hugging Face folder; None for any other folder. `load_config` takes it."""
    return read_tables(folder) if is_pretrained(folder) else None


def tables_of(folder: str | Path, architecture: Architecture, theirs: dict[str, Any]) -> Tables:
    """The same of a config.json that is read already."""
    try:
        return architecture.tables(theirs)
    except UserError as error:
        raise UserError(*(f"{folder}: {problem}" for problem in error.problems)) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:   # a list for a table, a 0 ...
        raise UserError(f"{folder}: config.json: a value that no {architecture.class_name} has ({error}); "
                        "get it again") from error


def load_pretrained(folder: Path) -> tuple[GPT, Config, Tokenizer]:
    """Model (fp32, on the CPU), config and tokenizer. Raises UserError for what is missing or does not fit.

    L, as train.seq_len, is what config.json says of the training before any scaling. The config names no
    corpus.
    """
    from hf.tokenizer import read_tokenizer  # here: ordinary runs load none of these
    from model import GPT

    architecture, theirs = read_config(folder)
    tables = {**tables_of(folder, architecture, theirs), "run": {"dir": str(folder)}, "data": {"dir": ""}}
    config = config_from(tables, f"in {folder}/config.json")
    with torch.device("meta"):      # no numbers drawn, no memory taken: all weights are there already
        model = GPT(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    try:
        weights = architecture.import_tensors(_read_weights(folder), shapes)
        tokenizer = read_tokenizer(folder, theirs)
    except UserError as error:
        raise UserError(*(f"{folder}: {problem}" for problem in error.problems)) from error
    model.load_state_dict(weights, assign=True)
    if config.model.vocab_size and tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"{folder}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, the model "
                        f"{config.model.vocab_size} of them; take both from the same model")
    return model, config, tokenizer


def read_config(folder: Path) -> tuple[Architecture, dict[str, Any]]:
    """Which architecture a folder holds, and its config.json. Raises UserError for one that is unknown."""
    from hf.architectures import ARCHITECTURES  # here: it reads configs itself

    theirs = _read_json(folder / "config.json")
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        named = ", ".join(map(str, theirs.get("architectures") or [kind]))
        raise UserError(f"{folder}: architecture {named} is not supported; supported are "
                        f"{', '.join(a.class_name for a in ARCHITECTURES.values())}")
    if theirs.get("quantization_config"):
        raise UserError(f"{folder}: its weights are quantised; take the model as it was before that")
    return ARCHITECTURES[kind], theirs


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors, from one file or from those that an index lists."""
    names = [WEIGHTS]
    if (folder / PARTS).is_file():
        index = _read_json(folder / PARTS).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else [""]
    elif not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        only = f"only {pickles[0]}, a pickle, which is not read" if pickles else "no weights at all"
        raise UserError(f"no {WEIGHTS}, {only}; save it again as safetensors")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{PARTS} lists {name}, which is not there; get the folder again, whole")
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise UserError(f"{name}: damaged ({error}); get it again") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); get it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object; get it again")
    return content
