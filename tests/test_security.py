"""Nothing that comes from others is executed, followed out of its folder, or believed about its size."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, slow_except
from safetensors.torch import load_file, save_file

import eval as eval_module
import sample
import train as train_module
from config import load_config
from data.loader import Corpus
from data.tokenizer import load_tokenizer
from evaluation.runs import read_run
from hf.tokenizer import read_tokenizer
from runtime import checkpoint
from runtime.command import run_command
from runtime.errors import UserError
from train import train

SECRET = "hunter2hunter2"
MINIMAL = '[data]\ndir = "x"\n[position]\nencoding = "rope"\n'


# -----------------------------------------------------------------------------------------------------------
# The source


def tracked_sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
                            cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [p for p in paths if p.exists()] or [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]


BANNED_CALLS = {
    "exec", "eval", "compile", "__import__", "builtins.exec", "builtins.eval", "os.system", "os.popen",
    "runpy.run_path", "runpy.run_module", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load",
    "marshal.loads", "shelve.open", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads",
    "joblib.load", "pd.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "jsonpickle.decode",
    "tempfile.mktemp", "torch.jit.load", "torch.hub.load", "torch.utils.cpp_extension.load"}
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}
BANNED_KEYWORDS = {("weights_only", "False"), ("shell", "True"), ("trust_remote_code", "True"),
                   ("allow_pickle", "True")}
NEEDED_KEYWORDS = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False"),
                   "numpy.load": ("allow_pickle", "False")}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in BANNED_MODULES)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in BANNED_MODULES:
            yield f"from {node.module}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {(k.arg, ast.unparse(k.value)) for k in node.keywords}
        if name in BANNED_CALLS or keywords & BANNED_KEYWORDS:
            yield ast.unparse(node)
        if name in NEEDED_KEYWORDS and NEEDED_KEYWORDS[name] not in keywords:
            yield f"{ast.unparse(node)} without {NEEDED_KEYWORDS[name]}"


def test_no_source_executes_text_or_unpickles() -> None:
    paths = tracked_sources()
    assert len(paths) > 40 and ROOT / "train.py" in paths
    found = {str(path.relative_to(ROOT)): problem for path in paths
             for problem in offences(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize("text", [
    "eval('1')", "exec(open('c.py').read())", "import pickle", "from pickle import load", "pickle.load(f)",
    "torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p)", "np.load(p, allow_pickle=True)",
    "subprocess.run('ls', shell=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
    "os.system('ls')", "yaml.load(f)", "__import__('os')"])
def test_the_ban_sees_what_it_is_for(text: str) -> None:
    assert list(offences(ast.parse(text)))


@pytest.mark.parametrize("text", ["model.eval()", "re.compile('x')", "torch.compile(m)", "json.load(f)",
                                  "torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)"])
def test_the_ban_leaves_the_rest(text: str) -> None:
    assert list(offences(ast.parse(text))) == []


# -----------------------------------------------------------------------------------------------------------
# The run's folder


@pytest.mark.parametrize("run_dir", [
    "..", "~/x", "runs/..", "../outside/../run", "runs/../../x", "/", ".", "runs/a b", "runs/x;rm",
    "runs/$HOME", "runs/ü", "runs/" + "x" * 101, "runs/a\\nb", "runs/a\\u0000b", "a\\u0000b/run",
    "runs/\\u001b[31m"])
def test_a_run_has_a_plain_name(run_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'{MINIMAL}[run]\ndir = "{run_dir}"\n')
    with pytest.raises(UserError, match=r"^run.dir in .*must be FOLDER/NAME") as caught:
        load_config(path)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize("run_dir", ["x", "./x", "runs/x/", "/data/me/runs/X.-_9", "a b/ü/" + "x" * 100])
def test_its_folder_may_lie_anywhere(run_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(MINIMAL)
    assert load_config(path, [f'run.dir="{run_dir}"']).run.dir == run_dir


def test_a_config_whose_file_name_names_no_run_must_say_one(tmp_path: Path) -> None:
    path = tmp_path / "my config.toml"
    path.write_text(MINIMAL)
    with pytest.raises(UserError, match="after the config's file name.*got 'runs/my config'"):
        load_config(path)
    assert load_config(path, ["run.dir=runs/mine"])


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("link", slow_except(
    ["", "checkpoints", "metrics.jsonl", "summary.json", "corpus.json", "wandb", ".config.toml.tmp",
     "checkpoints/.tmp-00000012", "checkpoints/00000008", "checkpoints/00000008/model.safetensors", "eval"],
    "", "checkpoints"))
def test_no_link_is_followed_out_of_the_runs(link: str, tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    outside, runs = tmp_path / "outside", tmp_path / "runs"
    config = tiny("rope", f"run.dir={runs / 'mine'}", "train.steps=8")
    train(config, [])
    (runs / "mine" / "summary.json").unlink()
    outside.mkdir()
    path = runs / "mine" / link
    target = outside / "there"
    if path.exists():
        shutil.move(path, target)
    elif "." in link:
        target.write_text("keep me")
    else:
        target.mkdir()
    path.symlink_to(target)
    before = everything(tmp_path)
    with pytest.raises(UserError, match=f"is a link that leads out of {runs}"):
        train(config, [])
    with pytest.raises(UserError, match="leads out of"):
        checkpoint.load_run(runs / "mine")
    with pytest.raises(UserError, match="leads out of"):
        read_run(runs / "mine", None)
    assert everything(tmp_path) == before


def test_a_link_inside_the_runs_is_fine(tiny, tmp_path: Path) -> None:
    config = tiny("rope", f"run.dir={tmp_path / 'runs' / 'mine'}", "train.steps=4")
    train(config, [])
    shutil.move(tmp_path / "runs" / "mine" / "checkpoints", tmp_path / "runs" / "kept")
    (tmp_path / "runs" / "mine" / "checkpoints").symlink_to(tmp_path / "runs" / "kept")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "runs")          # the folder of the runs is the user's
    assert checkpoint.load_run(tmp_path / "elsewhere" / "mine")


# -----------------------------------------------------------------------------------------------------------
# Configs from others


def config_error(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    text = "\n".join(caught.value.problems)
    assert len(text.splitlines()) == len(caught.value.problems) and len(text) < 2000
    assert text.replace("\n", "").isprintable()
    return text


@pytest.mark.parametrize("content", [
    f"password: {SECRET}", f"AWS_SECRET={SECRET}", f"[default]\nkey = {SECRET}", f'token = "{SECRET}"',
    f'[secrets]\ntoken = "{SECRET}"', f"{SECRET}\n", f'a = "{SECRET}', b"\xff\xfe" + SECRET.encode()])
def test_extending_someones_secrets_does_not_show_them(content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "secrets").write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "a.toml").write_text('extends = "secrets"\n' + MINIMAL)
    error = config_error(tmp_path / "a.toml")
    assert SECRET not in error and "secrets" in error


def test_a_config_that_is_no_small_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for parent in ("fifo", "/dev/zero", "circle", "a\\u0000b", "x" * 300, ".", "", "a.toml"):
        path.write_text(f'extends = "{parent}"')
        assert config_error(path)
    for content in ("#\n" * 100_000, "a=" + "[" * 50_000, "train.lr=" + "9" * 5000,
                    "train.lr=0x" + "f" * 9999, "model.n_embd=1" + "0" * 400,
                    "train.lr." + "a." * 5000 + "b=1",
                    'run.dir="' + "x" * 100_000 + '"', '"a\\nb\\u001b[31m"=1', "model.n_head=1e400"):
        path.write_text('data.dir="x"\nposition.encoding="rope"\n' + content)
        assert config_error(path)
    for i in range(40):
        (tmp_path / f"{i}.toml").write_text(f'extends = "{i + 1}.toml"')
    assert "more than 20" in config_error(tmp_path / "0.toml")


def test_config_text_is_never_executed(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    path = tmp_path / "a.toml"
    code = f"__import__('os').system('touch {sentinel}')"
    path.write_text(f'[data]\ndir = "{code}"\n[position]\nencoding = "rope"\n')
    config = load_config(path, [f"run.wandb_project={code}"])
    with pytest.raises(UserError):
        train(config, [])
    path.write_text(f"import os\n{code}\n")
    config_error(path)
    assert not sentinel.exists()


# -----------------------------------------------------------------------------------------------------------
# Hostile files in a run and a corpus


class Run:
    """A finished run with an evaluation, on a corpus of its own, and the commands that open its files."""

    def __init__(self, folder: Path, corpus_dir: Path, tiny: Callable) -> None:
        self.corpus, self.run = folder / "corpus", folder / "run"
        shutil.copytree(corpus_dir, self.corpus)
        self.config = tiny("rope", f"data.dir={self.corpus}", "train.steps=4")
        train(self.config, [])

    def commands(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
        """The exit codes of all that read it."""
        calls = {train_module: None, sample: [str(self.run), "--tokens", "2"],
                 eval_module: [str(self.run), "--lengths", "32", "--windows", "4", "--tokens", "512"]}
        for module, arguments in calls.items():
            monkeypatch.setattr(sys, "argv", ["command", *(arguments or [])])
            main = module.main if arguments else lambda: train(self.config, [])
            with pytest.raises(SystemExit) as caught:
                run_command(main)
            yield caught.value.code or 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")

    def make(encoding: str, *overrides: str):
        path = folder / "rope.toml"
        path.write_text(MINIMAL)
        return load_config(path, [*TINY, f"run.dir={folder / 'run'}", *overrides])

    run = Run(folder, corpus_dir, make)
    with pytest.MonkeyPatch.context() as patch:
        assert list(run.commands(patch)) == [0, 0, 0]
    return folder


def rehash_checkpoint(folder: Path) -> None:
    """Make the checksums of a checkpoint true, as whoever made it hostile would."""
    state = json.loads((folder / "state.json").read_text())
    state.pop("check")
    state["sha256"] = {name: checkpoint._sha256(folder / name) for name in checkpoint.FILES}
    (folder / "state.json").write_text(json.dumps({**state, "check": checkpoint._check(state)}))


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rehash_corpus(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    for about in meta["splits"].values():
        about["sha256"] = {name: file_sha256(folder / name) for name in about["sha256"]}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "verified.json").unlink(missing_ok=True)


def hostile_pickles(sentinel: Path) -> dict[str, bytes]:
    """Pickles that make a file when loaded: bare, inside a .npy of objects, and as torch.save zips them."""
    bare = f"cos\nsystem\n(S'touch {sentinel}'\ntR.".encode()
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    import io
    import zipfile
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", bare)
        archive.writestr("archive/version", "3\n")
        archive.writestr("plain/fixed/32/nll.npy", b"\x93NUMPY\x01\x00v\x00" + header + bare)
    return {"bare": bare, "npy": b"\x93NUMPY\x01\x00v\x00" + header + bare, "zip": zipped.getvalue()}


def test_those_pickles_bite(tmp_path: Path) -> None:
    """Else nothing would be shown by their doing nothing."""
    (tmp_path / "p").write_bytes(hostile_pickles(tmp_path / "sentinel")["bare"])
    loader = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", loader, str(tmp_path / "p")], check=True)
    assert (tmp_path / "sentinel").exists()


CHECKPOINT = "run/checkpoints/00000004"
OPENED = [f"{CHECKPOINT}/model.safetensors", f"{CHECKPOINT}/optimizer.safetensors",
          f"{CHECKPOINT}/state.json", "run/config.toml", "run/corpus.json", "run/metrics.jsonl",
          "run/summary.json",
          "run/eval/corpus.json", "run/eval/corpus.npz", "corpus/meta.json", "corpus/train.bin",
          "corpus/val.bin", "corpus/train.idx.npy", "corpus/val.idx.npy"]


@pytest.mark.parametrize(("kind", "name"), slow_except(
    [*(("bare", name) for name in OPENED), *(("npy", name) for name in OPENED if name.endswith(".npy")),
     *(("zip", name) for name in OPENED if name.endswith((".npz", ".safetensors", "val.bin")))],
    ("bare", "corpus/train.bin"), ("zip", "run/eval/corpus.npz")))
def test_a_hostile_pickle_is_refused_wherever_it_lies(name: str, kind: str, finished: Path, tmp_path: Path,
                                                      monkeypatch, capsys) -> None:
    folder, sentinel = tmp_path / "copy", tmp_path / "sentinel"
    shutil.copytree(finished, folder)
    text = (folder / "run" / "config.toml").read_text().replace(str(finished), str(folder))
    (folder / "run" / "config.toml").write_text(text)
    run = Run.__new__(Run)
    run.corpus, run.run = folder / "corpus", folder / "run"
    run.config = load_config(folder / "run" / "config.toml")
    if not name.startswith("run/summary"):
        (folder / "run" / "summary.json").unlink()      # else train.py opens nothing more
    assert (folder / name).exists()
    (folder / name).write_bytes(hostile_pickles(sentinel)[kind])
    if name.endswith(".safetensors"):
        rehash_checkpoint(folder / CHECKPOINT)
    if name.startswith("corpus/") and name != "corpus/meta.json":
        rehash_corpus(folder / "corpus")
        shutil.copy(folder / "corpus" / "meta.json", folder / "run" / "corpus.json")
    codes = list(run.commands(monkeypatch))
    if name.startswith("run/eval"):
        (folder / name).write_bytes(hostile_pickles(sentinel)[kind])
        with pytest.raises(UserError, match="damaged"):
            read_run(run.run, None)
    captured = capsys.readouterr()
    assert not sentinel.exists() and set(codes) <= {0, 2}
    assert len(captured.err.splitlines()) == codes.count(2) and "Traceback" not in captured.out
    harmless = ("metrics", "eval/", "optimizer")        # opened by one command or none of the three
    if not any(part in name for part in harmless):
        assert 2 in codes


@pytest.mark.parametrize("kind", ["bare", "npy", "zip"])
def test_a_hostile_pickle_is_no_tokenizer(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(hostile_pickles(tmp_path / "sentinel")[kind])
    with pytest.raises(UserError, match="tokenizer.json"):
        load_tokenizer("bpe:270", tmp_path)
    with pytest.raises(UserError, match="tokenizer.json"):
        read_tokenizer(tmp_path, {"bos_token_id": 0})
    assert not (tmp_path / "sentinel").exists()


# -----------------------------------------------------------------------------------------------------------
# What a checkpoint claims


def lying_header(claim: dict, n_bytes: int = 64) -> bytes:
    header = json.dumps(claim).encode()
    return len(header).to_bytes(8, "little") + header + bytes(n_bytes)


def tampered(folder: Path, change: str) -> None:
    """Change a checkpoint as someone hostile would, its checksums made true again."""
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    optimizer = load_file(folder / "optimizer.safetensors")
    state = json.loads((folder / "state.json").read_text())
    raw = {
        "header of 2^62 bytes": (2**62).to_bytes(8, "little") + b"{}",
        "a terabyte": lying_header({"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}),
        "negative": lying_header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
        "overlap": lying_header({k: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for k in "ab"}),
        "a shape that overflows": lying_header(
            {"x": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 64]}}),
        "deep": (10**6).to_bytes(8, "little") + b"[" * 10**6}
    if change in raw:
        (folder / "model.safetensors").write_bytes(raw[change])
    elif change == "another shape":
        save_file({**tensors, name: torch.zeros(7)}, folder / "model.safetensors")
    elif change == "another type":
        save_file({**tensors, name: tensors[name].to(torch.float16)}, folder / "model.safetensors")
    elif change == "a weight missing":
        save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    elif change == "a weight too many":
        save_file({**tensors, "more": torch.zeros(1)}, folder / "model.safetensors")
    elif change == "a moment missing":
        save_file({k: v for k, v in optimizer.items() if k != f"{name}/exp_avg"},
                  folder / "optimizer.safetensors")
    elif change == "a moment of another shape":
        save_file({**optimizer, f"{name}/exp_avg": torch.zeros(3)}, folder / "optimizer.safetensors")
    elif change == "a moment of no parameter":
        save_file({**optimizer, "no/exp_avg": torch.zeros(3)}, folder / "optimizer.safetensors")
    else:
        key, value = change.split("=")
        state[key] = json.loads(value)
        (folder / "state.json").write_text(json.dumps(state))
    rehash_checkpoint(folder)


@pytest.mark.parametrize("change", [
    "header of 2^62 bytes", "a terabyte", "negative", "overlap", "a shape that overflows", "deep",
    "another shape", "another type", "a weight missing", "a weight too many", "a moment missing",
    "a moment of another shape", "a moment of no parameter", "step=-1", 'step="x"', "step=true", "step=3",
    "step=1e400", "wall_s=null", "wall_s=[1]", "wall_s=-1", "metrics=3", 'metrics={"loss": "x"}'])
def test_a_checkpoint_that_lies_is_refused_before_it_is_believed(change: str, finished: Path,
                                                                 tmp_path: Path, capsys) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "run" / "summary.json").unlink()
    config = load_config(folder / "run" / "config.toml", [f"run.dir={folder / 'run'}"])
    tampered(folder / CHECKPOINT, change)
    before = everything(folder)
    with pytest.raises(UserError, match="every checkpoint is damaged|does not fit the model") as caught:
        train(config, [])
    assert len(caught.value.problems) == 1 and everything(folder) == before


def test_a_huge_or_deep_json_costs_nothing(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    state, meta = folder / CHECKPOINT / "state.json", folder / "corpus" / "meta.json"
    for path in (state, meta):
        with path.open("r+b") as file:
            file.truncate(2**40)                        # a terabyte that takes no room on the disk
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoint.load_run(folder / "run")
    with pytest.raises(UserError, match="larger than"):
        Corpus(folder / "corpus")
    for content in ("[" * 200_000, '{"a":' * 200_000, "9" * 10**6, '"\\ud800"', "NaN", "{}", "[]", "null"):
        meta.write_text(content)
        with pytest.raises(UserError, match="damaged"):
            Corpus(folder / "corpus")
        (folder / "run" / "summary.json").write_text(content)
        config = load_config(folder / "run" / "config.toml", [f"run.dir={folder / 'run'}"])
        with pytest.raises(UserError, match="summary.json: damaged"):
            train(config, [])


# -----------------------------------------------------------------------------------------------------------
# Keys


FAILING_WANDB = """
import os
class errors:
    class Error(Exception):
        pass
class Settings:
    def __init__(self, **options): pass
class Run:
    def log(self, *arguments, **options):
        raise ConnectionError("refused: " + os.environ["WANDB_API_KEY"] + chr(10) + "more")
def init(**options):
    if options.get("mode") != "offline":
        raise errors.Error("key " + os.environ["WANDB_API_KEY"] + " is not known")
    return Run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offline", "failing"])
def test_a_wandb_key_is_in_no_file_and_no_line(kind: str, tiny, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    key = "0123456789abcdef" * 2 + "01234567"
    path = tmp_path / "keyed.toml"
    path.write_text(MINIMAL)
    environment = {**os.environ, "WANDB_API_KEY": key, "HOME": str(tmp_path)}
    if kind == "offline":
        environment["WANDB_MODE"] = "offline"
    else:
        (tmp_path / "fake" / "wandb").mkdir(parents=True)
        (tmp_path / "fake" / "wandb" / "__init__.py").write_text(FAILING_WANDB)
        environment["PYTHONPATH"] = str(tmp_path / "fake")
    config = tiny("rope", "run.wandb=true", "train.steps=2")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), str(path), *TINY, "model.vocab_size=257", "train.steps=2",
         f"data.dir={config.data.dir}", f"run.dir={config.run.dir}", "run.wandb=true"],
        capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert key not in done.stdout + done.stderr
    assert kind == "offline" or "warning: W&B failed" in done.stdout and "***" in done.stdout
    found = [p for p in tmp_path.rglob("*") if p.is_file() and key.encode() in p.read_bytes()]
    assert found == [] and (tmp_path / "run" / "summary.json").exists()
    assert kind == "failing" or list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
