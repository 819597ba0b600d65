"""lm-evaluation-harness loads an exported folder, and its rolling perplexity is our protocol `rolling`."""

import os
from pathlib import Path

import pytest
from conftest import ROOT, measured, words

from evaluation.scoring import Evaluation, Settings
from evaluation.windows import open_text
from hf.export import export
from runtime.checkpoint import load_run
from train import train

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate", reason="lm_eval's models need accelerate: pip install 'lm-eval[hf]'")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("length", "overrides"), [
    (32, []), (128, ["position.scaling={method='yarn', factor=4.0, original_length=32}"])])
def test_bits_per_byte_are_the_same(length: int, overrides: list[str], tiny, tmp_path: Path,
                                    monkeypatch) -> None:
    """By the task file of docs/hugging-face.md, on windows of L and, under YaRN, of 4 L. Not all is ASCII."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    train(tiny("rope", "train.lr=1e-2", "train.steps=40", *overrides), [])
    model, config, tokenizer = load_run("run")
    export(Path("run"), Path("out"), model, config, tokenizer)
    text = words(99, 94 * 32 + 7) + "é\n\n".encode()
    Path("my-text.txt").write_bytes(text)
    task = (ROOT / "docs/hugging-face.md").read_text().split("```yaml\n")[1].split("```")[0]
    Path("my_text.yaml").write_text(task)
    found = lm_eval.simple_evaluate(
        "hf", f"pretrained=out,dtype=float32,max_length={length}", ["my_text"], device="cpu", batch_size=16,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0)
    ours = open_text("my-text.txt", "", tokenizer)
    settings = Settings(["rolling"], [length], length, 8)
    (record,) = measured(Evaluation(model, config, tokenizer, ours, settings))
    assert record["bytes"] == len(text)
    assert found["results"]["my_text"]["bits_per_byte,none"] == pytest.approx(record["bpb"], abs=1e-5)
