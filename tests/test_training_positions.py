"""train.positions: what each kind draws, that training uses it, and what evaluation then does."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import every_encoding, lively, tokens

import eval as eval_command
from config import config_from, load_config
from data.training_positions import training_positions
from evaluation.extension import parse
from hf.architectures import ARCHITECTURES
from model import GPT
from positions import ENCODINGS
from runtime.checkpoint import load_run
from runtime.errors import UserError
from train import check_positions, train


def at(kind: str, M: int) -> tuple[str, str]:
    return f"train.positions={kind}", f"train.position_range={M}"


@pytest.mark.parametrize("kind", ["pose", "random", "rfs"])
def test_positions_are_a_function_of_seed_and_step_and_stay_in_order_below_the_range(kind: str, tiny) -> None:
    t = tiny("rope", "train.batch_size=512", *at(kind, 300)).train
    drawn = training_positions(t, 3)
    assert drawn.shape == (512, 32) and drawn.min() >= 0 and drawn.max() < 300
    assert (drawn.diff(dim=1) > 0).all() and len(drawn.unique(dim=0)) > 400     # each row its own
    assert drawn.is_floating_point() == (kind == "rfs")
    assert torch.equal(drawn, training_positions(t, 3)) and not torch.equal(drawn, training_positions(t, 4))
    other = t.model_copy(update={"seed": 1})
    assert not torch.equal(drawn, training_positions(other, 3))


def test_plain_positions_are_none_and_a_range_without_room_is_plain(tiny) -> None:
    assert training_positions(tiny("rope").train, 0) is None
    for kind in ("pose", "random"):
        drawn = training_positions(tiny("rope", *at(kind, 32)).train, 0)
        assert torch.equal(drawn, torch.arange(32).expand(4, 32))


def test_pose_skips_once_and_reaches_every_distance(tiny) -> None:
    drawn = training_positions(tiny("rope", "train.batch_size=512", *at("pose", 300)).train, 3)
    steps = drawn.diff(dim=1)
    assert (drawn[:, 0] == 0).all() and ((steps == 1).sum(1) >= 30).all()       # one jump at most
    assert drawn[:, -1].max() > 290 and drawn[:, -1].min() < 40
    jump = steps.argmax(dim=1)[steps.amax(dim=1) > 1] + 1               # tokens before the skip
    assert jump.min() == 1 and jump.max() == 16


@pytest.mark.parametrize("kind", ["random", "rfs"])
def test_random_positions_are_uniform(kind: str, tiny) -> None:
    """The i-th of T sorted draws (from 1) has the mean of the theory, within 5 standard errors."""
    drawn = training_positions(tiny("rope", "train.batch_size=2048", *at(kind, 100)).train, 0).double()
    i = torch.arange(1, 33)
    mean = i * 101 / 33 - 1 if kind == "random" else i * 100 / 33
    assert ((drawn.mean(dim=0) - mean).abs() < 5 * drawn.std(dim=0) / 2048**0.5).all()


@pytest.mark.parametrize("kind", ["pose", "random", "rfs"])
def test_training_uses_them_and_validation_does_not(kind: str, tiny, monkeypatch) -> None:
    config, seen = tiny("rope", *at(kind, 99), "train.accumulate=2", "train.steps=1"), []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, x, y, at=None, documents=None:
                        seen.append(at) or forward(self, x, y, at))
    train(config, [])
    assert torch.equal(torch.cat(seen[:2]), training_positions(config.train, 0))
    assert seen[2:] and all(at is None for at in seen[2:])


@every_encoding
def test_positions_between_the_integers_are_defined_or_refused(name: str, tiny) -> None:
    model, x, whole = lively(tiny(name)), tokens((2, 20)), torch.arange(20)
    if not ENCODINGS[name].takes_floats:
        with pytest.raises(ValueError, match="takes integer positions, got torch.float32"):
            model(x, positions=whole.float())
        with pytest.raises(UserError, match=f"train.positions rfs: {name} takes integer positions only"):
            check_positions(model, tiny(name, *at("rfs", 32)))
        return
    torch.testing.assert_close(model(x, positions=whole.float()), model(x, positions=whole), atol=1e-4,
                               rtol=1e-4)
    moved, between = (model(x, positions=whole + step * (whole % 2)) - model(x) for step in (1, 0.5))
    assert between.isfinite().all() and (between.abs().max() > 1e-3) == (moved.abs().max() > 1e-3)


def test_rfs_is_evaluated_at_equidistant_positions_below_its_range_at_any_length(tiny) -> None:
    model = lively(tiny("rope", *at("rfs", 50)))
    plain = lively(tiny("rope"))
    for n in (8, 32, 40):           # up to L = 32 the distance is 50 / 32, beyond it 50 / n
        x = tokens((2, n))
        i = torch.arange(1, n + 1)
        expected = plain(x, positions=50 * (2 * i - 1) / (2 * max(32, n)))
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        assert (model(x) - plain(x)).abs().max() > 1e-3


def test_rfs_decodes_from_the_cache_up_to_the_training_length(tiny) -> None:
    model, x = lively(tiny("rope", *at("rfs", 50))), tokens((2, 32))
    cache = model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in ((0, 9), (9, 10), (10, 32))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=2e-4, rtol=1e-4)
    single = lively(tiny("rope", *at("rfs", 50), "model.n_layer=1"))    # its keys know no positions
    cache, x = single.new_cache(), tokens((2, 40))
    parts = [single(x[:, i:j], cache=cache) for i, j in ((0, 30), (30, 40))]
    torch.testing.assert_close(parts[1], single(x)[:, 30:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("overrides", "expected"), [
    (("train.positions=pose",), "position_range .*: must be at least 32 with train.positions = pose, got 0"),
    (at("random", 31), "position_range .*: must be at least 32 with train.positions = random, got 31"),
    (("train.positions=rfs",), "position_range .*: must be at least 1 with train.positions = rfs, got 0"),
    (("train.position_range=64",), "position_range .*: must be unset with train.positions = plain, got 64"),
    (("train.positions=rope",), "train.positions .*: must be one of .plain., .pose., .random., .rfs."),
    (("train.pose_length=64", "train.positions=pose"), "unknown key of .train.")])
def test_a_range_that_does_not_fit_is_refused(overrides: tuple[str, ...], expected: str, tiny) -> None:
    with pytest.raises(UserError, match=expected):
        tiny("rope", *overrides)


def test_learned_positions_cannot_go_beyond_their_table(tiny) -> None:
    with pytest.raises(UserError, match="learned ends at position 32"):
        train(tiny("learned", *at("random", 64)), [])


def test_a_run_with_the_key_of_older_versions_is_read(tiny, tmp_path: Path) -> None:
    """In its config.toml and in the state.json of its checkpoint."""
    path = tmp_path / "old.toml"
    path.write_text(f'[data]\ndir = "{tmp_path}"\n[position]\nencoding = "rope"\n[train]\nseq_len = 32\n'
                    "pose_length = 64\n")
    t = load_config(path).train
    assert (t.positions, t.position_range) == ("pose", 64)
    tables = load_config(path).model_dump(exclude_none=True)
    new = tables["train"].copy()
    del tables["train"]["positions"], tables["train"]["position_range"]
    tables["train"]["pose_length"] = 64
    assert config_from(tables, "in state.json").train.model_dump(exclude_none=True) == new


def test_evaluation_says_at_which_positions_the_run_was_trained(
        tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    train(tiny("rope", *at("rfs", 99), "train.steps=2"), [])
    model, config, _ = load_run(tmp_path / "run")
    assert model.span == 99
    monkeypatch.setattr(sys, "argv", ["eval.py", str(tmp_path / "run"), "--lengths", "32,64", "--protocol",
                                      "fixed", "--windows", "2"])
    eval_command.main()
    printed = capsys.readouterr().out
    assert "rope, trained at L = 32 and rfs positions below 99, on" in printed
    assert "\nevaluated at equidistant positions\n" in printed
    (path,) = (tmp_path / "run" / "eval").glob("*.json")
    content = json.loads(path.read_text())
    assert (content["positions"], content["position_range"]) == ("rfs", 99)
    for spec, is_refused in (("pi", True), ("rerope", True), ("window", False), ("drope", False)):
        (method,) = parse(spec).methods
        assert (method.problem(model, config, 64) is not None) == is_refused
    llama = ARCHITECTURES["llama"]
    assert llama.obstacles(config)[-1] == "train.positions = 'rfs'"
