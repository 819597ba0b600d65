"""Checkpoints: saved atomically, verified when read, no pickle anywhere.

A checkpoint is a folder checkpoints/STEP with model.safetensors, optimizer.safetensors and state.json, which
holds the step, everything else that the training loop must remember, and a checksum of each file and of
itself. It is written under a temporary name, flushed to disk and renamed, so it exists whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from base.errors import UserError
from base.files import flush, read_json, sha256_of
from config import MAY_DIFFER, Config, differing_keys, flatten, load_config
from data.loader import read_meta
from data.tokenizer import Tokenizer, tokenizer_of
from hf.pretrained import files_sha256, is_pretrained, load_pretrained
from model import GPT
from runtime import parallel
from runtime.device import pick_device

FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass
class State:
    """What a run remembers besides weights and moments: state.json. Runs of older code lack some keys."""

    step: int = 0                                       # steps whose metrics were read, skipped ones too
    wall_s: float = 0.0                                 # seconds of training
    metrics: dict[str, Any] = field(default_factory=dict)       # metrics of the newest step, validation
    n_bad: int = 0                                      # bad steps in a row; a float16 overflow is none
    best: tuple[int, float] | None = None               # step and validation loss of run.keep_best
    scaler: dict[str, Any] = field(default_factory=dict)        # state of the GradScaler
    dtype: str | None = None                            # of matrix products at the last start
    revisions: list[str] = field(default_factory=list)  # commits whose code has trained it, in order
    init_sha256: str | None = None                      # checksum of the weights of train.init_from
    sha256: dict[str, str] = field(default_factory=dict)        # checksum of each file


def save(run_dir: Path, model: GPT, optimizer: Optimizer, state: State, keep: int | None,
         is_writer: bool = True) -> None:
    """Write checkpoints/STEP, then delete all but the newest `keep` and the best (None: delete nothing).

    Every process must call it, to gather sharded tensors; one of them is the writer. Raises OSError, and
    UserError if the run's folder was deleted.
    """
    weights = model.state_dict()            # first: under FSDP2 it makes the sharded parameters current
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    moments = {f"{names[p]}/{key}": torch.as_tensor(value)
               for p, values in optimizer.state.items() for key, value in values.items()}
    files = [{name: parallel.unshard(x.detach()).cpu().contiguous() for name, x in tensors.items()}
             for tensors in (weights, moments)]
    if not is_writer:
        return
    folder = run_dir / "checkpoints"
    temporary, final = folder / f".tmp-{state.step:08d}", folder / f"{state.step:08d}"
    if not (run_dir / "config.toml").exists():
        raise UserError(f"run {run_dir}: its folder was deleted while it was trained; start again")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, tensors in zip(FILES, files, strict=True):
            save_file(tensors, temporary / name)
        content = asdict(replace(state, sha256={name: sha256_of(temporary / name) for name in FILES}))
        text = json.dumps({**content, "check": checksum(content)}, indent=1)
        (temporary / "state.json").write_text(text, encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)        # a damaged one that the run did not resume from
        temporary.rename(final)
        flush(folder)
    except SafetensorError as error:                    # what safetensors makes of a full disk
        raise OSError(f"{temporary}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if keep:
        best = state.best[0] if state.best else None
        # later ones must be damaged, else the run would have resumed from them: they do not count
        old = [path for path in checkpoints(run_dir) if int(path.name) <= state.step][:-keep]
        for path in old:
            if int(path.name) != best:
                path.rename(path.with_name(f".tmp-{path.name}"))        # so a half-deleted one is never read
        for path in folder.glob(".tmp-*"):                              # also what a kill left
            shutil.rmtree(path)


def intact(run_dir: Path) -> Iterator[tuple[Path, State]]:
    """The checkpoints whose checksums are right, from new to old, with their states; warns of the others."""
    for folder in reversed(checkpoints(run_dir)):
        try:
            content = read_json(folder / "state.json")
            if content.pop("check") != checksum(content):
                raise ValueError("state.json: checksum mismatch")
            if content["step"] != int(folder.name):
                raise ValueError(f"it is of step {content['step']}: a copy, or renamed")
            for name in FILES:
                if content["sha256"][name] != sha256_of(folder / name):
                    raise ValueError(f"{name}: checksum mismatch")
        except (OSError, ValueError, KeyError) as error:
            print(f"warning: checkpoint {folder} is damaged ({error}); trying the one before", flush=True)
            continue
        yield folder, State(**{key.name: content[key.name] for key in fields(State) if key.name in content})


def load_checkpoint(run_dir: Path, model: GPT, optimizer: Optimizer | None = None,
                which: str = "newest") -> State | None:
    """Read an intact checkpoint into model and optimizer; return its state, or None without one.

    `which` is "newest", "best" or a step. Raises UserError if it is not there, if all are
    damaged, or if an intact one belongs to another model.
    """
    wanted = which
    for folder, state in intact(run_dir):
        if wanted == "best" and state.best:         # the newest one knows which it is
            wanted = str(state.best[0])
        if wanted not in ("newest", str(state.step)):
            continue
        load_weights(model, load_file(folder / FILES[0]), folder)
        if optimizer:
            parameters = dict(model.named_parameters())
            for name, value in load_file(folder / FILES[1]).items():
                parameter_name, _, key = name.rpartition("/")
                p = parameters[parameter_name]
                optimizer.state[p][key] = parallel.shard_like(value.to(p.device), p)
        return state
    saved = checkpoints(run_dir)
    if not saved:
        return None
    if which == "newest":
        raise UserError(f"run {run_dir}: every checkpoint is damaged; nothing was deleted; restore one from "
                        "a backup, or train again in another run.dir")
    steps = ", ".join(str(int(path.name)) for path in saved)
    raise UserError(f"--checkpoint {which}: {run_dir} has newest, best if run.keep_best was set, and those "
                    f"of steps {steps}")


class Opened(NamedTuple):
    """A run at one of its checkpoints, or a Hugging Face folder, which has neither state nor corpus."""

    model: GPT
    config: Config
    tokenizer: Tokenizer
    state: State | None = None                  # what its checkpoint remembers
    meta: dict[str, Any] | None = None          # meta.json of its training corpus
    files_sha256: str | None = None             # checksum of a Hugging Face folder

    def origin(self) -> dict[str, Any]:
        """Step and checksum of the checkpoint's weights, and of those that the run began from, or None."""
        if self.state is None:
            return {"step": None, "checkpoint_sha256": self.files_sha256, "init_sha256": None}
        return {"step": self.state.step, "checkpoint_sha256": self.state.sha256[FILES[0]],
                "init_sha256": self.state.init_sha256}


def load_run(run_dir: str | Path) -> tuple[GPT, Config, Tokenizer]:
    """The model of a run at its newest checkpoint, or of a Hugging Face folder, in evaluation mode."""
    return open_run(run_dir)[:3]


def open_run(run_dir: str | Path, which: str = "newest", device_name: str = "auto") -> Opened:
    """What `load_run` returns, at any checkpoint, and where it comes from. Raises UserError."""
    run_dir, device = Path(run_dir), pick_device(device_name)
    if is_pretrained(run_dir):
        if which != "newest":
            raise UserError(f"--checkpoint {which}: a Hugging Face folder has only one; leave it out")
        model, config, tokenizer = load_pretrained(run_dir)
        return Opened(model.to(device).eval(), config, tokenizer, files_sha256=files_sha256(run_dir))
    if not (run_dir / "config.toml").is_file():
        inside = [path.parent for path in sorted(run_dir.glob("*/config.toml"))]
        if inside:
            raise UserError(f"run {run_dir}: a folder of runs; give one of them, such as {inside[0]}")
        raise UserError(f"run {run_dir}: no run there (no config.toml); give a folder that train.py made, "
                        "such as runs/quick, a Hugging Face folder with a config.json, or hf:ORG/NAME")
    config, meta = load_config(run_dir / "config.toml"), read_meta(run_dir / "corpus.json")
    model, tokenizer = GPT(config), tokenizer_of(meta, run_dir)
    state = load_checkpoint(run_dir, model, which=which)
    if state is None:
        raise UserError(f"run {run_dir}: no checkpoint yet; train it with `python train.py` first")
    model.set_step(state.step)
    return Opened(model.to(device).eval(), config, tokenizer, state, meta)


def start_from(run_dir: str | Path, model: GPT, config: Config, tokenizer: Tokenizer | None) -> str:
    """Read the newest weights of another run into a model of the same shape, encoding and tokenizer.

    Without a tokenizer that is not checked. Returns their checksum. An encoding whose formula contains L
    (fire, integer_normalised) uses the new L.
    """
    opened = open_run(run_dir)
    source, source_config = opened.model, opened.config
    changes = differing_keys(flatten(source_config), flatten(config), MAY_DIFFER["init_from"])
    if changes:
        raise UserError(*(f"train.init_from {run_dir}: its model differs: {line}; use the value of that run"
                          for line in changes))
    if tokenizer and opened.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(f"train.init_from {run_dir}: its {opened.tokenizer.name} is another tokenizer than "
                        f"the {tokenizer.name} of data.dir; prepare the text with --tokenizer {run_dir}")
    scaling, L = getattr(config.position, "scaling", None), source_config.train.seq_len
    if scaling is not None and scaling.original_length is None and config.train.seq_len != L:
        raise UserError(f"position.scaling: {run_dir} was trained at L = {L}, not at train.seq_len = "
                        f"{config.train.seq_len}; add original_length = {L} to it")
    if source.is_dropped and not model.is_dropped:
        raise UserError(f"position.drop_at: {run_dir} has dropped its encoding; set position.drop_at=0")
    load_weights(model, source.state_dict(), Path(run_dir))
    return str(opened.origin()["checkpoint_sha256"])


def is_current(run_dir: Path, sha256: str) -> bool:
    """Whether weights with this checksum are the newest intact or the best ones; True if there are none."""
    steps: set[int] = set()
    for _, state in intact(run_dir):        # from the newest on: each is read whole, so as few as possible
        if not steps:
            steps = {state.step, state.best[0]} if state.best else {state.step}
        if state.step in steps and state.sha256[FILES[0]] == sha256:
            return True
    return not steps


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, from old to new."""
    folders = [path for path in (run_dir / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    return sorted(folders, key=lambda path: int(path.name))


def load_weights(model: GPT, tensors: dict[str, Tensor], folder: Path) -> None:
    """Load all weights of a model. Raises UserError if it has others."""
    current = model.state_dict()        # says how FSDP2 shards each
    try:
        model.load_state_dict({name: parallel.shard_like(x, current.get(name))
                               for name, x in tensors.items()})
    except RuntimeError as error:       # missing, unexpected or misshapen weights, listed over several lines
        raise UserError(f"checkpoint {folder}: does not fit the model of this config: {error}") from error


def checksum(state: dict[str, Any]) -> str:
    """The checksum of what state.json holds besides it."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
