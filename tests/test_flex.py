"""FlexAttention gives the same values and gradients. The fused kernel needs a GPU; its inputs do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from toys import lively, slow_except, tokens

import attention
from model import GPT
from positions import ENCODINGS

FLEXIBLE = [name for name, encoding in ENCODINGS.items() if encoding.by_distance]
OPTIONS = {"plain": (), "window": ("model.window=9", "model.full_every=2"),
           "chunks": ("model.chunk=9", "model.full_every=2"),
           "grouped": ("model.n_head=4", "model.n_kv_head=2", "model.head_dim=16"),
           "sink": ("model.sink=head", "model.window=9", "model.full_every=2"),
           "sharp": ("position.temperature=ssmax",), "invariant": ("position.scale_invariant=10",),
           "all of it": ("model.window=20", "model.n_kv_head=1", "position.temperature=ssmax",
                         "position.scale_invariant=3")}


def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: Any,
          scale: float, enable_gqa: bool, kernel_options: Any, return_aux: Any) -> tuple[Tensor, Any]:
    """FlexAttention as documented, computed for all pairs at once."""
    (B, H, T, _), n_shared = q.shape, q.shape[1] // k.shape[1]
    assert enable_gqa == (n_shared > 1)
    k, v = (x.repeat_interleave(n_shared, dim=1) for x in (k, v))
    b, h, i, j = (torch.arange(n).view([-1 if place == axis else 1 for axis in range(4)])
                  for place, n in enumerate((B, H, T, T)))
    logits = q @ k.mT * scale
    logits = score_mod(logits, b, h, i, j) if score_mod else logits
    logits = logits.masked_fill(~block_mask.mask_mod(b, h, i, j), -torch.inf)
    assert T % 128 == 0
    assert block_mask.shape[-2:] == (T, T)
    return logits.softmax(-1) @ v, flex_attention.AuxOutput(lse=logits.logsumexp(-1))


def values(model: GPT, documents: Tensor | None, monkeypatch, is_flex: bool) -> tuple[list[Tensor], int]:
    """Loss and gradients of all parameters, and how many layers used FlexAttention."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "FLEX_DEVICES", {"cpu"} if is_flex else set())
        taken = []
        attend = attention.attend_flex
        patch.setattr(attention, "attend_flex", lambda *given: taken.append(1) or attend(*given))
        patch.setattr(flex_attention, "flex_attention", dense)
        model.zero_grad()
        loss = model(tokens((2, 33)), tokens((2, 33), 1), documents=documents)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], len(taken)


CASES = [(name, options, packed) for name in ("rope", "pope", *FLEXIBLE, "alibi position.learned=true")
         for options in OPTIONS for packed in (False, True)]


@pytest.mark.parametrize(("name", "options", "packed"), slow_except(
    CASES, *(("t5", options, True) for options in OPTIONS), ("rope", "window", False),
    ("rope", "all of it", True), ("bam", "sharp", False)))
def test_flex_is_the_explicit_softmax(name: str, options: str, packed: bool, tiny, monkeypatch) -> None:
    name, *learned = name.split()
    model = lively(tiny(name, "model.flex=true", *learned, *OPTIONS[options])).double()
    documents = (tokens((2, 33), 2) < 30).cumsum(-1) if packed else None
    expected, n_none = values(model, documents, monkeypatch, False)
    found, n_taken = values(model, documents, monkeypatch, True)
    tensors = ["the loss", *(f"the gradient of {key}" for key, _ in model.named_parameters())]
    for tensor, one, other in zip(tensors, found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-7, msg=lambda text, tensor=tensor: (
            f"{tensor} in fp64 (is a parameter cast to fp32?): {text}"))
    n_windows = sum(bool(block.attention.window or block.attention.chunk) for block in model.blocks)
    has_sink = model.blocks[0].attention.sink is not None
    n_served = 2 if packed or has_sink else n_windows
    encoding = model.encodings[0]
    if encoding.has_scores:   # a temperature makes the bias of bam one of more than the distance
        n_served = 2 * (encoding.by_distance or encoding.scales_by_distance)
    assert (n_none, n_taken) == (0, n_served)


@pytest.mark.slow
def test_the_kernel_itself_in_one_graph(tiny, monkeypatch) -> None:
    """PyTorch's own kernel, uncompiled. It has a backward pass on a CPU, but a check forbids it.

    With masks by blocks, of a window and of documents; shared keys; a learned bias that it captures.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    options = ("model.flex=true", "model.window=100", "model.chunk=130", "model.full_every=2",
               "model.n_kv_head=1")
    model = lively(tiny("t5", *options)).double()
    x = tokens((2, 201))
    found = []
    documents = (x[:, :-1] < 3).cumsum(-1)
    for devices, call in ((set(), model), ({"cpu"}, torch.compile(model, backend="eager", fullgraph=True))):
        monkeypatch.setattr(attention, "FLEX_DEVICES", devices)
        model.zero_grad()
        loss = call(x[:, :-1], x[:, 1:], documents=documents)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*found, atol=1e-9, rtol=1e-7)


def test_flex_is_not_used_where_it_does_not_serve(tiny, monkeypatch) -> None:
    """Given positions, a cache, dropout, narrow heads and biases by content."""
    monkeypatch.setattr(attention, "FLEX_DEVICES", {"cpu"})
    monkeypatch.setattr(attention, "attend_flex", lambda *_: pytest.fail("flex was taken"))
    x = tokens((1, 12))
    on = "model.flex=true"
    lively(tiny("t5", on))(x, positions=torch.arange(12))
    for given in (("cope", on, "model.window=4"), ("t5", on, "model.head_dim=8"), ("t5",), ("rope", on)):
        lively(tiny(*given))(x)                             # rope: no gain over the causal kernel
    model = lively(tiny("t5", on))
    model(x, cache=model.new_cache())
    lively(tiny("t5", on, "model.dropout=0.1")).train()(x)
