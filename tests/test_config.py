"""Configs: inheritance, overrides, and one clear line for each mistake, all at once."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from toys import ROOT, every_encoding

from base.command import run_command
from base.errors import UserError
from base.schema import Tables
from config import SECTIONS, differing_keys, flatten, load_config, to_toml
from model import GPT
from positions import ENCODINGS
from positions.scaling import SCALINGS
from runtime.help import help_text

MINIMAL = '[data]\ndir = "x"\n[position]\nencoding = "rope"\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(*arguments) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load_config(*arguments)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


TUNED = {"needles": ["position.encoding=rope"]}       # configs that take the encoding from train.init_from


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_is_valid_and_survives_the_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path, TUNED.get(path.stem, ()))
    assert load_config(write(tmp_path / "again.toml", to_toml(config))) == config
    assert config.run.dir == f"runs/{path.stem}"
    odd = config.model_copy(update={"run": config.run.model_copy(update={"dir": "runs/\N{GRINNING FACE}"})})
    assert load_config(write(tmp_path / "odd.toml", to_toml(odd))) == odd


def test_a_config_of_the_size_of_gpt2_has_its_parameters() -> None:
    config = load_config(ROOT / "configs" / "gpt2-124m.toml")
    with torch.device("meta"):
        model = GPT(config)
    assert round(model.n_parameters() / 1e6) == 124
    assert config.model.vocab_size % 64 == 0 and 50_257 <= config.model.vocab_size < 50_257 + 64
    assert config.train.batch_size * config.train.seq_len == 491_520    # nanoGPT's half a million tokens


def test_a_byte_order_mark_is_not_a_key(tmp_path: Path) -> None:
    text = '[data]\ndir = "somewhere"\n[position]\nencoding = "rope"\n'
    (tmp_path / "a.toml").write_text(text, encoding="utf-8-sig")
    assert load_config(tmp_path / "a.toml").data.dir == "somewhere"


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", MINIMAL)
    steps = load_config(path, ["train.steps=1e3"]).train.steps
    assert steps == 1000 and isinstance(steps, int)
    with pytest.raises(UserError, match="train.steps"):
        load_config(path, ["train.steps=1.5"])


def test_extends_inherits_and_overrides_come_last(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", MINIMAL + "base = 500.0\n[train]\nlr = 0.5\nsteps = 7\n")
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\n[train]\nlr = 0.25\n')
    config = load_config(child)
    assert (config.train.lr, config.train.steps, config.position.base) == (0.25, 7, 500.0)
    config = load_config(child, ["train.lr=1", "position.layers=[0, 2]", "train.dtype=float32"])
    assert (config.train.lr, config.position.layers, config.train.dtype) == (1, [0, 2], "float32")
    assert load_config(child, ["position.encoding=none"]).position.encoding == "none"  # without rope's base


@every_encoding
def test_a_change_of_encoding_brings_its_own_default_of_lr_scale(name: str, tmp_path: Path) -> None:
    """Also where the config of another encoding names it, as the config.toml of a run does."""
    kind = ENCODINGS[name]
    run = write(tmp_path / "run.toml", to_toml(load_config(write(tmp_path / "a.toml", MINIMAL))))
    assert "lr_scale = 1.0" in run.read_text()
    assert load_config(run, [f"position.encoding={name}"]).position.lr_scale == kind.lr_scale
    assert load_config(run, ["position.lr_scale=7"]).position.lr_scale == 7


def test_all_problems_come_at_once_each_with_its_fix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", '[data]\ndir = "x"\n[position]\nencoding = "rop"\n'
                                      '[train]\nlearning_rate = 1\nsteps = 2.5\nlr = -1.0\n'
                                      '[modle]\nn_layer = 2\n[model]\nn_head = "4"\n')
    found = problems(path, ["train.bach_size=3", 'position.scaling={method="yarm"}',
                            "train.positions=rfs"])
    expected = [f"[modle] in {path}: unknown section; did you mean model?", "'rop'; did you mean rope?",
                "train.learning_rate", "unknown key", "train.steps", "must be a valid integer (got 2.5)",
                f"train.lr in {path}: must be greater than 0 (got -1)", "model.n_head in",
                "train.bach_size on the command line: ", "train.positions on the command line: must be "]
    text = "\n".join(found)
    assert [e for e in expected if e not in text] == [] and len(found) == 8
    for text in ("train.lr.x=1", "nonsense"):
        assert f"{text!r}: must read section.key=value" in problems(path, [text])[0]
    wrong = ['position.scaling={method="yarm"}', "position.layers=[true]"]
    assert problems(write(path, MINIMAL), wrong) == (
        "position.layers on the command line: must be 'all' or 'first' or must be a valid integer "
        "(got [True])",
        "position.scaling on the command line: unknown method 'yarm'; did you mean yarn?")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "no such file" in problems(write(tmp_path / "a.toml", 'extends = "gone.toml"'))[0]
    assert [line.split()[0] for line in problems(write(tmp_path / "b.toml", ""))] == [
        "data.dir", "position.encoding"]


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "quick.toml", MINIMAL)
    assert problems(tmp_path / "quik.toml") == (
        f"config {tmp_path}/quik.toml: no such file or directory; did you mean {tmp_path}/quick.toml?",)
    assert "valid TOML" in problems(write(tmp_path / "bad.toml", "[train\n"))[0]
    assert "directory" in problems(tmp_path)[0]


def hugging_face(folder: str) -> Tables:
    """Stands for hf.pretrained.pretrained_tables: the tables in a file of the folder."""
    return tomllib.loads((Path(folder) / "tables.toml").read_text())


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A config that starts from a Hugging Face folder and overrides some of its keys."""
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "tables.toml", '[model]\nn_layer = 3\nbias = true\n[train]\nseq_len = 64\n'
                                             '[position]\nencoding = "rope"\nbase = 500.0\n')
    return write(tmp_path / "tuned.toml", f'[data]\ndir = "x"\n[model]\nn_layer = 5\n'
                                          f'[train]\ninit_from = "{tmp_path / "base"}"\n')


def test_a_config_overrides_the_hugging_face_folder_that_it_starts_from(tuned: Path) -> None:
    config = load_config(tuned, (), hugging_face)
    assert (config.model.n_layer, config.model.bias, config.train.seq_len) == (5, True, 64)
    assert (config.position.encoding, config.position.base) == ("rope", 500.0)
    assert load_config(tuned, ["position.base=7.0"], hugging_face).position.base == 7.0
    assert load_config(tuned, ["position.encoding=none"], hugging_face).position.encoding == "none"


def test_an_error_in_the_tables_of_a_hugging_face_folder_names_the_folder(tuned: Path) -> None:
    write(tuned.parent / "base" / "tables.toml", '[model]\nn_head = 0\n[position]\nencoding = "rope"\n')
    assert problems(tuned, (), hugging_face) == (
        f"model.n_head in {tuned.parent / 'base'}: must be greater than 0 (got 0)",)

    def refuse(folder: str) -> None:
        raise UserError("the folder is damaged")

    assert problems(tuned, ["train.steps=0"], refuse) == ("the folder is damaged",)


def test_out_of_memory_is_one_line(capsys) -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        def main(error: BaseException = error) -> int:
            raise error
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: out of memory; ")


@pytest.mark.parametrize(("overrides", "key"), [
    (["model.n_head=5"], "model.n_head"),
    (["model.n_kv_head=3"], "model.n_kv_head"),
    (["model.head_dim=7"], "position.fraction"),
    (["train.min_lr=1"], "train.min_lr"),
    (["position.layers=[7]"], "position.layers"),
    (["position.encoding=none", "position.layers=first"], "position.layers"),
    (["position.encoding=none", "position.skip_every=2"], "position.skip_every"),
    (["position.skip_every=1"], "position.skip_every"),
    (["position.layers=[1, 3]", "position.skip_every=2"], "position.skip_every"),
    (["position.fraction=0.1"], "position.fraction"),
    (["data.mixture={x=0.3}"], "data.mixture"),
    (["data.mixture={a=0.5,b=0.5}"], "data.mixture"),
    (["data.mixture={a=0.4995,b=0.4999}"], "data.mixture"),     # 500 and 500 windows of 1,000
    (["data.mixture={a=0.0005}"], "data.mixture.a"),        # 0.001 is the smallest that windows can have
    (["data.mixture_only=4"], "data.mixture_only"),
])
def test_rules_between_keys(overrides: list[str], key: str, tmp_path: Path) -> None:
    found = problems(write(tmp_path / "a.toml", MINIMAL), overrides)
    assert len(found) == 1 and found[0].startswith(key)


@pytest.mark.slow
def test_help_names_every_topic_and_its_keys() -> None:
    text, every = help_text(None), help_text("all")
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 110
    assert {*SECTIONS, *ENCODINGS, *SCALINGS, "all"} <= set(re.findall(r"\w+", text))
    encodings = {name: encoding.Options for name, encoding in ENCODINGS.items()}
    for topic, schema in {**SECTIONS, **encodings, **SCALINGS}.items():
        fields = dict(schema.model_fields)
        if topic in ENCODINGS:      # the keys that all encodings share are the topic "position"
            fields = {key: field for key, field in fields.items()
                      if key not in SECTIONS["position"].model_fields}
        text = help_text(topic)
        assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == list(fields), topic
        assert all(" ".join((field.description or "").split()) in text for field in fields.values()), topic
        assert text.splitlines()[0].endswith(".") and len(text.splitlines()[0]) > 40
        assert text.partition("\n\nlr_scale is")[0] in every
    with pytest.raises(UserError, match="^--help 'trian': unknown topic; did you mean train[?]$"):
        help_text("trian")


def test_differences_name_what_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", MINIMAL)
    old = flatten(load_config(path))
    new = flatten(load_config(path, ["train.lr=0.5", "run.log_every=3", "position.encoding=none"]))
    assert "train.lr: 0.001 -> 0.5" in differing_keys(old, new, ["run"])
    changes = differing_keys(old, new, [])
    assert [d for d in changes if d.startswith("position")] == ["position.encoding: rope -> none"]
    assert not any("run." in d for d in differing_keys(old, new, ["run", "train.lr"]))
    assert differing_keys(old, old, []) == []


def test_positions_restart_by_default_where_documents_are_masked(tiny) -> None:
    assert tiny("rope").data.positions == "row"
    config = tiny("rope", "data.cross_documents=mask")
    assert config.data.positions == "document"
    assert tiny("rope", "data.cross_documents=mask", "data.positions=row").data.positions == "row"
    with pytest.raises(UserError, match="data.positions .*: needs data.cross_documents"):
        tiny("rope", "data.positions=document")
