"""A run as a folder of Hugging Face: `python export.py RUN OUT_DIR`.

Writes config.json, model.safetensors (fp32), tokenizer.json, tokenizer_config.json, generation_config.json
and README.md, a model card: what AutoModelForCausalLM and AutoTokenizer load, with no code of ours. Which
architecture a run becomes, and what has none, stands in architectures.py. The other way, a folder of Hugging
Face is given to eval.py, sample.py or train.init_from as it is.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from config import Config, to_toml
from data.tokenizer import Tokenizer
from hf.architectures import choose
from hf.tokenizer import separator_name, tokenizer_json
from model import GPT
from runtime.checkpoint import load_run
from runtime.errors import UserError
from runtime.files import read_json


def export(run: Path, out: Path) -> str:
    """Write the folder, complete or not at all; return the architecture's name. Raises UserError."""
    model, config, tokenizer = load_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT_DIR {out}: exists and is not empty; give another folder")
    try:
        architecture = choose(config)
    except UserError as error:
        raise UserError(*(f"{run}: {problem}" for problem in error.problems)) from error
    fields = architecture.config_json(config)
    eot = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    separator, longest = separator_name(tokenizer), fields[architecture.length]
    files: dict[str, Any] = {
        "config.json": {**fields, **eot, "pad_token_id": None, "use_cache": True, "torch_dtype": "float32"},
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
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (new / name).write_text(text, encoding="utf-8")
        (new / "README.md").write_text(card(run, config, model, tokenizer, architecture.class_name),
                                       encoding="utf-8")
        save_file(architecture.export_tensors(weights, config), new / "model.safetensors", {"format": "pt"})
        if out.exists():
            out.rmdir()
        new.rename(out)
    return architecture.class_name


def card(run: Path, config: Config, model: GPT, tokenizer: Tokenizer, architecture: str) -> str:
    """The model card: what it is, how to load it, and the config it was trained with."""
    separator = separator_name(tokenizer)
    result = ""
    if (run / "summary.json").is_file():
        try:
            summary = read_json(run / "summary.json")
            result = (f" {summary['tokens']:,} tokens of training, validation loss {summary['val_loss']:.4f} "
                      f"nats a token, {summary['val_bpb']:.4f} bits a byte.")
        except (ValueError, KeyError, TypeError):       # damaged, or a loss that was no number: no figures
            pass
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {run.resolve().name}

{architecture}, {model.n_parameters():,} parameters, position encoding {config.position.encoding}, trained at
{config.train.seq_len} tokens.{result}

Every document of its training opens with `{separator}` (id {tokenizer.eot}), which is both bos_token and
eos_token here, whatever the tokenizer's eos_token was before. The tokenizer does not put it there by itself:
begin a prompt with `tokenizer.bos_token`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
prompt = tokenizer(tokenizer.bos_token + "Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

Trained by nanorope with this config:

```toml
{to_toml(config)}```
"""
