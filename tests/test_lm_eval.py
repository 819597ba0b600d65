"""lm-evaluation-harness loads an exported folder, and its rolling perplexity is our protocol `rolling`."""

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, words

from config import load_config
from evaluation.protocols import Evaluation, Settings
from evaluation.windows import Text, open_text, rolling_windows
from hf.export import export
from runtime.checkpoint import load_run
from train import train

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate", reason="lm_eval's models need accelerate: pip install 'lm-eval[hf]'")


def test_windows_are_those_of_rolling() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for n, length in ((1, 8), (7, 8), (8, 8), (9, 8), (61, 8), (64, 8), (30, 1), (5, 99)):
        document = np.arange(100, 101 + n)
        theirs = list(map(make_disjoint_window, get_rolling_token_windows(
            document[1:].tolist(), document[0], length, context_len=1)))
        ours = [(document[w.start:w.end + 1 - w.n_scored], document[w.end + 1 - w.n_scored:w.end + 1])
                for w in rolling_windows(Text("x", [document]), length)]
        assert [(context.tolist(), targets.tolist()) for context, targets in ours] == theirs


@pytest.mark.slow
@pytest.mark.parametrize(("length", "overrides"), [
    (32, []), (128, ["position.scaling={method='yarn', factor=4.0, original_length=32}"])])
def test_bits_per_byte_are_the_same(length: int, overrides: list[str], tmp_path: Path, corpus_dir: Path,
                                    monkeypatch) -> None:
    """By the task file of docs/hugging-face.md, on windows of L and, under YaRN, of 4 L. Not all is ASCII."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "rope"\n')
    train(load_config("run.toml", [*TINY, "run.dir=run", "train.lr=1e-2", "train.steps=40",
                                  *overrides]), [])
    export(Path("run"), Path("out"), *load_run(Path("run")))
    text = words(99, 94 * 32 + 7) + "é\n\n".encode()
    Path("my-text.txt").write_bytes(text)
    task = (ROOT / "docs/hugging-face.md").read_text().split("```yaml\n")[1].split("```")[0]
    Path("my_text.yaml").write_text(task)
    found = lm_eval.simple_evaluate(
        "hf", f"pretrained=out,dtype=float32,max_length={length}", ["my_text"], device="cpu", batch_size=16,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0)
    model, config, tokenizer = load_run("run")
    ours = open_text("my-text.txt", "", tokenizer)
    (record,) = Evaluation(model, config, tokenizer, ours, Settings(["rolling"], [length], length, 8)).run()
    assert record["bytes"] == len(text)
    assert found["results"]["my_text"]["bits_per_byte,none"] == pytest.approx(record["bpb"], abs=1e-5)
