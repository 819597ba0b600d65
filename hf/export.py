"""Writing a model as a Hugging Face folder: config, weights, tokenizer and model card."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from config import Config, load_config, to_toml
from data.tokenizer import Tokenizer
from hf.architectures import choose
from hf.pretrained import is_pretrained, read_config
from hf.rope_parameters import LENGTH, Fields
from hf.tokenizer import read_object, read_tokenizer, separator_name, tokenizer_json
from model import GPT
from positions.rotary import RotaryOptions
from positions.scaling import Scaling
from runtime.errors import UserError
from runtime.files import is_fixed, write_whole

KEPT = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")


def export(run: Path, out: Path, model: GPT, config: Config, tokenizer: Tokenizer,
           state: dict[str, Any] | None = None, max_length: int | None = None) -> str:
    """Write the folder `out`, complete or not at all; return the architecture's name. Raises UserError.

    Model, config and tokenizer are those of `run`, whose name is on the model card; so are step and loss of
    the exported checkpoint, if its state is given. If the run began from a Hugging Face folder, its
    tokenizer, special tokens, chat template and generation_config are copied from there.

    The folder's number of positions is `max_length`, by default that of training or of that folder, whichever
    is larger.
    """
    if is_fixed(out) or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError(f"OUT_DIR {out}: exists and is not empty, or is the current folder or a mount point; "
                        "give another folder")
    try:
        architecture = choose(config)
    except UserError as error:
        raise UserError(*(f"{run}: {problem}" for problem in error.problems)) from error
    fields = architecture.config_json(config)
    source = origin_of(run, tokenizer)
    before = read_object(source / "config.json") if source else {}
    is_dynamic = getattr(getattr(config.position, "scaling", None), "is_dynamic", False)
    if isinstance(config.position, RotaryOptions) and not is_dynamic:   # else the field has another meaning
        fields[architecture.length] = max_length or max(
            fields[architecture.length], before.get(architecture.length) or 0)
    elif max_length:
        raise UserError(f"--max-length: {architecture.length} is a part of the encoding here; omit it")
    eot = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    special = {key: before.get(key) for key in (*eot, "pad_token_id")} if source else \
        {**eot, "pad_token_id": None}
    separator, longest = separator_name(tokenizer), fields[architecture.length]
    files: dict[str, Any] = {
        "config.json": {**fields, **special, "use_cache": True, "torch_dtype": "float32"},
        "generation_config.json": {**eot, "pad_token_id": tokenizer.eot},
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": separator,
                                  "eos_token": separator, "model_max_length": longest,
                                  "clean_up_tokenization_spaces": False},
    }
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for name in KEPT:
            if source and (source / name).is_file():
                files.pop(name, None)
                shutil.copyfile(source / name, new / name)
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (new / name).write_text(text, encoding="utf-8")
        card = model_card(run, config, model, tokenizer, architecture.class_name, state,
                          opens_texts(new / "tokenizer.json", tokenizer.eot))
        (new / "README.md").write_text(card, encoding="utf-8")
        save_file(architecture.export_tensors(weights, config), new / "model.safetensors", {"format": "pt"})
        if out.exists():
            out.rmdir()
        new.rename(out)
    return architecture.class_name


def origin_of(run: Path, tokenizer: Tokenizer) -> Path | None:
    """The Hugging Face folder that a run began from, perhaps over other runs, if it is still there.

    Not if it has another tokenizer by now: its ids are not those of the run.
    """
    not_kept, seen = ", from which the run began: special tokens and chat template are not those of it", set()
    while not is_pretrained(run):
        if run in seen or not (run / "config.toml").is_file():
            return None
        seen.add(run)
        init_from = load_config(run / "config.toml").train.init_from
        if not init_from:
            return None
        run = Path(init_from)
        if not run.exists():
            print(f"warning: {run}: is gone{not_kept}")
            return None
    with suppress(UserError):               # damaged
        if read_tokenizer(run, read_config(run)[1]).sha256 == tokenizer.sha256:
            return run
    print(f"warning: {run}: has another tokenizer now, or is damaged{not_kept}")
    return None


def rope_fields(config: Config, scaling: Scaling, T: int) -> Fields | None:
    """What config.json needs for a model under a scaling, for T tokens; None if it cannot express it."""
    if not isinstance(config.position, RotaryOptions):
        return None
    position = config.position.model_copy(update={"scaling": scaling})
    extended = config.model_copy(update={"position": position})
    try:
        fields = choose(extended).positions_json(extended)
    except UserError:
        return None
    # a base says nothing of the length; vLLM multiplies the length of "linear" by its factor
    if scaling.method == "ntk":
        fields["max_position_embeddings"] = T
    return {key: fields[key] for key in ("rope_parameters", "max_position_embeddings", LENGTH)
            if key in fields}


def write_extended(folder: Path, out: Path, fields: Fields) -> None:
    """Copy a Hugging Face folder, with other fields in its config.json. Raises UserError."""
    if out.exists():
        raise UserError(f"--write {out}: exists; give a new folder")
    older = {"rope_scaling", "rope_theta"}              # of transformers 4: now in rope_parameters
    content = {key: value for key, value in read_object(folder / "config.json").items() if key not in older}
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("eval", ".*"))
    write_whole(out / "config.json", json.dumps({**content, **fields}, indent=2) + "\n")


def opens_texts(path: Path, separator: int) -> bool:
    """Whether this tokenizer.json puts the separator before a text by itself, as Llama's do."""
    from tokenizers import Tokenizer as Library  # here: train.py does not need the package

    return Library.from_file(str(path)).encode("a").ids[:1] == [separator]


def model_card(run: Path, config: Config, model: GPT, tokenizer: Tokenizer, architecture: str,
               state: dict[str, Any] | None, is_opened: bool) -> str:
    """README.md: what the model is, how to load it, and the config of its training."""
    separator = separator_name(tokenizer)
    how = "the tokenizer adds it to a prompt" if is_opened else "begin a prompt with it"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {run.resolve().name}

{architecture}, {model.n_parameters():,} parameters, position encoding {config.position.encoding}, trained at
{config.train.seq_len} tokens.{results_of(config, state)}

Every training document opens with `{separator}` (id {tokenizer.eot}); {how}. It is bos_token and
eos_token, unless the model began from another one, whose tokens it keeps.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
prompt = tokenizer("{'' if is_opened else separator}Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

Trained by nanorope with this config:

```toml
{to_toml(config)}```
"""


def results_of(config: Config, state: dict[str, Any] | None) -> str:
    """What is known of the exported checkpoint: its step, and its validation loss if measured there."""
    if state is None:
        return ""
    t, step, metrics = config.train, state["step"], state["metrics"]
    text = f" Step {step:,} of {t.steps:,}: {step * t.batch_size * t.seq_len:,} tokens of training"
    if metrics.get("val_loss") is None or metrics.get("val_bpb") is None:
        return f"{text}."
    return (f"{text}, validation loss {metrics['val_loss']:.4f} nats per token, {metrics['val_bpb']:.4f} "
            "bits per byte.")
