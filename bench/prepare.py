"""Preparing a corpus: data/prepare.py against nanoGPT's way, in time and peak memory, on the same text.

`python -m bench.prepare [SOURCE] [--megabytes N] [--rounds N] [--out FILE.md]` writes the documents of SOURCE
(default stdlib), again and again until they are N megabytes, to a .parquet file. Both ways tokenize it with
GPT-2's tokenizer on all cores, in turn and in fresh processes: A B A B ...

nanoGPT's way is that of its data/openwebtext/prepare.py: `datasets.map(num_proc)` calls tiktoken's
`encode_ordinary` for each document, and the arrays are copied one shard after another into a np.memmap. Here
a shard has 8,000 documents, as there; its time starts after `load_dataset`, which has copied the text.
data/prepare.py is timed from start to end, without imports. The tokens are compared.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from bench.measuring import fresh, peak_bytes, table
from data.prepare import n_cores, open_source, prepare
from data.sources import Generated
from runtime.command import argument_parser, run_command

ROW_GROUP = 100     # documents
SHARD = 8_000       # documents that nanoGPT copies at a time: 8.0 M in 1,024 shards
NANOGPT, NANOROPE = "nanoGPT's way", "data/prepare.py"
TOKENS = {NANOGPT: "nanogpt.bin", NANOROPE: "nanorope/train.bin"}


def texts(source: str, n_bytes: int) -> Iterator[bytes]:
    """Documents of a source's train split, repeated until they are n_bytes."""
    while n_bytes > 0:
        for shard in open_source(source, Path("bench")).shards:
            for document in shard.documents() if shard.split != "val" else ():
                text = b"" if isinstance(document.text, Generated) else b"".join(document.blocks(0))
                if n_bytes > 0 and document.split == "train" and text:
                    n_bytes -= len(text)
                    yield text


def write_parquet(folder: Path, source: str, n_bytes: int) -> int:
    """Write the text, in prepare.py's layout of a folder with splits; return its size."""
    import pyarrow
    import pyarrow.parquet

    for split in ("train", "val"):
        (folder / "text" / split).mkdir(parents=True)
    (folder / "text" / "val" / "little.txt").write_bytes(b"little")
    written, schema = 0, pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(folder / "text" / "train" / "rows.parquet", schema) as file:
        found = texts(source, n_bytes)
        while rows := [text.decode("utf-8", errors="ignore") for text in islice(found, ROW_GROUP)]:
            written += sum(len(row.encode()) for row in rows)
            file.write(pyarrow.table({"text": rows}, schema))
    return written


def nanogpt_way(folder: Path) -> float:
    """Seconds that nanoGPT's way takes."""
    import datasets
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    dataset = datasets.load_dataset("parquet", data_files=str(folder / "text" / "train" / "rows.parquet"),
                                    split="train", cache_dir=str(folder / "cache"))

    def process(row: dict[str, str]) -> dict[str, object]:
        ids = [*encoding.encode_ordinary(row["text"]), encoding.eot_token]
        return {"ids": ids, "len": len(ids)}

    began = time.perf_counter()
    encoded = dataset.map(process, remove_columns=["text"], num_proc=n_cores(), load_from_cache_file=False)
    n_shards = max(1, len(encoded) // SHARD)
    tokens = np.memmap(folder / TOKENS[NANOGPT], dtype=np.uint16, mode="w+",
                       shape=(int(np.sum(encoded["len"], dtype=np.uint64)),))
    at = 0
    for index in range(n_shards):
        shard = encoded.shard(n_shards, index, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        tokens[at:at + len(ids)] = ids
        at += len(ids)
    tokens.flush()
    return time.perf_counter() - began


def nanorope_way(folder: Path) -> float:
    """Seconds that data/prepare.py takes."""
    began = time.perf_counter()
    prepare(str(folder / "text"), folder / "nanorope", "gpt2")
    return time.perf_counter() - began


WAYS = {NANOGPT: nanogpt_way, NANOROPE: nanorope_way}


def measure(way: str, folder: Path) -> tuple[float, int]:
    """Seconds of one way, and the peak memory in bytes of its largest process."""
    seconds = WAYS[way](folder)
    workers_peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return seconds, max(peak_bytes(), workers_peak)


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    """Run both in turn; return the lines to show."""
    n_bytes = write_parquet(folder, args.source, args.megabytes * 10**6)
    rounds = [{way: fresh(measure, way, folder) for way in WAYS} for _ in range(args.rounds)]
    nanogpt, nanorope = (np.memmap(folder / file, dtype=np.uint16, mode="r") for file in TOKENS.values())
    assert np.array_equal(nanogpt[:-1], nanorope[1:]), "the tokens differ"  # separators come last or first
    rows = []
    for way in WAYS:
        seconds = statistics.median(both[way][0] for both in rounds)
        peak = max(both[way][1] for both in rounds)
        rows.append((way, f"{seconds:.1f}", f"{n_bytes / 1e6 / seconds:.2f}", f"{peak / 1e6:.0f}"))
    ratios = sorted(both[NANOGPT][0] / both[NANOROPE][0] for both in rounds)
    return [*table(("", "s", "MB/s", "peak memory of a process, MB"), rows), "",
            f"**{statistics.median(ratios):.2f} times as fast** (rounds: "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}), the same {len(nanorope) - 1:,} tokens: "
            f"{n_bytes / 1e6:.0f} MB of {Path(args.source).name}, GPT-2's tokenizer, {n_cores()} cores, "
            f"Python {platform.python_version()}."]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", nargs="?", default="stdlib", help="as for data/prepare.py (default stdlib)")
    parser.add_argument("--megabytes", type=int, default=100, help="of text (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times each way (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = compare(args, Path(folder))
    command = "python -m bench.prepare " + " ".join(sys.argv[1:])
    title = "# Preparing a corpus, against nanoGPT's way"
    text = "\n".join([title, "", f"`{command.strip()}`", "", *lines, ""])
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    run_command(main)
