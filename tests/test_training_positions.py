"""train.positions: what each kind draws, that training uses it, and what evaluation then does."""


import pytest
import torch

from base.errors import UserError
from data.loader import training_positions
from model import GPT
from train import train


def at(kind: str, M: int) -> tuple[str, str]:
    return f"train.positions={kind}", f"train.position_range={M}"


@pytest.mark.parametrize("kind", ["pose", "random"])
def test_positions_are_a_function_of_seed_and_step_and_stay_in_order_below_the_range(kind: str, tiny) -> None:
    t = tiny("rope", "train.batch_size=512", *at(kind, 300)).train
    drawn = training_positions(t, 3)
    assert drawn.shape == (512, 32) and drawn.min() >= 0 and drawn.max() < 300
    assert (drawn.diff(dim=1) > 0).all() and len(drawn.unique(dim=0)) > 400     # each row its own
    assert torch.equal(drawn, training_positions(t, 3)) and not torch.equal(drawn, training_positions(t, 4))
    other = t.model_copy(update={"seed": 1})
    assert not torch.equal(drawn, training_positions(other, 3))


def test_pose_skips_once_and_reaches_every_distance(tiny) -> None:
    drawn = training_positions(tiny("rope", "train.batch_size=512", *at("pose", 300)).train, 3)
    steps = drawn.diff(dim=1)
    assert (drawn[:, 0] == 0).all() and ((steps == 1).sum(1) >= 30).all()       # one jump at most
    assert drawn[:, -1].max() > 290 and drawn[:, -1].min() < 40
    jump = steps.argmax(dim=1)[steps.amax(dim=1) > 1] + 1               # tokens before the skip
    assert jump.min() == 1 and jump.max() == 16


def test_random_positions_are_uniform(tiny) -> None:
    """The i-th of T sorted draws (from 1) has the mean of the theory, within 5 standard errors."""
    drawn = training_positions(tiny("rope", "train.batch_size=2048", *at("random", 100)).train, 0).double()
    mean = torch.arange(1, 33) * 101 / 33 - 1
    assert ((drawn.mean(dim=0) - mean).abs() < 5 * drawn.std(dim=0) / 2048**0.5).all()


@pytest.mark.parametrize("kind", ["pose", "random"])
def test_training_uses_them_and_validation_does_not(kind: str, tiny, monkeypatch) -> None:
    config, seen = tiny("rope", *at(kind, 99), "train.accumulate=2", "train.steps=1"), []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, x, y, at=None, documents=None, reduction="mean":
                        seen.append(at) or forward(self, x, y, at, reduction=reduction))
    train(config, [])
    assert torch.equal(torch.cat(seen[:2]), training_positions(config.train, 0))
    assert seen[2:] and all(at is None for at in seen[2:])


@pytest.mark.parametrize(("overrides", "expected"), [
    (("train.positions=pose",), "position_range .*: must be at least 32 with train.positions = pose .got 0."),
    (at("random", 31), "position_range .*: must be at least 32 with train.positions = random .got 31."),
    (("train.position_range=64",), "position_range .*: has no effect with train.positions = plain; set"),
    (("train.positions=rfs",), "train.positions")])
def test_a_range_that_does_not_fit_is_refused(overrides: tuple[str, ...], expected: str, tiny) -> None:
    with pytest.raises(UserError, match=expected):
        tiny("rope", *overrides)


def test_learned_positions_cannot_go_beyond_their_table(tiny) -> None:
    tiny("learned", *at("random", 32))
    with pytest.raises(UserError, match="learned has no position from train.seq_len on: .*= 64"):
        tiny("learned", *at("random", 64))
