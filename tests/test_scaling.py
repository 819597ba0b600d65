"""Scaling methods: their formulas, what they leave alone, through a model, and as a config key."""

import json
import math
from itertools import product
from typing import Any

import pytest
import torch
from explicit import config_of, model_of
from toys import lively, slow_except, tokens

import rope
from base.errors import UserError
from config import load_config, to_toml
from model import shape_of
from positions import ENCODINGS, At
from positions.rotary import RoPE
from positions.scaling import PI, SCALINGS, DynamicNTK, LongRoPE, Scaling, YaRN

pytestmark = pytest.mark.usefixtures("no_gradients")

L, BASE = 32, 10_000.0
ROTARY = [name for name, encoding in ENCODINGS.items() if issubclass(encoding, RoPE)]
DYNAMIC = ("dynamic_ntk", "longrope")
methods = pytest.mark.parametrize("method", SCALINGS)
shapes = [(dim, base, length, s) for dim, base in ((16, 1e4), (64, 1e4), (64, 5e5), (128, 500.0))
          for length in (128, 4096) for s in (1.0, 1.5, 4.0, 64.0)]


def make(method: str, factor: float = 4.0, dim: int = 16, **options) -> Scaling:
    """The method with its required options."""
    required: dict[str, Any] = {"factor": factor}
    if method == "base":
        required = {"base": BASE * factor}
    if method == "longrope":
        required |= {"short_factor": [1.0] * (dim // 2), "long_factor": [factor] * (dim // 2)}
    return SCALINGS[method].model_validate(required | options)


def written(scaling: Scaling) -> str:
    """The override that sets it, without spaces."""
    options = scaling.model_dump(exclude_none=True)
    text = ",".join(f"{key}={json.dumps(value)}" for key, value in options.items())     # TOML writes alike
    return f"position.scaling={{{text}}}".replace(" ", "")


def frequencies(scaling: Scaling, dim: int = 16, base: float = BASE, length: int = L,
                T: int = L) -> tuple[torch.Tensor, float]:
    """Frequencies and factor at T tokens after training at `length`."""
    return scaling.frequencies(dim, base, length, torch.arange(T)[None])


def ramp(plain: list[float], s: float, shares: list[float]) -> list[float]:
    """f / s for a share of 1, f for a share of 0, both beyond them too."""
    shares = [min(1, max(0, share)) for share in shares]
    return [f + share * (f / s - f) for f, share in zip(plain, shares, strict=True)]


def test_a_method_gives_a_frequency_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("rope", written(make("pi")))
    monkeypatch.setattr(PI, "frequencies", lambda *_: (torch.ones(1), 1.0))
    with pytest.raises(AssertionError, match="pi: a frequency for each pair"):
        model(tokens((1, 8)))


@pytest.mark.parametrize(("dim", "base", "length", "s"), shapes)
def test_frequencies_are_the_formula(dim: int, base: float, length: int, s: float) -> None:
    """Of pair i with the plain frequency f, which makes n turns in the length."""
    pairs = range(dim // 2)
    T = int(s * length)
    plain = [base ** (-2 * i / dim) for i in pairs]
    turns = [length * f / (2 * math.pi) for f in plain]
    amplitude = 0.1 * math.log(s) + 1

    def check(scaling: Scaling, expected: list[float], factor: float = 1) -> None:
        f, found = frequencies(scaling, dim, base, length, T)
        torch.testing.assert_close(f, torch.tensor(expected), rtol=3e-5, atol=0)
        assert found == pytest.approx(factor)

    def ntk(s: float) -> list[float]:
        return [f / s ** (2 * i / (dim - 2)) for i, f in enumerate(plain)]

    check(make("pi", s), [f / s for f in plain])
    check(make("base", base=5e5), [5e5 ** (-2 * i / dim) for i in pairs])
    check(make("ntk", s), ntk(s))
    check(make("dynamic_ntk", 3.0), ntk(3 * T / length - 2))

    # YaRN: a ramp between the pairs that make 8 turns and 2 turns
    def pair_of(n_turns: float) -> float:
        return dim * math.log(length / (2 * math.pi * n_turns)) / (2 * math.log(base))

    first = max(pair_of(8), 0)
    last = min(pair_of(2), dim - 1)
    expected = ramp(plain, s, [(i - first) / ((last - first) or 1e-3) for i in pairs])
    yarn = {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
    check(make("yarn", s, **yarn), expected, amplitude)
    check(make("yarn", s, **yarn, attention_factor=1.25), expected, 1.25)
    llama3 = make("llama3", s, low_freq_factor=2.0, high_freq_factor=6.0)
    check(llama3, ramp(plain, s, [1 - (n - 2) / (6 - 2) for n in turns]))

    longer = [2.0 + i for i in pairs]
    longrope = make("longrope", s, dim, short_factor=[1.0] * (dim // 2), long_factor=longer)
    factor = math.sqrt(1 + math.log(s) / math.log(length))
    check(longrope, [f / by if s > 1 else f for f, by in zip(plain, longer, strict=True)], factor)

    # MrRoPE: a product over the faster pairs, from the last one with more than 32 turns to the first below 1
    low = max([0, *(i for i in pairs if turns[i] > 32)])
    high = min([len(turns), *(i for i in pairs if turns[i] < 1)])
    count = max(1, high - low)
    exponents = [0.0] * len(pairs)
    for n in range(min(count, len(pairs) - low)):
        exponents[low + n] = 2 * (n + 1) / (count * (count + 1))
    check(make("mrrope", s), [f / s ** sum(exponents[:i]) for i, f in enumerate(plain)], amplitude)


@methods
def test_factor_1_changes_no_bit(method: str) -> None:
    for dim, length, base in product((4, 16, 36, 64), (7, 32, 100, 4096), (3.0, 500.0, 10_000.0, 5e5)):
        scaling = make(method, 1.0, dim, **({"base": base} if method == "base" else {}))
        f, factor = frequencies(scaling, dim, base, length, T=length)
        assert factor == 1
        assert torch.equal(f, rope.inv_freq(dim, base))


@pytest.mark.parametrize("factor", [1.0, 1.21, 2.7, 8.0])
def test_what_depends_on_the_length_begins_above_the_original_length(factor: float) -> None:
    """To the last bit: a L / L - (a - 1) is not 1 at a = 1.21, L = 7."""
    plain = rope.inv_freq(16)
    for scaling in (DynamicNTK(factor=factor), make("longrope", 8.0)):
        for length, shorter in product((7, L, 49), (0, 1)):
            assert torch.equal(frequencies(scaling, length=length, T=length - shorter)[0], plain)
        longer = frequencies(scaling, T=L + 1)[0]
        assert (longer < plain)[1:].all()
        two_keys = scaling.frequencies(16, BASE, L, torch.tensor([[0, L]]))[0]
        assert torch.equal(two_keys, longer)                            # by the largest position
        changed = scaling.model_copy(update={"original_length": 100})
        assert torch.equal(frequencies(changed, T=100)[0], plain)
        assert not torch.equal(frequencies(changed, T=101)[0], plain)


@pytest.mark.parametrize("method", [method for method in SCALINGS if method not in DYNAMIC])
def test_other_methods_read_no_position(method: str) -> None:
    """Reading waits for the device; "meta" has nothing to read."""
    k_pos = torch.empty(1, 100, dtype=torch.long, device="meta")
    assert make(method).frequencies(16, BASE, L, k_pos)[0].device.type == "meta"


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3", "mrrope"])
def test_no_method_rotates_further_or_faster_than_in_training(method: str) -> None:
    """No pair turns faster than trained; none slower than PI's; the slowest reaches no angle beyond L."""
    plain = rope.inv_freq(64)
    for factor in (2.0, 8.0):
        f = frequencies(make(method, factor), 64, length=1024)[0]
        assert (f <= plain * (1 + 1e-6)).all()
        assert (f >= plain / factor * (1 - 1e-5)).all()
        assert f[-1] * factor * 1024 == pytest.approx((plain[-1] * 1024).item(), rel=1e-5)
    if method in ("yarn", "llama3", "mrrope"):
        changed = frequencies(make(method, original_length=2048), 64, length=128)[0]
        assert torch.equal(changed, frequencies(make(method), 64, length=2048)[0])
        assert not torch.equal(changed, frequencies(make(method), 64, length=128)[0])


def test_yarn_warns_if_it_keeps_no_pair_and_names_a_better_beta_fast() -> None:
    yarn = YaRN(factor=4.0)
    for length, dim, expected in ((128, 64, True), (256, 64, True), (512, 64, False), (4096, 128, False)):
        f = frequencies(yarn, dim, length=length)[0]
        assert (f[1] < rope.inv_freq(dim)[1]).item() == expected
        warning = yarn.warning(dim, BASE, length)
        assert (warning is not None) == expected
        assert YaRN(factor=4.0, original_length=length).warning(dim, BASE, 4096) == warning
    for length, beta in ((128, 2.0), (256, 4.1)):
        assert f"lower it, to {beta:g} " in (yarn.warning(64, BASE, length) or "")
        better = YaRN(factor=4.0, beta_fast=beta)
        assert better.warning(64, BASE, length) is None
        n_kept = (frequencies(better, 64, length=length)[0] == rope.inv_freq(64)).sum()
        assert abs(n_kept - 8) <= 1
    assert all(make(method).warning(16, BASE, L) is None for method in SCALINGS if method != "yarn")


# --- Through a model


OF_ROPE = [("rope", method) for method in SCALINGS]
# longrope has a factor for each pair, whose number depends on the encoding
OF_OTHERS = list(product(ROTARY[1:], (method for method in SCALINGS if method != "longrope")))


@pytest.mark.parametrize(("name", "method"), slow_except(
    OF_ROPE + OF_OTHERS, *OF_ROPE, *((name, "pi") for name in ROTARY)))
def test_a_trained_model_takes_another_scaling(name: str, method: str) -> None:
    """A subclass whose `frequencies` are its own does not ignore it.

    It is not in the checkpoint: setting it equals building the model with it; None removes it."""
    scaling = make(method)
    x = tokens((2, 3 * L))
    model = lively(config_of(name)).double()
    plain = model_of(name)(x)
    model.encoding.scaling = scaling
    whole = model_of(name, written(scaling))(x)
    assert torch.equal(model(x), whole)
    assert (whole - plain).abs().max() > 1e-2
    model.encoding.scaling = None
    assert torch.equal(model(x), plain)


@methods
def test_cos_and_sin_alone_carry_the_factor_and_the_frequencies(method: str) -> None:
    """Partial rotary: R channels rotate at the frequencies for R and are scaled; the rest is unchanged."""
    encoding = lively(config_of("rope", "position.fraction=0.5")).encoding
    encoding.scaling = make(method, dim=8)
    at = torch.arange(3 * L)[None]
    f, factor = frequencies(encoding.scaling, 8, T=3 * L)
    assert (factor > 1.01) == (method in ("yarn", "longrope", "mrrope"))
    q = torch.randn(1, 2, 3 * L, 16, generator=torch.Generator().manual_seed(0))
    expected = rope.rotate(q, rope.angles(at[:, None], f))
    expected[..., :8] *= factor
    for found in encoding.rotate(q, q, At(at, at, 0, encoding.tables(at, at))):
        torch.testing.assert_close(found, expected)


def test_subclasses_of_rope_scale_their_own_frequencies() -> None:
    encoding = lively(config_of("p_rope", "position.p=0.5")).encoding
    encoding.scaling = YaRN(factor=4.0)
    f, factor = encoding.layer_frequencies(False, torch.arange(L))      # p_rope stops pairs after it
    assert torch.equal(f[:4], frequencies(YaRN(factor=4.0))[0][:4])
    assert (f[4:] == 0).all()
    assert factor > 1.1
    factors = [1.0 + c / 10 for c in range(16)]
    pope = model_of("pope", written(LongRoPE(factor=4.0, short_factor=factors, long_factor=factors))).encoding
    expected = 10_000.0 ** (-torch.arange(16) / 16) / torch.tensor(factors)     # one for each channel
    torch.testing.assert_close(pope.layer_frequencies(False, torch.arange(4))[0], expected)
    assert model_of("pope", "model.head_dim=7")(tokens((1, 8))).isfinite().all()        # odd widths too


def test_a_subclass_of_rope_has_its_frequencies_in_every_layer() -> None:
    """In layers with a window too, with a base of their own or without, and under a scaling of --extend."""
    class HalfSpeed(RoPE):
        def frequencies(self, f):
            return super().frequencies(f) / 2

    at = torch.arange(3 * L)[None]
    for local_base in ("", "position.local_base=50.0"):
        config = config_of("rope", f"model.window=5 model.full_every=2 {local_base}")
        plain, half = (kind(shape_of(config), config.position) for kind in (RoPE, HalfSpeed))
        for scaling in (None, YaRN(factor=4.0)):
            plain.scaling = half.scaling = scaling
            tables = plain.tables(at, at)
            assert not torch.equal(tables[0][0], tables[1][0]) or not (local_base or scaling)
            for layer, slow in zip(tables, half.tables(2 * at, 2 * at), strict=True):
                assert all(map(torch.equal, layer, slow))


@pytest.mark.parametrize("method", DYNAMIC)
def test_each_decoding_step_rotates_all_keys_for_the_current_length(method: str) -> None:
    """In one layer a step equals the last row of a full forward of its length, also across L.

    In two it does not beyond L: what the second layer's keys are made of saw earlier frequencies.
    """
    x = tokens((1, L + 8))
    for n_layer in (1, 2):
        model = model_of("rope", f"model.n_layer={n_layer} {written(make(method))}")
        cache = model.new_cache()
        model(x[:, :L - 3], cache=cache)
        for t in range(L - 3, L + 4):
            step = model(x[:, t:t + 1], cache=cache)[:, -1]
            whole = model(x[:, :t + 1])[:, -1]
            is_equal = (step - whole).abs().max() < 1e-3
            assert is_equal == (n_layer == 1 or t < L), t


# --- As a config key


@methods
def test_configs_survive_the_round_trip_and_evaluation_fills_in_the_rest(method: str, tmp_path) -> None:
    config = config_of("rope", written(make(method, 3.0, original_length=77)))
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert isinstance(config.position.scaling, SCALINGS[method])
    assert load_config(path) == config
    given = make(method).model_dump(exclude={"factor", "original_length"})
    scaling = SCALINGS[method].for_context(L, 4 * L, given)
    assert scaling.original_length == L
    assert getattr(scaling, "factor", None) == {"dynamic_ntk": 1, "base": None}.get(method, 4)


def test_a_scaling_may_be_a_table_and_an_override_replaces_all_of_it(tmp_path) -> None:
    path = tmp_path / "a.toml"
    child = tmp_path / "b.toml"
    path.write_text('[data]\ndir = "x"\n[position]\nencoding = "rope"\n[position.scaling]\nmethod = "yarn"\n'
                    "factor = 4.0\nbeta_fast = 8.0\n")
    assert load_config(path).position.scaling == YaRN(factor=4.0, beta_fast=8.0)
    child.write_text('extends = "a.toml"\n[position]\nscaling = { method = "pi", factor = 2.0 }\n')
    assert load_config(child).position.scaling == PI(factor=2.0)
    assert load_config(child, ["position.encoding=none"]).position.encoding == "none"


@pytest.mark.parametrize(("name", "overrides", "expected"), [
    ("rope", '{method="pi"}', "position.scaling.factor"), ("rope", "yarn", "position.scaling .*yarn"),
    ("rope", '{method="yarn",factor=2.0,beta_fast=1.0}', "beta_fast must be above beta_slow = 1, got 1"),
    ("rope", '{method="llama3",factor=2.0,low_freq_factor=9.0}', "high_freq_factor must be above low_freq_"),
    *((name, '{method="longrope",factor=2.0,short_factor=[1,1],long_factor=[1]}', f"short_factor must .* {n}")
      for name, n in (("rope", 8), ("rope_2d", 4))),
    ])
def test_mistakes_name_the_inner_key_and_the_fix(name: str, overrides: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        config_of(name, f"position.scaling={overrides}")
