"""The paths of attention: each equals the explicit softmax, and needs no more memory than it should."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from toys import every_encoding_slowly, lively, tokens

import attention
from attention import Mask, ScoreInputs, attend_fused, attend_in_blocks
from base.errors import UserError
from model import GPT
from positions import ENCODINGS, At, Encoding
from positions.bias import ALiBi
from positions.parts import ToeplitzBias

B, H, D = 2, 12, 8      # slopes times sqrt(D) that are no powers of two
POSITIONS = {
    "consecutive": torch.arange(24)[None],
    "far": torch.arange(24)[None] + 65_512,
    "gaps": torch.tensor([[0, 1, 2, 3, 50, 51, 255, 256, 257, 511, 512, 600, 4000, 4001, 4095, 4096, 4097,
                           30_000, 65_000, 65_279, 65_280, 65_281, 65_534, 65_535]]),
    "two rows": torch.stack((torch.arange(24), 3 * torch.arange(24) + 777)),
    "beyond two digits": 400_000 * torch.arange(24)[None],
}


def make_alibi(tiny) -> Encoding:
    return lively(tiny("alibi", f"model.n_head={H}", f"model.n_embd={H * D}")).encoding


def inputs(T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in fp64, with logits far from zero."""
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 2 * q, k, v


def explicit(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """Softmax over all keys at once, in fp64, from the formula of ALiBi."""
    Tq = q.shape[2]
    Tk = k.shape[2]
    slopes = ALiBi.slopes(H).double()[:, None, None]      # as exact as fp32
    distance = (pos[:, -Tq:, None] - pos[:, None])[:, None]
    logits = q.double() @ k.double().mT / math.sqrt(D) - slopes * distance
    i = torch.arange(Tk - Tq, Tk)[:, None]
    j = torch.arange(Tk)
    return logits.masked_fill((j > i) | (i - j >= (window or Tk)), -torch.inf).softmax(-1) @ v.double()


def at_of(encoding: Encoding, pos: Tensor, Tq: int) -> At:
    return At(pos[:, -Tq:], pos, 0, encoding.tables(pos[:, -Tq:], pos))


def by(path, q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, mask: Mask | None = None) -> Tensor:
    """Attention of unrotated q and k on a path."""
    bias = ScoreInputs(encoding, q, k, at) if encoding.has_scores else None
    return path(*encoding.rotate(q, k, at), v, mask or Mask(), bias)


@pytest.mark.slow
@pytest.mark.parametrize("where", POSITIONS)
def test_folded_alibi_is_the_explicit_softmax(where: str, tiny, monkeypatch) -> None:
    """Of all queries, of some and of one; over all keys and in windows."""
    monkeypatch.setattr(attention, "MIN_QUERIES", 5)
    encoding = make_alibi(tiny)
    pos = POSITIONS[where]
    q, k, v = inputs(24)
    for Tq, window in itertools.product((24, 10, 1), (None, 1, 7)):
        found = by(attend_fused, q[:, :, -Tq:], k, v, encoding, at_of(encoding, pos, Tq), Mask(window=window))
        torch.testing.assert_close(found, explicit(q[:, :, -Tq:], k, v, pos, window), atol=1e-9, rtol=1e-9,
                                   msg=lambda text, case=(Tq, window): f"(Tq, window) = {case}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("made", [lambda f: f, pytest.param(torch.compile, marks=pytest.mark.slow)],
                         ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_channels_survive_16_bits(dtype: torch.dtype, made, tiny) -> None:
    """Products of the rounded channels are slope times position, up to 2^24 tokens from the first."""
    encoding = make_alibi(tiny)
    pos = torch.tensor([[7, 8, 262, 263, 264, 65_542, 65_543, 2**24 + 6]])
    nothing = torch.zeros(1, H, 8, 64, dtype=dtype)
    q, k = made(encoding.fold)(nothing, nothing, at_of(encoding, pos, 8))
    assert q.dtype == k.dtype == dtype
    slopes = ALiBi.slopes(H).double()[:, None, None]
    torch.testing.assert_close(q.double() @ k.double().mT / math.sqrt(64),
                               (slopes * (pos - 7)[:, None, None]).expand(1, H, 8, 8), atol=0, rtol=2**-16)
    _, shifted = encoding.fold(nothing, nothing, at_of(encoding, pos + 50_000, 8))
    assert torch.equal(shifted, k)                                      # the sum in fp32 stays small


def spied(monkeypatch) -> list[str]:
    """A list to which each call of a path appends its name."""
    taken: list[str] = []
    for path in (attend_fused, attend_in_blocks):
        monkeypatch.setattr(attention, path.__name__,
                            lambda *args, path=path: taken.append(path.__name__) or path(*args))
    return taken


@pytest.mark.parametrize("name", ["rope", "pope", "none"])
def test_on_a_cpu_bf16_trains_in_blocks_and_evaluates_in_the_kernel(name: str, tiny, monkeypatch) -> None:
    """From FUSE_FROM queries on, and in fp32, the kernel trains too."""
    model = lively(tiny(name))
    x = tokens((2, 12))
    y = tokens((2, 12), 1)
    taken = spied(monkeypatch)

    def path(dtype: torch.dtype, grad: bool) -> set[str]:
        taken.clear()
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(x, y)
        return set(taken)

    assert path(torch.bfloat16, True) == {"attend_in_blocks"}
    assert path(torch.bfloat16, False) == path(torch.float32, True) == {"attend_fused"}
    monkeypatch.setattr(attention, "FUSE_FROM", 12)
    assert path(torch.bfloat16, True) == {"attend_fused"}


def test_bf16_training_keeps_attention_weights_once() -> None:
    """Without a bias no T x T numbers are kept in fp32; the output equals that of a softmax in fp32."""
    T, width = 48, 64
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, width, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    kept: list[torch.dtype] = []

    def note(x: Tensor) -> Tensor:
        if x.shape[-2:] == (T, T):
            kept.append(x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = attend_in_blocks(q, k, v, Mask())
    assert set(kept) == {torch.bfloat16}

    logits = (q @ k.mT).float() / math.sqrt(width)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
    assert torch.equal(y, weights.bfloat16() @ v)


def grads(attend, dtype: torch.dtype, encoding, pos: Tensor, features: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v and the features of two heads, computed in this dtype, as fp64."""
    q, k, v = (x[:1, :2].bfloat16().to(dtype).requires_grad_() for x in inputs(pos.shape[1]))
    features = features.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    at = at_of(encoding, pos, pos.shape[1])._replace(features=features)
    y = by(attend, q, k, v, encoding, at)
    y.backward(inputs(pos.shape[1], 1)[2][:1, :2].to(dtype))
    return [x.detach().double() for x in (y, q.grad, k.grad, v.grad, features.grad)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound", "bound_of_gates"), [
    (torch.float32, 5e-6, 1e-5), (torch.bfloat16, 5e-3, 2e-2)])
def test_folded_sums_of_gates_lose_few_digits(dtype: torch.dtype, bound: float, bound_of_gates: float,
                                              tiny) -> None:
    """Gates f are about 1/2: over 1024 tokens the sums reach 800. Blocks err by 2e-6 and 5e-3."""
    encoding = GPT(tiny("forgetting")).encoding
    pos = torch.arange(1024)[None]
    log_f = torch.randn(1, 2, 1024, 1, generator=torch.Generator().manual_seed(2)).sigmoid().log()
    expected = grads(attend_in_blocks, torch.float64, encoding, pos, log_f)
    found = grads(attend_fused, dtype, encoding, pos, log_f)
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]
    assert max(errors[:4]) < bound and errors[4] < bound_of_gates, errors


@pytest.mark.parametrize("change", ["none", "learned", "positions"])
def test_alibi_folds_only_where_it_can(change: str, tiny, monkeypatch) -> None:
    """Not with learned slopes or unordered positions."""
    model = lively(tiny("alibi", *(["position.learned=true"] if change == "learned" else [])))
    monkeypatch.setattr(attention, "FUSE_FROM", 1)
    taken = spied(monkeypatch)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)) if change == "positions" else None
    model(tokens((1, 12)), positions=order)
    assert set(taken) == {"attend_fused" if change == "none" else "attend_in_blocks"}


@pytest.mark.slow
@every_encoding_slowly
@pytest.mark.parametrize("positions", ["plain", "skipping"])
def test_a_training_pass_never_waits_for_the_device(name: str, positions: str, tiny, monkeypatch) -> None:
    """Reading a value waits for a GPU. On the meta device, which holds no values, it is an error."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())      # the meta device has none
    model = GPT(tiny(name)).to("meta")
    x = torch.zeros((2, 32), dtype=torch.long, device="meta")
    at = None
    if positions == "skipping" and model.encoding.max_length is None:   # a limit makes it read positions
        at = torch.zeros((2, 32), dtype=torch.long, device="meta")
    documents = (x == 5).cumsum(-1)
    model(x, x, at, documents=documents).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_training_pass_is_one_graph_that_is_not_recompiled(name: str, tiny) -> None:
    """Different tokens and seeds reuse the compiled graph."""
    torch._dynamo.reset()
    model = GPT(tiny(name, "model.n_layer=1"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(3):
        torch.manual_seed(step)
        x = tokens((2, 33), step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0), torch.autocast("cpu", torch.bfloat16):
            compiled(x[:, :-1], x[:, 1:]).backward()


def test_a_bias_of_a_wrong_shape_is_refused(tiny, monkeypatch) -> None:
    """Else all heads would have the bias of the first: a bias by distance is computed once for each."""
    monkeypatch.setattr(ALiBi, "scores", lambda self, logits, q, k, at: logits - at.tables[:, None])
    model = lively(tiny("alibi", "position.learned=true"))
    with pytest.raises(UserError, match=r"ALiBi.scores: made logits .2, 2, 1, .* of .1, 2, 1, "):
        model(tokens((1, 8)))


@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_a_number_for_each_distance_becomes_one_for_each_pair(n: int, m: int) -> None:
    f = torch.randn(2, 3, n + m - 1, dtype=torch.float64, requires_grad=True)
    index = n - 1 - torch.arange(n)[:, None] + torch.arange(m)
    assert torch.equal(ToeplitzBias.apply(f, n), f[..., index])
    assert torch.autograd.gradcheck(lambda f: ToeplitzBias.apply(f, n), f)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [
    ("rope", torch.bfloat16), ("alibi", torch.float32), ("t5", torch.float32)])
def test_lengths_that_change_share_one_graph(dtype: torch.dtype, name: str, tiny) -> None:
    from torch._dynamo.testing import CompileCounter  # 3 s, for all who collect this file
    torch._dynamo.reset()
    model = GPT(tiny(name, "model.n_layer=1"))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for T in (32, 47, 21):
        x = tokens((2, T + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = compiled(x[:, :-1], x[:, 1:])
            expected = model(x[:, :-1], x[:, 1:])
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


def test_the_paths_of_the_layers_are_said(tiny) -> None:
    def paths(*options: str, T: int = 32, dtype: torch.dtype = torch.float32) -> str:
        model = GPT(tiny(*options))
        return attention.describe_paths(model, Mask(has_plain_positions=True), T, dtype, torch.device("cpu"))

    assert paths("rope") == "fused"
    assert paths("rope", dtype=torch.bfloat16) == paths("alibi") == paths("t5") == "explicit softmax"
    assert paths("alibi", T=1024) == "fused"
    assert paths("rope", "model.sink=head") == "explicit softmax"
    assert paths("t5", "position.layers=first") == "explicit softmax in layers 0, fused in layers 1"
