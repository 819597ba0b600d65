"""Scaling methods: against formulas and other implementations, through a model, and as a config key."""

import math
from pathlib import Path

import pytest
import torch
from conftest import lively, tokens
from test_config import wrong_values

import rope
from config import load_config, to_toml
from model import GPT
from positions.scaling import NTK, PI, SCALINGS, Base, DynamicNTK, Llama3, LongRoPE, Scaling, YaRN
from runtime.errors import UserError
from runtime.help import help_text

L, BASE = 32, 10_000.0
methods = pytest.mark.parametrize("method", SCALINGS)
shapes = pytest.mark.parametrize(("dim", "base"), [(16, 10_000.0), (64, 10_000.0), (64, 5e5), (128, 500.0)])
lengths = pytest.mark.parametrize("length", [128, 4096])
factors = pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 64.0])


def make(method: str, factor: float = 4.0, dim: int = 16, **options) -> Scaling:
    """The method with its required options."""
    required = {"longrope": {"short_factor": [1.0] * (dim // 2), "long_factor": [factor] * (dim // 2)},
                "base": {"base": BASE * factor}}.get(method, {})
    given = required | options | ({} if method == "base" else {"factor": factor})
    return SCALINGS[method].model_validate(given)


def frequencies(scaling: Scaling, dim: int = 16, base: float = BASE, length: int = L,
                T: int = L) -> tuple[torch.Tensor, float]:
    """Frequencies and factor at T tokens after training at `length`."""
    return scaling.frequencies(dim, base, length, torch.arange(T)[None])


# -----------------------------------------------------------------------------------------------------------
# The mathematics


@methods
@pytest.mark.parametrize("dim", [4, 16, 36, 64])
@pytest.mark.parametrize("length", [7, 32, 100, 4096])
def test_factor_1_changes_no_bit(method: str, dim: int, length: int) -> None:
    for base in (3.0, 500.0, 10_000.0, 5e5):
        scaling = make(method, 1.0, dim, **({"base": base} if method == "base" else {}))
        f, factor = frequencies(scaling, dim, base, length, T=length)
        assert factor == 1 and torch.equal(f, rope.inv_freq(dim, base))


@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
def test_what_depends_on_the_length_begins_above_the_original_length(factor: float) -> None:
    plain = rope.inv_freq(16)
    for scaling in (DynamicNTK(factor=factor), make("longrope", 8.0)):
        for T in (1, L - 1, L):
            assert torch.equal(frequencies(scaling, T=T)[0], plain)
        longer = frequencies(scaling, T=L + 1)[0]
        assert (longer < plain)[1:].all()
        two_keys = scaling.frequencies(16, BASE, L, torch.tensor([[0, L]]))[0]
        assert torch.equal(two_keys, longer)                            # by the largest position
        changed = scaling.model_copy(update={"original_length": 100})
        assert torch.equal(frequencies(changed, T=100)[0], plain)
        assert not torch.equal(frequencies(changed, T=101)[0], plain)


def test_the_dynamic_base_is_the_base_up_to_the_original_length() -> None:
    for factor in (1.0, 1.21, 1.49, 2.7, 64.0):                # a L / L - (a - 1) is not 1 at 1.21, 7
        for length in (7, 49, 100, 128):
            assert rope.dynamic_ntk_base(16, BASE, factor, length, length) == BASE  # to the last bit
            assert rope.dynamic_ntk_base(16, BASE, factor, length, 2 * length) == pytest.approx(
                BASE * (1 + factor) ** (16 / 14))                       # 2 a - (a - 1)


@pytest.mark.parametrize("method", ["yarn", "llama3"])
def test_original_length_overrides_the_training_length(method: str) -> None:
    found = frequencies(make(method, original_length=2048), 64, length=128)[0]
    assert torch.equal(found, frequencies(make(method), 64, length=2048)[0])
    assert not torch.equal(found, frequencies(make(method), 64, length=128)[0])


@shapes
@factors
def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_as_pi(dim: int, base: float, factor: float) -> None:
    f = frequencies(NTK(factor=factor), dim, base)[0]
    interpolated = frequencies(PI(factor=factor), dim, base)[0]
    torch.testing.assert_close(interpolated * factor, rope.inv_freq(dim, base), rtol=1e-6, atol=0)
    assert f[0] == 1
    torch.testing.assert_close(f[-1], interpolated[-1], rtol=1e-5, atol=0)
    assert (f[1:-1] >= interpolated[1:-1]).all()
    dynamic = frequencies(DynamicNTK(), dim, base, length=100, T=int(100 * factor))[0]
    assert torch.equal(dynamic, frequencies(NTK(factor=int(100 * factor) / 100), dim, base)[0])


def ramp(i: int, dim: int, base: float, length: int, fast: float, slow: float) -> float:
    """The share of pair i that is interpolated, from its number of turns (YaRN without rounding)."""
    low, high = (dim * math.log(length / (2 * math.pi * r)) / (2 * math.log(base)) for r in (fast, slow))
    return min(1.0, max(0.0, (i - low) / (high - low)))


@shapes
@lengths
@factors
def test_yarn_is_the_formula(dim: int, base: float, length: int, factor: float) -> None:
    scaling = YaRN(factor=factor, truncate=False, beta_fast=8.0, beta_slow=2.0)
    f, attention_factor = frequencies(scaling, dim, base, length)
    assert attention_factor == pytest.approx(0.1 * math.log(factor) + 1)
    changed = scaling.model_copy(update={"attention_factor": 1.25})
    assert frequencies(changed, dim, base, length)[1] == 1.25
    for i, found in enumerate(f.tolist()):
        plain = base ** (-2 * i / dim)
        turns = length * plain / (2 * math.pi)
        g = ramp(i, dim, base, length, 8.0, 2.0)
        assert found == pytest.approx((1 - g) * plain + g * plain / factor, rel=1e-5)
        assert found == pytest.approx(plain, rel=1e-6) if turns >= 8 else True
        assert found == pytest.approx(plain / factor, rel=1e-6) if turns <= 2 else True


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_at_its_ends(truncate: bool) -> None:
    """All pairs faster than beta_fast: RoPE (in transformers PI). All slower: PI, except pair 0."""
    all_fast = YaRN(factor=4.0, beta_fast=2e-4, beta_slow=1e-4, truncate=truncate)
    plain = rope.inv_freq(16, 500.0)
    assert torch.equal(frequencies(all_fast, 16, 500.0, 4096)[0], plain)
    all_slow = YaRN(factor=4.0, beta_fast=2e4, beta_slow=1e4, truncate=truncate)
    assert torch.equal(frequencies(all_slow, 16, 500.0, 4096)[0][1:], plain[1:] / 4)


@shapes
@lengths
@factors
def test_llama3_is_the_formula(dim: int, base: float, length: int, factor: float) -> None:
    f, attention_factor = frequencies(Llama3(factor=factor, low_freq_factor=2.0, high_freq_factor=6.0),
                                      dim, base, length)
    assert attention_factor == 1
    for i, found in enumerate(f.tolist()):
        plain = base ** (-2 * i / dim)
        wavelength = 2 * math.pi / plain
        if wavelength < length / 6:
            expected = plain
        elif wavelength > length / 2:
            expected = plain / factor
        else:
            smooth = (length / wavelength - 2) / (6 - 2)
            expected = (1 - smooth) * plain / factor + smooth * plain
        assert found == pytest.approx(expected, rel=1e-5)


def test_longrope_divides_by_the_given_factors() -> None:
    short, long = [1.0, 1.5, 2.0, 2.5], [1.0, 4.0, 8.0, 16.0]
    scaling = LongRoPE(factor=8.0, short_factor=short, long_factor=long)
    for T, given in ((L, short), (L + 1, long), (8 * L, long)):
        f, attention_factor = frequencies(scaling, 8, T=T)
        assert f.tolist() == pytest.approx([BASE ** (-2 * i / 8) / given[i] for i in range(4)], rel=1e-6)
        assert attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(L)))


def test_another_base_is_another_base() -> None:
    assert torch.equal(frequencies(Base(base=5e5))[0], rope.inv_freq(16, 5e5))


@shapes
@lengths
@pytest.mark.parametrize("factor", [2.0, 16.0])
def test_mrrope_passes_its_factors_on_to_slower_pairs(dim: int, base: float, length: int,
                                                      factor: float) -> None:
    """The paper's product over the faster pairs, with eps_d = 2 (1 + d - low) / (n (n + 1))."""
    plain = rope.inv_freq(dim, base, dtype=torch.float64)
    turns = (length * plain / (2 * math.pi)).tolist()
    low = max([0, *(i for i, t in enumerate(turns) if t > 32)])
    high = min([len(turns), *(i for i, t in enumerate(turns) if t < 1)])
    n = high - low
    eps = [2 * (1 + d - low) / (n * (n + 1)) if low <= d < high else 0 for d in range(len(turns))]
    assert sum(eps) == pytest.approx(1)
    expected = [f / math.prod(factor ** e for e in eps[:i]) for i, f in enumerate(plain.tolist())]
    found, amplitude = frequencies(make("mrrope", factor), dim, base, length)
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=0, rtol=1e-5)
    assert amplitude == 1 + 0.1 * math.log(factor)
    assert torch.equal(found[:low + 1], rope.inv_freq(dim, base)[:low + 1])


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3", "mrrope"])
def test_no_method_rotates_further_or_faster_than_in_training(method: str) -> None:
    """No pair turns faster than trained; no pair slower than PI's; the slowest reaches no angle beyond L."""
    plain = rope.inv_freq(64)
    for factor in (2.0, 8.0):
        f = frequencies(make(method, factor), 64, length=1024)[0]
        assert (f <= plain * (1 + 1e-6)).all() and (f >= plain / factor * (1 - 1e-5)).all()
        assert f[-1] * factor * 1024 == pytest.approx((plain[-1] * 1024).item(), rel=1e-5)


# -----------------------------------------------------------------------------------------------------------
# Other implementations


def transformers(method: str, dim: int, base: float, length: int, T: int | None = None,
                 **options) -> tuple[torch.Tensor, float]:
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim,
                         max_position_embeddings=length,
                         rope_parameters={"rope_type": "default", "rope_theta": base})
    # past the checks of the constructor, which warn of values that are allowed here
    config.rope_parameters = {"rope_type": method, "rope_theta": base, **options}
    return functions[method](config, torch.device("cpu"), seq_len=T)


def assert_equal(found: tuple[torch.Tensor, float], peer: tuple[torch.Tensor, float]) -> None:
    torch.testing.assert_close(found[0], peer[0], rtol=1e-6, atol=0)
    assert found[1] == pytest.approx(peer[1], rel=1e-12)


@shapes
@lengths
@factors
def test_parity_with_transformers(dim: int, base: float, length: int, factor: float) -> None:
    arguments = dim, base, length
    original = {"factor": factor, "original_max_position_embeddings": length}
    assert_equal(frequencies(PI(factor=factor), *arguments),
                 transformers("linear", *arguments, factor=factor))
    for T in (1, length, length + 1, 3 * length, 64 * length):
        assert_equal(frequencies(DynamicNTK(factor=factor), *arguments, T=T),
                     transformers("dynamic", *arguments, T, factor=factor))
    for options in ({}, {"truncate": False}, {"beta_fast": 4.0, "beta_slow": 0.5}, {"attention_factor": 1.25},
                    {"beta_fast": 2.5, "beta_slow": 2.0}):
        assert_equal(frequencies(YaRN(factor=factor, **options), *arguments),
                     transformers("yarn", *arguments, **original, **options))
    for low, high in ((1.0, 4.0), (0.5, 20.0)):
        options = {"low_freq_factor": low, "high_freq_factor": high}
        assert_equal(frequencies(Llama3(factor=factor, **options), *arguments),
                     transformers("llama3", *arguments, **original, **options))
    given = {"short_factor": [1 + i / 7 for i in range(dim // 2)],
             "long_factor": [2.0 + i for i in range(dim // 2)]}
    for T in (1, length, length + 1, 5 * length):
        assert_equal(frequencies(LongRoPE(factor=factor, **given), *arguments, T=T),
                     transformers("longrope", *arguments, T, **original, **given))


@shapes
@factors
def test_parity_with_rotary_embedding_torch(dim: int, base: float, factor: float) -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    at = torch.arange(0, 2000, 37)
    peer = module.RotaryEmbedding(dim, theta=base, theta_rescale_factor=factor).freqs
    found = frequencies(NTK(factor=factor), dim, base)[0]
    torch.testing.assert_close(found, peer.detach(), rtol=2e-6, atol=0)
    peer = module.RotaryEmbedding(dim, theta=base, interpolate_factor=factor)
    angle = peer(peer.get_seq_pos(2000, torch.device("cpu"), torch.float32))[at][:, ::2].detach()
    torch.testing.assert_close(rope.angles(at, frequencies(PI(factor=factor), dim, base)[0]), angle,
                               rtol=1e-5, atol=0)


# -----------------------------------------------------------------------------------------------------------
# Through a model


@methods
@pytest.mark.parametrize("name", ["rope", "p_rope", "xpos"])
def test_a_trained_model_takes_another_scaling(method: str, name: str, tiny) -> None:
    """It is not in the checkpoint: setting it equals building the model with it; None removes it."""
    scaling = make(method)
    written = to_toml(load_config_with(tiny, name, scaling)).splitlines()
    assert any(line.startswith(f'scaling = {{ method = "{method}"') for line in written)
    built = lively(load_config_with(tiny, name, scaling))
    model = lively(tiny(name))
    x = tokens((2, 3 * L))
    plain = model(x)
    model.load_state_dict(built.state_dict())
    model.encoding.scaling = scaling
    assert torch.equal(model(x), built(x)) and (model(x) - plain).abs().max() > 1e-2
    model.encoding.scaling = None
    assert torch.equal(model(x), plain)


def load_config_with(tiny, name: str, scaling: Scaling, *overrides: str):
    options = {key: value for key, value in scaling.model_dump().items() if value is not None}
    text = ", ".join(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
                     for key, value in options.items())
    return tiny(name, f"position.scaling={{ {text} }}", *overrides)


@methods
@pytest.mark.parametrize("name", ["rope", "p_rope", "xpos"])
def test_factor_1_gives_the_same_logits(method: str, name: str, tiny) -> None:
    model, x = lively(tiny(name)), tokens((1, L))
    plain = model(x)
    model.encoding.scaling = make(method, 1.0)
    assert torch.equal(model(x), plain)


@methods
def test_cos_and_sin_alone_carry_the_factor_and_the_frequencies(method: str, tiny) -> None:
    """Partial rotary: R channels rotate at the frequencies for R and are scaled; the rest is unchanged."""
    model = lively(tiny("rope", "position.fraction=0.5"))
    model.encoding.scaling = scaling = make(method, 4.0, dim=8)
    at = torch.arange(3 * L)[None]
    f, factor = frequencies(scaling, 8, T=3 * L)
    assert (factor > 1.01) == (method in ("yarn", "longrope", "mrrope"))
    angle = at[0, :, None] * f
    q_cos, q_sin, k_cos, k_sin = model.encoding.tables(at[:, -5:], at)
    torch.testing.assert_close(k_cos[0, 0], angle.cos() * factor)
    torch.testing.assert_close(k_sin[0, 0], angle.sin() * factor)
    assert torch.equal(q_cos, k_cos[:, :, -5:]) and torch.equal(q_sin, k_sin[:, :, -5:])


def test_p_rope_stops_the_slowest_pairs_after_scaling(tiny) -> None:
    encoding = lively(tiny("p_rope", "position.p=0.5")).encoding
    encoding.scaling = YaRN(factor=4.0)
    f, factor = encoding.frequencies(torch.arange(L))
    whole = frequencies(YaRN(factor=4.0))[0]
    assert torch.equal(f[:4], whole[:4]) and (f[4:] == 0).all() and factor > 1.1


@pytest.mark.parametrize("method", [m for m in SCALINGS if m not in ("dynamic_ntk", "longrope")])
@pytest.mark.parametrize("name", ["rope", "p_rope", "xpos"])
def test_cached_decoding_equals_the_full_forward(method: str, name: str, tiny) -> None:
    model = lively(tiny(name))
    model.encoding.scaling = make(method)
    x, cache = tokens((2, 3 * L)), model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in ((0, 20), (20, 21), (21, 40), (40, 41), (41, 96))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope"])
def test_each_decoding_step_rotates_all_keys_for_the_current_length(method: str, tiny) -> None:
    """In one layer a step equals the last row of a full forward of its length, also across L.

    In two it does not beyond L: what the second layer's keys are made of saw earlier frequencies.
    """
    x = tokens((1, L + 8))
    for n_layer in (1, 2):
        model = lively(tiny("rope", f"model.n_layer={n_layer}"))
        model.encoding.scaling = make(method)
        cache = model.new_cache()
        model(x[:, :L - 3], cache=cache)
        for t in range(L - 3, L + 8):
            step, whole = model(x[:, t:t + 1], cache=cache)[:, -1], model(x[:, :t + 1])[:, -1]
            assert ((step - whole).abs().max() < 1e-3) == (n_layer == 1 or t < L), t


def test_only_those_that_depend_on_the_length_read_the_positions() -> None:
    """Reading positions waits for the device; here the meta device, without values, makes it an error."""
    for method in SCALINGS:
        k_pos = torch.empty(1, 100, dtype=torch.long, device="meta")
        if method in ("dynamic_ntk", "longrope"):
            with pytest.raises(RuntimeError):
                make(method).frequencies(16, BASE, L, k_pos)
        else:
            assert make(method).frequencies(16, BASE, L, k_pos)[0].device.type == "meta"


# -----------------------------------------------------------------------------------------------------------
# As a config key


def problems(tiny, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        tiny("rope", *overrides)
    return caught.value.problems


@methods
def test_configs_survive_the_round_trip(method: str, tiny, tmp_path: Path) -> None:
    config = load_config_with(tiny, "rope", make(method, 3.0, original_length=77))
    assert isinstance(config.position.scaling, SCALINGS[method])
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert load_config(path) == config
    assert torch.equal(*(lively(c)(tokens((1, 100))) for c in (config, load_config(path))))


def test_scaling_may_be_a_table_and_an_override_replaces_all_of_it(tiny, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[data]\ndir = "x"\n[position]\nencoding = "rope"\n[position.scaling]\nmethod = "yarn"\n'
                    "factor = 4.0\nbeta_fast = 8.0\n")
    assert load_config(path).position.scaling == YaRN(factor=4.0, beta_fast=8.0)
    child = tmp_path / "b.toml"
    child.write_text('extends = "a.toml"\n[position]\nscaling = { method = "pi", factor = 2.0 }\n')
    assert load_config(child).position.scaling == PI(factor=2.0)
    assert load_config(child, ["position.encoding=none"]).position.encoding == "none"


def test_an_old_config_loads(tiny, tmp_path: Path) -> None:
    config = tiny("rope")
    text = to_toml(config)
    assert "scaling" not in text
    path = tmp_path / "old.toml"
    path.write_text(text)
    assert load_config(path) == config and GPT(config).encoding.scaling is None


@methods
def test_every_key_refuses_wrong_types_and_values(method: str, tiny) -> None:
    for key, field in SCALINGS[method].model_fields.items():
        wrong = ["1", "[0.5]", '["x"]'] if key in ("short_factor", "long_factor") else wrong_values(field)
        for value in wrong if key != "method" else []:
            others = ", ".join(f"{k} = {v}" for k, v in make(method).model_dump().items()
                               if k not in (key, "method") and v is not None and not isinstance(v, bool))
            text = f'{{method = "{method}", {key} = {value}, {others}}}'.replace(", }", "}")
            found = problems(tiny, f"position.scaling={text}")
            assert len(found) == 1, found
            assert found[0].startswith(f"position.scaling.{key} on the command line: must be "), found


@pytest.mark.parametrize(("scaling", "expected"), [
    ("yarn", ["position.scaling on the command line: must be a table, got 'yarn'"]),
    ("{factor = 2.0}", ["position.scaling.method on the command line: missing; choose from pi, ntk"]),
    ('{method = "yarm"}',
     ["position.scaling.method on the command line: unknown method 'yarm'; did you mean yarn?"]),
    ('{method = "zzz"}', ["unknown method 'zzz'; choose from pi, ntk, dynamic_ntk, yarn"]),
    ('{method = "pi"}', ["position.scaling.factor on the command line: missing; add factor = ..."]),
    ('{method = "pi", facto = 2.0, factor = 0.5}',
     ["must be a number >= 1 and <= 1e+06, got 0.5", "position.scaling.facto on the command line: unknown "
      "key of position.scaling with this method; did you mean factor?"]),
    ('{method = "yarn", factor = 2.0, beta_fast = 1.0}', ["beta_fast must be above beta_slow = 1, got 1"]),
    ('{method = "longrope", factor = 2.0, short_factor = [0.5], long_factor = [1]}',
     ["position.scaling.short_factor on the command line: must be a list of numbers >= 1, got 0.5"]),
    ('{method = "llama3", factor = 2.0, low_freq_factor = 9.0}',
     ["high_freq_factor must be above low_freq_factor = 9, got 4"]),
    ('{method = "longrope", factor = 2.0, short_factor = [1, 1], long_factor = [1]}',
     ["position.scaling on the command line: short_factor must have 8 numbers, one for each pair, got 2"]),
    ('{method = "longrope", factor = 2.0, short_factor = [1,1,1,1,1,1,1,1], long_factor = [1]}',
     ["long_factor must have 8 numbers, one for each pair, got 1"]),
])
def test_mistakes_name_the_inner_key_and_the_fix(scaling: str, expected: list[str], tiny) -> None:
    found = problems(tiny, f"position.scaling={scaling}")
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True)), found


def test_rules_between_keys_know_how_many_channels_rotate(tiny) -> None:
    scaling = ('position.scaling={method = "longrope", factor = 2.0, short_factor = [1, 1], '
               "long_factor = [1, 1]}")
    assert tiny("rope", scaling, "position.fraction=0.25").position.scaling.factor == 2
    assert "8 numbers" in problems(tiny, scaling)[0]
    found = problems(tiny, 'position.scaling={method = "ntk", factor = 2.0}', "position.fraction=0.125")
    assert found == ("position.scaling on the command line: ntk needs 4 rotary channels or more, got 2",)
    with pytest.raises(ValueError, match="4 rotary channels"):
        rope.ntk_base(2, BASE, 2.0)


def test_yarn_warns_if_it_keeps_no_pair_and_names_a_better_beta_fast() -> None:
    for length, dim, expected in ((128, 64, True), (256, 64, True), (512, 64, False), (4096, 128, False)):
        f = frequencies(YaRN(factor=4.0), dim, length=length)[0]
        assert (f[1] < rope.inv_freq(dim)[1]).item() == expected
        warning = YaRN(factor=4.0).warning(dim, BASE, length)
        assert (warning is not None) == expected
        assert YaRN(factor=4.0, original_length=length).warning(dim, BASE, 4096) == warning
    for dim, length, beta in ((64, 128, 2.0), (64, 256, 4.1)):
        text = YaRN(factor=4.0).warning(dim, BASE, length)
        assert "\n" not in text and f"lower beta_fast, to {beta:g} " in text and "beta_slow" not in text
        better = YaRN(factor=4.0, beta_fast=beta)
        kept = frequencies(better, dim, length=length)[0] == rope.inv_freq(dim)
        assert better.warning(dim, BASE, length) is None
        assert abs(int(kept.sum()) - dim // 8) <= 1
    assert "and beta_slow below that" in YaRN(factor=4.0).warning(16, BASE, 32)
    assert all(make(method).warning(16, BASE, L) is None for method in SCALINGS if method != "yarn")


@methods
def test_evaluation_fills_in_what_is_not_given(method: str) -> None:
    given = {key: value for key, value in make(method).model_dump().items()
             if key not in ("factor", "original_length")}
    scaling = SCALINGS[method].for_context(L, 4 * L, given)
    assert scaling.original_length == L
    assert getattr(scaling, "factor", None) == {"dynamic_ntk": 1, "base": None}.get(method, 4)
    assert getattr(SCALINGS[method].for_context(L, L // 2, given), "factor", 1) == 1
    if method != "base":
        changed = SCALINGS[method].for_context(L, 4 * L, {**given, "factor": 2.5, "original_length": 8})
        assert (changed.factor, changed.original_length) == (2.5, 8)


def test_help_lists_every_method_and_its_keys() -> None:
    text = help_text("all")
    for method, scaling in SCALINGS.items():
        summary = scaling.__doc__.splitlines()[0]
        assert f"\n{method}: {summary}\n" in text and summary.endswith(".") and len(summary) > 40
        for key, field in scaling.model_fields.items():
            assert f"  {key} " in text and (field.description or "") in text
