"""Promise 10: a mistake ends with exit code 2 and `error:` lines that say what to type instead."""

import shutil
from pathlib import Path

import pandas
import pytest
import torch
from test_promises import SMALL, Case, one_error
from toys import ROOT, call, words

from config import load_config, to_toml

# Command, arguments, what the error must contain. Names in braces are of the folder that `made` makes.
MISTAKES: list[tuple[str, str, list[str]]] = [
    ("train", "configs/quik.toml", ["did you mean", "quick.toml?"]),
    ("train", "train.lr=1", ["train.lr=1", ".toml file"]),
    ("train", "{config} position.encoding=alibi position.base=5.0", ["position.base"]),
    ("train", "{config} train.steps=2.5 train.lr=-1", ["valid integer (got 2.5)", "greater than 0 (got -1)"]),
    ("train", "{config} data.dir=nowhere", ["nowhere", "data/prepare.py"]),
    ("train", "{config} train.seq_len=99999", ["train.seq_len = 99999", "shorten it"]),
    ("train", "{config} model.vocab_size=9", ["model.vocab_size", "257"]),
    ("train", "{config} train.init_from=nowhere", ["nowhere", "give the folder of one"]),
    ("train", "{config} run.dir={mine}", ["{mine}", "run.dir"]),
    ("train", "{config} train.device=cuda", ["train.device", "auto or cpu"]),
    ("train", "{config} train.dtype=float16 train.parallel=fsdp", ["bfloat16 or ddp"]),
    ("train", "{config} --lr 1e-3", ["train.lr="]),
    ("train", "{config} train.learning_rate=1 train.block_size=64", ["mean train.lr?", "train.seq_len?"]),
    ("train", "quick", ["did you mean configs/quick.toml?"]),
    ("train", "{config} n_head=4", ["did you mean model.n_head=4?"]),
    ("train", "{config} model.n_embd=192 model.n_head=64", ["n_embd / n_head), got 3"]),
    ("train", "{config} position.scaling=yarn", ['position.scaling={{method="yarn",factor=4.0}}']),
    ("train", "{config} position.encoding=RoPE", ["did you mean rope?"]),
    ("train", "{config} position.encoding=", ["unknown encoding ''; choose from none, learned"]),
    ("train", "{config} configs/alibi.toml", ["a second config", "sweep.py"]),
    ("train", "{config} data.dir={texts}", ["holds text", "prepare.py {texts} --out {texts}-corpus"]),
    ("train", "{config} --dry-run train.init_from={run} model.n_embd=64", ["model.n_embd: 16 -> 64"]),
    ("train", "{config} --dry-run train.init_from={run} data.dir={bpe}", ["257", "--tokenizer {run}"]),
    ("train", "{config} --dry-run train.init_from={bpe_run} data.dir={bpe_too}", ["--tokenizer {bpe_run}"]),
    ("train", "{config} --dry-run --tokens-per-s 0", ["--tokens-per-s", "at least 1"]),
    ("sweep", "{config} --eval --windows", ['--eval="VALUE"']),
    ("train", "{orphan}", ["nowhere.toml", "which {orphan} extends"]),
    ("train", "{slip}", ["did you mean extends?"]),
    ("train", "{config} run.dir={run} train.steps=2 train.warmup=0", ["train.init_from={run}"]),
    ("train", "{config} data.dir={cut}", ["{cut}", "train.bin", "prepare"]),
    ("train", "{circle}", ["extends itself in a circle"]),
    ("eval", "nowhere", ["nowhere", "give a folder that train.py made, such as runs/quick"]),
    ("eval", "{runs}", ["a folder of runs", "such as {runs}/"]),
    ("eval", "{run} --lengths 64,x", ["--lengths: 64,x: must be", "such as 0,1,2"]),
    ("eval", "{run} --protocol fixd", ["did you mean fixed?"]),
    ("eval", "{hf} --data {text} --protocol trigram", ["--protocol trigram", "(none)"]),
    ("eval", "{run} --extend yran", ["did you mean yarn?"]),
    ("train", '{config} position.scaling={{method="yarn",fator=4.0}}', ["train.py --help yarn"]),
    ("eval", "{run} --extend yarn:beta=2", ["yarn.beta", "did you mean yarn.beta_"]),
    ("eval", "{run} --extend leaky_rerope:window=31 --lengths 64", ["at most L - 2 = 30, got 31"]),
    ("eval", "{run} --extend dual_chunk:chunk=40 --lengths 64", ["at most L = 32 together"]),
    ("eval", "{run} --seed -1", ["--seed -1: must be 0 or more"]),
    ("eval", "{run} --lengths 16 --protocol trigram", ["trigram", "it needs L among --lengths"]),
    ("eval", "{run} --json out.txt", ["--json out.txt: must end in .json"]),
    ("eval", "{learned} --extend yarn --lengths 16", ["needs a rotary encoding; this run has learned"]),
    ("eval", "{learned} --lengths 64", ["learned ends at 32 positions; give a shorter one"]),
    ("eval", "{run} --data {texts}", ["holds text", "prepare.py {texts} --out {texts}-corpus"]),
    ("eval", "{run} --data nowhere", ["nowhere: no such file or folder", "data/prepare.py"]),
    ("eval", "{run} --device cuda", ["--device cuda", "auto or cpu"]),
    ("sample", "{run} --checkpoint best", ["--checkpoint best", "run.keep_best", "steps 1"]),
    ("eval", "{hf}", ["--data: missing", "give a text file or a prepared corpus"]),
    ("compare", "nowhere", ["nowhere: no such folder", "a folder of them"]),
    ("compare", "{run}", ["eval.py {run}"]),
    ("sweep", "train.lr=1", ["config"]),
    ("sweep", "{config} --seeds 0,a", ["--seeds: 0,a: must be", "such as 0,1,2"]),
    ("sweep", "{config} --grid train.lr", ["such as train.lr=1e-3,2e-3"]),
    ("sweep", "{config} --grid train.bach_size=1,2", ["batch_size"]),
    ("sweep", "{config} run.dir=x", ["run.dir", "--runs DIR"]),
    ("sweep", "{config} --slurm timeout_min=5", ["--submitit FOLDER"]),
    ("sample", "{run} --temperature nan", ["--temperature nan: must be 0 or more"]),
    ("sample", "{learned} --prompt dog --tokens 30", ["0 ... 31 only", "give fewer tokens"]),
    ("sample", "hf:nonsense", ["hf:ORG/NAME"]),
    ("export", "nowhere {hf}-2", ["nowhere", "give a folder that train.py made"]),
    ("export", "{run} {mine}", ["{mine}", "another folder"]),
    ("export", "{cope} {hf}-2", ["does not support position.encoding = 'cope'"]),
    ("export", "{hf} {hf}-2 --extend self_extend", ["config.json has no field for it", "pi, ntk"]),
    ("export", "{run} {hf}-2 --extend yarn", ["--extend yarn:factor=4"]),
    ("export", "{run} {hf}-2 --extend yarn:factor=4,beta_fast=0.5", ["beta_fast must be above beta_slow"]),
    ("data.prepare", "{text} --tokenizer gpt3", ["gpt3", "gpt2"]),
    ("data.prepare", "{empty} --out {out}", ["empty.txt", "add text"]),
    ("data.prepare", "{rows} --out {out}", ["give one of ['body'] as --text-column"]),
    ("data.prepare", "{torn} --out {out}", ["{torn}", "document 2", "repair it"]),
    ("data.prepare", "{partial} --out {out}", ["give a copy that has all of it, or rename the folder"]),
    ("data.prepare", "{text} --val-share 0 --out {out}", ["must be between 0 and 1, such as 0.1"]),
    ("data.prepare", "stdlib --length 64 --out {out}", ["does not use --length; omit it"]),
    ("data.prepare", "stdlib --revision main --out {out}", ["does not use --revision; omit it"]),
    ("data.prepare", "stdlib --text-column body --out {out}", ["does not use --text-column; omit it"]),
    ("data.prepare", "sdists:list.csv --val-share 0.2 --out {out}", ["does not use --val-share; omit it"]),
    ("data.prepare", "parity --separator x --out {out}", ["does not use --separator; omit it"]),
    ("data.prepare", "{text} --tokenizer hf:0 --out {out}", ["hf:0/tokenizer.json: missing"]),
    ("data.prepare", "sdists:list.csv {text} --out {out}", ["sdists:list.csv", "prepare it alone"]),
    ("data.prepare", "needles variables --out {out}", ["source needles", "data.mixture"]),
    ("data.prepare", "addition --length 8 --out {out}", ["--length 24"]),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> dict[str, Path]:
    """Trained runs, and texts and corpora in which something is wrong, by name."""
    folder = tmp_path_factory.mktemp("mistakes")
    case = Case(folder, corpus_dir)
    for name in ("run", "learned", "cope"):
        encoding = f"position.encoding={'rope' if name == 'run' else name}"
        assert case.train(name, "train.steps=1", "train.warmup=0", encoding).code == 0
    assert call("export", folder / "run", folder / "hf").code == 0
    for name, text in (("bpe", words(0, 9000)), ("bpe_too", words(0, 9000)[::-1])):
        (folder / f"{name}.txt").write_bytes(text)
        command = ["data.prepare", folder / f"{name}.txt", "--tokenizer", "bpe:266", "--out", folder / name]
        assert call(*command).code == 0
    assert case.train("bpe_run", "train.steps=1", "train.warmup=0", f"data.dir={folder / 'bpe'}").code == 0
    config = to_toml(load_config(case.config, [*SMALL, f"run.dir={folder / 'new'}"]))
    for name, content in {
            "config": config, "mine/mine.md": "mine", "texts/a.txt": "text",
            "text.txt": "text " * 99, "empty.txt": "",
            "orphan.toml": 'extends = "nowhere.toml"', "slip.toml": 'extend = "quick.toml"',
            "circle.toml": 'extends = "circle.toml"',
            "rows.jsonl": '{"body": "text"}\n' * 9, "torn.jsonl": '{"text": "text"}\n{"text": "te',
            }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "partial" / "partial-train").mkdir(parents=True)
    pandas.DataFrame({"text": ["text"] * 99}).to_parquet(folder / "partial" / "partial-train" / "0.parquet")
    shutil.copytree(corpus_dir, folder / "cut")
    (folder / "cut" / "train.bin").write_bytes(b"cut short")
    names = ("config orphan.toml slip.toml circle.toml run learned cope hf mine text.txt texts bpe bpe_too "
             "bpe_run empty.txt rows.jsonl torn.jsonl partial cut new out")
    return {"runs": folder} | {name.partition(".")[0]: folder / name for name in names.split()}


@pytest.mark.parametrize(("command", "arguments", "expected"), MISTAKES,
                         ids=[f"{command} {arguments}" for command, arguments, _ in MISTAKES])
def test_a_mistake_is_an_error_line_that_says_what_to_type(command: str, arguments: str, expected: list[str],
                                                           made: dict[str, Path], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    error = one_error(call(command, *(word.format(**made) for word in arguments.split())))
    missing = [text for text in expected if text.format(**made) not in error]
    assert not missing, error
    left = [made["new"] / "config.toml", made["out"], Path(f"{made['hf']}-2")]
    assert not any(path.exists() for path in left)
