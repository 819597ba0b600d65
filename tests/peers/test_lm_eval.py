"""lm-evaluation-harness on an export and on a run by hf.lm_eval, and our protocol `rolling`, agree."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_hf_tokenizer import bpe_file, write_json
from toys import ROOT, call, measured, words

from base.errors import UserError
from data.prepare import prepare
from data.tokenizer import SEPARATOR, Tokenizer
from evaluation.scoring import Evaluation, Settings, open_text
from hf.export import export
from hf.tokenizer import prefix_ids
from runtime.checkpoint import load_run
from train import train

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
pytest.importorskip("lm_eval.models")           # registers hf, unless another model is registered before
pytest.importorskip("accelerate", reason="lm_eval's models need accelerate: pip install 'lm-eval[hf]'")
pytestmark = pytest.mark.slow

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import hf.lm_eval  # noqa: E402, F401  (registers nanorope)

QUICK = ("train.lr=1e-2", "train.steps=4", "run.eval_every=4")
PAGE = (ROOT / "docs/hugging-face.md").read_text()
LF = words(99, 20 * 32 + 7) + "é\n\n".encode()
TEXTS = {"LF": LF, "CRLF": LF.replace(b" ", b"\r\n").replace(b"e", b"\r"),
         "special": LF.replace(b" t", b"<|endoftext|> t<|endoftext|>")}
ROWS = [{"question": "The cat sat on", "choices": [" the mat", " a", " the other mat. It"], "answer": 0},
        {"question": "words and", "choices": [" then", "ce"], "answer": 1}]
QUESTIONS = """dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: question
"""
TASKS = {
    "choose": "task: choose\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    "write": "task: write\noutput_type: generate_until\ndoc_to_target: answer\n"
             "generation_kwargs: {until: [\"e\"], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n"}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch) -> Path:
    """A folder with the task file of docs/hugging-face.md and two more, which is the current one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("my_text.yaml").write_text(PAGE.split("```yaml\n")[1].split("```")[0])
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, content in TASKS.items():
        Path(f"{name}.yaml").write_text(content + QUESTIONS)
    return tmp_path


def write_text(text: bytes) -> None:
    """By the command of docs/hugging-face.md."""
    Path("my-text.txt").write_bytes(text)
    line = next(line for line in PAGE.splitlines() if "json.dumps" in line)
    with open("my-text.jsonl", "w") as out:
        subprocess.run([sys.executable, "-c", line.split('"')[1]], stdout=out, check=True)


def evaluate(model: str, names: list[str], tasks: Path, **arguments: object) -> dict[str, Any]:
    return lm_eval.simple_evaluate(
        model, dict(arguments), names, device="cpu" if model == "hf" else None, batch_size=16,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0)


def by_lm_eval(model: str, tasks: Path, **arguments: object) -> float:
    return evaluate(model, ["my_text"], tasks, **arguments)["results"]["my_text"]["bits_per_byte,none"]


def by_rolling(run: str, length: int) -> tuple[float, dict]:
    model, config, tokenizer = load_run(run)
    text = open_text("my-text.txt", "", tokenizer)
    settings = Settings(["rolling"], [length], length, 8)
    (record,) = measured(Evaluation(model, config, tokenizer, text, settings))
    return record["bpb"], record


def test_bits_per_byte_are_the_same(tiny, tasks: Path) -> None:
    """By the task file of docs/hugging-face.md, on windows of L and, under YaRN, of 4 L. Not all is ASCII."""
    train(tiny("rope", *QUICK, "position.scaling={method='yarn', factor=4.0, original_length=32}"), [])
    export(Path("run"), Path("out"), *load_run("run"))
    settings = json.loads(Path("out/tokenizer_config.json").read_text())
    for name, length in (("LF", 32), ("CRLF", 128), ("special", 32)):
        write_text(TEXTS[name])
        expected, record = by_rolling("run", length)
        assert record["bytes"] == len(TEXTS[name])
        place = {"pretrained": "out", "dtype": "float32", "max_length": length}
        if name == "special":
            assert abs(by_lm_eval("hf", tasks, **place) - expected) > 0.01
            write_json(Path("out"), tokenizer_config={**settings, "split_special_tokens": True})
        assert by_lm_eval("hf", tasks, **place) == pytest.approx(expected, abs=1e-5)
        ours = by_lm_eval("nanorope", tasks, run="run", max_length=length)
        assert ours == pytest.approx(expected, abs=1e-5)


def test_choices_and_texts_are_those_of_the_export(tiny, tasks: Path) -> None:
    train(tiny("rope", *QUICK), [])
    export(Path("run"), Path("out"), *load_run("run"))
    places = {"hf": {"pretrained": "out", "dtype": "float32"}, "nanorope": {"run": "run"}}
    found = {model: evaluate(model, [*TASKS], tasks, max_length=32, **place)["samples"]
             for model, place in places.items()}
    for ours, theirs in zip(found["nanorope"]["choose"], found["hf"]["choose"], strict=True):
        for (ours_nll, ours_top), (theirs_nll, theirs_top) in zip(
                ours["filtered_resps"], theirs["filtered_resps"], strict=True):
            assert ours_nll == pytest.approx(theirs_nll, abs=1e-4) and bool(ours_top) == bool(theirs_top)
    texts = [[row["resps"] for row in found[model]["write"]] for model in places]
    assert texts[0] == texts[1] and any(text for text in texts[0])


@pytest.mark.parametrize("encoding", ["t5", "learned"])
def test_any_encoding_gets_numbers(encoding: str, tiny, tasks: Path) -> None:
    """Of t5 beyond L; rolling perplexity is our protocol's."""
    train(tiny(encoding, *QUICK), [])
    write_text(LF[:1000])
    length = 32 if encoding == "learned" else 96
    found = evaluate("nanorope", ["my_text", *TASKS], tasks, run="run", max_length=length)["results"]
    assert found["my_text"]["bits_per_byte,none"] == pytest.approx(by_rolling("run", length)[0], abs=1e-6)
    assert {"choose", "write"} < found.keys()
    if encoding == "learned":
        with pytest.raises(UserError, match="defined at positions 0 ... 31 only"):
            evaluate("nanorope", ["my_text"], tasks, run="run", max_length=64)


def test_the_command_prints_a_table(tiny, tasks: Path, monkeypatch) -> None:
    ours_alone = partial(TaskManager, include_defaults=False)     # its own list takes 20 s
    monkeypatch.setattr("lm_eval.tasks.TaskManager", ours_alone)
    train(tiny("t5", *QUICK), [])
    write_text(LF[:200])
    ended = call("hf.lm_eval", tasks / "run", "--length", 64, "--tasks", "my_text", "--include_path", tasks)
    assert ended.code == 0, ended.err
    assert "bits_per_byte" in ended.out


def test_rolling_scores_a_separator_that_the_tokenizer_adds(tiny, tasks: Path, corpus_dir: Path) -> None:
    """As lm_eval does: the template's separator is a target after another one, of a folder and of a run."""
    template = {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": SEPARATOR, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SEPARATOR: {"id": SEPARATOR, "ids": [499], "tokens": [SEPARATOR]}}}
    write_json(Path("source"), tokenizer=bpe_file({"post_processor": template}), config={
        "model_type": "llama", "vocab_size": 500, "bos_token_id": 499})
    Path("text.txt").write_bytes(words(0, 4000) + b"\n\n" + words(1, 4000))
    prepare("text.txt", Path("corpus"), "source")
    train(tiny("rope", *QUICK, "model.vocab_size=500", "data.dir=corpus"), [])
    export(Path("run"), Path("out"), *load_run("run"))
    tokenizer: Tokenizer = load_run("run")[2]
    assert prefix_ids(tokenizer) == [499] == prefix_ids(load_run("out")[2])
    write_text(LF)
    theirs = by_lm_eval("hf", tasks, pretrained="out", dtype="float32", max_length=32)
    n = 1 + len(tokenizer.encode(LF))
    for folder in ("run", "out"):
        expected, record = by_rolling(folder, 32)
        assert record["tokens"] == n and record["bytes"] == len(LF)
        assert theirs == pytest.approx(expected, abs=1e-5)
        assert by_lm_eval("nanorope", tasks, run=folder, max_length=32) == pytest.approx(expected, abs=1e-5)
