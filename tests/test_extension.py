"""Methods of --extend: brute force over every pair, identities, and the model is restored afterwards."""

import itertools
import math

import pytest
import torch
from toys import lively, tokens

import rope
from base.errors import UserError
from evaluation.extension import METHODS, Regrouped, Regrouping, Rescaled, extended, parse
from model import GPT
from positions import ENCODINGS, At, Encoding
from positions.scaling import SCALINGS

L = 32          # tests' train.seq_len
RELATIVE = [name for name, encoding in ENCODINGS.items() if encoding.is_relative]
ARGUMENTS = {"base": "base:base=50000",
             "longrope": f"longrope:short_factor={[1.0] * 8},long_factor={[2.0] * 8}"}
REGROUPING = [name for name, method in METHODS.items() if issubclass(method, Regrouping)]
SPECS = [ARGUMENTS.get(name, name) for name in METHODS]
q, k, v = torch.randn(3, 1, 2, 48, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
POSITIONS = torch.arange(48)[None]


def under(spec: str, model: GPT, config, x: torch.Tensor) -> torch.Tensor:
    with extended(model, config, parse(spec).methods, x.shape[1]):
        return model(x)


def logits_under(spec: str, tiny, name: str = "rope") -> torch.Tensor:
    """Logits (2, 48, 48) of fixed queries and keys, computed by the hooks of the changed model."""
    config = tiny(name)
    model = lively(config).double()
    with extended(model, config, parse(spec).methods, 48):
        encoding = model.encodings[0]
        at = At(POSITIONS, POSITIONS, 0, encoding.tables(POSITIONS, POSITIONS))
        turned_q, turned_k = encoding.rotate(q, k, at)
        logits = (turned_q @ turned_k.mT) / 4
        logits = logits.masked_fill(~torch.ones(48, 48, dtype=torch.bool).tril(), -torch.inf)
        return encoding.scores(logits, q, k, at)[0]


def brute_force(angle_of, is_seen=lambda m, n: True) -> torch.Tensor:
    """Logits with a distance of angle_of(m, n) tokens, computed for each pair (m, n) separately."""
    f = rope.inv_freq(16)
    logits = torch.full((2, 48, 48), -torch.inf, dtype=torch.float64)
    for m in range(48):
        for n in range(m + 1):
            if is_seen(m, n):
                turned = rope.rotate(q[0, :, m:m + 1], torch.tensor([angle_of(m, n)]) * f)
                logits[:, m, n] = (turned[:, 0] * k[0, :, n]).sum(-1) / 4
    return logits


def placed(m: int, n: int, s: int, w: int) -> int:
    """Where Dual Chunk Attention places the query at m for a key at n, which it places at n mod s."""
    within, successive = list(range(s)), [s + i if i < w else L - 1 for i in range(s)]
    return {0: within[m % s], 1: successive[m % s]}.get(m // s - n // s, L - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "angle_of", "is_seen"), [
    ("rerope:window=5", lambda m, n: min(m - n, 5), None),
    ("rerope", lambda m, n: min(m - n, L // 4), None),
    ("leaky_rerope:window=5,k=4.0", lambda m, n: m - n if m - n < 5 else 5 + (m - n - 5) / 4, None),
    ("self_extend:window=6,group=4", lambda m, n: m - n if m - n < 6 else m // 4 + 6 - 6 // 4 - n // 4, None),
    ("dual_chunk:chunk=12,window=5", lambda m, n: placed(m, n, 12, 5) - n % 12, None),
    ("dual_chunk", lambda m, n: placed(m, n, 24, 8) - n % 24, None),
    ("sinks:sinks=3,window=7", lambda m, n: m - n if m - n < 7 else min(m, 9) - n,
     lambda m, n: m - n < 7 or n < 3),
    ("lm_infinite:first=3,window=7", lambda m, n: min(m - n, 7), lambda m, n: m - n < 7 or n < 3),
])
def test_regrouping_is_each_pair_at_its_own_angle(spec: str, angle_of, is_seen, tiny) -> None:
    expected = brute_force(angle_of, is_seen or (lambda m, n: True))
    torch.testing.assert_close(logits_under(spec, tiny), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.slow
def test_the_last_tokens_alone_and_from_a_cache_are_the_end_of_all(name: str, tiny) -> None:
    """Under every method. Dynamic scalings move cached keys: they are evaluated by full forwards alone."""
    config, measured = tiny(name, "model.n_kv_head=1"), []
    model, x = lively(config).double(), tokens((2, 90))
    for spec in SPECS:
        methods = parse(spec).methods
        if methods[0].problem(model, config, 90):
            continue
        measured.append(spec)
        with extended(model, config, methods, 90):
            whole = model.hidden(x)
            for n in (1, 40, 89):
                torch.testing.assert_close(model.hidden(x, last=n), whole[:, -n:], atol=1e-5, rtol=1e-5)
            if not isinstance(methods[0], Rescaled):
                cache = model.new_cache()
                parts = [model.hidden(x[:, i:j], cache=cache) for i, j in ((0, 30), (30, 31), (31, 90))]
                torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    assert "log_n" in measured


@pytest.mark.parametrize("spec", REGROUPING)
def test_packed_documents_do_not_see_one_another(spec: str, tiny) -> None:
    """Each has the logits of a batch of its own, at the same positions."""
    config, at = tiny("rope", "model.n_kv_head=1"), torch.arange(100)
    model, x = lively(config).double(), tokens((2, 100))
    with extended(model, config, parse(spec).methods, 100):
        packed = model(x, documents=(at // 40).expand(2, -1))
        for piece in at.split(40):
            alone = model(x[:, piece], positions=piece)
            torch.testing.assert_close(packed[:, piece], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [      # in features hidden tokens may count as well
    name for name in RELATIVE if ENCODINGS[name].features is Encoding.features])
@pytest.mark.parametrize("spec", ["sinks:sinks=3,window=7", "lm_infinite:first=3,window=7"])
def test_masked_keys_have_no_effect(spec: str, name: str, tiny) -> None:
    """A token after the sinks changes no logits further on than the windows of all layers reach."""
    config = tiny(name, "position.layers=first") if ENCODINGS[name].acts_in_layers() else tiny(name)
    model, x = lively(config), tokens((1, 48))
    plain = under(spec, model, config, x)

    def moved_by(t: int) -> torch.Tensor:
        changed = x.clone()
        changed[0, t] = (x[0, t] + 1) % 257
        return (under(spec, model, config, changed) - plain).abs().amax(-1)[0]

    assert moved_by(10)[10] > 1e-4 and moved_by(10)[10 + 2 * 6 + 1:].max() <= 1e-4
    assert moved_by(1)[40:].max() > 1e-6                                # a sink is seen from everywhere


def test_lm_infinite_caps_the_distance_of_any_relative_encoding(tiny) -> None:
    got = logits_under("lm_infinite:first=3,window=7", tiny, "alibi")
    slopes = [2**-4, 2**-8]                                             # two heads
    for h, m, n in ((0, 40, 1), (1, 40, 2), (0, 40, 38)):
        expected = (q[0, h, m] * k[0, h, n]).sum() / 4 - slopes[h] * min(m - n, 7)
        assert got[h, m, n].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_every_method_runs_far_beyond_L_and_restores_the_model(spec: str, tiny) -> None:
    config = tiny()
    model, x = lively(config), tokens((1, 100))
    before = model(x)
    changed = under(spec, model, config, x)
    assert changed.isfinite().all() and (changed - before).abs().max() > 1e-3
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(("spec", "tolerance"), [
    *((ARGUMENTS.get(name, name), 0) for name in SCALINGS if name != "base"),
    *((spec, 0) for spec in ("log_n", "drope", "window", "dual_chunk", "dual_chunk:chunk=31")),
    *((spec, 2e-4) for spec in ("rerope:window=100", "leaky_rerope:k=1.0", "self_extend:group=1",
                                "leaky_rerope", "self_extend", "sinks", "lm_infinite"))])
def test_up_to_L_nothing_changes(spec: str, tolerance: float, tiny) -> None:
    """Bit for bit, unless each pair is scored anew."""
    config = tiny()
    model, x = lively(config), tokens((2, L))
    torch.testing.assert_close(under(spec, model, config, x), model(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spec", ["yarn:beta_fast=2", "self_extend", "dual_chunk", "sinks"])
def test_a_subclass_of_rope_gets_every_method(spec: str, tiny) -> None:
    """Even if it widens q and k and heads share keys: an effect beyond L, none on near pairs."""
    config = tiny("pope", "model.n_head=4", "model.n_kv_head=2")
    model, x = lively(config), tokens((1, 100))
    assert all(method.problem(model, config, 100) is None for method in parse(spec).methods)
    changed = under(spec, model, config, x)
    assert changed.isfinite().all() and (changed - model(x)).abs().max() > 1e-3
    near = 1 if spec.startswith("yarn") else 8                          # all distances below 8 are exact
    torch.testing.assert_close(changed[:, :near], model(x)[:, :near], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["rope", "xpos", "fope"])
def test_a_rescaling_leaves_layers_whose_window_is_within_L(name: str, tiny) -> None:
    """Of two layers the first has a window of 10 and is as before, the second is as without it."""
    config = tiny(name, "model.window=10", "model.full_every=2")
    model = lively(config)
    k_pos = torch.arange(64)[None]
    before, *_ = model.encoding.tables(k_pos, k_pos)[0]
    with extended(model, config, parse("pi:factor=4").methods, 64):
        of_window, of_full, *_ = model.encoding.tables(k_pos, k_pos)
    assert torch.equal(of_window[0], before) and not torch.equal(of_full[0], before)
    for switch in ("model.window=10", "model.chunk=16"):                # in every layer: no method is left
        config = tiny(name, switch)
        problem = parse("yarn").methods[0].problem(lively(config), config, 64)
        assert problem is not None and "this run has none" in problem
    config = tiny(name, "model.window=40")                              # which sees further than L = 32
    assert parse("yarn:beta_fast=2").methods[0].problem(lively(config), config, 64) is None


def test_window_is_the_configs_window(tiny) -> None:
    x = tokens((1, 80))
    config = tiny("rope", "model.window=10")
    torch.testing.assert_close(under("window:size=10", lively(tiny()), tiny(), x), lively(config)(x))
    assert torch.equal(under("window:size=20", lively(config), config, x), lively(config)(x))   # not widened


def test_factors_follow_the_length_and_what_was_given(tiny) -> None:
    config = tiny()
    model = lively(config)
    for spec, T, factor in (("pi", 4 * L, 4.0), ("pi", L // 2, 1.0), ("pi:factor=3", 4 * L, 3.0),
                            ("pi:original_length=16", 4 * L, 4 * L / 16)):
        with extended(model, config, parse(spec).methods, T):
            assert model.encoding.scaling.factor == factor
    trained = tiny("rope", 'position.scaling={method="yarn",factor=2.0,original_length=16}')
    model = lively(trained)
    with extended(model, trained, parse("yarn").methods, 4 * L):
        assert model.encoding.scaling.factor == 4 * L / 16 and model.encoding.scaling.original_length == 16
    assert model.encoding.scaling.factor == 2.0


def test_several_methods_at_once_are_all_applied(tiny) -> None:
    config, m = tiny(), torch.arange(100)[None]
    model = lively(config)
    with extended(model, config, parse("log_n+yarn+rerope").methods, 100):
        assert model.encoding.scaling.factor == 100 / L
        assert all(isinstance(encoding, Regrouped) for encoding in model.encodings)
        factor = model.temperature(At(m, m, 0, None, n_before=m)).flatten()
    torch.testing.assert_close(factor, ((m[0] + 1).double().log() / math.log(L)).clamp(min=1).float())


@pytest.mark.parametrize(("spec", "expected"), [
    ("yarm", "did you mean yarn"), ("pi:factor=x", "key=value"), ("window:size=0", "window.size"),
    ("window:sise=3", "did you mean window.size"), ("window+sinks", "same thing"),
    ("base", "base.base .*missing"),
    ("dynamic_ntk+sinks", "depend on"), ("yarn:factor=inf", "factor")])
def test_specs_are_checked(spec: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        parse(spec)
    assert "\n" not in str(error.value)


def test_a_plus_in_a_number_does_not_end_a_method() -> None:
    assert parse("dual_chunk+yarn:factor=1e+1").methods == parse("dual_chunk+yarn:factor=10").methods


def test_no_pair_is_further_apart_than_in_training() -> None:
    """With default options, and with the smallest and largest chunks, at any L."""
    m, n = torch.arange(200)[:, None], torch.arange(200)[None]
    chunks = ("dual_chunk", "dual_chunk:chunk=1", "dual_chunk:chunk={}", "dual_chunk:chunk=1,window=1")
    cases = [*itertools.product((2, 3, 16, 33), chunks), (33, "leaky_rerope"), (33, "self_extend")]
    for length, spec in cases:
        method = parse(spec.format(length - 1)).methods[0]
        q_pos, k_pos = method.far(m, n, length, 200)
        is_near = n >= method.first_near(m, length)
        distance = torch.where(is_near, m - n, q_pos - k_pos)[m >= n]
        assert distance.min() == 0 and length / 2 <= distance.max() < length, spec
        assert (is_near | (m - n >= method.near(length)))[m >= n].all(), spec


REFUSED = [
    ("rope position.temperature=ssmax", "log_n"), ("rope model.window=16", "sinks"),
    ('rope position.scaling={method="dynamic_ntk"}', "rerope"), ("rope position.temperature=log_n", "drope"),
    ("rope model.window=16 model.full_every=2 position.skip_every=2", "yarn"),
    ("rope model.window=16 position.local_base=50.0", "yarn"), ("rope position.rotate_values=true", "rerope"),
    ("rope", "yarn:beta_fast=0.5"), ("rope train.seq_len=2", "leaky_rerope"),
    ("alibi", "yarn"), ("alibi", "rerope"), ("sinusoidal", "lm_infinite"),
    ("rope position.rotate_values=true", "sinks"),
    *(("fope", spec) for spec in ("rerope", "self_extend", "dual_chunk", "lm_infinite"))]
FITTING = [("p_rope", "dual_chunk:chunk=20,window=12"), ("alibi", "sinks"), ("alibi", "lm_infinite"),
           ("sinusoidal", "sinks"), ("learned", "log_n"), ("xpos", "pi"), ("fope", "yarn:beta_fast=2"),
           ("rope position.temperature=log_n", "log_n"),
           ("rope model.window=16 model.full_every=2 position.local_base=50.0", "yarn")]


@pytest.mark.parametrize(("given", "spec"), REFUSED + FITTING)
def test_methods_refuse_runs_they_do_not_fit(given: str, spec: str, tiny) -> None:
    """FoPE is rotary and takes every scaling, but needs the positions themselves."""
    config = tiny(*given.split())
    problem = parse(spec).methods[0].problem(lively(config), config, 4 * L)
    assert bool(problem) == ((given, spec) in REFUSED)
