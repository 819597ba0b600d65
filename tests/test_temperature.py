"""Query temperatures: each against its formula, and laws that hold under every encoding."""

import math
from typing import get_args

import pytest
import torch
from conftest import every_encoding, every_encoding_slowly, lively, tokens

from attention import Mask
from evaluation.extension import extended, parse
from model import GPT, Attention
from positions import At, Options
from positions.temperature import TEMPERATURES
from runtime.device import autocast

every_temperature = pytest.mark.parametrize("temperature", TEMPERATURES)
real = pytest.mark.parametrize("temperature", [name for name in TEMPERATURES if name != "none"])


def rotated_queries(model: GPT, x: torch.Tensor, **arguments) -> list[torch.Tensor]:
    """The q that each layer passes to its encoding, (B, H, T, D)."""
    seen = []
    rotate = model.encoding.rotate
    model.encoding.rotate = lambda q, k, at: seen.append(q) or rotate(q, k, at)
    model(x, **arguments)
    model.encoding.rotate = rotate
    return seen


def test_the_schema_names_the_registry() -> None:
    assert get_args(Options.model_fields["temperature"].annotation) == tuple(TEMPERATURES)


@every_encoding
def test_none_leaves_no_trace(name: str, tiny) -> None:
    model = lively(tiny(name))
    assert not any("temperature" in key for key in model.state_dict())
    assert model.temperature(torch.arange(5)[None]) == [None, None]


@real
def test_other_weights_and_the_checkpoint_are_the_same(temperature: str, tiny) -> None:
    torch.manual_seed(0)
    plain = GPT(tiny("rope")).state_dict()
    torch.manual_seed(0)
    model = GPT(tiny("rope", f"position.temperature={temperature}"))
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in plain.items())
    assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}
    extra = {"temperature.s"} if temperature == "ssmax" else set()
    assert set(model.state_dict()) - set(plain) == extra


@pytest.mark.parametrize("L", [2, 3, 7, 49, 128])   # ln L / ln L, in fp32, is not 1 at 7 and 49
def test_log_n_is_the_formula(L: int, tiny) -> None:
    model = GPT(tiny("rope", "position.temperature=log_n", f"train.seq_len={L}"))
    at = torch.cat((torch.arange(3 * L), torch.tensor([10**6])))[None]
    for factor in model.temperature(at):
        assert factor.shape == (1, 1, at.shape[1], 1) and factor.dtype == torch.float32
        for m, f in zip(at[0].tolist(), factor[0, 0, :, 0].tolist(), strict=True):
            assert f == pytest.approx(max(1.0, math.log(m + 1) / math.log(L)), rel=1e-6)
            assert f == 1 if m < L else f > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_n_leaves_positions_below_l_alone(dtype: str, tiny) -> None:
    config = tiny("rope", "position.temperature=log_n", f"train.dtype={dtype}")
    x = tokens((2, 64))
    with autocast(config.train, torch.device("cpu")):
        found, plain = lively(config)(x), lively(tiny("rope"))(x)
    assert torch.equal(found[:, :32], plain[:, :32])
    assert (found[:, 33:] != plain[:, 33:]).any(-1).all()


def test_ssmax_is_the_formula(tiny) -> None:
    """weights_j = n^(s z_j) / sum over n = m + 1 keys, as the paper writes it, with s of layer and head."""
    model = lively(tiny("none", "position.temperature=ssmax")).double()
    for layer in (0, 1):
        attention = model.blocks[layer].attention
        x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        at = torch.arange(9)[None]
        found = attention(x, model.encoding, At(at, at, layer, None), Mask(), model.temperature(at)[layer])
        q, k, v = (p(x).view(2, 9, 2, 16) for p in (attention.q, attention.k, attention.v))
        mixed = torch.zeros(2, 9, 2, 16, dtype=torch.float64)
        for b in range(2):
            for h in range(2):
                s = model.temperature.s[layer, h]
                for i in range(9):
                    z = [(q[b, i, h] * k[b, j, h]).sum() / 4 for j in range(i + 1)]
                    powers = [(i + 1) ** (s * z_j) for z_j in z]
                    for j in range(i + 1):
                        mixed[b, i, h] += powers[j] / sum(powers) * v[b, j, h]
        torch.testing.assert_close(found, attention.o(mixed.flatten(2)), atol=1e-5, rtol=1e-5)


def test_ssmax_begins_at_the_papers_value(tiny) -> None:
    s = GPT(tiny("rope", "position.temperature=ssmax")).temperature.s
    assert s.shape == (2, 2) and (s == 0.43).all()                      # layers, heads


@real
def test_q_is_scaled_after_its_norm_and_for_scores_too(temperature: str, tiny) -> None:
    options = ("model.qk_norm=true", f"position.temperature={temperature}", "model.n_layer=1")
    model, plain = lively(tiny("alibi", *options)), lively(tiny("alibi", options[0], options[2]))
    plain.load_state_dict(model.state_dict(), strict=False)
    x, at = tokens((2, 8)), torch.tensor([[0, 3, 50, 51, 52, 90, 91, 4000], list(range(8))])
    factor = model.temperature(at)[0]
    before, after = (rotated_queries(m, x, positions=at)[0] for m in (plain, model))
    torch.testing.assert_close(after, before * factor)
    assert (factor[0, :, -1] != 1).all()
    seen = []
    scores = model.encoding.scores
    model.encoding.scores = lambda logits, q, k, at: seen.append((logits, q, k)) or scores(logits, q, k, at)
    model(x, positions=at)
    (logits, q, k), = seen
    torch.testing.assert_close(q, after)
    torch.testing.assert_close(logits.tril(), (after @ k.mT / 4).tril(), atol=1e-5, rtol=1e-5)


@every_encoding_slowly
@real
def test_cached_decoding_equals_the_full_forward_beyond_l(name: str, temperature: str, tiny) -> None:
    model = lively(tiny(name, f"position.temperature={temperature}", "train.seq_len=16")).double()
    T = min(40, model.encoding.max_length or 40)
    x = tokens((2, T))
    whole, cache = model(x), model.new_cache()
    pieces = [model(x[:, i:j], cache=cache) for i, j in ((0, 6), (6, 7), (7, 13), (13, T - 1), (T - 1, T))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ssmax_learns(dtype: str, tiny) -> None:
    config = tiny("rope", "position.temperature=ssmax", f"train.dtype={dtype}")
    model = lively(config).train()
    with autocast(config.train, torch.device("cpu")):
        model(tokens((2, 32)), tokens((2, 32), 1)).backward()
    assert (model.temperature.s.grad != 0).all() and model.temperature.s.grad.isfinite().all()


@real
def test_positions_may_differ_in_a_batch(temperature: str, tiny) -> None:
    model = lively(tiny("rope", f"position.temperature={temperature}"))
    x, at = tokens((1, 10)).repeat(2, 1), torch.stack((torch.arange(10), torch.arange(10) * 9))
    batch = model(x, positions=at)
    for b in range(2):
        torch.testing.assert_close(batch[b:b + 1], model(x[:1], positions=at[b]), atol=2e-4, rtol=1e-4)


@every_temperature
def test_the_future_cannot_leak(temperature: str, tiny) -> None:
    model = lively(tiny("rope", f"position.temperature={temperature}"))
    x = tokens((1, 48))
    changed = x.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 257
    assert torch.equal(model(changed)[:, :40], model(x)[:, :40])
    assert model(x, positions=torch.arange(48) - 5).isfinite().all()    # no log of 0 or less


@pytest.mark.parametrize(("only", "layers"), [
    ("all", {0, 1, 2, 3}), ("encoded", {0, 2}), ("unencoded", {1, 3})])
def test_a_temperature_acts_in_the_layers_of_its_kind_alone(only: str, layers: set[int], tiny,
                                                            monkeypatch) -> None:
    """Also one that --extend applies: SWAN-GPT's, for the layers without an encoding."""
    config = tiny("rope", "model.n_layer=4", "position.skip_every=2", f"position.temperature_layers={only}")
    model, x, seen = lively(config), tokens((1, 64)), []
    attend = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda self, x, encoding, at, mask, factor, cache:
                        seen.append((at.layer, factor)) or attend(self, x, encoding, at, mask, factor, cache))
    with extended(model, config, parse("log_n").methods, 64):
        model(x)
    assert {n for n, factor in seen if factor is not None and (factor[..., 32:, :] > 1).all()} == layers
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
