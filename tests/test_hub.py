"""Models on the hub: huggingface_hub's own requests, answered by a stand-in on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from conftest import slow_except

import export
import sample
from hf.hub import pulled, push
from runtime.checkpoint import load_run
from runtime.errors import UserError
from train import train

COMMIT = "c0ffee" * 6 + "beef"


class Hub(ThreadingHTTPServer):
    """Repositories in memory, over the part of the hub's protocol that pulling and pushing need."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}        # ORG/NAME -> path -> content
        self.made: dict[str, dict[str, object]] = {}        # ORG/NAME -> what was asked for when it was made
        self.asked: list[str] = []
        self.breaks_at = ""                                 # a file whose download fails
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, content: bytes = b"", code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, content: object) -> None:
        self.answer(json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if path.startswith("/api/models/"):
            repository = "/".join(path.split("/")[3:5])
            files = self.server.files.get(repository)
            if files is None:
                return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
            if "/tree/" in path:
                return self.answer_json([{"type": "file", "path": name, "size": len(content),
                                          "oid": hashlib.sha1(content).hexdigest()}
                                         for name, content in files.items()])
            return self.answer_json({"id": repository, "sha": COMMIT, "private": False, "tags": [],
                                     "siblings": [{"rfilename": name} for name in files]})
        repository, _, name = path[1:].partition(f"/resolve/{COMMIT}/")
        if not name:                                        # what else the client is curious about
            return self.answer_json({})
        content = self.server.files[repository][name]
        if name == self.server.breaks_at and self.command == "GET":
            return self.answer(b"", 403)
        return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked['organization']}/{asked['name']}"
            self.server.files.setdefault(repository, {})
            self.server.made[repository] = asked
            return self.answer_json({"url": f"http://127.0.0.1/{repository}", "name": repository})
        repository = "/".join(path.split("/")[3:5])
        if "/commit/" not in path and "/preupload/" not in path:                # it checks the model card
            return self.answer_json({"errors": [], "warnings": []})
        if "/preupload/" in path:
            return self.answer_json({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False}
                                               for file in json.loads(body)["files"]]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[repository][line["value"]["path"]] = base64.b64decode(
                    line["value"]["content"])
        return self.answer_json({"commitUrl": f"http://127.0.0.1/{repository}/commit/{COMMIT}",
                                 "commitOid": COMMIT, "success": True})


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)      # as other tests have it
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run_main(module, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *arguments])
    module.main()


@pytest.mark.slow
def test_a_run_that_was_pushed_and_pulled_has_the_same_logits(hub: Hub, tiny, monkeypatch, capsys) -> None:
    """By the commands: export.py to the hub, sample.py and eval.py from there; a second pull asks nobody."""
    train(tiny("rope"), [])
    run_main(export, monkeypatch, "run", "hf:somebody/small", "--private")
    assert f"/somebody/small/commit/{COMMIT}" in capsys.readouterr().out
    assert hub.made["somebody/small"].keys() & {"private", "visibility"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(
        hub.files["somebody/small"])
    run_main(sample, monkeypatch, "hf:somebody/small", "--tokens", "2")
    out = capsys.readouterr().out
    assert f"downloaded hf:somebody/small at commit {COMMIT} to models/somebody/small" in out
    ids = torch.arange(20)[None]
    assert torch.equal(load_run("run")[0](ids), load_run("models/somebody/small")[0](ids))
    n_asked = len(hub.asked)
    assert pulled("hf:somebody/small") == "models/somebody/small" and len(hub.asked) == n_asked
    assert "remove it to download hf:somebody/small again" in capsys.readouterr().out


def test_a_pushed_model_is_as_private_as_its_organisation_has_it(hub: Hub, tmp_path: Path) -> None:
    """Unless --private asks for more: a request that says "public" would overrule the organisation."""
    for is_private in (False, True):
        push(tmp_path, f"hf:somebody/{is_private}", is_private)
    assert not hub.made["somebody/False"].keys() & {"private", "visibility"}
    assert {"visibility": "private"}.items() <= hub.made["somebody/True"].items() or \
        {"private": True}.items() <= hub.made["somebody/True"].items()      # older versions of the client


def test_only_data_is_pulled_and_a_download_that_breaks_goes_on(hub: Hub, capsys) -> None:
    hub.files["o/m"] = {"config.json": b"{}", "model.safetensors": b"1", "modeling.py": b"import os",
                        "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}
    hub.breaks_at = "tokenizer.json"
    with pytest.raises(UserError, match="hf:o/m@v1: cannot be downloaded .*check the name and the network"):
        pulled("hf:o/m@v1")
    assert not Path("models/o/m@v1").exists()
    hub.breaks_at, hub.asked[:] = "", []
    assert pulled("hf:o/m@v1") == "models/o/m@v1"
    assert {path.name for path in Path("models/o/m@v1").glob("*.*")} - {".cache"} == {
        "config.json", "model.safetensors", "tokenizer.json"}
    assert "GET /api/models/o/m/revision/v1" in hub.asked
    assert f"GET /o/m/resolve/{COMMIT}/model.safetensors" not in hub.asked      # it was there already


@pytest.mark.parametrize(("name", "expected"), slow_except([
    ("hf:nobody/nothing", "hf:nobody/nothing: cannot be downloaded (RepositoryNotFoundError"),
    ("hf:nothing", "must read hf:ORG/NAME[@REVISION], such as"), ("hf:../x", "must read hf:ORG/NAME"),
    ("hf:o/../../x", "must read hf:ORG/NAME"), ("hf:o/empty", "has no config.json")],
    ("hf:../x", "must read hf:ORG/NAME"), ("hf:o/empty", "has no config.json")))
def test_what_cannot_be_pulled_is_one_line(name: str, expected: str, hub: Hub) -> None:
    hub.files["o/empty"] = {"README.md": b"empty"}
    with pytest.raises(UserError) as error:
        pulled(name)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert pulled("runs/quick") == "runs/quick"                                 # a folder


def test_what_cannot_be_pushed_is_one_line(hub: Hub, tiny, monkeypatch) -> None:
    train(tiny("rope"), [])
    for out, expected in (("hf:small", "hf:small: must read hf:ORG/NAME"), ("out --private", "omit it"),
                          ("hf:somebody/small@v1", "must read hf:ORG/NAME, such as")):
        with pytest.raises(UserError, match=expected):
            run_main(export, monkeypatch, "run", *out.split())
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match="hf:somebody/small: cannot be uploaded .*hf auth login"):
        run_main(export, monkeypatch, "run", "hf:somebody/small")
    assert not Path("out").exists()
