"""Models of the Hugging Face hub, written hf:ORG/NAME: pulled into models/ORG/NAME, or pushed from a folder.

The token is huggingface_hub's own (`hf auth login`, or HF_TOKEN). Only files that hold data are pulled: no
code and no pickles.
"""

from __future__ import annotations

import re
from pathlib import Path

from runtime.errors import UserError, describe_exception
from runtime.lock import lock

PREFIX = "hf:"
NAME = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*", "README.md"]


def parts(name: str, may_have_revision: bool) -> tuple[str, str | None]:
    """ORG/NAME and the revision (None: the newest) of hf:ORG/NAME@REVISION. Raises UserError."""
    found = NAME.fullmatch(name)
    if found is None or (found[2] and not may_have_revision):
        raise UserError(f"{name}: must read {PREFIX}ORG/NAME" + "[@REVISION]" * may_have_revision
                        + ", such as hf:HuggingFaceTB/SmolLM2-135M")
    return found[1], found[2]


def pulled(run: str) -> str:
    """The folder of a model: `run` itself, or where hf:ORG/NAME[@REVISION] was downloaded. Raises UserError.

    models/ORG/NAME[@REVISION] appears when the download is complete. A folder that is there is used as it is,
    so a model does not change between two commands.
    """
    if not run.startswith(PREFIX):
        return run
    repository, revision = parts(run, may_have_revision=True)
    folder = Path("models", repository + (f"@{revision.replace('/', '_')}" if revision else ""))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.with_name(f".{folder.name}.lock"), waits=True):    # ranks, or two commands
        if folder.is_dir():
            print(f"{folder} is there and is used; remove it to download {run} again", flush=True)
        else:
            download(run, repository, revision, folder)
    return str(folder)


def download(run: str, repository: str, revision: str | None, folder: Path) -> None:
    """Download a model; the folder appears when it is complete."""
    from huggingface_hub import HfApi

    part = folder.with_name(f".{folder.name}.part")     # an interrupted download goes on from there
    try:
        commit = HfApi().model_info(repository, revision=revision).sha
        HfApi().snapshot_download(repository, revision=commit, local_dir=part, allow_patterns=FILES)
    except Exception as error:      # the client raises the exceptions of several HTTP libraries
        raise UserError(f"{run}: cannot be downloaded ({describe_exception(error)}); check the name and the "
                        "network, and log in with `hf auth login` if it is private or gated") from error
    if not (part / "config.json").is_file():
        raise UserError(f"{run}: has no config.json, so it is no model of transformers; give another one")
    part.rename(folder)
    print(f"downloaded {run} at commit {commit} to {folder}", flush=True)


def push(folder: Path, name: str, is_private: bool) -> str:
    """Upload a folder as hf:ORG/NAME, which is made if it does not exist; the address. Raises UserError.

    Unless `is_private`, the hub decides: public, or what is the default of the organisation.
    """
    repository, _ = parts(name, may_have_revision=False)
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=is_private or None, exist_ok=True)
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder,
                                         commit_message="Export by nanorope").commit_url)
    except Exception as error:
        raise UserError(f"{name}: cannot be uploaded ({describe_exception(error)}); check the name and the "
                        "network, and log in with `hf auth login` as one who may write there") from error
