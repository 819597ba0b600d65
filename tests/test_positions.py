"""Laws that every encoding obeys: all in the registry, also new ones."""

import math

import pytest
import torch
from conftest import ROOT, every_encoding, features_of, lively, slow_except, tokens

import attention
import rope
from attention import Mask, attend_fused, attend_in_blocks
from config import load_config
from model import GPT
from positions import ENCODINGS, At
from positions.distance import ALiBi
from runtime.device import autocast

every_encoding_slowly = pytest.mark.parametrize("name", slow_except([*ENCODINGS], "rope", "t5", "pope"))


@every_encoding
def test_the_future_cannot_leak(name: str, tiny) -> None:
    model = lively(tiny(name))
    x = tokens((2, 32))
    before = model(x)
    for t in (1, 17, 31):
        changed = x.clone()
        changed[:, t] = (changed[:, t] + 1) % 257
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@every_encoding
def test_only_relative_encodings_ignore_a_shift_of_all_positions(name: str, tiny) -> None:
    model = lively(tiny(name)).double()
    x, at = tokens((2, 20)), torch.arange(20)
    change = (model(x, positions=at + 11) - model(x, positions=at)).abs().max()
    assert change < 1e-4 if ENCODINGS[name].is_relative else change > 1e-2


@every_encoding
def test_cached_decoding_equals_the_full_forward(name: str, tiny) -> None:
    model = lively(tiny(name)).double()
    x = tokens((2, 30))
    whole = model(x)
    cache = model.new_cache()
    parts, start = [], 0
    for size in (7, 1, 1, 5, 1, 15):                                    # prefill, single tokens, chunks
        parts.append(model(x[:, start:start + size], cache=cache))
        start += size
    assert cache.next_position() == 30
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@every_encoding
@pytest.mark.parametrize("overrides", slow_except([
    "", "model.window=5 model.full_every=2", "model.window=5", "model.chunk=8",
    "position.temperature=log_n train.seq_len=16", "position.scale_invariant=10",
    "train.positions=rfs train.position_range=64"], "", "model.window=5 model.full_every=2"))
def test_the_last_tokens_alone_are_the_end_of_all(name: str, overrides: str, tiny) -> None:
    is_real, model = "positions=rfs" in overrides, lively(tiny(name, *overrides.split()))
    if is_real and not ENCODINGS[name].takes_floats:
        pytest.skip("has integer positions only")
    model, tolerance = (model, 1e-4) if is_real else (model.double(), 1e-5)     # real positions are in fp32
    T = min(30, model.encoding.max_length or 30)
    x = tokens((2, T))
    whole = model.hidden(x)                                             # (B, T, C)
    for n in (1, 7, T - 1, T, 99):
        torch.testing.assert_close(model.hidden(x, last=n), whole[:, -n:], atol=tolerance, rtol=tolerance)
    if is_real:     # positions of cached tokens move: its own law is in test_training_positions.py
        return
    cache = model.new_cache()
    for i, j in ((0, 9), (9, 11), (11, T)):                             # of 2 new tokens, 4 are those 2
        found = model.hidden(x[:, i:j], cache=cache, last=4)
        torch.testing.assert_close(found, whole[:, max(i, j - 4):j], atol=tolerance, rtol=tolerance)


@every_encoding
def test_positions_may_skip(name: str, tiny) -> None:
    """With gaps between positions, cached decoding equals the full forward."""
    model = lively(tiny(name)).double()
    x, at = tokens((1, 10)), torch.tensor([0, 1, 2, 9, 10, 11, 20, 21, 29, 31])
    cache = model.new_cache()
    parts = [model(x[:, i:j], positions=at[i:j], cache=cache) for i, j in ((0, 4), (4, 5), (5, 10))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x, positions=at), atol=1e-5, rtol=1e-5)
    batch = model(x.repeat(2, 1), positions=torch.stack((at, torch.arange(10))))
    torch.testing.assert_close(batch[:1], model(x, positions=at), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch[1:], model(x), atol=1e-5, rtol=1e-5)


@every_encoding
@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], "bfloat16"))
def test_every_parameter_learns(name: str, dtype: str, tiny) -> None:
    config = tiny(name, f"train.dtype={dtype}")
    model = lively(config).train()
    with autocast(config.train, torch.device("cpu")):
        loss = model(tokens((2, 32)), tokens((2, 32), 1))
    loss.backward()
    assert math.isfinite(loss.item())
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), parameter_name


@every_encoding
@pytest.mark.parametrize(("window", "chunk"), slow_except(
    [(None, None), (1, None), (7, None), (24, None), (None, 7), (4, 9)], (None, None), (7, None), (None, 7)))
def test_both_attention_paths_equal_the_explicit_softmax(name: str, window: int | None, chunk: int | None,
                                                         tiny, monkeypatch) -> None:
    encoding = lively(tiny(name)).double().encoding
    q, k, v = torch.randn(3, 2, 2, 24, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = torch.arange(24)[None] + 5
    at = At(at, at, 0, encoding.tables(at, at), features_of(encoding, x))
    turned_q, turned_k = encoding.rotate(q, k, at)
    logits = torch.einsum("bhid,bhjd->bhij", turned_q, turned_k) / math.sqrt(16)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    mask = (j <= i) & (i - j < (window or 99)) & (i // (chunk or 99) == j // (chunk or 99))
    logits = encoding.final_logits(logits.masked_fill(~mask, -torch.inf), q, k, at)
    expected = torch.einsum("bhij,bhjd->bhid", logits.exp() / logits.exp().sum(-1, keepdim=True), v)
    # blocks of 5 rows, the last one shorter
    monkeypatch.setattr(attention, "MAX_BLOCK", 2 * 2 * 24 * 5)
    monkeypatch.setattr(attention, "MIN_ROWS", 5)
    paths = [attend_in_blocks] if encoding.changes_logits() else [attend_in_blocks, attend_fused]
    for path in paths:
        found = path(q, k, v, encoding, at, Mask(window=window, chunk=chunk), 0.0)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@every_encoding
@pytest.mark.parametrize(("window", "chunk"), slow_except([(None, None), (7, None), (None, 7)], (None, None)))
def test_to_know_that_positions_are_consecutive_changes_no_value_and_no_gradient(
        name: str, window: int | None, chunk: int | None, tiny, monkeypatch) -> None:
    encoding = lively(tiny(name)).double().encoding
    generator = torch.Generator().manual_seed(0)
    leaves = list(torch.randn(3, 2, 2, 24, 16, generator=generator, dtype=torch.float64).unbind())
    for leaf in leaves:
        leaf.requires_grad_()
    x = torch.randn(2, 24, 32, generator=generator, dtype=torch.float64)
    pos, learned = torch.arange(24)[None], list(encoding.parameters())
    monkeypatch.setattr(attention, "MAX_BLOCK", 2 * 2 * 24 * 5)         # blocks of a few rows
    monkeypatch.setattr(attention, "MIN_ROWS", 5)
    found = []
    for in_order in (False, True):
        at = At(pos, pos, 0, encoding.tables(pos, pos), features_of(encoding, x))
        mask = Mask(window=window, chunk=chunk, in_order=in_order)
        out = attend_in_blocks(*leaves, encoding, at, mask, 0.0)
        gradients = torch.autograd.grad(out.sin().sum(), leaves + learned, allow_unused=True)
        found.append([out, *(g for g in gradients if g is not None)])
    assert len(found[0]) > 3
    for without, with_it in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without, atol=1e-5, rtol=1e-5)      # angles are in fp32


# tokens before a layer's window that act on it: the token after the first key takes from some before that key
BEFORE_THE_WINDOW = {"path": 1, "path_fox": 1, "selective_rope": 2}


@every_encoding_slowly
def test_windows_limit_how_far_a_token_acts_and_decode_from_the_cache(name: str, tiny) -> None:
    """With two layers of window 5 a token changes its own logits and those of the next 8, no others."""
    model = lively(tiny(name, "model.window=5"))
    x = tokens((1, 30))
    whole = model(x)
    cache = model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in ((0, 9), (9, 10), (10, 17), (17, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=1e-4)
    changed = x.clone()
    changed[:, 10] = (x[:, 10] + 1) % 257
    moved = ((model(changed) - whole).abs().amax(-1)[0] > 1e-4).nonzero().flatten().tolist()
    reach = 8 + 2 * BEFORE_THE_WINDOW.get(name, 0)
    assert 10 in moved and set(moved) <= set(range(10, 11 + reach))
    assert (lively(tiny(name, "model.window=32"))(x) - lively(tiny(name))(x)).abs().max() < 1e-4


def test_every_kth_layer_has_no_window_or_no_encoding(tiny) -> None:
    config = tiny("rope", "model.n_layer=5", "model.window=4", "model.full_every=2", "position.skip_every=3")
    model = lively(config)
    assert [block.attention.window for block in model.blocks] == [4, None, 4, None, 4]
    assert model.encoded_layers == {0, 1, 3, 4}


def two_dogs(name: str, tiny, *overrides: str) -> float:
    """Difference of the outputs at both dogs of "The dog chased another dog", without a causal mask."""
    model = lively(tiny(name, *overrides)).double()
    for block in model.blocks:
        block.attention.is_causal = False
    the, dog, chased, another = 1, 2, 3, 4
    logits = model(torch.tensor([[the, dog, chased, another, dog]]))[0]
    return (logits[1] - logits[4]).abs().max().item()


@every_encoding
def test_without_a_causal_mask_only_the_encoding_shows_the_order(name: str, tiny) -> None:
    distance = two_dogs(name, tiny)
    assert distance < 1e-12 if name in ("none", "repo") else distance > 1e-5    # repo's positions are content


def test_without_mask_and_encoding_the_model_is_permutation_equivariant(tiny) -> None:
    model = lively(tiny("none"))
    for block in model.blocks:
        block.attention.is_causal = False
    x, order = tokens((1, 12)), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order], atol=1e-4, rtol=1e-4)


def test_rotate_gets_the_features_of_all_keys(tiny, monkeypatch) -> None:
    model, seen = lively(tiny("forgetting")), []
    rotate = model.encoding.rotate
    monkeypatch.setattr(model.encoding, "rotate",
                        lambda q, k, at: seen.append((k.shape[2], at.features.shape[2])) or rotate(q, k, at))
    cache, x = model.new_cache(), tokens((1, 12))
    for part in (x[:, :9], x[:, 9:]):
        model(part, cache=cache)
    assert seen == [(9, 9), (9, 9), (12, 12), (12, 12)]                 # two layers


@every_encoding
def test_nothing_derived_enters_a_checkpoint(name: str, tiny) -> None:
    """What is neither trained nor drawn at random has no place there."""
    model, other = lively(tiny(name)), lively(tiny(name), seed=1)
    trained = {n for n, _ in model.named_parameters()}
    for key, weight in model.state_dict().items():
        assert key in trained or not torch.equal(weight, other.state_dict()[key]), key


@every_encoding
def test_equal_seeds_give_equal_weights_except_the_encodings(name: str, tiny) -> None:
    torch.manual_seed(0)
    model = GPT(tiny(name))
    torch.manual_seed(0)
    plain = GPT(tiny("none")).state_dict()
    for parameter_name, weight in plain.items():
        assert torch.equal(model.state_dict()[parameter_name], weight), parameter_name


@every_encoding
def test_every_encoding_has_a_config(name: str) -> None:
    used = {load_config(path).position.encoding for path in (ROOT / "configs").glob("*.toml")
            if path.stem != "needles"}                                  # it takes the encoding of a run
    assert name in used, f'no configs/*.toml has position.encoding = "{name}"'


@every_encoding
def test_every_encoding_and_option_is_documented(name: str) -> None:
    """Its docstring and its options' descriptions are what --help and the field guide show."""
    assert (ENCODINGS[name].__doc__ or "").strip(), f"{ENCODINGS[name].__name__} needs a docstring"
    for key, field in ENCODINGS[name].Options.model_fields.items():
        assert field.description, f"{name}: give {key} a Field(..., description=...)"


@pytest.mark.parametrize(("layers", "rotated"), [("all", [0, 1, 2]), ("first", [0]), ("[0, 2]", [0, 2])])
def test_the_encoding_acts_in_the_chosen_layers(layers: str, rotated: list[int], tiny, monkeypatch) -> None:
    model = lively(tiny("rope", "model.n_layer=3", f"position.layers={layers}"))
    calls = []
    turn = rope.turn
    monkeypatch.setattr(rope, "turn", lambda *args: calls.append(1) or turn(*args))
    counts = []

    def count(*_) -> None:
        counts.append(len(calls))
        calls.clear()

    for block in model.blocks:
        block.register_forward_hook(count)
    model(tokens((1, 8)))
    assert [layer for layer, count in enumerate(counts) if count] == rotated
    assert set(counts) <= {0, 2}                                        # q once and k once


def test_first_layer_only_differs_from_all_and_none(tiny) -> None:
    x = tokens((1, 16))
    outputs = [lively(tiny("rope", *o))(x) for o in ((), ("position.layers=first",), ("position.layers=[]",))]
    torch.testing.assert_close(outputs[2], lively(tiny("none"))(x))
    assert all((a - b).abs().max() > 1e-2 for a, b in ((outputs[0], outputs[1]), (outputs[1], outputs[2])))


def test_learned_refuses_positions_beyond_its_table(tiny) -> None:
    model = lively(tiny("learned"))
    assert model.encoding.max_length == 32
    for arguments in ({"tokens": tokens((1, 33))},
                      {"tokens": tokens((1, 2)), "positions": torch.tensor([0, 32])}):
        with pytest.raises(ValueError, match=r"positions 0 \.\.\. 31 only, got 32"):
            model(**arguments)


def test_learned_starts_with_the_scale_of_the_token_embeddings(tiny) -> None:
    model = GPT(tiny("learned"))
    assert 0.9 < model.encoding.table.weight.std() / model.embedding.weight.std() < 1.1


@every_encoding
def test_other_encodings_have_no_length_limit(name: str, tiny) -> None:
    model = lively(tiny(name))
    if model.encoding.max_length is None:
        assert model(tokens((1, 200))).isfinite().all()


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoidal_is_the_papers_table(layout: str, tiny) -> None:
    encoding = lively(tiny("sinusoidal", f"position.layout={layout}")).encoding
    added = encoding.embed(torch.zeros(1, 3, 32), torch.tensor([[0, 5, 1000]]))[0]
    for row, t in enumerate((0, 5, 1000)):
        for i in range(16):
            a = t / 10_000 ** (2 * i / 32)
            sin_at, cos_at = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 16)
            assert added[row, sin_at].item() == pytest.approx(math.sin(a), abs=1e-4)
            assert added[row, cos_at].item() == pytest.approx(math.cos(a), abs=1e-4)


@pytest.mark.parametrize("n_head", [1, 2, 6, 8, 12, 40])
def test_alibi_slopes_are_bloom_and_mpt_slopes(n_head: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    found = torch.tensor(ALiBi.slopes(n_head))
    at = torch.arange(50)
    peer = bloom.build_alibi_tensor(torch.ones(1, 50), n_head,
                                      torch.float32).view(n_head, 50)   # slope * key
    torch.testing.assert_close(found[:, None] * at, peer, atol=1e-5, rtol=1e-5)
    if n_head & (n_head - 1) == 0 or n_head == 12:                      # MPT orders others differently
        peer = mpt.build_mpt_alibi_tensor(n_head, 50).view(n_head, 50)
        torch.testing.assert_close(found.sort().values[:, None] * (at - 49),
                                   peer[peer[:, 0].argsort(descending=True)], atol=1e-5, rtol=1e-5)


GROUPED = ("model.n_head=4", "model.head_dim=12")       # 4 x 12 is not n_embd = 32


@every_encoding_slowly
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_queries_are_heads_with_repeated_keys_and_values(name: str, n_kv_head: int, tiny,
                                                                 monkeypatch) -> None:
    """Neighbouring query heads share a head of keys and values, on all paths and in the cache."""
    monkeypatch.setattr(attention, "FUSE_FROM", 20)
    grouped = lively(tiny(name, *GROUPED, f"model.n_kv_head={n_kv_head}")).double()
    plain = GPT(tiny(name, *GROUPED)).eval().double()
    weights = grouped.state_dict()
    for key in weights:
        if key.endswith((".attention.k.weight", ".attention.v.weight")):
            heads = weights[key].unflatten(0, (n_kv_head, 12))
            weights[key] = heads.repeat_interleave(4 // n_kv_head, 0).flatten(0, 1)
    plain.load_state_dict(weights)
    x = tokens((2, 24))
    whole = grouped(x)
    torch.testing.assert_close(whole, plain(x), atol=1e-9, rtol=1e-9)
    cache = grouped.new_cache()
    parts = [grouped(x[:, i:j], cache=cache) for i, j in ((0, 9), (9, 10), (10, 24))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    assert all(layer[0].shape == layer[1].shape == (2, n_kv_head, 24, 12) for layer in cache.layers)


@every_encoding
def test_every_parameter_of_grouped_heads_learns(name: str, tiny) -> None:
    model = lively(tiny(name, *GROUPED, "model.n_kv_head=2", "model.qkv_bias=true")).train()
    model(tokens((2, 32)), tokens((2, 32), 1)).backward()
    for n, p in model.named_parameters():
        # a bias of k adds a constant to each row of logits under some encodings: the softmax ignores it
        assert p.grad is not None and ((p.grad != 0).any() or n.endswith("k.bias")), n
