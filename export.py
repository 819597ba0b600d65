"""Export a run as a Hugging Face folder: `python export.py RUN OUT_DIR [--extend METHOD]`.

Writes config.json, model.safetensors (fp32), tokenizer.json, tokenizer_config.json, generation_config.json
and a model card, README.md. AutoModelForCausalLM and AutoTokenizer load the folder without this repository.
The supported encodings and architectures are in hf/architectures.py; export fails with one error that lists
every setting in the way. A run that began from a Hugging Face folder keeps its tokenizer, special tokens,
chat template and generation_config.

--extend yarn:factor=4 writes a scaling of RoPE into config.json: the model that eval.py measures under it at
4 L. RUN may then be a Hugging Face folder too, which is copied with other fields in its config.json.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

from pathlib import Path

from base.command import run_command, run_parser
from base.errors import UserError
from config import Config
from evaluation.extension import Rescaled, open_extensions, parse
from hf.export import export, rope_fields, write_extended
from hf.pretrained import is_pretrained, pulled
from hf.rope_parameters import ROPE_TYPES, Fields
from model import GPT
from positions.scaling import SCALINGS
from runtime.checkpoint import open_run


def extended_fields(spec: str, model: GPT, config: Config) -> Fields:
    """The fields of config.json for what --extend names. Raises UserError if there are none."""
    method, *others = parse(spec).methods
    name = spec.partition(":")[0]
    if others or not isinstance(method, Rescaled) or name not in ROPE_TYPES:
        raise UserError(f"--extend {spec}: config.json has no field for it; it has fields for "
                        f"{', '.join(ROPE_TYPES)}")
    field = SCALINGS[name].model_fields.get("factor")
    if field and field.is_required() and "factor" not in method.given:
        raise UserError(f"--extend {spec}: needs a factor; write --extend {name}:factor=4")
    open_extensions([spec], model, config, [config.train.seq_len])      # refuses and warns as eval.py does
    scaling = method.scaling(model, config, config.train.seq_len)
    T = round((scaling.original_length or 0) * getattr(scaling, "factor", 1.0))
    fields = rope_fields(config, scaling, T)
    if fields is None:
        raise UserError(f"--extend {spec}: no class of transformers has this block with this scaling")
    return fields


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--extend", metavar="METHOD", help="a scaling of RoPE, such as yarn:factor=4")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"OUT_DIR {args.out}: exists and is not empty; give another folder")
    folder = Path(pulled(args.run))
    if is_pretrained(folder) and not args.extend:
        raise UserError(f"RUN {folder}: is a Hugging Face folder already; copy it, or give --extend METHOD")
    run = open_run(folder, args.checkpoint, args.device)
    fields = extended_fields(args.extend, run.model, run.config) if args.extend else None
    if fields and is_pretrained(folder):
        write_extended(folder, args.out, fields)
        print(f"wrote {args.out}: {folder} with {args.extend} in its config.json")
        return
    architecture = export(folder, args.out, run.model, run.config, run.tokenizer, fields)
    print(f"wrote {args.out}: {architecture}; AutoModelForCausalLM.from_pretrained loads it")


if __name__ == "__main__":
    run_command(main)
