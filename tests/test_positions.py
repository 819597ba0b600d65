"""Laws that every encoding obeys under every switch: all in the registry, also new ones."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from explicit import attention_of, config_of, model_of, scale_invariant, watched
from test_scaling import DYNAMIC, make, written
from toys import ROOT, every_encoding, every_encoding_slowly, lively, tokens

import attention
from base.errors import UserError
from config import load_config
from evaluation.extension import extended, parse
from model import GPT, shape_of
from positions import ENCODINGS, At, Encoding
from positions.bias import ALiBi
from positions.scaling import SCALINGS
from positions.switches import TEMPERATURES, Tempered
from runtime.device import autocast

pytestmark = pytest.mark.usefixtures("no_gradients")

ON = "position.scale_invariant=10"
ONLY = "position.temperature_layers"
# How far a later token may move a logit, in fp64. A mixture of experts, or another kernel whose rounding
# depends on the rest of the batch, needs 1e-9. That still finds a leak: logits are about 1 here.
LEAK = 0.0
BEYOND = "train.seq_len=12"     # some tokens lie beyond L
# what acts under any encoding
SWITCHES = {
    "plain": "", "scale_invariant": ON, "window": "model.window=5", "chunk": "model.chunk=8",
    "window and full": "model.window=5 model.full_every=2",
    **{name: f"position.temperature={name} {BEYOND}" for name in TEMPERATURES if name != "none"},
    "both": f"position.temperature=log_n {BEYOND} {ON} model.qk_norm=true",
    "grouped": "model.n_head=4 model.n_kv_head=2 model.head_dim=12 model.qkv_bias=true",
    "list": "position.layers=[1]",
    "every": f"{BEYOND} {ONLY}=unencoded position.skip_every=2 position.temperature=llama4",
    "encoded": f"{BEYOND} {ONLY}=encoded position.layers=first position.temperature=ssmax "
               "model.window=5 model.chunk=7 model.full_every=2",
    "dropped": "position.drop_at=0",
    "gate": "model.sink=head model.gate=true",
    "whole": "model.qk_norm=whole model.n_kv_head=1 model.pre_norm=false model.post_norm=true "
             "model.parallel=true",
}
IN_SOME_LAYERS = ("list", "every", "encoded")
# several switches at once: every encoding has these, and one of each kind of encodings has all
TOGETHER = ["plain", "both", "grouped", "every", "encoded", "gate", "whole"]
KINDS = ["learned", "rope", "pope", "alibi", "t5", "bam", "forgetting", "path"]
# of rotary encodings alone; the frequencies of a scaling that depend on the length have laws of their own
OF_ROPE = {
    "values": "position.rotate_values=true model.n_head=4 model.n_kv_head=2 model.head_dim=12 "
              + written(make("yarn")),
    **{method: written(make(method)) for method in SCALINGS if method not in DYNAMIC},
}
FAST = {
    "rope": ["plain", "both", "grouped", "encoded", "whole", "values"],
    "pope": ["plain", "both"],
    "bam": ["plain", "ssmax"],
    "alibi": ["plain", "grouped", "every"],
    "t5": ["plain", "gate"],
    "forgetting": ["plain", "window"],
    "path": ["plain", "chunk"],
    "learned": ["plain", "dropped"],
}


def switches_of(name: str) -> list[str]:
    """The switches under which an encoding is asked for its laws."""
    switches = list(SWITCHES) if name in KINDS else TOGETHER
    if not ENCODINGS[name].acts_in_layers():
        switches = [switch for switch in switches if switch not in IN_SOME_LAYERS]
    return [*switches, *OF_ROPE] if name == "rope" else switches


def laws(law: Callable[..., None]) -> Callable[..., None]:
    """Ask a law(name, switch, ...) of every encoding: fast under a few switches, slow under the others."""
    cases = []
    for name in ENCODINGS:
        fast = FAST.get(name, ["plain"])
        slow = [switch for switch in switches_of(name) if switch not in fast]
        cases.append(pytest.param(name, fast, id=name))
        cases.append(pytest.param(name, slow, id=f"{name}-slow", marks=pytest.mark.slow))

    @functools.wraps(law)
    def test(name: str, switch: list[str], **fixtures: Any) -> None:
        for each in switch:
            try:
                law(name, each, **fixtures)
            except Exception as error:
                error.add_note(f"{name} under the switch {each!r}: {options_of(each)}")
                raise

    return pytest.mark.parametrize(("name", "switch"), cases)(test)


def options_of(switch: str) -> str:
    return (SWITCHES | OF_ROPE)[switch]


def given(name: str, switch: str, T: int = 30) -> tuple[GPT, torch.Tensor]:
    """The model of a case, and as many tokens as its encoding is defined for, at most T."""
    model = model_of(name, options_of(switch))
    return model, tokens((2, min(T, model.encoding.max_length or T)))


def gaps(T: int) -> torch.Tensor:
    """Positions of two rows: with a gap, and an offset. (2, T), below T + 4."""
    i = torch.arange(T)
    return torch.stack((i + 3 * (i > T // 3), i + 2))


def small_blocks(monkeypatch, T: int, n_rows: int = 5, fuse_from: int = 1) -> None:
    """Blocks of n_rows queries of T keys, and the fused kernel from fuse_from queries on."""
    limits = {"MOST_LOGITS": 2 * 2 * T * n_rows, "MIN_QUERIES": 5, "FUSE_FROM": fuse_from}
    for constant, value in limits.items():
        monkeypatch.setattr(attention, constant, value)


# --- Under every switch


@laws
def test_attention_is_one_softmax_over_all_pairs(name: str, switch: str, monkeypatch) -> None:
    """With gaps and packed documents, and at consecutive positions; at once, in blocks, in the kernel."""
    (model, x), config = given(name, switch, 20), config_of(name, options_of(switch))
    T = x.shape[1] - 4
    x = x[:, :T]
    pos = torch.arange(T)[None]
    documents = (torch.arange(T) // 9).expand(2, T)
    for arguments in ({"positions": gaps(T), "documents": documents}, {}):
        expected = []
        for n_rows, fuse_from in ((99, 1024), (5, 1024), (5, 1)):
            small_blocks(monkeypatch, T, n_rows, fuse_from)
            layers = watched(model, x, **arguments)
            if not expected:                # the inputs of the layers are the same on the other paths
                expected = [attention_of(model, config, layer, before, arguments.get("positions", pos),
                                         arguments.get("documents"))
                            for layer, (before, _) in enumerate(layers)]
            for (_, after), exact in zip(layers, expected, strict=True):
                torch.testing.assert_close(after, exact, atol=1e-5, rtol=1e-5)      # angles are fp32


@laws
def test_the_future_cannot_leak(name: str, switch: str) -> None:
    """A change of token t leaves all logits before t as they were: to the bit, see LEAK."""
    model, x = given(name, switch)
    before = model(x)
    T = x.shape[1]
    for t in (1, T // 2, T - 1):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % 257
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=LEAK, rtol=0)
        assert (after[:, t] != before[:, t]).any()


@laws
def test_only_relative_encodings_ignore_a_shift_of_all_positions(name: str, switch: str) -> None:
    model, x = given(name, switch, 20)
    shift = 60 if model.encoding.max_length is None else x.shape[1] // 2
    T = min(x.shape[1], (model.encoding.max_length or 99) - shift)
    x = x[:, :T]
    at = torch.arange(T)
    change = (model(x, positions=at + shift) - model(x, positions=at)).abs().max()
    is_relative = ENCODINGS[name].is_relative or switch == "dropped"
    assert change < 1e-4 if is_relative else change > 1e-2


@laws
def test_cached_decoding_equals_the_full_forward(name: str, switch: str, monkeypatch) -> None:
    """Prefill, single tokens and chunks; consecutive positions, and with gaps; rows alone and together."""
    model, x = given(name, switch)
    T = x.shape[1]
    cuts = [0, 7, 8, 15, T] if T > 16 else [0, 4, 5, T]
    monkeypatch.setattr(attention, "FUSE_FROM", 1)                      # folded biases too
    whole = model(x)
    cache = model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in zip(cuts, cuts[1:], strict=False)]
    assert int(cache.positions.max()) + 1 == T
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    T, pos = T - 4, gaps(T - 4)
    whole = model(x[:, :T], positions=pos)
    cache = model.new_cache()
    parts = [model(x[:, i:j], positions=pos[:, i:j], cache=cache) for i, j in ((0, 4), (4, 5), (5, T))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    for b in range(2):
        alone = model(x[b:b + 1, :T], positions=pos[b])
        torch.testing.assert_close(alone, whole[b:b + 1], atol=1e-5, rtol=1e-5)


@every_encoding_slowly
def test_each_row_of_a_cache_has_its_own_positions(name: str) -> None:
    """By default a row goes on from its own end; positions (T,) and (B, T) mix in one cache."""
    model = model_of(name)
    x = tokens((2, 12))
    i = torch.arange(12)
    own = torch.stack((i, i + 3))
    for before, after in ((own[:, :5], None), (i[:5], own[:, 5:]), (own[:, :5], i[5:] + 4)):
        cache = model.new_cache()
        model(x[:, :5], positions=before, cache=cache)
        found = model(x[:, 5:], positions=after, cache=cache)
        expected_after = own[:, 5:] if after is None else after
        pos = torch.cat((before.expand(2, -1), expected_after.expand(2, -1)), dim=1)
        torch.testing.assert_close(found, model(x, positions=pos)[:, 5:], atol=1e-5, rtol=1e-5)


@laws
def test_the_last_tokens_alone_are_the_end_of_all(name: str, switch: str) -> None:
    model, x = given(name, switch)
    T = x.shape[1]
    whole = model.hidden(x)                                             # (B, T, C)
    for n in (1, T - 1, 99):
        torch.testing.assert_close(model.hidden(x, last=n), whole[:, -n:], atol=1e-5, rtol=1e-5)
    cache = model.new_cache()
    for i, j in ((0, 9), (9, 11), (11, T)):                             # of 2 new tokens, 4 are those 2
        found = model.hidden(x[:, i:j], cache=cache, last=4)
        torch.testing.assert_close(found, whole[:, max(i, j - 4):j], atol=1e-5, rtol=1e-5)


@laws
def test_the_default_positions_change_no_value_and_no_gradient(name: str, switch: str, monkeypatch) -> None:
    """Positions known to be consecutive take other paths than the same positions given by the caller."""
    model, x = given(name, switch, 16)
    parameters = list(model.parameters())
    found = []
    small_blocks(monkeypatch, 16)
    for positions in (None, torch.arange(x.shape[1])):
        with torch.enable_grad():
            out = model(x, positions=positions)
            found.append([out, *torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True)])
    for default, same in zip(*found, strict=True):
        assert (default is None) == (same is None)
        if same is not None:
            torch.testing.assert_close(default, same, atol=1e-5 * max(1, float(same.abs().max())), rtol=1e-5)


@laws
def test_every_parameter_learns(name: str, switch: str) -> None:
    """From its start, or the layer in which it acts has no encoding. Without a switch in bfloat16."""
    dtype, (_, x) = "float32" if options_of(switch) else "bfloat16", given(name, switch, 32)
    torch.manual_seed(0)
    parameters = dict((model := GPT(config_of(name, options_of(switch)))).named_parameters())
    with torch.enable_grad(), autocast(config_of("none", f"train.dtype={dtype}").train, torch.device("cpu")):
        loss = model(x, tokens(tuple(x.shape), 1))
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    assert math.isfinite(loss)
    for key, gradient in zip(parameters, gradients, strict=True):
        is_left_out = switch in (*IN_SOME_LAYERS, "dropped") and key.startswith("encoding.")
        may_rest = is_left_out or key.endswith((".k.bias", ".2.bias"))  # a constant in each row of logits
        assert may_rest or (gradient is not None and (gradient != 0).any()), (
            f"{key} has no gradient at its start; if another factor is 0 there, start one of them at random")
        assert gradient is None or gradient.isfinite().all(), key


@pytest.mark.slow
@every_encoding
def test_far_positions_stay_finite(name: str) -> None:
    """One row from a million on, one from 2^40 on."""
    model = model_of(name, dtype=torch.float32)
    if model.encoding.max_length is not None:
        pytest.skip("it has a last position")
    pos = torch.stack([torch.arange(8) + shift for shift in (10**6, 2**40)])
    for dtype in ("float32", "bfloat16"):
        config = config_of(name, f"train.dtype={dtype}")
        with torch.enable_grad(), autocast(config.train, torch.device("cpu")):
            logits = model(tokens((2, 8)), positions=pos)
            loss = logits.float().logsumexp(-1).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert logits.isfinite().all(), dtype
        assert all(g is None or g.isfinite().all() for g in gradients), dtype


@every_encoding
def test_far_keys_do_not_merge_in_bfloat16(name: str) -> None:
    """16,384 keys without content have as many biases under autocast as outside of it."""
    T = 16_384
    config = config_of(name)
    model = model_of(name, dtype=torch.float32)
    encoding = model.encoding
    H = config.model.n_head
    D = config.model.head_width
    if not encoding.has_scores or encoding.max_length or name == "transformer_xl":
        pytest.skip("it has no scores, none at far keys, or those of the authors' products in 16 bits")
    pos = torch.arange(T)[None]
    x = torch.randn(1, T, config.model.n_embd)
    features = encoding.features(x, 0)
    features = None if features is None else encoding.mix(features, 0, None)
    q, k = (torch.zeros(1, H, n, D) for n in (4, T))
    at = At(pos[:, -4:], pos, 0, encoding.tables(pos[:, -4:], pos), features)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        bias = attention.ScoreInputs(encoding, q.to(dtype), k.to(dtype), at)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = attention.add_scores(torch.zeros(1, H, 4, T), bias, slice(0, 4), slice(0, T), False)
        found.append(len(logits.unique()))
    assert found[0] > found[1] / 2


@every_encoding
def test_single_precision_gives_the_logits_of_double(name: str) -> None:
    x = tokens((2, 30))
    exact = model_of(name)(tokens((2, 30)))
    model = model_of(name, dtype=torch.float32)
    assert (model(x) - exact).abs().max() < 1e-3 * exact.abs().max()
    far = torch.arange(30) + (0 if model.encoding.max_length else 4096)
    with torch.autocast("cpu", torch.bfloat16):     # angles and distances must stay in fp32
        rough = model(x, positions=far)
    assert (rough - model(x, positions=far)).std() < 0.5 * exact.std()


@pytest.mark.parametrize("threshold", [0.3, 0.75, 1.5])
def test_fire_around_its_threshold(threshold: float) -> None:
    """The rows before the threshold (of 32 tokens), at it and beyond it have one bias by position."""
    model = lively(config_of("fire")).double()
    x = tokens((1, 60))
    model.encoding.threshold.fill_(threshold)
    torch.testing.assert_close(model(x), model(x, positions=torch.arange(60)), atol=1e-8, rtol=1e-8)


# --- Masks and order


# tokens before a layer's window that act on it: the token after the first key takes from some before that key
BEFORE_THE_WINDOW = {"path": 1, "path_fox": 1, "selective_rope": 2}


@every_encoding_slowly
def test_windows_limit_how_far_a_token_acts(name: str) -> None:
    """With two layers of window 5 a token changes its own logits and those of the next 8, no others."""
    (model, x), changed = given(name, "window"), given(name, "window")[1].clone()
    changed[:, 10] = (x[:, 10] + 1) % 257
    moved = ((model(changed) - model(x)).abs().amax((0, 2)) > 1e-4).nonzero().flatten().tolist()
    reach = 8 + 2 * BEFORE_THE_WINDOW.get(name, 0)
    assert 10 in moved
    assert set(moved) <= set(range(10, 11 + reach))


@every_encoding
def test_all_but_these_encodings_read_positions(name: str) -> None:
    """A gap moves their logits."""
    model, x = given(name, "plain", 20)
    at_gaps = model(x, positions=gaps(20)[:1])
    if name in ("none", "cope", "forgetting", "log_forgetting", "path", "path_fox", "selective_rope", "repo"):
        assert torch.equal(at_gaps, model(x))
    else:
        moved = (at_gaps - model(x)).abs().max().item()
        assert moved > 1e-4, f"{name} reads no positions; if that is meant, add it to the list above"


@every_encoding
def test_a_head_of_keys_serves_a_group_of_queries(name: str) -> None:
    """G heads of keys equal H heads, in which each of the G stands H / G times, next to itself."""
    options = "model.n_head=4 model.n_kv_head=2 model.head_dim=12"
    grouped, whole = model_of(name, options), model_of(name, options.replace("n_kv_head=2", "n_kv_head=4"))
    weights = grouped.state_dict()
    for key, weight in weights.items():
        if key.endswith(("attention.k.weight", "attention.v.weight")):          # (G D, C)
            weights[key] = weight.unflatten(0, (2, 12)).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(weights)
    x = tokens((2, 20))
    torch.testing.assert_close(grouped(x), whole(x))


WITH_FEATURES = [name for name, encoding in ENCODINGS.items() if encoding.features is not Encoding.features]


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_sums_over_time_keep_their_terms_in_bfloat16(name: str) -> None:
    """`mix` makes of features in 16 bits what it makes of the same numbers in 64, also where they add up."""
    encoding = model_of(name, dtype=torch.float32).encoding
    x = 1 + 0.3 * torch.randn(1, 4096, config_of(name).model.n_embd)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoding.features(x, 0)
        assert features is not None
        found = encoding.mix(features, 0, None).double()
    exact = encoding.double().mix(features.double(), 0, None)
    step = exact.diff(dim=2).abs().mean(dim=2)                          # (1, H, F)
    assert ((found - exact)[:, :, -1].abs() < 0.5 * step + 1e-4).all()


# --- One encoding is another, to the last bit or nearly


@pytest.mark.parametrize(("name", "overrides", "other", "tolerance"), [
    ("p_rope", "position.p=0", "none", 0),
    ("xpos", "position.scale_base=1e30", "rope", 0),
    ("rope", "position.drop_at=0", "none", 0),
    ("rope", "model.window=32", "rope", 1e-9),
    *(("rope", f"position.temperature={kind} train.seq_len={L}", "rope", 0)     # ln L / ln L is not 1 at 49
      for kind in ("log_n", "llama4") for L in (7, 32, 49))])
def test_in_a_limit_it_is_another(name: str, overrides: str, other: str, tolerance: float) -> None:
    """Up to L, where log_n is exactly 1, and llama4 but for the last token."""
    config = config_of(name, overrides)
    plain = model_of(other)
    model = lively(config).double()
    x = tokens((2, config.train.seq_len))
    weights = model.state_dict()
    model.load_state_dict(weights | {key: y for key, y in plain.state_dict().items() if key in weights})
    x = x[:, :-1] if "llama4" in overrides else x
    torch.testing.assert_close(model(x), plain(x), atol=tolerance, rtol=tolerance)
    if "temperature" in overrides:
        assert (model(tokens((2, 80))) - plain(tokens((2, 80)))).abs().max() > 1e-3
        assert model(x, positions=torch.arange(x.shape[1]) - 5).isfinite().all()    # no log of 0


# --- Scale-invariant attention, temperatures, and --extend over them


def test_normal_logits_get_the_attention_of_the_theorem() -> None:
    """E exp(logit) = e^0.5 / (1 + d / tau) for logits from N(0, 1): an integral over their density."""
    distance = torch.tensor([0, 1, 9, 10, 100, 1000, 10_000])[:, None]
    z = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    density = torch.exp(-z**2 / 2) / math.sqrt(2 * math.pi)
    found = torch.trapezoid(scale_invariant(z, distance, 10).exp() * density, z)
    torch.testing.assert_close(found, math.e**0.5 / (1 + distance[:, 0].double() / 10), rtol=1e-9, atol=0)
    zero, one = scale_invariant(torch.tensor([0.0, 1.0]), torch.tensor([4096, 4096]), 10.0).tolist()
    assert (one - zero, zero) == pytest.approx((3.61, -12.0), abs=0.05)     # the paper's a and m at d = 4096


@pytest.mark.parametrize(("name", "overrides"), [
    *(("pope", f"position.temperature={t} {BEYOND}") for t in TEMPERATURES), ("rope", ON)])
def test_a_pair_that_rerope_moves_has_its_temperature_and_its_distance(name: str, overrides: str) -> None:
    config = config_of(name, overrides)
    x = tokens((1, 24))
    pos = torch.arange(24)[None]
    model = lively(config).double()
    before = model(x)
    with extended(model, config, parse("rerope:window=5").methods, 24):
        found = watched(model, x)
    for layer, (given_x, after) in enumerate(found):
        expected = attention_of(model, config, layer, given_x, pos, farthest=5)
        torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(model(x), before)


def test_a_model_without_encoding_has_its_temperature_in_the_unencoded_layers() -> None:
    ssmax = "position.temperature=ssmax position.temperature_layers="
    everywhere, unencoded = (lively(config_of("none", ssmax + kind)) for kind in ("all", "unencoded"))
    assert torch.equal(everywhere(tokens((1, 40))), unencoded(tokens((1, 40))))


def test_a_bias_that_a_temperature_multiplies_takes_no_path_for_biases_by_distance() -> None:
    class Times(ALiBi):
        tempers_bias = True

    config = config_of("alibi")
    inner = Times(shape_of(config), config.position)
    assert inner.by_distance and inner.max_fold_queries
    outer = Tempered(inner, TEMPERATURES["ssmax"](shape_of(config)))
    assert not outer.by_distance and not outer.max_fold_queries


@pytest.mark.parametrize("only", ["all", "encoded", "unencoded"])
def test_log_n_applied_later_acts_in_the_layers_of_its_kind_alone(only: str) -> None:
    """As if the config had it: SWAN-GPT's, for the layers without an encoding."""
    shared = f"model.n_layer=4 position.skip_every=2 position.temperature_layers={only}"
    config = config_of("rope", shared)
    x = tokens((1, 64))
    model = lively(config)
    built = lively(config_of("rope", f"{shared} position.temperature=log_n"))
    with extended(model, config, parse("log_n").methods, 64):
        torch.testing.assert_close(model(x), built(x), atol=1e-5, rtol=1e-5)
    assert (model(x) - built(x)).abs().max() > 1e-3


# --- Checkpoints, configs and limits


@laws
def test_nothing_derived_enters_a_checkpoint_and_seeds_give_equal_weights(name: str, switch: str) -> None:
    """What is neither trained nor drawn at random has no place there; other weights are as under NoPE."""
    model = model_of(name, options_of(switch))
    other = lively(config_of(name, options_of(switch)), seed=1)
    trained = {key for key, _ in model.named_parameters()}
    weights = model.state_dict()
    for key, weight in weights.items():
        assert key in trained or not torch.equal(weight, other.state_dict()[key]), key
        assert key != "temperature.s" or any(name in options_of(switch) for name in ("ssmax", "affine"))
    shape = " ".join(o for o in options_of(switch).split() if o.startswith("model."))
    made = []
    for config in (config_of(name, options_of(switch)), config_of("none", shape)):
        torch.manual_seed(0)
        made.append(GPT(config).state_dict())
    assert all(torch.equal(made[0][key], weight) for key, weight in made[1].items())


def test_every_encoding_has_a_config_and_every_option_a_description() -> None:
    """What --help and the field guide show."""
    used = {load_config(path).position.encoding for path in (ROOT / "configs").glob("*.toml")
            if path.stem != "needles"}                                  # it takes the encoding of a run
    for name, encoding in ENCODINGS.items():
        assert name in used, f'no configs/*.toml has position.encoding = "{name}"'
        assert (encoding.__doc__ or "").strip(), f"{encoding.__name__} needs a docstring"
        for key, field in encoding.Options.model_fields.items():
            assert field.description, f"{name}: give {key} a Field(..., description=...)"


def test_positions_beyond_a_limit_are_refused() -> None:
    for name, overrides, limit in (("learned", "", 32), ("binary", "model.n_embd=8", 256)):
        model = model_of(name, overrides)
        assert model.encoding.max_length == limit
        assert model(tokens((1, 2)), positions=torch.tensor([0, limit - 1])).isfinite().all()
        for T, at, wrong in ((limit + 1, None, limit), (2, [0, limit], limit), (2, [-1, 0], -1)):
            with pytest.raises(ValueError, match=rf"positions 0 \.\.\. {limit - 1} only, got {wrong}"):
                model(tokens((1, T)), positions=at and torch.tensor(at))
    wide = model_of("binary", "model.n_embd=96").encoding
    bits = wide.embed(torch.zeros(1, 1, 96), torch.tensor([[2**63 - 2]]))[0, 0]
    assert wide.max_length is None
    assert bits.tolist() == [0.0] + [1.0] * 62 + [0.0] * 33


@pytest.mark.parametrize(("name", "overrides", "expected"), [
    ("t5", "position.max_distance=16", "must exceed num_buckets / 2 = 16"),
    ("rope", "position.scale_invariant=-1", "scale_invariant"),
    ("rope", "position.scale_invariant=true", "scale_invariant"),
    ("rope", "position.fraction=0.1", "must rotate an even number of the 16 channels"),
    ("rope", "position.spectrum=hope position.local_base=9 model.window=5", "local_base.*needs spectrum"),
    # keys without effect
    ("p_rope", "position.p=1", "position.p "), ("rope", "position.layers=[]", 'use encoding = "none"'),
    ("rope", "position.temperature_layers=unencoded", "temperature_layers .*no layer is of this kind"),
    ("rope", "position.temperature_layers=encoded position.skip_every=1", "no layer is of this kind"),
    ("rope", "model.full_every=2", "full_every .*no effect"), ("rope", "position.local_base=9", "no effect"),
    ("rope_2d", "position.prompt=3 data.cross_documents=mask data.positions=row", "prompt .*data.positions"),
    ("rope_2d", "model.n_head=1 model.n_embd=6", "multiple of 4 channels"),
    ("rope", "model.head_dim=7", "even number of the 7 channels"),
    ("sinusoidal", "model.n_head=1 model.n_embd=7", "even model.n_embd"),
    ("sinusoidal", "model.scaled_embedding=true", "set model.scaled_embedding=false"),
    ("none", "position.temperature_layers=encoded", "no layer is of this kind"),
    *((name, "model.head_dim=7", "multiple of 2") for name in ("p_rope", "repo", "selective_rope"))])
def test_options_that_make_no_sense_are_refused(name: str, overrides: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        config_of(name, overrides)


def test_an_encoding_of_values_alone_acts_in_layers() -> None:
    class OfValues(Encoding):
        def turn_values(self, v, at):
            return -v

    assert OfValues.acts_in_layers() and not Encoding.acts_in_layers()
