"""A run as a folder of Hugging Face: `python export.py RUN OUT_DIR`.

Writes config.json, model.safetensors (fp32), tokenizer.json, tokenizer_config.json, generation_config.json
and README.md, a model card: what AutoModelForCausalLM and AutoTokenizer load, with no code of ours. Which
architecture a run becomes, and what has none, stands in architectures.py. The other way, a folder of Hugging
Face is given to eval.py, sample.py or train.init_from as it is.
"""

from __future__ import annotations

import signal
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

from hf.export import export
from runtime.command import argument_parser, run_command


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("run", metavar="RUN", type=Path, help="a folder that train.py made")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="folder to write; must be new or empty")
    args = parser.parse_args()
    architecture = export(args.run, args.out)
    print(f"wrote {args.out}: {architecture}; AutoModelForCausalLM.from_pretrained loads it")


if __name__ == "__main__":
    run_command(main)
