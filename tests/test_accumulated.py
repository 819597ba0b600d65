"""Encodings that accumulate along the tokens in between: each against loops over its formula."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from conftest import features_of, lively, tokens
from test_content import LAYER, SHAPES, B, Case, D, H, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import rope
from positions import ENCODINGS, At, Shape, accumulated

FLA = importlib.util.find_spec("fla")


@pytest.fixture
def case(tiny, monkeypatch):
    """case(name, (Tq, Tk)) -> a Case whose keys are several chunks and a rest."""
    monkeypatch.setattr(accumulated, "CHUNK", 4)
    return lambda name, shape: Case(lively(tiny(name)).encoding, *shape)


def convolved(raw: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's depthwise convolution of (T, D), padded on the left; weight (D, n)."""
    padded = F.pad(raw.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], groups=weight.shape[0])[0].T


def directions(c: Case, b: int, h: int) -> tuple[Tensor, Tensor]:
    """w (T, D) and beta (T,) of one head, from the formulas."""
    e = c.encoding
    raw = c.x[b] @ (e.up[LAYER].unflatten(0, (H, D))[h] @ e.down[LAYER]).T
    w = F.silu(convolved(raw, e.convolution[LAYER, h]))
    beta = 2 * torch.sigmoid(c.x[b] @ e.u[LAYER, h] + e.b[LAYER, h])
    return w / w.norm(dim=-1, keepdim=True), beta


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_is_the_product_of_its_reflections(name: str, shape: tuple[int, int], case) -> None:
    c = case(name, shape)

    def term(b: int, h: int, i: int, j: int) -> float:
        (w, beta), row = directions(c, b, h), c.q[b, h, i - c.past]
        for t in range(i, j, -1):
            row = row @ (torch.eye(D, dtype=torch.float64) - beta[t] * torch.outer(w[t], w[t]))
        logit = (row @ c.k[b, h, j]).item() / math.sqrt(D)
        if name == "path_fox":
            gates = c.encoding.gates
            for t in range(j + 1, i + 1):
                logit += F.logsigmoid(c.x[b, t] @ gates.w[LAYER, h] + gates.b[LAYER, h]).item()
        return logit

    same(c.after(), c.loop(term), 1e-5)      # the length of w has 1e-6 under its root


def reference(name: str) -> ModuleType:
    """A naive form of flash-linear-attention, by its path: importing the package would need Triton."""
    spec = FLA
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no fla: `pip install --no-deps fla-core` and put it on PYTHONPATH")
    pytest.importorskip("einops")
    path = Path(spec.submodule_search_locations[0]) / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_is_that_of_flash_linear_attention(name: str, tiny) -> None:
    """Over several chunks of 64 tokens, in fp32, forwards and backwards."""
    naive, T = reference("path_attn").naive_path_attn, 200
    encoding = lively(tiny(name)).encoding.requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, H, T, D, generator=random)
    x = torch.randn(B, T, 32, generator=random)
    features = features_of(encoding, x, LAYER).clone()
    features[..., D + 1:] = -torch.rand(B, H, T, 1, generator=random)[..., :features.shape[-1] - D - 1] / 9
    gate = features[..., D + 1] if name == "path_fox" else torch.zeros(B, H, T)
    found = []
    for inputs in ([x.clone().requires_grad_() for x in (q, k, v, features)] for _ in range(2)):
        q_, k_, v_, features_ = inputs
        if not found:
            mask = torch.ones(T, T, dtype=torch.bool).tril()
            logits = torch.zeros(B, H, T, T).masked_fill(~mask, -torch.inf)
            at = Case(encoding.float(), 1, 1).at()._replace(features=features_)
            out = encoding.scores(logits, q_, k_, at).softmax(dim=-1) @ v_
        else:
            w, beta = features_[..., :D], features_[..., D]
            g = features_[..., D + 1] * D**0.5 if name == "path_fox" else gate      # it scales the gates too
            out = naive(*(x.transpose(1, 2) for x in (q_, k_, v_, w, beta, g)), scale=D**-0.5).transpose(1, 2)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_wall_is_a_product_of_gates_in_each_channel(shape: tuple[int, int], case, monkeypatch) -> None:
    monkeypatch.setattr(accumulated, "TILE", 3)
    c = case("wall", shape)
    e = c.encoding

    def term(b: int, h: int, i: int, j: int) -> float:
        gates = F.logsigmoid(c.x[b] @ e.w[LAYER].unflatten(0, (H, D))[h].T + e.b[LAYER, h])     # (T, D)
        factor = gates[j + 1:i + 1].sum(dim=0).exp()
        return (c.q[b, h, i - c.past] * c.k[b, h, j] * factor).sum().item() / math.sqrt(D)

    same(c.after(), c.loop(term))


def test_wall_survives_gates_that_close_at_once(tiny) -> None:
    """exp(-P) of these gates overflows after four tokens; the logit of a token with itself has no gate."""
    encoding = lively(tiny("wall")).encoding.requires_grad_(False)
    c = Case(encoding, 70, 70)
    encoding.float().b.fill_(-200.0)
    c.q, c.k, c.x, c.logits = (x.float().requires_grad_() for x in (c.q, c.k, c.x, c.logits))
    own = torch.einsum("bhic,bhic->bhi", c.q, c.k) / math.sqrt(D)
    found = c.after()
    torch.testing.assert_close(found, torch.diag_embed(own), atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert all(x.grad.isfinite().all() for x in (c.q, c.k, c.x))


def test_wall_is_that_of_flash_linear_attention(tiny, monkeypatch) -> None:
    """Over several tiles, in fp32. The reference's sum over time, a Triton kernel, is PyTorch's here."""
    stubs = {"constant": {"RCP_LN2": 1 / math.log(2)},
             "cumsum": {"chunk_global_cumsum": lambda g, cu_seqlens, scale: scale * g.cumsum(dim=1)}}
    for name in ("fla", "fla.ops", "fla.ops.utils", *(f"fla.ops.utils.{name}" for name in stubs)):
        module = ModuleType(name)
        vars(module).update(stubs.get(name.rpartition(".")[2], {}))
        monkeypatch.setitem(sys.modules, name, module)
    naive, T = reference("wall_attn").naive_wall_attn, 80
    encoding, random = lively(tiny("wall")).encoding, torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, B, H, T, D, generator=random)
    gates = encoding.features(torch.randn(B, T, 32, generator=random), LAYER).detach() / 9
    found = []
    for is_ours in (True, False):
        q_, k_, v_, g_ = inputs = [x.clone().requires_grad_() for x in (q, k, v, gates)]
        if is_ours:
            logits = torch.full((T, T), -torch.inf).triu(1).expand(B, H, T, T)
            at = Case(encoding, 1, 1).at()._replace(features=encoding.mix(g_, LAYER, None))
            out = encoding.float().scores(logits, q_, k_, at).softmax(dim=-1) @ v_
        else:
            out = naive(*(x.transpose(1, 2) for x in (q_, k_, v_, g_)), scale=D**-0.5).transpose(1, 2)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_taps", [1, 4])
def test_selective_rope_turns_by_the_sum_of_what_the_tokens_say(n_taps: int, shape: tuple[int, int],
                                                                tiny) -> None:
    c = Case(lively(tiny("selective_rope", f"position.n_taps={n_taps}")).encoding, *shape)
    e = c.encoding
    q, k = c.encoding.rotate(c.q, c.k, c.at())
    found = (q @ k.mT / math.sqrt(D)).masked_fill(c.logits.isneginf(), 0)

    def term(b: int, h: int, i: int, j: int) -> float:
        x = torch.cat([part / part.norm(dim=-1, keepdim=True) for part in c.x[b].chunk(H, dim=-1)], dim=-1)
        raw = x @ (e.up[LAYER].unflatten(0, (H, D // 2))[h] @ e.down[LAYER]).T
        phi = convolved(raw, e.convolution[LAYER, h])                   # (T, D / 2)
        total, logit = phi[j + 1:i + 1].sum(dim=0), 0.0
        for pair in range(D // 2):
            angle = total[pair].item() * 500_000 ** (-2 * pair / D)
            a, b_ = (complex(z[pair], z[pair + D // 2]) for z in (c.q[b, h, i - c.past], c.k[b, h, j]))
            logit += (a.conjugate() * b_ * complex(math.cos(angle), -math.sin(angle))).real
        return logit / math.sqrt(D)

    same(found, c.loop(term), 1e-6)


def test_equal_angles_are_rope(tiny, monkeypatch) -> None:
    """If every token says 1, the angle of pair i is its frequency times the distance."""
    model, plain = lively(tiny("selective_rope", "position.base=10000")), lively(tiny("rope"))
    monkeypatch.setattr(model.encoding, "features",
                        lambda x, layer: torch.ones(len(x), H, x.shape[1], D // 2))
    with torch.no_grad():
        model.encoding.convolution.zero_()[..., -1] = 1.0
    weights = model.state_dict()
    plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
    x = tokens((2, 40))
    torch.testing.assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["path", "wall", "selective_rope"])
def test_no_T_by_T_at_evaluation(name: str) -> None:
    """2,048 tokens in blocks of 64 queries: no tensor of more than a quarter of T x T numbers ever exists."""
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            result = function(*arguments, **(options or {}))
            largest = max([largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
            return result

    shape, T = Shape(n_layer=1, n_head=1, n_embd=8, head_dim=8, seq_len=2048), 2048
    kind = ENCODINGS[name]
    encoding = kind(shape, kind.Options(encoding=name))
    q = torch.randn(1, 1, T, 8)
    with torch.no_grad(), Largest(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_BLOCK", 2 * 64 * T)
        at = torch.arange(T)[None]
        features = encoding.mix(encoding.features(torch.randn(1, T, 8), 0), 0, None)
        attention.attend(q, q, q, encoding, At(at, at, 0, features=features, tables=None),
                         attention.Mask(in_order=True), 0.0)
    assert T < largest <= T * T / 4


@pytest.mark.parametrize("shape", SHAPES)
def test_repo_is_rope_at_the_positions_that_the_tokens_choose(shape: tuple[int, int], tiny) -> None:
    c = Case(lively(tiny("repo")).encoding, *shape)
    e = c.encoding
    q, k = e.rotate(c.q, c.k, c.at())
    found = (q @ k.mT / math.sqrt(D)).masked_fill(c.logits.isneginf(), 0)

    def term(b: int, h: int, i: int, j: int) -> float:
        z = [e.out[LAYER, h] @ (F.silu(e.gate[LAYER] @ x) * (e.value[LAYER] @ x)) for x in c.x[b, [i, j]]]
        q_i, k_j = (rope.rotate(x, rope.angles(z_t, rope.inv_freq(D, dtype=torch.float64)))
                    for x, z_t in zip((c.q[b, h, i - c.past], c.k[b, h, j]), z, strict=True))
        return (q_i @ k_j).item() / math.sqrt(D)

    same(found, c.loop(term), 1e-6)
