"""Nothing is silently wrong: what does not belong together is refused, or named."""

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, TINY, slow_except, words
from test_security import everything
from test_train import assert_equal_runs, stop_after

import compare as compare_command
import eval as eval_command
import export as export_command
from config import load_config
from data import prepare as prepare_module
from data.prepare import Options, default_out, prepare
from data.tokenizer import ByteTokenizer
from evaluation import results
from evaluation.pictures import pyplot
from evaluation.protocols import Evaluation
from evaluation.runs import KNOWN_LATER, check_comparable, read_run
from hf.export import export
from hf.pretrained import resolve_config
from model import GPT
from runtime import checkpoint
from runtime.errors import UserError
from train import train


@pytest.fixture
def command(monkeypatch) -> Callable[..., None]:
    """command(eval_command, "runs/a", ...): a command in this process, without pictures."""
    monkeypatch.setattr("eval.draw_evaluation", lambda *_: None)
    monkeypatch.setattr("compare.draw", lambda *_: [])

    def call(module: Any, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()
    return call


SHORT = ("--lengths", "16,32", "--windows", "8", "--tokens", "256", "--protocol", "nonoverlap,fixed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """A finished run of 12 steps, with checkpoints at 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "rope.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "rope"\n')
    assert train(load_config(folder / "rope.toml", [*TINY, f"run.dir={folder / 'run'}"]), []) == 0
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def without_the_last_checkpoint(run_dir: Path, at: Path) -> Path:
    """A copy of a run as it was at its step before the last checkpoint."""
    shutil.copytree(run_dir, at)
    shutil.rmtree(at / "checkpoints" / "00000012")
    (at / "summary.json").unlink()
    return at


# -----------------------------------------------------------------------------------------------------------
# Evaluations belong to a checkpoint


def test_an_evaluation_names_its_checkpoint(run_dir: Path, tmp_path: Path, command) -> None:
    for folder, step in ((run_dir, 12), (without_the_last_checkpoint(run_dir, tmp_path / "early"), 8)):
        command(eval_command, folder, *SHORT)
        head = json.loads((folder / "eval" / "words.json").read_text())
        state = json.loads((folder / "checkpoints" / f"{step:08d}" / "state.json").read_text())
        assert (head["step"], head["dtype"]) == (step, "float32")
        assert head["checkpoint_sha256"] == state["sha256"]["model.safetensors"]


def test_an_evaluation_of_an_earlier_checkpoint_is_refused(run_dir: Path, tmp_path: Path, command,
                                                           capsys) -> None:
    """Evaluated at step 8 of 12, then trained to the end: its figures are not those of the finished run."""
    early = without_the_last_checkpoint(run_dir, tmp_path / "early")
    command(eval_command, early, *SHORT)
    capsys.readouterr()
    command(compare_command, early, "--out", tmp_path / "out")      # not stale yet, but unfinished
    assert f"run {early} (unfinished: step 8 of 12)" in capsys.readouterr().err
    for report in ("report.md", "report.html"):
        assert f"{early} (unfinished: step 8 of 12)" in (tmp_path / "out" / report).read_text()
    shutil.copytree(run_dir / "checkpoints" / "00000012", early / "checkpoints" / "00000012")
    with pytest.raises(UserError, match=r"evaluated at step 8, but the run has another checkpoint now"):
        command(compare_command, early, "--out", tmp_path / "out")
    command(eval_command, early, *SHORT, "--replace")
    capsys.readouterr()
    command(compare_command, early, "--out", tmp_path / "out")
    assert capsys.readouterr().err == ""


def test_an_evaluation_copied_from_another_run_is_refused(run_dir: Path, tmp_path: Path, command,
                                                          corpus_dir: Path) -> None:
    other = load_config(run_dir / "config.toml", ["train.seed=1", f"run.dir={tmp_path / 'other'}"])
    train(other, [])
    command(eval_command, run_dir, *SHORT)
    shutil.copytree(run_dir / "eval", tmp_path / "other" / "eval")
    with pytest.raises(UserError, match="another checkpoint now"):
        command(compare_command, run_dir, tmp_path / "other", "--out", tmp_path / "out")


def test_an_evaluation_beside_a_damaged_newer_checkpoint_is_used(run_dir: Path, tmp_path: Path, command,
                                                                 capsys) -> None:
    """eval.py passes over the damaged one, so evaluating again would change nothing."""
    path = run_dir / "checkpoints" / "00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    command(eval_command, run_dir, *SHORT)
    capsys.readouterr()
    command(compare_command, run_dir, "--out", tmp_path / "out")
    assert "unfinished: step 8 of 12" in capsys.readouterr().err


def test_an_older_evaluation_is_compared_with_one_line_about_what_is_unknown(run_dir: Path, tmp_path: Path,
                                                                             command, capsys) -> None:
    command(eval_command, run_dir, *SHORT)
    path = run_dir / "eval" / "words.json"
    older = {key: value for key, value in json.loads(path.read_text()).items()
             if key not in KNOWN_LATER}
    path.write_text(json.dumps(older))
    capsys.readouterr()
    command(compare_command, run_dir, "--out", tmp_path / "out")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "did not record its checkpoint" in error


def test_evaluations_in_different_dtypes_are_named_and_never_merged(run_dir: Path, tmp_path: Path, command,
                                                                    capsys) -> None:
    command(eval_command, run_dir, *SHORT)
    path = run_dir / "eval" / "words.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    with pytest.raises(UserError, match="holds an evaluation of another --dtype"):
        command(eval_command, run_dir, *SHORT)
    run = read_run(run_dir, None)
    check_comparable([run, run._replace(head={**run.head, "dtype": "float32"})])
    assert "evaluated in bfloat16 and float32" in capsys.readouterr().err


def test_a_json_that_would_overwrite_another_file_is_refused(run_dir: Path, tmp_path: Path, command) -> None:
    for name in ("x.npz", "x.png", "yarn-0.5", "x.JSON.tmp"):
        with pytest.raises(UserError, match="must end in .json"):
            command(eval_command, run_dir, *SHORT, "--json", tmp_path / name)


def picture(path: Path, **metadata: str) -> None:
    """A picture of the user, who draws by matplotlib too."""
    figure, axes = pyplot().subplots()
    axes.plot([1, 2])
    figure.savefig(path, metadata=metadata)


FILES_OF_THE_USER: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "text": (".npz", lambda path: path.write_text("mine")),
    "own arrays": (".npz", lambda path: np.savez(path, weights=np.ones(3))),
    "another archive": (".npz", lambda path: zipfile.ZipFile(path, "w").writestr("a/b.txt", "mine")),
    "a folder": (".npz", Path.mkdir),
    "no picture": (".png", lambda path: path.write_text("mine")),
    "a picture": (".png", lambda path: picture(path, Software="scanner")),
    "a picture by matplotlib": (".png", picture),
    "a folder of pictures": (".png", Path.mkdir)}


@pytest.mark.parametrize(("what", "is_beside"), slow_except([
    (what, is_beside) for what in FILES_OF_THE_USER for is_beside in (False, True)
    if not (is_beside and "matplotlib" in what)],       # older versions did not sign their pictures
    *((what, False) for what in FILES_OF_THE_USER)))
def test_a_file_that_eval_did_not_write_is_never_replaced(what: str, is_beside: bool, run_dir: Path,
                                                             tmp_path: Path, command, monkeypatch) -> None:
    """With --replace or without it, beside an evaluation or alone; refused before anything is computed."""
    json_path, (suffix, write_mine) = tmp_path / "mine.json", FILES_OF_THE_USER[what]
    if is_beside:
        command(eval_command, run_dir, *SHORT, "--json", json_path)
        json_path.with_suffix(suffix).unlink(missing_ok=True)
    write_mine(json_path.with_suffix(suffix))
    before = everything(tmp_path)
    monkeypatch.setattr(Evaluation, "measure", lambda *_: pytest.fail("it computed first"))
    for flags in ([], ["--replace"]):
        with pytest.raises(UserError, match=rf"mine\{suffix}: was not written by eval.py.* another --json"):
            command(eval_command, run_dir, *SHORT, "--json", json_path, *flags)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("protocol", slow_except(["fixed", "position"], "fixed"))
def test_replace_discards_every_file_that_eval_wrote(protocol: str, run_dir: Path, tmp_path: Path,
                                                     monkeypatch) -> None:
    """As it was written, without the JSON, empty after a power cut, cut short; with an older picture."""
    path = tmp_path / "out.json"
    both = path.with_suffix(".npz"), path.with_suffix(".png")

    def cut(n_bytes: int) -> None:
        for file in both:
            file.write_bytes(file.read_bytes()[:n_bytes])

    monkeypatch.setattr(sys, "argv", ["eval.py", str(run_dir), "--json", str(path), *SHORT[:4], "--protocol",
                                      protocol, "--replace"])
    eval_command.main()
    for change in (lambda: None, path.unlink, lambda: cut(400), lambda: cut(0), lambda: picture(both[1])):
        change()
        eval_command.main()
        assert results.read(path).records and b"eval.py" in both[1].read_bytes()


def test_replace_discards_evaluations_alone(run_dir: Path, command) -> None:
    """Even damaged ones, but no other JSON, such as the run's own."""
    for path in (run_dir / "summary.json", run_dir / "corpus.json"):
        before = path.read_bytes()
        with pytest.raises(UserError, match="was not written by eval.py"):
            command(eval_command, run_dir, *SHORT, "--replace", "--json", path)
        assert path.read_bytes() == before
    command(eval_command, run_dir, *SHORT)
    path = run_dir / "eval" / "words.json"
    for damaged in (path.read_text()[:100], ""):
        path.write_text(damaged)
        command(eval_command, run_dir, *SHORT, "--replace")
        assert read_run(run_dir, None).records


@pytest.mark.parametrize("name", ["words-{}", "words-{}.txt"])
def test_names_with_a_dot_share_no_files(name: str, run_dir: Path, tmp_path: Path, command) -> None:
    """In a corpus, a text and a --json: words-0.5 and words-0.75."""
    for share in ("0.5", "0.75"):
        text = tmp_path / name.format(share)
        text.write_bytes(b"the dog chased another cat\n" * 20)
        command(eval_command, run_dir, *SHORT, "--data", text)
    assert {path.name for path in (run_dir / "eval").iterdir()} == {
        f"words-{share}.{end}" for share in ("0.5", "0.75") for end in ("json", "npz")}
    assert default_out("books-0.5") != default_out("books-0.75")


def test_names_with_tmp_in_them_share_no_files(tmp_path: Path) -> None:
    """x.json was written over x.tmp.npz, and deleted it."""
    for name in ("x.tmp.json", "x.json"):
        results.write(tmp_path / name, results.Results({}, [], {"plain/fixed/8/nll": np.ones(3)}))
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "x.npz", "x.tmp.json", "x.tmp.npz"}


# -----------------------------------------------------------------------------------------------------------
# A run needs nothing outside its folder


def small_llama(folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    config = load_config(ROOT / "configs" / "quick.toml", [*TINY, "model.vocab_size=257"])
    export(folder, folder, GPT(config), config, ByteTokenizer())
    return folder


def test_a_run_stays_the_same_when_the_hugging_face_folder_that_it_began_from_changes(
        tmp_path: Path, corpus_dir: Path) -> None:
    """YaRN is added to its config.json, then the folder is deleted."""
    base, run_dir = small_llama(tmp_path / "base"), tmp_path / "run"
    (tmp_path / "tune.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{base}"\n')
    keys = [key for key in TINY if not key.startswith("model.")]
    arguments = [str(tmp_path / "tune.toml"), *keys, f"run.dir={run_dir}"]
    config = resolve_config(arguments[0], arguments[1:])
    assert train(config, stop_after(12)) == 130
    hf_config = json.loads((base / "config.json").read_text())
    yarn = {**hf_config["rope_parameters"], "rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32}
    (base / "config.json").write_text(json.dumps({**hf_config, "rope_parameters": yarn}))
    assert checkpoint.load_run(run_dir)[1] == config
    with pytest.raises(UserError, match=rf"position.scaling: None -> .*yarn.*{run_dir}/config.toml run.dir"):
        train(resolve_config(arguments[0], arguments[1:]), [])
    assert resolve_config(run_dir / "config.toml", [f"run.dir={run_dir}"]) == config
    shutil.rmtree(base)
    again = resolve_config(run_dir / "config.toml", [f"run.dir={run_dir}"])
    assert again == config and train(again, []) == 0 and (run_dir / "summary.json").exists()
    assert checkpoint.load_run(run_dir)[1] == config


def test_an_evaluation_of_a_hugging_face_folder_is_of_its_present_files(tmp_path: Path, command) -> None:
    base, text = small_llama(tmp_path / "base"), tmp_path / "words.txt"
    text.write_bytes(words(0, 4000))
    command(eval_command, base, *SHORT, "--data", text)
    assert read_run(base, None).records
    config = json.loads((base / "config.json").read_text())
    linear = {"rope_parameters": {**config["rope_parameters"], "rope_type": "linear", "factor": 4.0}}
    other = small_llama(tmp_path / "other")
    for name, content in (("config.json", json.dumps(config | linear).encode()),
                          ("model.safetensors", (other / "model.safetensors").read_bytes())):
        before = (base / name).read_bytes()
        (base / name).write_bytes(content)
        with pytest.raises(UserError, match="is of another config.json, tokenizer.json or weights"):
            read_run(base, None)
        (base / name).write_bytes(before)
    assert read_run(base, None).records


# -----------------------------------------------------------------------------------------------------------
# The text of an evaluation is that of the run


def test_a_corpus_prepared_again_with_another_split_is_not_evaluated_on(tmp_path: Path, command,
                                                                        monkeypatch) -> None:
    """Its validation text is training text of the run; only --data makes that explicit."""
    for i in range(24):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"doc{i:02}.txt").write_bytes(words(i, 1500))
    monkeypatch.chdir(tmp_path)
    prepare("source", Path("words"), "byte")
    (tmp_path / "rope.toml").write_text('[data]\ndir = "words"\n[position]\nencoding = "rope"\n')
    train(load_config("rope.toml", [*TINY, "run.dir=runs/a", "train.steps=2"]), [])
    command(eval_command, "runs/a", *SHORT)
    prepare("source", Path("words"), "byte", Options(val_share=0.5))
    with pytest.raises(UserError, match=f"{tmp_path}/words has another validation text") as caught:
        command(eval_command, "runs/a", *SHORT, "--replace")
    assert "--data words" in str(caught.value)
    command(eval_command, "runs/a", *SHORT, "--data", "words", "--json", "other.json")
    (tmp_path / "elsewhere").mkdir()
    shutil.move("words", "elsewhere/words")
    prepare("source", Path("words"), "byte")
    monkeypatch.chdir("elsewhere")          # a corpus of that name is here too
    with pytest.raises(UserError, match="elsewhere/words has another validation text"):
        command(eval_command, tmp_path / "runs" / "a", *SHORT)
    monkeypatch.chdir(tmp_path)
    command(eval_command, "runs/a", *SHORT)


# -----------------------------------------------------------------------------------------------------------
# A checkpoint belongs to its run


def test_a_checkpoint_of_another_seed_is_refused(run_dir: Path, tmp_path: Path) -> None:
    other = load_config(run_dir / "config.toml", ["train.seed=1", f"run.dir={tmp_path / 'other'}"])
    assert train(other, stop_after(8)) == 130
    for path in (tmp_path / "other" / "checkpoints").iterdir():
        shutil.rmtree(path)
    shutil.copytree(run_dir / "checkpoints" / "00000008", tmp_path / "other" / "checkpoints" / "00000008")
    for call in (lambda: train(other, []), lambda: checkpoint.load_run(tmp_path / "other")):
        with pytest.raises(UserError, match="8: was saved by a run with another config: train.seed: 0 -> 1"):
            call()


@pytest.mark.parametrize(("old", "new"), [("base = 10000.0", "base = 500.0"), ("lr = 0.001", "lr = 0.1"),
                                          ("seed = 0", "seed = 3")])
def test_a_config_edited_in_the_run_is_refused(old: str, new: str, run_dir: Path) -> None:
    """Even if the command is changed in the same way, and although the run is finished."""
    path = run_dir / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match="saved by a run with another config"):
        checkpoint.load_run(run_dir)
    for _ in ("finished", "unfinished"):
        with pytest.raises(UserError, match="saved by a run with another config"):
            train(load_config(path, [f"run.dir={run_dir}"]), [])
        (run_dir / "summary.json").unlink(missing_ok=True)


def test_a_config_edited_after_the_evaluation_is_not_compared(run_dir: Path, command) -> None:
    """A copy with another seed would count as a second sample."""
    command(eval_command, run_dir, *SHORT)
    path = run_dir / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(UserError, match="train.seed: 0 -> 1"):
        read_run(run_dir, None)


def test_a_run_may_move_to_another_machine(run_dir: Path, tmp_path: Path, corpus_dir: Path) -> None:
    """Its folder, its corpus' folder and its device are no part of what was trained."""
    shutil.copytree(corpus_dir, tmp_path / "moved")
    text = (run_dir / "config.toml").read_text()
    text = text.replace(str(corpus_dir), str(tmp_path / "moved")).replace('device = "cpu"', 'device = "auto"')
    (run_dir / "config.toml").write_text(text)
    run_dir.rename(tmp_path / "renamed")
    checkpoint.load_run(tmp_path / "renamed")
    (tmp_path / "renamed" / "summary.json").unlink()
    config = load_config(tmp_path / "renamed" / "config.toml", [f"run.dir={tmp_path / 'renamed'}"])
    assert train(config, []) == 0


def test_another_corpus_json_is_refused(run_dir: Path) -> None:
    path = run_dir / "corpus.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "revision": "another"}))
    with pytest.raises(UserError, match="another corpus than in corpus.json"):
        checkpoint.load_run(run_dir)


def older_checkpoints(run_dir: Path) -> None:
    """Rewrite the checkpoints as an earlier version saved them."""
    for path in run_dir.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        state = {key: state[key] for key in ("step", "wall_s", "metrics", "n_bad", "sha256")}
        path.write_text(json.dumps({**state, "check": checkpoint._check(state)}))


def test_an_older_checkpoint_resumes_with_one_line(run_dir: Path, tmp_path: Path, capsys) -> None:
    early = without_the_last_checkpoint(run_dir, tmp_path / "early")
    older_checkpoints(early)
    config = load_config(early / "config.toml", [f"run.dir={early}"])
    capsys.readouterr()
    assert train(config, []) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "00000008: saved by an older train.py" in warnings[0]
    assert_equal_runs(early, run_dir, 12)
    checkpoint.load_run(early)
    assert capsys.readouterr() == ("", "")


def test_the_summary_names_the_code_of_all_starts(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    early = without_the_last_checkpoint(run_dir, tmp_path / "early")
    monkeypatch.setattr("runtime.run.git_revision", lambda: "abc-dirty")
    config = load_config(early / "config.toml", [f"run.dir={early}"])
    assert train(config, []) == 0
    first, last = (json.loads((folder / "summary.json").read_text()) for folder in (run_dir, early))
    assert last["git_revisions"] == [*first["git_revisions"], "abc-dirty"]
    assert last["git_revision"] == "abc-dirty" and last["git_dirty"] is True


def test_the_card_of_an_exported_checkpoint_has_its_own_loss(run_dir: Path, tmp_path: Path, command) -> None:
    command(export_command, run_dir, tmp_path / "last")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    card = (tmp_path / "last" / "README.md").read_text()
    assert "Step 12 of 12: 1,536 tokens" in card and f"loss {lines[-1]['val_loss']:.4f} nats" in card
    path = run_dir / "checkpoints" / "00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    command(export_command, run_dir, tmp_path / "earlier")
    card = (tmp_path / "earlier" / "README.md").read_text()
    assert "Step 8 of 12: 1,024 tokens of training." in card and "nats" not in card.split("```")[0]


# -----------------------------------------------------------------------------------------------------------
# The text stays what it was


def overwrite(path: Path) -> None:
    """Other ids of the vocabulary, in place, with size and time of modification as before."""
    before = path.stat()
    ids = np.fromfile(path, dtype=np.uint16)
    with path.open("r+b") as file:
        file.write(np.roll(ids, 1).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("split", ["train", "val"])
def test_steps_on_overwritten_text_are_not_saved(split: str, tiny, tmp_path: Path,
                                                 corpus_dir: Path) -> None:
    """The text changes in step 6, after the save of step 4; with the old text the run ends bit-equal."""
    folder = shutil.copytree(corpus_dir, tmp_path / "words")
    config, path = tiny("rope", f"data.dir={folder}"), folder / f"{split}.bin"
    good = path.read_bytes()

    class Overwrite(list):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            if self.looks == 12:
                overwrite(path)
            return False

    with pytest.raises(UserError, match=f"{split}.bin was overwritten while it was in use"):
        train(config, Overwrite())
    assert checkpoint.newest(tmp_path / "run").name == "00000004"
    with pytest.raises(UserError, match=f"{split}.bin is not what was written"):
        train(config, [])
    path.write_bytes(good)
    assert train(config, []) == 0
    assert train(tiny("rope", f"run.dir={tmp_path / 'straight'}"), []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 12)


def test_text_overwritten_during_an_evaluation_leaves_no_figures(run_dir: Path, tmp_path: Path, command,
                                                                 corpus_dir: Path, monkeypatch) -> None:
    folder, forward = shutil.copytree(corpus_dir, tmp_path / "words"), GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda *a, **k: overwrite(folder / "val.bin") or forward(*a, **k))
    with pytest.raises(UserError, match="data words: was overwritten during the evaluation"):
        command(eval_command, run_dir, *SHORT, "--data", folder)
    assert not list(run_dir.glob("eval/words*"))


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path, capsys) -> None:
    source = tmp_path / "books"
    (source / ".git").mkdir(parents=True)
    for i in range(9):
        (source / f"{i}.txt.gz").write_bytes(b"x")
        (source / f"{i}.txt").write_bytes(words(i, 50))
        (source / ".git" / f"{i}").write_bytes(b"x")
    prepare(str(source), tmp_path / "a", "byte")
    assert (f"left out of {source}: 9 files, since only .txt, .jsonl (or .gz, .zst of it) or .parquet files "
            "are read: 0.txt.gz, 1.txt.gz, 2.txt.gz and 6 more\n") in capsys.readouterr().out
    for path in source.glob("*.gz"):
        path.unlink()
    prepare(str(source), tmp_path / "a", "byte")
    assert "left out" not in capsys.readouterr().out


def test_a_dataset_in_a_folder_that_changed_while_it_is_prepared_makes_no_corpus(tmp_path: Path,
                                                                                 monkeypatch) -> None:
    files = [tmp_path / "hub" / f"train-{i}.jsonl" for i in range(3)]
    files[0].parent.mkdir()
    for i, path in enumerate(files):
        path.write_text("".join(json.dumps({"text": words(i, 9 + n).decode()}) + "\n" for n in range(99)))
    write = prepare_module.write

    def changing(*arguments: Any) -> None:
        files[2].write_text(files[2].read_text().replace("dog", "cat"))
        write(*arguments)

    monkeypatch.setattr(prepare_module, "write", changing)
    with pytest.raises(UserError, match="was changed while it was read"):
        prepare(f"hf:{tmp_path / 'hub'}", tmp_path / "out", "byte", Options(val_share=0.3))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["while it is read", "between a kill and a resume"])
def test_a_source_changed_while_it_is_prepared_makes_no_corpus(when: str, tmp_path: Path,
                                                               monkeypatch) -> None:
    """With size and time of modification kept: half of the corpus would be the old text."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(9):
        (source / f"{i}.txt").write_bytes(words(i, 500))
    old = prepare(str(source), tmp_path / "old", "byte")

    def change() -> None:
        for path in source.iterdir():
            before = path.stat()
            path.write_bytes(path.read_bytes()[::-1])
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    class Killed(Exception):
        pass

    write, calls = prepare_module.write, []

    def changing(*arguments: Any) -> None:
        calls.append(1)
        write(*arguments)
        if len(calls) == 2:
            change()
            if when != "while it is read":
                raise Killed("killed")

    monkeypatch.setattr("data.pieces.MAX_PIECE", 400)
    monkeypatch.setattr("data.journal.SAVE_EVERY_S", 0)
    monkeypatch.setattr(prepare_module, "write", changing)
    with pytest.raises(Killed if "kill" in when else UserError, match="killed|was changed while it was read"):
        prepare(str(source), out, "byte", workers=1)
    assert not out.exists()
    meta = prepare(str(source), out, "byte")
    assert meta["splits"] != old["splits"]
    assert meta["splits"] == prepare(str(source), tmp_path / "again", "byte")["splits"]


# -----------------------------------------------------------------------------------------------------------
# Further cases


def test_a_resume_in_another_dtype_or_by_other_code_is_named(run_dir: Path, tmp_path: Path, monkeypatch,
                                                             capsys) -> None:
    early = without_the_last_checkpoint(run_dir, tmp_path / "early")
    config = load_config(early / "config.toml", [f"run.dir={early}"])
    monkeypatch.setattr("runtime.run.dtype_name", lambda *_: "bfloat16")
    monkeypatch.setattr("runtime.run.git_revision", lambda: "abc")
    assert train(config, []) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(lines) == 2 and "another dtype: float32 -> bfloat16" in lines[0] and "-> abc" in lines[1]


def test_records_and_sums_of_two_evaluations_are_not_mixed(run_dir: Path, tmp_path: Path, command) -> None:
    """A kill between the two renames, or a file copied alone."""
    command(eval_command, run_dir, *SHORT)
    eval_dir = run_dir / "eval"
    earlier = (eval_dir / "words.npz").read_bytes()
    command(eval_command, run_dir, *SHORT, "--replace", "--seed", "1")
    assert len(read_run(run_dir, None).records)
    (eval_dir / "words.npz").write_bytes(earlier)
    with pytest.raises(UserError, match="do not add up to the record of nonoverlap at 16"):
        command(compare_command, run_dir, "--out", tmp_path / "out")


def test_seeds_that_began_from_different_weights_are_not_averaged(run_dir: Path, tmp_path: Path,
                                                                  command) -> None:
    """The run of train.init_from was trained on between the two."""
    base = without_the_last_checkpoint(run_dir, tmp_path / "base")
    for seed in (0, 1):
        train(load_config(run_dir / "config.toml", [f"train.init_from={base}", f"train.seed={seed}",
                                                    f"run.dir={tmp_path / f'tuned{seed}'}"]), [])
        command(eval_command, tmp_path / f"tuned{seed}", *SHORT)
        shutil.copytree(run_dir / "checkpoints" / "00000012", base / "checkpoints" / "00000012",
                        dirs_exist_ok=True)
    with pytest.raises(UserError, match="began from different weights"):
        command(compare_command, tmp_path / "tuned0", tmp_path / "tuned1", "--out", tmp_path / "out")


def test_a_corpus_of_a_mixture_that_was_prepared_again_is_refused(tmp_path: Path, tiny, capsys) -> None:
    (tmp_path / "source").mkdir()
    for i in range(9):
        (tmp_path / "source" / f"{i}.txt").write_bytes(words(i, 900))
    prepare(str(tmp_path / "source"), tmp_path / "more", "byte")
    config = tiny("rope", f'data.mixture={{ "{tmp_path / "more"}" = 0.5 }}')
    assert train(config, stop_after(8)) == 130
    prepare(str(tmp_path / "source"), tmp_path / "more", "byte", Options(val_share=0.5))
    with pytest.raises(UserError, match="was started on another corpus"):
        train(config, [])


def test_moments_of_another_seed_are_refused(run_dir: Path, tmp_path: Path) -> None:
    """The file has the right names and shapes."""
    other = load_config(run_dir / "config.toml", ["train.seed=1", f"run.dir={tmp_path / 'other'}"])
    train(other, [])
    (run_dir / "summary.json").unlink()
    for step in ("00000008", "00000012"):
        name = Path("checkpoints") / step / "optimizer.safetensors"
        shutil.copyfile(tmp_path / "other" / name, run_dir / name)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        train(load_config(run_dir / "config.toml", [f"run.dir={run_dir}"]), [])


def test_a_parent_config_edited_before_a_resume_is_refused(tmp_path: Path, corpus_dir: Path) -> None:
    parent, child = tmp_path / "parent.toml", tmp_path / "child.toml"
    parent.write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "rope"\nbase = 10000.0\n')
    child.write_text('extends = "parent.toml"\n')
    keys = [*TINY, f"run.dir={tmp_path / 'run'}"]
    assert train(resolve_config(child, keys), stop_after(8)) == 130
    parent.write_text(parent.read_text().replace("10000.0", "500.0"))
    with pytest.raises(UserError, match=r"position.base: 10000.0 -> 500.0"):
        train(resolve_config(child, keys), [])
