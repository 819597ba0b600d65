"""The decoder: its parts against their formulas, size and cost against the closed form."""

import itertools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from explicit import config_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from toys import every_encoding, lively, tokens

from model import GPT, hidden_width


@pytest.mark.parametrize(("mlp", "matrices", "tied"), [("geglu", 3, True), ("relu2", 2, False)])
def test_parameters_and_flops_are_the_closed_form(mlp: str, matrices: int, tied: bool, tiny) -> None:
    """With 6 heads of 10 channels that share 2 heads of keys; biases of q, k and v alone."""
    config = tiny("rope", f"model.mlp={mlp}", f"model.tied={str(tied).lower()}", "model.n_embd=48",
                  "model.n_layer=3", "model.n_head=6", "model.n_kv_head=2", "model.head_dim=10",
                  "model.qkv_bias=true")
    model = GPT(config)
    C = 48
    V = 257
    n_layer = 3
    T = 40
    width = 128 if matrices == 3 else 192
    assert hidden_width(config.model) == width
    block = 2 * C * 60 + 2 * C * 20 + matrices * C * width
    assert model.n_parameters() == n_layer * (block + 100 + 2 * C) + C + V * C * (1 if tied else 2)
    with FlopCounterMode(display=False) as counter:             # an independent count of the matrix products
        model(tokens((1, T)), tokens((1, T))).backward()
    products = sum(n for operation, n in counter.get_flop_counts()["Global"].items()
                   if "attention" not in str(operation))
    assert products == 6 * (n_layer * block + V * C) * T


@pytest.mark.slow
@every_encoding
def test_bfloat16_under_autocast_warns_of_nothing(name: str, tiny) -> None:
    """In training, in evaluation and in decoding from a cache."""
    model = GPT(tiny(name, "model.qk_norm=true"))
    x = tokens((2, 8))
    torch.set_warn_always(True)                     # PyTorch warns only once in a process otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x, x)
            loss.backward()
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                cache = model.eval().new_cache()
                model(x[:, :7], cache=cache)
                model(x[:, 7:], cache=cache)
    finally:
        torch.set_warn_always(False)


def test_a_norm_after_each_sublayer_and_a_scaled_embedding(tiny) -> None:
    """What a sublayer adds has its norm's weight as root mean square; embeddings are sqrt(C) larger."""
    model = lively(tiny("rope", "model.post_norm=true", "model.scaled_embedding=true"))
    streams = []
    x = tokens((1, 8))
    for block in model.blocks:
        for norm in (block.attention_post_norm, block.mlp_post_norm):
            torch.nn.init.constant_(norm.weight, 3.0)
        for module in (block.attention_norm, block.mlp_norm, model.norm):
            module.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    model(x)
    torch.testing.assert_close(streams[0], 32**0.5 * model.embedding(x))
    streams = streams[:4] + streams[-1:]                                # the last norm had two hooks
    for before, after in itertools.pairwise(streams):
        torch.testing.assert_close((after - before).square().mean(-1), torch.full((1, 8), 9.0), rtol=1e-3,
                                   atol=0)


def test_dropout_acts_in_training_only(tiny, monkeypatch) -> None:
    """On embeddings, and in each of two layers on attention and both sublayers' outputs."""
    seen = []
    drop = F.dropout
    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "dropout", lambda x, p, is_on=True, *rest: (
        seen.append(p * is_on), drop(x, p, is_on, *rest))[1])
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, dropout_p, **rest: (
        seen.append(dropout_p), kernel(*given, dropout_p=dropout_p, **rest))[1])
    for name in ("rope", "alibi"):                                      # the fused path and the blocks
        model = lively(tiny(name, "model.dropout=0.5"))
        x = tokens((1, 16))
        assert torch.equal(model(x), model(x))
        assert not any(seen)
        seen.clear()
        model.train()(x)
        assert seen == [0.5] * 7
        seen.clear()


def test_initial_loss_is_that_of_a_uniform_guess(tiny) -> None:
    torch.manual_seed(0)
    loss = GPT(tiny("rope"))(tokens((4, 32)), tokens((4, 32), 1))
    assert loss.item() == pytest.approx(math.log(257), abs=0.05)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_all_norms_have_the_epsilon(norm: str, tiny) -> None:
    model = GPT(tiny("rope", f"model.norm={norm}", "model.norm_eps=0.5", "model.qk_norm=true"))
    assert {module.eps for module in model.modules() if hasattr(module, "eps")} == {0.5}


@pytest.mark.slow
def test_compiled_training_gives_the_same_loss(tiny) -> None:
    for name in ("rope", "alibi"):
        model = lively(tiny(name, "model.n_layer=1"))
        x = tokens((2, 32))
        y = tokens((2, 32), 1)
        torch.testing.assert_close(torch.compile(model)(x, y), model(x, y), atol=1e-4, rtol=1e-4)


def gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize(("kind", "activation"), [
    ("relu2", lambda x: x.clamp(min=0) ** 2),
    ("gelu_exact", lambda x: x * torch.distributions.Normal(0, 1).cdf(x)),
    ("gelu", gelu_by_tanh), ("geglu", gelu_by_tanh),
    ("swiglu", lambda x: x / (1 + (-x).exp()))])
def test_an_mlp_is_its_formula(kind: str, activation: Callable[[Tensor], Tensor], tiny) -> None:
    mlp = lively(tiny("rope", f"model.mlp={kind}")).double().blocks[0].mlp
    x = torch.randn(2, 3, 32).double()
    inner = activation(mlp.gate(x)) * mlp.up(x) if kind in ("geglu", "swiglu") else activation(mlp.up(x))
    torch.testing.assert_close(mlp(x), mlp.down(inner))


@pytest.mark.parametrize("parallel", [False, True])
def test_the_mlp_reads_what_attention_added_unless_both_are_parallel(parallel: bool, tiny) -> None:
    model = lively(tiny("rope", f"model.parallel={str(parallel).lower()}", "model.norm=layernorm"))
    block = model.blocks[0]
    seen = {}
    for name, module in {"block": block, "attention": block.attention}.items():
        module.register_forward_hook(lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)}))
    model(tokens((2, 8)))
    x, out = seen["block"]
    normalised, attended = seen["attention"]
    torch.testing.assert_close(normalised, block.attention_norm(x))
    mlp_input = x if parallel else x + attended
    torch.testing.assert_close(out, x + attended + block.mlp(block.mlp_norm(mlp_input)))


def test_the_last_matrices_of_the_sublayers_start_small_whatever_their_names() -> None:
    """0.02 / sqrt(2 n_layer) for attention.o and mlp.down, 0.02 for every other matrix; biases are 0."""
    model = GPT(config_of("none", "model.n_layer=8 model.n_embd=256 model.bias=true model.gate=true"))
    for block in model.blocks:
        small = {block.attention.o: 0.02 / 4, block.mlp.down: 0.02 / 4}
        for layer in (module for module in block.modules() if isinstance(module, torch.nn.Linear)):
            assert layer.weight.std().item() == pytest.approx(small.get(layer, 0.02), rel=0.05)
            assert layer.bias is None or (layer.bias == 0).all()
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
