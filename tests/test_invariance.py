"""Scale-invariant attention: its formula, the paper's theorem, and the laws of the encodings under it."""

import math

import pytest
import torch
from conftest import every_encoding, features_of, lively, slow_except, tokens
from test_attention import LargestTensor

import attention
from attention import Mask
from config import load_config
from evaluation.extension import EXTENSIONS, Regrouping, extended, parse
from model import GPT
from positions import ENCODINGS, At
from positions.invariance import scale_invariant
from runtime.errors import UserError

TAU = 10
ON = f"position.scale_invariant={TAU}"
every_encoding_slowly = pytest.mark.parametrize(
    "name", slow_except([*ENCODINGS], "rope", "t5", "learned", "forgetting"))


def by_hand(logit: float, d: int, tau: float = TAU) -> float:
    """Equation 16 of the paper with a(0) = 1 and m(0) = 0."""
    a = math.sqrt(2 * math.log(d / tau + 1) + 1)
    return a * logit + 1 - a**2


def test_normal_logits_get_the_attention_of_the_theorem() -> None:
    """E exp(logit) = e^0.5 / (1 + d / tau) for logits from N(0, 1): an integral over their density."""
    distance = torch.tensor([0, 1, 9, 10, 100, 1000, 10_000])[:, None]
    z = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    density = torch.exp(-z**2 / 2) / math.sqrt(2 * math.pi)
    found = torch.trapezoid(scale_invariant(z, distance, TAU).exp() * density, z)
    torch.testing.assert_close(found, math.e**0.5 / (1 + distance[:, 0].double() / TAU), rtol=1e-9, atol=0)


def test_tau_is_where_it_begins_and_at_distance_0_nothing_changes() -> None:
    z = torch.randn(1, 2, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = scale_invariant(z, torch.tensor([[[[0, 1, 7, 4096]]]]), 3.5)
    for h in range(2):
        for j, d in enumerate((0, 1, 7, 4096)):
            assert found[0, h, 0, j].item() == pytest.approx(by_hand(z[0, h, 0, j].item(), d, 3.5), rel=1e-12)
    assert torch.equal(found[..., 0], z[..., 0])
    zero, one = scale_invariant(torch.tensor([0.0, 1.0]), torch.tensor([4096, 4096]), 10.0).tolist()
    assert (one - zero, zero) == pytest.approx((3.61, -12.0), abs=0.05)     # the paper's a and m at d = 4096


def test_masked_logits_stay_masked() -> None:
    masked = torch.full((1, 1, 1, 3), -torch.inf)
    assert torch.equal(scale_invariant(masked, torch.tensor([0, 1, 10**6]), TAU), masked)


@every_encoding
@pytest.mark.parametrize("window", slow_except([None, 7], 7))
def test_it_is_a_double_loop_after_the_encodings_own_scores(name: str, window: int | None, tiny,
                                                           monkeypatch) -> None:
    """With several blocks, a window, packed documents and positions with gaps."""
    encoding = lively(tiny(name, ON)).double().encoding
    q, k, v = torch.randn(3, 2, 2, 24, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    position = torch.arange(24)[None] + 5 * (torch.arange(24) > 9)
    at = At(position, position, 0, encoding.tables(position, position), features_of(encoding, x))
    documents = (torch.arange(24) // 10).expand(2, 24)
    turned_q, turned_k = encoding.rotate(q, k, at)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    seen = (j <= i) & (i - j < (window or 99)) & (i // 10 == j // 10)
    logits = (turned_q @ turned_k.mT / 4).masked_fill(~seen, -torch.inf)
    logits = encoding.scores(logits, q, k, at)
    for m in range(24):
        for n in range(m + 1):
            d = int(position[0, m] - position[0, n])
            logits[:, :, m, n] = by_hand(logits[:, :, m, n], d)
    monkeypatch.setattr(attention, "MAX_BLOCK", 2 * 2 * 24 * 5)
    taken = []
    blocks = attention.attend_in_blocks
    monkeypatch.setattr(attention, "attend_in_blocks", lambda *args: taken.append(1) or blocks(*args))
    monkeypatch.setattr(attention, "FUSE_FROM", 1)                      # not even folded biases are fused
    mask = Mask(window=window, documents=documents, in_order=True)
    found = attention.attend(q, k, v, encoding, at, mask, 0.0)
    torch.testing.assert_close(found, logits.softmax(-1) @ v, atol=1e-6, rtol=1e-6)
    assert taken


@every_encoding
def test_it_acts_in_every_layer_and_off_means_the_same_bits(name: str, tiny) -> None:
    x = tokens((1, 24))
    plain, on = lively(tiny(name)), lively(tiny(name, ON))
    assert list(plain.state_dict()) == list(on.state_dict())
    assert torch.equal(lively(tiny(name, "position.scale_invariant=0"))(x), plain(x))
    assert (on(x) - plain(x)).abs().max() > 1e-3
    none = tiny(name, ON, "position.layers=[]") if ENCODINGS[name].acts_in_layers() else tiny(name, ON)
    assert lively(none).no_encoding.tau == TAU


@every_encoding_slowly
def test_cached_decoding_equals_the_full_forward(name: str, tiny) -> None:
    model = lively(tiny(name, ON, "model.window=20")).double()
    x, cache = tokens((2, 30)), model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in ((0, 7), (7, 8), (8, 15), (15, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=1e-5, rtol=1e-5)


@every_encoding_slowly
def test_the_future_cannot_leak_and_every_parameter_learns(name: str, tiny) -> None:
    model, x = lively(tiny(name, ON)), tokens((2, 32))
    changed = x.clone()
    changed[:, 20] = (x[:, 20] + 1) % 257
    assert torch.equal(model(changed)[:, :20], model(x)[:, :20])
    model(x, tokens((2, 32), 1)).backward()
    assert all(p.grad.isfinite().all() and (p.grad != 0).any() for p in model.parameters())


@every_encoding_slowly
def test_only_relative_encodings_ignore_a_shift_of_all_positions(name: str, tiny) -> None:
    model, x, at = lively(tiny(name, ON)).double(), tokens((2, 20)), torch.arange(20)
    change = (model(x, positions=at + 11) - model(x, positions=at)).abs().max()
    assert change < 1e-4 if ENCODINGS[name].is_relative else change > 1e-2


ARGUMENTS = {"base": "base:base=50000",
             "longrope": f"longrope:short_factor={[1.0] * 8},long_factor={[2.0] * 8}"}


@pytest.mark.parametrize("method", EXTENSIONS)
def test_extensions_apply_beyond_L_and_restore_the_model(method: str, tiny) -> None:
    config = tiny("rope", ON)
    model, x = lively(config), tokens((1, 100))
    before = model(x)
    with extended(model, config, parse(ARGUMENTS.get(method, method)).methods, 100):
        assert (model(x) - before).abs().max() > 1e-3
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("spec", ["rerope:window=5", "leaky_rerope:window=5,k=4.0", "dual_chunk:chunk=9",
                                  "sinks:sinks=3,window=7"])
def test_a_pair_that_gets_other_positions_gets_their_distance(spec: str, tiny) -> None:
    """Without an encoding's own effect: NoPE, and q = 0."""
    config = tiny("none", ON)
    model, pos = lively(config), torch.arange(48)[None]
    method = parse(spec).methods[0]
    assert isinstance(method, Regrouping)
    q = torch.zeros(1, 2, 48, 16)
    logits = torch.zeros(1, 2, 48, 48).masked_fill(~torch.ones(48, 48, dtype=torch.bool).tril(), -torch.inf)
    with extended(model, config, [method], 48):
        found = model.encoding.final_logits(logits, q, q, At(pos, pos, 0, None))[0, 0]
    for m in range(48):
        for n in range(m + 1):
            far = [p.item() for p in method.far(torch.tensor(m), torch.tensor(n), 32, 48)]
            is_near = n >= method.first_near(torch.tensor(m), 32)
            d = m - n if is_near else far[0] - far[1]
            is_seen = is_near or not method.hides or n < 3
            assert found[m, n].item() == pytest.approx(by_hand(0, d) if is_seen else -math.inf, abs=1e-5)


def test_memory_at_8192_tokens_is_bounded(tiny) -> None:
    """No T x T logits, which would take 268 MB for one head."""
    model = GPT(tiny("p_rope", ON, "model.n_layer=1", "model.n_embd=8")).eval()
    with torch.no_grad(), LargestTensor() as mode:
        model.hidden(tokens((1, 8192)))
    assert mode.n_bytes <= 4 * attention.MAX_BLOCK


def test_positions_with_several_axes_are_refused(tiny) -> None:
    model = lively(tiny("rope_2d", ON))
    with pytest.raises(ValueError, match="one axis under .*scale_invariant"):
        model(tokens((1, 8)), positions=torch.zeros(1, 8, 2, dtype=torch.long))


def test_tau_must_be_a_length(tiny) -> None:
    for wrong in ("-1", "true"):
        with pytest.raises(UserError, match="scale_invariant"):
            tiny("rope", f"position.scale_invariant={wrong}")


@pytest.mark.parametrize("name", ["scale-invariant", "p-rope-log-n", "p-rope-ssmax"])
def test_the_configs_have_the_papers_frequencies(name: str) -> None:
    """Half of the pairs turn, from 1 down to 1 / 1024 radians per token."""
    config = load_config(f"configs/{name}.toml", ["model.vocab_size=257"])
    assert config.model.qk_norm and config.position.encoding == "p_rope"
    assert (config.position.scale_invariant, config.position.temperature) == {
        "scale-invariant": (10, "none"), "p-rope-log-n": (0, "log_n"), "p-rope-ssmax": (0, "ssmax")}[name]
    f, _ = GPT(config).encoding.frequencies(torch.arange(1))
    n = len(f) // 2
    expected = torch.cat((1024.0 ** (-torch.arange(n) / (n - 1)), torch.zeros(n)))
    torch.testing.assert_close(f, expected, rtol=1e-5, atol=0)
