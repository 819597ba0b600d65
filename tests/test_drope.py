"""DroPE: the encoding acts up to a step and never afterwards, and the phase is that of the checkpoint."""

import math
from pathlib import Path

import pytest
import torch
from toys import TINY, every_encoding_slowly, lively, tokens

import train as train_module
from base.errors import UserError
from config import load_config
from data.loader import Corpus
from evaluation.extension import extended, parse
from hf.pretrained import pretrained_tables
from model import GPT
from positions import At, NoPE
from runtime.checkpoint import load_run
from train import train


@pytest.mark.parametrize(("share", "steps", "dropped"), [
    ("1.0", 12, []), ("0.875", 16, [14, 15, 16]), ("0.5", 5, [2, 3, 4, 5]), ("0.0", 2, [0, 1, 2]),
    ("0.99", 4, [3, 4]), ("0.5", 1, [0, 1])])
def test_it_is_dropped_from_a_share_of_the_steps_on(share: str, steps: int, dropped: list[int], tiny) -> None:
    model, found = GPT(tiny("rope", f"position.drop_at={share}", f"train.steps={steps}")), []
    assert model.is_dropped == (0 in dropped)
    for step in range(steps + 1):
        model.set_step(step)
        found += [step] * isinstance(model.active(), NoPE)
    assert found == dropped


@every_encoding_slowly
def test_a_dropped_encoding_leaves_a_model_without_one(name: str, tiny) -> None:
    model, x = lively(tiny(name, "position.drop_at=0.5", "train.steps=4")), tokens((2, 40))
    none = GPT(tiny("none")).eval()
    none.load_state_dict({key: model.state_dict()[key] for key in none.state_dict()})
    model.set_step(2)                                                   # even beyond the limit of a table
    assert torch.equal(model(x), none(x))
    model.set_step(1)
    assert name == "none" or (model(x[:, :32]) - none(x[:, :32])).abs().max() > 1e-3


def test_training_uses_it_up_to_that_step_and_the_run_is_loaded_in_its_phase(tiny, monkeypatch,
                                                                             tmp_path: Path) -> None:
    """12 steps, dropped from step 6 on, with a checkpoint after each 4; the drop outlives a checkpoint."""
    seen = []
    batch = Corpus.batch
    monkeypatch.setattr(train_module, "GPT", lambda config: seen.append(GPT(config)) or seen[-1])
    phases = []
    monkeypatch.setattr(Corpus, "batch", lambda *given: phases.append(seen[-1].is_dropped) or batch(*given))
    config = tiny("kerple_log", "position.drop_at=0.5")
    assert train(config, []) == 0
    assert phases == [False] * 6 + [True] * 6
    model, _, _ = load_run(tmp_path / "run")
    assert model.is_dropped and isinstance(model.active(), NoPE)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()                                                      # the one of step 8 stays
    assert load_run(tmp_path / "run")[0].is_dropped
    kept = load_run(tmp_path / "run")[0]
    own = {key for key, _ in kept.named_parameters() if key.startswith("encoding.")}
    assert all(torch.equal(kept.state_dict()[key], model.state_dict()[key]) for key in own)     # no update


def test_its_temperature_is_one_factor_for_the_whole_text(tiny) -> None:
    config = tiny("rope", "position.drop_at=0")
    model, x, c = lively(config), tokens((1, 100)), 0.3
    with extended(model, config, parse(f"drope:c={c}").methods, 100):
        m = torch.arange(100)[None]
        factor = model.temperature(At(m, m, 1, None))
        assert factor.shape == (1, 1, 100, 1) and (factor == factor[0, 0, 0]).all()
        assert factor[0, 0, 0].item() == pytest.approx(1 + c * math.log(100 / 32))
        changed = model(x)
    assert (changed - model(x)).abs().max() > 1e-3
    problem = parse("yarn").methods[0].problem(model, config, 100)
    assert problem == "needs a rotary encoding"
    assert parse("sinks").methods[0].problem(model, config, 100) is None


@pytest.mark.parametrize("given", [
    ("learned",), ("rope", 'position.scaling={method="dynamic_ntk",factor=2.0}')])
def test_an_extension_judges_the_model_without_the_dropped_encoding(given: tuple[str, ...], tiny) -> None:
    config = tiny(*given, "position.drop_at=0.5")
    model, method = GPT(config), parse("lm_infinite").methods[0]
    assert method.problem(model, config, 100)
    model.set_step(6)
    assert method.problem(model, config, 100) is None


def test_a_run_that_starts_from_a_dropped_one_goes_on_without(tiny, corpus_dir: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train(tiny("rope", "position.drop_at=0.5", "train.steps=2", f"run.dir={first}"), [])
    (tmp_path / "tune.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{first}"\n')
    again = [*TINY, "train.steps=1", f"run.dir={tmp_path / 'second'}"]
    with pytest.raises(UserError, match=r"position.drop_at: .*has dropped its encoding.*drop_at=0"):
        train(load_config(tmp_path / "tune.toml", [*again, "position.drop_at=1.0"], pretrained_tables), [])
    assert not (tmp_path / "second" / "config.toml").exists()
    config = load_config(tmp_path / "tune.toml", again, pretrained_tables)
    assert config.position.drop_at == 0 and train(config, []) == 0
    assert load_run(tmp_path / "second")[0].is_dropped
