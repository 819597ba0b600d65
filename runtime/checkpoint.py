"""Checkpoints: saved atomically, verified when read, no pickle anywhere.

A checkpoint is a folder checkpoints/STEP with model.safetensors, optimizer.safetensors and state.json, which
holds the step, everything else that the training loop must remember, and a checksum of each file and of
itself. It is written under a temporary name, flushed to disk and renamed, so it exists whole or not at all.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from config import Config, config_from, differences, load_config
from data.loader import read_meta
from data.tokenizer import Tokenizer, tokenizer_of
from hf.pretrained import files_sha256, is_pretrained, load_pretrained
from model import GPT, is_dropped
from runtime import parallel
from runtime.device import make_model, pick_device
from runtime.errors import UserError
from runtime.files import flush, is_special, name_in_errors, read_json
from runtime.optimizer import state_keys

FILES = ("model.safetensors", "optimizer.safetensors")
MOST_DELETED = 20       # checkpoints that may vanish under a reader, one after another
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


class State(BaseModel):
    """The keys that state.json must have; others are ignored."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0, lt=2**53)
    wall_s: float = Field(ge=0, allow_inf_nan=False)
    metrics: dict[str, float | None]
    n_bad: int = Field(0, ge=0, lt=2**53)       # steps in a row that were skipped; old runs lack it
    sha256: dict[str, str]
    lines: int = Field(0, ge=0, lt=2**53)       # of metrics.jsonl
    threads: int | None = None                  # of torch, per process; old checkpoints lack it
    config: dict[str, dict[str, Any]] | None = None     # what `identity` returned; old checkpoints lack both
    corpus_sha256: str | None = None
    init_sha256: str | None = None              # of the weights of train.init_from
    dtype: str | None = None                    # of matrix products in the last start
    revisions: list[str] = []                   # of the code, each once, in the order of the starts


def identity(config: Config, corpus: dict[str, Any]) -> dict[str, Any]:
    """What makes a checkpoint one of its run: the whole config, and a checksum of the corpus' meta.json."""
    return {"config": config.model_dump(mode="json", exclude_none=True),
            "corpus_sha256": hashlib.sha256(json.dumps(corpus, sort_keys=True).encode()).hexdigest()}


def check_identity(state: dict[str, Any], run_dir: Path, config: Config, corpus: dict[str, Any]) -> None:
    """Raise UserError if the checkpoint was saved under another config or corpus than these of its run."""
    where = f"checkpoint {run_dir}/checkpoints/{state['step']:08d}"
    if state["config"] is None:
        print(f"warning: {where}: saved by an older train.py, which did not record the config; nothing shows "
              f"whether it belongs to {run_dir}/config.toml", flush=True)
        return
    changes = [line for line in differences(config_from(state["config"], f"in {where}/state.json"), config)
               if not line.startswith(("run.", "train.device:", "train.compile:", "data.dir:"))]
    if state["corpus_sha256"] != identity(config, corpus)["corpus_sha256"]:
        changes.append("another corpus than in corpus.json")
    if changes:
        raise UserError(*(f"{where}: was saved by a run with another config: {change}; undo the change of "
                          "config.toml or corpus.json, or remove the checkpoint if it is of another run"
                          for change in changes))


def check_checkpoints(run_dir: Path, config: Config, corpus: dict[str, Any]) -> None:
    """Call `check_identity` for the newest checkpoint whose state.json is intact, without reading tensors."""
    for folder in _newest_first(run_dir):
        try:
            state = _read_state(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):      # damaged
            continue
        check_identity(state, run_dir, config, corpus)
        return


def save(run_dir: Path, model: GPT, optimizer: Optimizer, step: int, state: dict[str, Any],
         keep: int, is_writer: bool = True) -> None:
    """Write checkpoints/STEP, then delete all but the newest `keep`. Raises OSError, older ones untouched.

    Every process must call it, to gather sharded tensors; one of them is the writer.
    """
    tensors = dict(zip(FILES, (_gathered(model.state_dict(), is_writer),
                               _gathered(_optimizer_tensors(model, optimizer), is_writer)), strict=True))
    if not is_writer:
        return
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    temporary, final = folder / f".tmp-{step:08d}", folder / f"{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with name_in_errors(temporary):
            for name in FILES:
                _save_tensors(tensors[name], temporary / name)
            state = {**state, "step": step, "sha256": {name: _sha256(temporary / name) for name in FILES}}
            (temporary / "state.json").write_text(
                json.dumps({**state, "check": _check(state)}, indent=1), encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                flush(path)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    prune(run_dir, step, keep)


def prune(run_dir: Path, step: int, keep: int) -> None:
    """Delete incomplete checkpoints that a kill left, and all but the newest `keep` up to this step.

    Later checkpoints must be corrupt (else the run would have resumed from them), so they are ignored.
    """
    for stale in (run_dir / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(stale)
    for old in [path for path in _checkpoints(run_dir) if int(path.name) <= step][:-keep]:
        shutil.rmtree(old.rename(old.with_name(f".tmp-{old.name}")))    # so a half-deleted one is never read


def load_newest(run_dir: Path, model: GPT, optimizer: Optimizer | None = None) -> dict[str, Any] | None:
    """Read the newest intact checkpoint into model and optimizer, strictly; return its state or None.

    A damaged one is named on the screen, and the next older one is used. Raises UserError if all are damaged,
    or if an intact one belongs to another model.
    """
    damaged: list[str] = []
    for folder in _newest_first(run_dir):
        try:
            state = _verified_state(folder)
            problem = _problem(folder / FILES[0], model.state_dict())
            model_tensors = {} if problem else load_file(folder / FILES[0])
            optimizer_tensors = {}
            if optimizer and not problem:
                problem = _problem(folder / FILES[1], _moments(model, optimizer), is_whole=False)
                optimizer_tensors = {} if problem else load_file(folder / FILES[1])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
            if not folder.exists():         # deleted by the process that trains this run
                continue
            if isinstance(error, RuntimeError):     # torch, which could not open the file, has no other
                raise
            damaged.append(folder.name)
            reason = " ".join(str(error).split())
            print(f"warning: checkpoint {folder} is damaged ({reason}); trying the one before", flush=True)
            continue
        if problem:
            raise UserError(f"checkpoint {folder}: does not fit the model of this config: {problem}")
        _load_strictly(model, model_tensors, folder)
        if optimizer:
            _restore_optimizer(model, optimizer, optimizer_tensors)
            warn_about_threads(state, folder, model)
        return state
    if damaged:
        raise UserError(f"run {run_dir}: every checkpoint is damaged ({', '.join(damaged)}); "
                        "nothing was deleted; restore one from a backup, or train again in another run.dir")
    return None


def warn_about_threads(state: dict[str, Any], folder: Path, model: GPT) -> None:
    """Say that a resume with another number of threads is not exact: a CPU then adds in another order."""
    before, now = state["threads"], torch.get_num_threads()
    if before not in (None, now) and next(model.parameters()).device.type == "cpu":
        print(f"warning: checkpoint {folder}: was computed with {before} threads, this process has {now}; "
              f"to resume to the last bit, stop it and set OMP_NUM_THREADS={before}", flush=True)


class Opened(NamedTuple):
    """A run at its newest checkpoint, or a Hugging Face folder, which has neither state nor corpus."""

    model: GPT
    config: Config
    tokenizer: Tokenizer
    state: dict[str, Any] | None = None         # of the checkpoint: its step, metrics and checksums
    corpus: dict[str, Any] | None = None        # meta.json of the corpus that it was trained on
    files_sha256: str | None = None             # of a Hugging Face folder

    def origin(self) -> dict[str, Any]:
        """Step and checksum of the checkpoint's weights, and of those that the run began from, or None.

        Of a Hugging Face folder a checksum alone.
        """
        return {"step": self.state and self.state["step"],
                "checkpoint_sha256": self.state["sha256"][FILES[0]] if self.state else self.files_sha256,
                "init_sha256": self.state and self.state["init_sha256"]}


def load_run(run_dir: str | Path) -> tuple[GPT, Config, Tokenizer]:
    """The model of a run at its newest checkpoint, or of a Hugging Face folder (hf/pretrained.py).

    In evaluation mode, on the configured device.
    """
    return open_run(run_dir)[:3]


def open_run(run_dir: str | Path) -> Opened:
    """What `load_run` returns, and where it comes from. Raises UserError."""
    run_dir = Path(run_dir)
    if is_pretrained(run_dir):
        model, config, tokenizer = load_pretrained(run_dir)
        return Opened(model.to(pick_device(config.train)).eval(), config, tokenizer,
                      files_sha256=files_sha256(run_dir))
    check_links(run_dir)
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"run {run_dir}: no run there (no config.toml); {remedy_for(run_dir)}")
    config, corpus = load_config(run_dir / "config.toml"), read_meta(run_dir / "corpus.json")
    tokenizer = tokenizer_of(corpus, run_dir)
    model = make_model(config)
    state = load_newest(run_dir, model)
    if state is None:
        raise UserError(f"run {run_dir}: no checkpoint yet; train it with `python train.py` first")
    check_identity(state, run_dir, config, corpus)
    model.is_dropped = is_dropped(config, state["step"])
    return Opened(model.to(pick_device(config.train)).eval(), config, tokenizer, state, corpus)


def remedy_for(run_dir: Path) -> str:
    """What to do about a path that is neither a run nor a Hugging Face folder."""
    if run_dir.suffix == ".gguf" or any(run_dir.glob("*.gguf")):
        return ("GGUF files are not read; convert the model by transformers, in a few lines: "
                "docs/hugging-face.md")
    remedy = ("give a folder that train.py made, such as runs/quick, or a Hugging Face folder with a "
              "config.json")
    if not run_dir.parent.exists() and len(run_dir.parts) == 2:         # ORG/NAME
        remedy += f"; eval.py and sample.py download a model of the hub as hf:{run_dir}, to models/{run_dir}"
    return remedy


def start_from(run_dir: str | Path, model: GPT, config: Config, tokenizer: Tokenizer) -> str:
    """Read the newest weights of another run into a model of the same shape, encoding and tokenizer.

    Returns their checksum. If the formula of the encoding contains L (fire, integer_normalised, log_n), it
    uses the new L.
    """
    source, source_config, source_tokenizer = load_run(run_dir)
    may_change = tuple(f"{key}:" for key in (
        "model.dropout", "model.flex", "position.scaling", "position.base", "position.layers",
        "position.skip_every", "position.temperature", "position.temperature_layers",
        "position.scale_invariant", "position.drop_at", "position.lr_scale"))
    changes = [line for line in differences(source_config, config)
               if line.startswith(("model.", "position.")) and not line.startswith(may_change)]
    if source_tokenizer.sha256 != tokenizer.sha256:
        changes.append(f"tokenizer: {source_tokenizer.name} -> {tokenizer.name}")
    if changes:
        raise UserError(*(f"train.init_from {run_dir}: its model differs: {line}; use the value of that run"
                          for line in changes))
    scaling, L = getattr(config.position, "scaling", None), source_config.train.seq_len
    if scaling is not None and scaling.original_length is None and config.train.seq_len != L:
        raise UserError(f"position.scaling: {run_dir} was trained at L = {L}, not at train.seq_len = "
                        f"{config.train.seq_len}; add original_length = {L} to it")
    if source.is_dropped and not model.is_dropped:
        raise UserError(f"position.drop_at: {run_dir} has dropped its encoding and learned to do without; "
                        "set position.drop_at=0")
    _load_strictly(model, source.state_dict(), Path(run_dir))
    return weights_sha256(source)


def weights_sha256(model: nn.Module) -> str:
    """Checksum of a model's weights, which differs between two checkpoints."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_links(run_dir: Path) -> None:
    """Raise UserError if a run's folder, or a link inside it, leads out of the folder that holds the run.

    Also if it holds anything that is no file and no folder: a FIFO would block whoever reads it.
    """
    root = run_dir.parent.resolve()
    # iglob passes over folders that vanish meanwhile: another process may train this run
    inside = (glob.iglob(pattern, root_dir=run_dir, include_hidden=True)
              for pattern in ("*", "checkpoints/*", "checkpoints/*/*", "eval/*"))
    for path in itertools.chain([run_dir], map(run_dir.joinpath, itertools.chain(*inside))):
        if is_special(path):
            raise UserError(f"run {run_dir}: {path} is neither a file nor a folder; give another "
                            "path, or remove it")
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise UserError(f"run {run_dir}: {path} is a link that leads out of {root}; replace it by the "
                            "file or folder, or give the path of that folder")


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run, intact or damaged, or None."""
    return next(reversed(_checkpoints(run_dir)), None)


def is_newest(run_dir: Path, sha256: str) -> bool:
    """Whether the weights with this checksum are the newest intact ones; also if the run has none.

    The files are read only if the newest checkpoint has another checksum: it may be damaged.
    """
    for folder in _newest_first(run_dir):
        try:
            found = read_json(folder / "state.json")["sha256"][FILES[0]]
            if found == sha256 or _verified_state(folder):
                return found == sha256
        except (OSError, ValueError, KeyError, TypeError):      # damaged: load_newest would not use it
            continue
    return True


def _newest_first(run_dir: Path) -> Iterator[Path]:
    """The checkpoints of a run from new to old, for a reader while another process may train it.

    They are listed anew for each: that process saves newer ones, and deletes one while it is read. Raises
    UserError if this happens over and over.
    """
    passed: set[str] = set()
    n_deleted = 0
    while left := [path for path in _checkpoints(run_dir) if path.name not in passed]:
        yield left[-1]
        passed.add(left[-1].name)
        n_deleted += not left[-1].exists()
        if n_deleted == MOST_DELETED:
            raise UserError(f"run {run_dir}: {n_deleted} checkpoints in turn were deleted while they were "
                            "read: it saves faster than it can be read; wait until it has ended, or train it "
                            "with a larger run.keep or run.save_every")


def _checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run at one moment, from old to new: not one by one, since they may be deleted."""
    folder = run_dir / "checkpoints"
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries
                 if entry.name.isascii() and entry.name.isdigit() and entry.is_dir()]
        return [folder / name for name in sorted(names, key=int)]
    return []


def _verified_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, after checking its checksum and those of the tensors. Raises ValueError."""
    state = _read_state(folder)
    for name in FILES:
        if _sha256(folder / name) != state["sha256"][name]:
            raise ValueError(f"{name}: checksum differs")
    return state


def _read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, after checking its own checksum. Raises ValueError."""
    state = read_json(folder / "state.json")
    check = state.pop("check")
    if check != _check(state):
        raise ValueError("state.json: checksum differs")
    state = State.model_validate(state).model_dump()
    if state["step"] != int(folder.name):
        raise ValueError(f"state.json: belongs to step {state['step']}")
    return state


def _problem(path: Path, expected: Mapping[str, Tensor], is_whole: bool = True) -> str | None:
    """How a file's header differs from the expected tensors; None if it does not. No tensor is read.

    Unless `is_whole`, a parameter may lack all of its moments: it never had a gradient.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        slices = {name: file.get_slice(name) for name in names & set(expected)}
        wrong = [name for name, stored in slices.items() if stored.get_shape() != list(expected[name].shape)
                 or stored.get_dtype() != DTYPES[expected[name].dtype]]
    owners = {name.rpartition("/")[0] for name in names}
    missing = {name for name in set(expected) - names if is_whole or name.rpartition("/")[0] in owners}
    for kind, found in (("unexpected", names - set(expected)), ("of another shape or type", set(wrong)),
                        ("missing", missing)):
        if found:
            return f"{kind}: {', '.join(sorted(found)[:5])}{' ...' if len(found) > 5 else ''}"
    return None


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Call save_file, whose own exception hides that the disk is full. Raises OSError."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        known = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO
        number = next((n for n in known if f"os error {n})" in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number), str(path)) from error


def _load_strictly(model: GPT, tensors: dict[str, Tensor], folder: Path) -> None:
    weights = model.state_dict()
    tensors = {name: parallel.shard_like(x, weights[name]) if name in weights else x
               for name, x in tensors.items()}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:   # missing, unexpected or misshapen weights, listed over several lines
        raise UserError(f"checkpoint {folder}: does not fit the model of this config: "
                        + " ".join(str(error).split())) from error


def _optimizer_tensors(model: GPT, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments and step counts, named PARAMETER/KEY."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": torch.as_tensor(value)
            for p, moments in optimizer.state.items() for key, value in moments.items()}


def _moments(model: GPT, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors that an optimizer's file may hold, by name and shape: moments and step counts."""
    keys = {p: state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    return {f"{name}/{key}": torch.zeros(()) if key == "step" else p
            for name, p in model.named_parameters() for key in keys[p]}


def _restore_optimizer(model: GPT, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        moments = {key.rpartition("/")[2]: value for key, value in tensors.items()
                   if key.rpartition("/")[0] == name}
        optimizer.state[p] = {key: parallel.shard_like(value.to(p.device), p)
                              for key, value in moments.items()}


def _gathered(tensors: dict[str, Tensor], is_kept: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, gathered one at a time; without `is_kept` a process only takes part."""
    gathered = {}
    for name, tensor in tensors.items():
        complete = parallel.unshard(tensor.detach())
        if is_kept:
            gathered[name] = complete.cpu().contiguous()
    return gathered


def _check(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
