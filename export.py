"""Export a run as a Hugging Face folder, or to the hub: `python export.py RUN OUT_DIR`, or RUN hf:ORG/NAME.

Writes config.json, model.safetensors (fp32), tokenizer.json, tokenizer_config.json, generation_config.json
and a model card, README.md. AutoModelForCausalLM and AutoTokenizer load the folder without this repository.
The supported encodings and architectures are in hf/architectures.py; export fails with one error that lists
every setting in the way. A run that began from a Hugging Face folder keeps its tokenizer, special tokens,
chat template and generation_config. To go the other way, give a Hugging Face folder to eval.py, sample.py or
train.init_from.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # no traceback if Ctrl-C comes during the slow imports
    sys.path.insert(0, str(Path(__file__).resolve().parent))    # `python -P` leaves it out

from hf import hub
from hf.export import export
from runtime.checkpoint import open_run
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("run", metavar="RUN", type=Path, help="a folder that train.py made")
    parser.add_argument("out", metavar="OUT_DIR",
                        help="the folder to write, new or empty; or hf:ORG/NAME, after `hf auth login`")
    parser.add_argument("--private", action="store_true",
                        help="make hf:ORG/NAME private if it is new (default: as the settings of ORG say)")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help="max_position_embeddings of the folder (default: that of training, or of the "
                        "model that the run began from if that is longer)")
    args = parser.parse_args()
    if args.max_length is not None and not 1 <= args.max_length < 2**31:
        raise UserError(f"--max-length {args.max_length}: must be 1 ... 2^31 - 1")
    is_hub = args.out.startswith(hub.PREFIX)
    if is_hub:
        hub.parts(args.out, may_have_revision=False)
    elif args.private:
        raise UserError(f"--private: is for hf:ORG/NAME, and {args.out} is a folder; omit it")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "model") if is_hub else Path(args.out)
        architecture = export(args.run, out, *open_run(args.run)[:4], args.max_length)
        where = hub.push(out, args.out, args.private) if is_hub else args.out
    print(f"wrote {where}: {architecture}; AutoModelForCausalLM.from_pretrained loads it")


if __name__ == "__main__":
    run_command(main)
