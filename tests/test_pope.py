"""PoPE: its formula pair by pair, x-transformers, temperatures, and the limits of its phases."""

import math

import pytest
import torch
from conftest import lively, tokens

from evaluation.extension import extended, parse
from model import GPT
from positions import At
from positions.temperature import TEMPERATURES

D = 16


def by_hand(q: torch.Tensor, k: torch.Tensor, i: int, j: int, delta: torch.Tensor, base: float) -> float:
    """Equation of the paper for one pair: q and k (D,) at positions i and j."""
    total = 0.0
    for c in range(D):
        radius = math.log(1 + math.exp(q[c])) * math.log(1 + math.exp(k[c]))
        total += radius * math.cos((j - i) * base ** (-c / D) + delta[c].item())
    return total / math.sqrt(D)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_of(encoding, q_pos: torch.Tensor, k_pos: torch.Tensor, layer: int = 1) -> At:
    return At(q_pos, k_pos, layer, encoding.tables(q_pos, k_pos))


def test_logits_are_the_papers_formula(tiny) -> None:
    """With queries after cached keys, gaps, another base, and phases of each layer and head."""
    encoding = lively(tiny("pope", "position.base=500")).double().encoding
    q, k = vectors(1, 2, 3, D), vectors(1, 2, 5, D, seed=1)
    q_pos, k_pos = torch.tensor([[9, 30, 31]]), torch.tensor([[0, 2, 9, 30, 31]])
    turned_q, turned_k = encoding.rotate(q, k, at_of(encoding, q_pos, k_pos))
    found = turned_q @ turned_k.mT / math.sqrt(D)
    assert turned_q.shape[-1] == turned_k.shape[-1] == 2 * D
    for h in range(2):
        for i in range(3):
            for j in range(5):
                expected = by_hand(q[0, h, i], k[0, h, j], q_pos[0, i].item(), k_pos[0, j].item(),
                                   encoding.delta[1, h], 500)
                assert found[0, h, i, j].item() == pytest.approx(expected, abs=1e-5)
    assert (encoding.delta[1] < 0).any()                                # some phases are not at the bound


def test_x_transformers_agrees(tiny) -> None:
    peer = pytest.importorskip("x_transformers.x_transformers")
    encoding, T = lively(tiny("pope")).encoding, 20
    pos = torch.arange(T)
    q, k = vectors(2, 2, T, D).float(), vectors(2, 2, T, D, seed=1).float()
    turned = encoding.rotate(q, k, at_of(encoding, pos[None], pos[None]))
    polar = peer.PolarEmbedding(D, 2)
    polar.learned_bias.data.copy_(encoding.delta[1][:, None])
    freqs, bias = polar(pos)
    wanted = peer.apply_polar_pos_emb(q, freqs) @ peer.apply_polar_pos_emb(k, freqs + bias).mT
    torch.testing.assert_close(turned[0] @ turned[1].mT, wanted, atol=1e-5, rtol=1e-5)


def test_the_authors_package_agrees(tiny) -> None:
    peer = pytest.importorskip("PoPE_pytorch")
    encoding, T = lively(tiny("pope")).encoding, 20
    pos = torch.arange(T)[None]
    q, k = vectors(2, 2, T, D).float(), vectors(2, 2, T, D, seed=1).float()
    turned = encoding.rotate(q, k, at_of(encoding, pos, pos))
    pope = peer.PoPE(D, heads=2)
    pope.bias.data.copy_(encoding.delta[1].reshape(pope.bias.shape))
    wanted_q, wanted_k = peer.apply_pope_to_qk(pope(T), q, k)
    torch.testing.assert_close(turned[0] @ turned[1].mT, wanted_q @ wanted_k.mT, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("temperature", [name for name in TEMPERATURES if name != "none"])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_temperature_multiplies_the_logits_and_not_the_radius(temperature: str, blocks: bool, tiny,
                                                                monkeypatch) -> None:
    """In the fused kernel, in blocks, and through --extend, which scores far pairs anew in blocks."""
    config = tiny("pope", f"position.temperature={temperature}", "model.n_layer=1", "train.seq_len=4")
    model, x = lively(config).double(), tokens((1, 12))
    attention, encoding = model.blocks[0].attention, model.encoding
    hidden = model.blocks[0].attention_norm(model.embedding(x))
    q, k, v = (project(hidden).unflatten(-1, (2, D)).transpose(1, 2)
               for project in (attention.q, attention.k, attention.v))
    factor = model.temperature(torch.arange(12)[None])[0].double().expand(1, 2, 12, 1)
    model(x)                                                            # brings the phases into their range
    logits = torch.full((1, 2, 12, 12), -torch.inf, dtype=torch.float64)
    for h in range(2):
        for i in range(12):
            for j in range(i + 1):
                near = min(i - j, 5) if blocks else i - j
                logits[0, h, i, j] = factor[0, h, i, 0] * by_hand(
                    q[0, h, i], k[0, h, j], near, 0, encoding.delta[0, h], 10_000)
    expected = attention.o((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    found = []
    attention.register_forward_hook(lambda module, given, out: found.append(out))
    if blocks:
        monkeypatch.setattr("attention.MAX_BLOCK", 2 * 2 * 12 * 5)
    with extended(model, config, parse("rerope:window=5").methods if blocks else [], 12):
        model(x)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_phases_stay_in_their_range_and_learn_at_its_ends(tiny) -> None:
    model = GPT(tiny("pope"))
    assert model.encoding.delta.shape == (2, 2, D) and (model.encoding.delta == 0).all()
    model(tokens((2, 32)), tokens((2, 32), 1)).backward()
    assert (model.encoding.delta.grad != 0).all()
    model.encoding.delta.data = torch.linspace(-9, 3, 2 * 2 * D).view(2, 2, D)
    model(tokens((1, 4)))
    delta = model.encoding.delta.detach()
    assert delta.min().item() == pytest.approx(-2 * math.pi) and delta.max() == 0


def test_it_takes_scaling_for_twice_as_many_frequencies(tiny) -> None:
    factors = [1.0 + c / 10 for c in range(D)]
    scaling = f'{{method="longrope",factor=4.0,short_factor={factors},long_factor={factors}}}'
    model = lively(tiny("pope", f"position.scaling={scaling}"))
    f, _ = model.encoding.frequencies(torch.arange(4))
    torch.testing.assert_close(f, 10_000.0 ** (-torch.arange(D) / D) / torch.tensor(factors))
    assert lively(tiny("pope", "model.head_dim=7"))(tokens((1, 8))).isfinite().all()    # odd widths too
