"""Other libraries: what they compute under the same parameters. `make test` leaves this file out.

A peer that is not installed, or has changed its names, is skipped.
"""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from explicit import causal, config_of, logits_of
from test_scaling import frequencies, shapes
from torch import Tensor
from toys import lively

import rope
from positions import At, Encoding
from positions.scaling import NTK, PI, DynamicNTK, Llama3, LongRoPE, YaRN

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients")]

B, H, D, C, LAYER = 2, 2, 16, 32, 1


def encoding_of(name: str, overrides: str = "") -> Encoding:
    return lively(config_of(name, f"model.n_layer=3 {overrides}")).encoding     # LAYER is not the last one


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits(encoding: Encoding, q: Tensor, k: Tensor, x: Tensor | None = None) -> Tensor:
    """Logits over sqrt(D) at consecutive positions, q at the last; 0 for masked keys."""
    pos = torch.arange(k.shape[2])[None]
    found = logits_of(encoding, q, k, pos[:, -q.shape[2]:], pos, x, LAYER)
    return found.masked_fill(found.isneginf(), 0)


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert expected.abs().max() > 0.1                                   # else the comparison would be empty
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def x_transformers() -> ModuleType:
    return pytest.importorskip("x_transformers.x_transformers")


def transformers(module: str) -> ModuleType:
    return pytest.importorskip(f"transformers.{module}")


# --- Rotary


def test_rope() -> None:
    llama = transformers("models.llama.modeling_llama")
    at = torch.randint(100_000, (2, 50))
    config = transformers("models.llama").LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D)
    q = vectors(2, 4, 50, D)
    k = vectors(2, 4, 50, D, seed=1)
    expected = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, at))
    for x, other in zip((q, k), expected, strict=True):
        same(rope.rotate(x, rope.angles(at[:, None], rope.inv_freq(D))), other)


def test_interleaved_rope() -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    at = torch.randint(100_000, (50,))
    x = vectors(2, 4, 50, D)
    expected = module.apply_rotary_emb(module.RotaryEmbedding(D)(at), x)
    same(rope.rotate(x, rope.angles(at, rope.inv_freq(D)), "interleaved"), expected)


@pytest.mark.parametrize("library", ["rotary_embedding_torch", "x_transformers"])
def test_xpos(library: str) -> None:
    q = vectors(1, 2, 700, D)
    k = vectors(1, 2, 700, D, seed=1)
    if library == "x_transformers":
        module = x_transformers()
        angle, scale = module.RotaryEmbedding(D, use_xpos=True)(torch.arange(700)[None])
        peer = [module.apply_rotary_pos_emb(x, angle, size) for x, size in ((q, scale), (k, scale**-1))]
    else:
        module = pytest.importorskip(library)
        peer = module.RotaryEmbedding(D, use_xpos=True).rotate_queries_and_keys(q, k)
    same(logits(encoding_of("xpos", "position.layout=interleaved"), q, k), (peer[0] @ peer[1].mT / 4).tril())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.3, 0.75, 0.99])
@pytest.mark.parametrize("dim", [16, 20])
def test_the_frequencies_of_p_rope(p: float, dim: int) -> None:
    peer, factor = rope_init("proportional", dim, 10_000.0, 2048, partial_rotary_factor=p)
    encoding = encoding_of("p_rope", f"position.p={p} model.head_dim={dim}")
    assert factor == 1
    assert torch.equal(encoding.layer_frequencies(False, torch.arange(9)[None])[0], peer)


@pytest.mark.parametrize("library", ["x_transformers", "PoPE_pytorch"])
def test_pope(library: str) -> None:
    """The second is the authors' package."""
    encoding = encoding_of("pope")
    q = vectors(2, 2, 20, D)
    k = vectors(2, 2, 20, D, seed=1)
    found = logits(encoding, q, k)                                      # first: it clamps delta
    delta = encoding.delta[LAYER][:, None]
    if library == "x_transformers":
        module = x_transformers()
        polar = module.PolarEmbedding(D, 2)
        polar.learned_bias.data.copy_(delta)
        angle, bias = polar(torch.arange(20))
        peer = module.apply_polar_pos_emb(q, angle), module.apply_polar_pos_emb(k, angle + bias)
    else:
        module = pytest.importorskip(library)
        pope = module.PoPE(D, heads=2)
        pope.bias.data.copy_(delta.reshape(pope.bias.shape))
        peer = module.apply_pope_to_qk(pope(20), q, k)
    same(found, (peer[0] @ peer[1].mT / 4).tril())


# --- Scalings


def rope_init(method: str, dim: int, base: float, length: int, T: int | None = None,
              **options) -> tuple[Tensor, float]:
    functions = transformers("modeling_rope_utils").ROPE_INIT_FUNCTIONS
    if method not in functions:
        pytest.skip(f"this transformers has no {method}")
    config = transformers("models.llama").LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": base})
    # past the checks of the constructor, which warn of values that are allowed here
    config.rope_parameters = {"rope_type": method, "rope_theta": base, **options}
    return functions[method](config, torch.device("cpu"), seq_len=T)


@pytest.mark.parametrize(("dim", "base", "length", "factor"), shapes)
def test_scalings_are_those_of_transformers(dim: int, base: float, length: int, factor: float) -> None:
    original = {"factor": factor, "original_max_position_embeddings": length}
    given = {"short_factor": [1 + i / 7 for i in range(dim // 2)],
             "long_factor": [2.0 + i for i in range(dim // 2)]}
    lengths = (1, length, length + 1, 5 * length, 64 * length)
    yarns = ({}, {"truncate": False}, {"beta_fast": 4.0, "beta_slow": 0.5}, {"attention_factor": 1.25},
             {"beta_fast": 2.5, "beta_slow": 2.0})
    llamas = ({"low_freq_factor": low, "high_freq_factor": high} for low, high in ((1.0, 4.0), (0.5, 20.0)))
    cases = [(PI(factor=factor), "linear", {"factor": factor}, None),
             *((DynamicNTK(factor=factor), "dynamic", {"factor": factor}, T) for T in lengths),
             *((YaRN(factor=factor, **o), "yarn", original | o, None) for o in yarns),
             *((Llama3(factor=factor, **o), "llama3", original | o, None) for o in llamas),
             *((LongRoPE(factor=factor, **given), "longrope", original | given, T) for T in lengths)]
    for scaling, method, options, T in cases:
        f, found = frequencies(scaling, dim, base, length, T=T or length)
        peer, expected = rope_init(method, dim, base, length, T, **options)
        torch.testing.assert_close(f, peer, rtol=1e-6, atol=0)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("dim", "base", "length", "factor"), shapes)
def test_ntk(dim: int, base: float, length: int, factor: float) -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    found = frequencies(NTK(factor=factor), dim, base)[0]
    peer = module.RotaryEmbedding(
        dim, theta=base, theta_rescale_factor=factor).freqs
    torch.testing.assert_close(found, peer.detach(), rtol=2e-6, atol=0)


# --- Biases by distance


@pytest.mark.parametrize("n_head", [1, 2, 6, 8, 12, 40])
def test_alibis_slopes_are_blooms_and_mpts(n_head: int) -> None:
    bloom, mpt = (transformers(f"models.{name}.modeling_{name}") for name in ("bloom", "mpt"))
    encoding = encoding_of("alibi", f"model.n_head={n_head} model.n_embd={16 * n_head}")
    none = torch.zeros(1, n_head, 50, D)
    at = torch.arange(50)
    found = logits(encoding, none[:, :, -1:], none)[0, :, 0]            # -slope * distance
    peer = bloom.build_alibi_tensor(torch.ones(1, 50), n_head, torch.float32).view(n_head, 50)  # slope j
    same(found - found[:, :1], peer)
    if n_head & (n_head - 1) == 0 or n_head == 12:                      # MPT orders others differently
        peer = mpt.build_mpt_alibi_tensor(n_head, 50).view(n_head, 50)
        same(found[found[:, 0].argsort()] * (at < 49), peer[peer[:, 0].argsort()])


@pytest.mark.parametrize(("num_buckets", "max_distance"),
                         [(32, 128), (32, 64), (16, 128), (64, 512), (32, 4096), (8, 20), (2, 2), (33, 100)])
def test_t5s_buckets_are_hugging_faces(num_buckets: int, max_distance: int) -> None:
    """To the last one, at every distance up to 4,096."""
    module = transformers("models.t5.modeling_t5")
    pos = torch.arange(4097)[None]
    encoding = encoding_of("t5", f"position.num_buckets={num_buckets} position.max_distance={max_distance}")
    encoding.table.weight.copy_(torch.arange(num_buckets)[:, None].expand(-1, H))
    none = torch.zeros(1, H, 4097, D)
    found = logits_of(encoding, none[:, :, -1:], none, pos[:, -1:], pos, layer=LAYER)[0, 0, 0]
    distance = pos.flip(1)[0]
    peer = module.T5Attention._relative_position_bucket(-distance, False, num_buckets, max_distance)
    assert torch.equal(found.long(), peer)
    assert found[distance >= max_distance].unique().tolist() == [num_buckets - 1]     # one for all beyond


# --- Content


def test_relative_key_is_that_of_wav2vec2_bert() -> None:
    module = transformers("models.wav2vec2_bert.modeling_wav2vec2_bert")
    if not hasattr(module, "_apply_relative_key_position_encoding"):
        pytest.skip("this version of transformers keeps it elsewhere")
    encoding, (q, k) = encoding_of("relative_key", "position.max_distance=5"), vectors(2, B, H, 9, D)
    peer = SimpleNamespace(left_max_position_embeddings=5, right_max_position_embeddings=0, scaling=D**-0.5,
                           distance_embedding=lambda rows: encoding.table[LAYER].flip(0)[rows])
    _, bias = module._apply_relative_key_position_encoding(peer, q, k)
    same(logits(encoding, q, k), (q @ k.mT / 4 + bias).tril())


def test_transformer_xl_is_xlnets_attention() -> None:
    """XLNet, by the same authors, uses the same formula."""
    module, (q, k) = transformers("models.xlnet.modeling_xlnet"), vectors(2, B, H, 9, D)
    encoding = encoding_of("transformer_xl")
    config = module.XLNetConfig(d_model=C, n_head=H, n_layer=1, d_inner=C, vocab_size=4, dropout=0.0)
    peer = module.XLNetRelativeAttention(config)
    peer.r_w_bias.data, peer.r_r_bias.data = encoding.u, encoding.v
    waves = module.XLNetModel(config).relative_positional_encoding(9, 9, bsz=B)     # distances 9 ... -8
    r = (waves @ encoding.w[LAYER].T).unflatten(-1, (H, D))
    mask = torch.ones(9, 9).triu(1)[:, :, None, None].expand(9, 9, B, H)
    _, weights = peer.rel_attn_core(*(t.permute(2, 0, 1, 3) for t in (q, k, k)), r, attn_mask=mask,
                                    output_attentions=True)
    found = logits(encoding, q, k).masked_fill(~causal(9, 9), -torch.inf).softmax(-1)
    same(found, weights.permute(2, 3, 0, 1))


def test_cope_is_that_of_x_transformers() -> None:
    encoding = encoding_of("cope", "position.max_pos=4")
    peer = x_transformers().CoPE(D, H, 4)
    peer.pos_emb.data = encoding.table[LAYER]
    q = vectors(B, H, 4, D)
    k = vectors(B, H, 9, D, seed=1)
    plain = (q @ k.mT / 4).masked_fill(~causal(4, 9), -torch.inf)
    same(logits(encoding, q, k), torch.where(plain.isneginf(), 0, plain + peer(q, plain)), 1e-4)


def test_forgetting_is_the_data_dependent_alibi_of_x_transformers() -> None:
    encoding = encoding_of("forgetting")
    peer = x_transformers().DataDependentAlibi(C, H)
    linear = peer.to_forget_gates[0]
    linear.weight.data, linear.bias.data = encoding.w[LAYER], encoding.b[LAYER]
    (q, k), x = vectors(2, B, H, 9, D), vectors(B, 9, C, seed=1)
    same(logits(encoding, q, k, x), (q @ k.mT / 4 + peer(x)).tril())


def naive(name: str, monkeypatch) -> ModuleType:
    """A naive form of flash-linear-attention, by its path: importing the package would need Triton."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no fla: `pip install --no-deps fla-core` and put it on PYTHONPATH")
    pytest.importorskip("einops")
    path = Path(spec.submodule_search_locations[0]) / "ops" / name / "naive.py"
    # its sum over time, a Triton kernel, is PyTorch's here
    stubs = {"constant": {"RCP_LN2": 1 / math.log(2)},
             "cumsum": {"chunk_global_cumsum": lambda g, cu_seqlens, scale: scale * g.cumsum(dim=1)}}
    for stub in ("fla", "fla.ops", "fla.ops.utils", *(f"fla.ops.utils.{key}" for key in stubs)):
        module = ModuleType(stub)
        vars(module).update(stubs.get(stub.rpartition(".")[2], {}))
        monkeypatch.setitem(sys.modules, stub, module)
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_it_is_that_of_flash_linear_attention(name: str, monkeypatch) -> None:
    """Over several chunks of 64 tokens, in fp32, forwards and backwards."""
    T = 200
    peer = naive("path_attn", monkeypatch).naive_path_attn
    encoding = encoding_of(name)
    pos = torch.arange(T)[None]
    found = []
    features = encoding.features(vectors(B, T, C, seed=1), LAYER)
    features = encoding.mix(features, LAYER, None)
    if name == "path_fox":
        features = torch.cat((features[..., :-1], features[..., -1:] / 9), dim=-1)
    leaves = [*vectors(3, B, H, T, D), features]
    for is_peer in (False, True):
        q, k, v, f = inputs = [x.clone().requires_grad_() for x in leaves]
        with torch.enable_grad():
            if is_peer:                                                 # its scale is on the gates too
                gate = f[..., D + 1] * D**0.5 if name == "path_fox" else torch.zeros(B, H, T)
                rest = (f[..., :D], f[..., D], gate)
                out = peer(*(x.transpose(1, 2) for x in (q, k, v, *rest)), scale=D**-0.5).transpose(1, 2)
            else:
                at = At(pos, pos, LAYER, None, f)
                masked = torch.zeros(B, H, T, T).masked_fill(~causal(T, T), -torch.inf)
                out = encoding.scores(masked, q, k, at).softmax(dim=-1) @ v
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
