"""Writing a model as a Hugging Face folder: config, weights, tokenizer and model card."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from base.errors import UserError, warn
from base.files import read_json
from config import Config, load_config, to_toml
from data.tokenizer import Tokenizer
from hf.architectures import ARCHITECTURES, choose, warn_of_llama_cpp
from hf.pretrained import is_pretrained, read_config
from hf.rope_parameters import LENGTH, Fields
from hf.tokenizer import ALWAYS, AS_IT_IS, misreading, read_tokenizer, separator_name, tokenizer_json
from model import GPT, shape_of
from positions.rotary import RoPEOptions, RotaryOptions, layers_within_length
from positions.scaling import Scaling

KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")


def export(run: Path, out: Path, model: GPT, config: Config, tokenizer: Tokenizer,
           extended: Fields | None = None) -> str:
    """Write the folder `out`, complete or not at all; return the architecture's name. Raises UserError.

    Model, config and tokenizer are those of `run`, whose name is on the model card. If the run began from a
    Hugging Face folder, its tokenizer, special tokens, chat template and generation_config are copied from
    there; only a tokenizer class that would give other ids is replaced. For rotary encodings the number of
    positions is that of training or of that folder, whichever is larger. `extended`, from `rope_fields`,
    overrides fields of config.json for a longer context.
    """
    source = origin_of(run, tokenizer)
    special: Fields = {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator,
                       "pad_token_id": None}
    settings: Fields = {"tokenizer_class": AS_IT_IS}                    # of tokenizer_config.json
    before: Fields = {}                                                 # config.json of the source
    kept: dict[str, Path] = {}                                          # name -> file of the source
    if source:
        before = read_config(source)[1]
        special = {key: before.get(key) for key in special}
        kept = {name: source / name for name in KEPT if (source / name).is_file()}
        if "tokenizer_config.json" in kept:
            settings = read_json(kept["tokenizer_config.json"])
    among = dict(ARCHITECTURES)
    if misreading(tokenizer, ALWAYS, settings):
        del among[ALWAYS]
    architecture = choose(config, among.values())
    fields = architecture.config_json(config)
    is_dynamic = getattr(getattr(config.position, "scaling", None), "is_dynamic", False)
    if isinstance(config.position, RotaryOptions) and not is_dynamic:   # else the field has another meaning
        fields[architecture.length] = max(fields[architecture.length], before.get(architecture.length) or 0)
    fields |= extended or {}
    warn_of_llama_cpp(fields)
    files: dict[str, Fields] = {
        "config.json": {**fields, **special, "use_cache": True, "torch_dtype": "float32"},
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": {**settings, "tokenizer_class": AS_IT_IS}}
    if not source:
        separator = separator_name(tokenizer)
        files["tokenizer_config.json"] |= {
            "bos_token": separator, "eos_token": separator, "model_max_length": fields[architecture.length],
            "clean_up_tokenization_spaces": False}
        files["generation_config.json"] = {**special, "pad_token_id": tokenizer.separator}
    if misreading(tokenizer, architecture.model_type, settings):
        del kept["tokenizer_config.json"]
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    with new_folder(out) as folder:
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        for name, path in kept.items():
            shutil.copyfile(path, folder / name)                        # over ours
        card = model_card(run, config, model, tokenizer, architecture.class_name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        save_file(architecture.export_tensors(weights, config), folder / "model.safetensors",
                  {"format": "pt"})
    return architecture.class_name


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which then becomes `out`: complete or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "new"
        folder.mkdir()
        yield folder
        folder.rename(out)      # over an empty folder, if it is there


def origin_of(run: Path, tokenizer: Tokenizer) -> Path | None:
    """The Hugging Face folder that a run began from, perhaps over other runs, if it is still there.

    Not if it has another tokenizer by now: its ids are not those of the run.
    """
    while (run / "config.toml").is_file():
        init_from = load_config(run / "config.toml").train.init_from
        if not init_from:
            return None
        run = Path(init_from)
    if is_pretrained(run) and read_tokenizer(run, read_config(run)[1]).sha256 == tokenizer.sha256:
        return run
    warn(f"{run}, from which the run began, is gone or has another tokenizer now; its special tokens and "
         "chat template are not copied")
    return None


def rope_fields(config: Config, scaling: Scaling, T: int) -> Fields | None:
    """What config.json needs for a model under a scaling, for T tokens; None if it cannot express it."""
    if not isinstance(config.position, RoPEOptions):
        return None
    changes: dict[str, Any] = {"scaling": scaling}
    if layers_within_length(shape_of(config)) and config.position.local_base is None:
        # layers with a window keep their frequencies: in config.json as a base of their own, without scaling
        if config.position.scaling is not None:
            return None
        changes["local_base"] = config.position.base
    position = config.position.model_copy(update=changes)
    extended = config.model_copy(update={"position": position})
    folder = Path(config.run.dir)                   # of a pretrained model: its own (pretrained_config)
    among = [read_config(folder)[0]] if is_pretrained(folder) else ARCHITECTURES.values()
    try:
        fields = choose(extended, among).positions_json(extended)
    except UserError:
        return None
    # a base says nothing of the length; vLLM multiplies the length of "linear" by its factor
    if scaling.method == "ntk":
        fields["max_position_embeddings"] = T
    return {key: fields[key] for key in ("rope_parameters", "max_position_embeddings", LENGTH)
            if key in fields}


def write_extended(folder: Path, out: Path, fields: Fields) -> None:
    """Copy a Hugging Face folder, with other fields in its config.json, complete or not at all."""
    older = {"rope_scaling", "rope_theta"}              # of transformers 4: now in rope_parameters
    content = {key: value for key, value in read_json(folder / "config.json").items() if key not in older}
    content |= fields
    warn_of_llama_cpp(content)
    with new_folder(out) as new:
        shutil.copytree(folder, new, ignore=shutil.ignore_patterns("eval", ".*"), dirs_exist_ok=True)
        (new / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_card(run: Path, config: Config, model: GPT, tokenizer: Tokenizer, architecture: str) -> str:
    """README.md: what the model is, and the config of its training."""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {run.resolve().name}

{architecture}, {model.n_parameters():,} parameters, position encoding {config.position.encoding}, trained at
{config.train.seq_len} tokens.

Every training document opens with `{separator_name(tokenizer)}` (id {tokenizer.separator}); begin a prompt
with it.

Trained by nanorope with this config:

```toml
{to_toml(config)}```
"""
