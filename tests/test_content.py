"""Encodings whose bias depends on content: each against loops over its formula, and other libraries."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import features_of, lively, tokens
from torch import Tensor

from model import GPT
from positions import ENCODINGS, At, Encoding, Options, Shape, content

B, H, D, C, LAYER = 2, 2, 16, 32, 1     # what `tiny` makes, and its second layer
CONTENT = ["relative_key", "relative_key_query", "transformer_xl", "cope", "forgetting", "grape_ap", "dape",
           "tapa"]
SHAPES = [(9, 9), (4, 9), (1, 9)]       # Tq, Tk: all queries, a block or a cached chunk, one token


class Case:
    """An encoding with large random parameters, and the arguments of its hooks, in fp64."""

    def __init__(self, encoding: Encoding, Tq: int, Tk: int) -> None:
        random = torch.Generator().manual_seed(Tq)
        self.encoding, self.past = encoding.double().requires_grad_(False), Tk - Tq
        self.k, whole_q = torch.randn(2, B, H, Tk, D, generator=random, dtype=torch.float64)
        self.q = whole_q[:, :, self.past:]
        self.x = torch.randn(B, Tk, C, generator=random, dtype=torch.float64)
        steps = torch.randint(1, 6, (B, Tk), generator=random)          # gaps that differ between rows
        self.pos = steps.cumsum(-1) + 3
        mask = torch.arange(Tk) <= torch.arange(Tq)[:, None] + self.past
        self.logits = (self.q @ self.k.mT / math.sqrt(D)).masked_fill(~mask, -torch.inf)

    def at(self) -> At:
        q_pos = self.pos[:, self.past:]
        return At(q_pos, self.pos, LAYER, self.encoding.tables(q_pos, self.pos),
                  features_of(self.encoding, self.x, LAYER))

    def after(self) -> Tensor:
        """The logits after `scores`; 0 for keys ahead, whose logits must stay -inf."""
        after = self.encoding.scores(self.logits, self.q, self.k, self.at())
        assert torch.equal(after.isneginf(), self.logits.isneginf()) and not after.isnan().any()
        return after.masked_fill(after.isneginf(), 0)

    def bias(self) -> Tensor:
        """What `scores` adds; 0 for keys ahead."""
        return self.after() - self.logits.masked_fill(self.logits.isneginf(), 0)

    def loop(self, term) -> Tensor:
        """term(b, h, i, j) for each query i and each key j up to it, both counted from the first key."""
        out = torch.zeros_like(self.logits)
        for b in range(B):
            for h in range(H):
                for i in range(self.past, self.k.shape[2]):
                    for j in range(i + 1):
                        out[b, h, i - self.past, j] = term(b, h, i, j)
        return out


@pytest.fixture
def case(tiny):
    """case(name, (Tq, Tk), "position.key=value", ...) -> a Case."""
    def make(name: str, shape: tuple[int, int], *overrides: str) -> Case:
        return Case(lively(tiny(name, *overrides)).encoding, *shape)
    return make


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert expected.abs().max() > 0.1                                   # else the comparison would be empty
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_distance", [None, 5])
@pytest.mark.parametrize("name", ["relative_key", "relative_key_query"])
def test_relative_key_is_the_sum_of_its_formula(name: str, max_distance: int | None, shape: tuple[int, int],
                                                case, monkeypatch) -> None:
    monkeypatch.setattr(content, "KEYS_AT_A_TIME", 4)                   # 9 keys: two pieces and a rest
    c = case(name, shape, *([f"position.max_distance={max_distance}"] if max_distance else []))
    longest = max_distance or 31                                        # train.seq_len - 1
    assert c.encoding.table.shape == (2, longest + 1, D)

    def term(b: int, h: int, i: int, j: int) -> float:
        e = c.encoding.table[LAYER, min(int(c.pos[b, i] - c.pos[b, j]), longest)]
        q, k = c.q[b, h, i - c.past], c.k[b, h, j]
        return (q @ e + (k @ e if name == "relative_key_query" else 0.0)) / math.sqrt(D)

    same(c.bias(), c.loop(term))


def test_relative_key_is_hugging_faces(case) -> None:
    module = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    if not hasattr(module, "_apply_relative_key_position_encoding"):
        pytest.skip("this version of transformers keeps it elsewhere")
    c = case("relative_key", (9, 9), "position.max_distance=5")
    c.pos = torch.arange(9)[None]

    class Theirs:
        left_max_position_embeddings, right_max_position_embeddings, scaling = 5, 0, D**-0.5
        distance_embedding = staticmethod(lambda rows: c.encoding.table[LAYER].flip(0)[rows])

    _, bias = module._apply_relative_key_position_encoding(Theirs, c.q, c.k)
    same(c.bias(), bias.tril())


@pytest.mark.parametrize("shape", SHAPES)
def test_transformer_xl_is_the_sum_of_its_formula(shape: tuple[int, int], case) -> None:
    c = case("transformer_xl", shape)
    u, v, w = c.encoding.u, c.encoding.v, c.encoding.w[LAYER]
    assert u.shape == v.shape == (H, D) and c.encoding.w.shape == (2, C, C)

    def term(b: int, h: int, i: int, j: int) -> float:
        d = int(c.pos[b, i] - c.pos[b, j])
        angle = [d / 10_000 ** (2 * n / C) for n in range(C // 2)]
        wave = torch.tensor([math.sin(a) for a in angle] + [math.cos(a) for a in angle], dtype=torch.float64)
        r = (w @ wave)[h * D:(h + 1) * D]
        return (u[h] @ c.k[b, h, j] + (c.q[b, h, i - c.past] + v[h]) @ r) / math.sqrt(D)

    same(c.bias(), c.loop(term), 1e-4)                                  # angles are fp32


def test_transformer_xl_is_xlnets_attention(case) -> None:
    """XLNet, by the same authors, uses the same formula."""
    module = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    c = case("transformer_xl", (9, 9))
    c.pos = torch.arange(9)[None]
    config = module.XLNetConfig(d_model=C, n_head=H, n_layer=1, d_inner=C, vocab_size=4, dropout=0.0)
    peer = module.XLNetRelativeAttention(config).double()
    peer.r_w_bias.data, peer.r_r_bias.data = c.encoding.u, c.encoding.v
    model = module.XLNetModel(config)
    waves = model.relative_positional_encoding(9, 9, bsz=B).double()    # (18, B, C): distances 9 ... -8
    r = (waves @ c.encoding.w[LAYER].T).unflatten(-1, (H, D))
    time_first = [t.permute(2, 0, 1, 3) for t in (c.q, c.k, c.k)]       # (T, B, H, D)
    mask = torch.ones(9, 9, dtype=torch.float64).triu(1)[:, :, None, None]
    _, weights = peer.rel_attn_core(*time_first, r, attn_mask=mask.expand(9, 9, B, H),
                                      output_attentions=True)
    found = c.encoding.scores(c.logits, c.q, c.k, c.at()).softmax(-1)
    torch.testing.assert_close(found, weights.permute(2, 3, 0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_pos", [16, 3])
def test_cope_is_the_sum_of_its_formula(max_pos: int, shape: tuple[int, int], case) -> None:
    c = case("cope", shape, f"position.max_pos={max_pos}")
    assert c.encoding.table.shape == (2, max_pos, D)

    def term(b: int, h: int, i: int, j: int) -> float:
        q, e = c.q[b, h, i - c.past], c.encoding.table[LAYER]
        gates = [1 / (1 + math.exp(-float(q @ c.k[b, h, n]) / math.sqrt(D))) for n in range(j, i + 1)]
        count = min(sum(gates), max_pos - 1)
        low = int(count)
        high = min(low + 1, max_pos - 1)
        return q @ e[low] * (1 - (count - low)) + q @ e[high] * (count - low)

    same(c.bias(), c.loop(term))


def test_cope_is_that_of_x_transformers(case) -> None:
    module = pytest.importorskip("x_transformers.x_transformers")
    c = case("cope", (4, 9), "position.max_pos=4")
    peer = module.CoPE(D, H, 4).double()
    peer.pos_emb.data = c.encoding.table[LAYER]
    same(c.bias(), torch.where(c.logits.isneginf(), 0.0, peer(c.q, c.logits)))


@pytest.mark.parametrize("shape", SHAPES)
def test_forgetting_is_the_sum_of_its_formula(shape: tuple[int, int], case) -> None:
    c = case("forgetting", shape)
    assert c.encoding.w.shape == (2, H, C) and c.encoding.b.shape == (2, H)

    def term(b: int, h: int, i: int, j: int) -> float:
        gates = [c.encoding.w[LAYER, h] @ c.x[b, n] + c.encoding.b[LAYER, h] for n in range(j + 1, i + 1)]
        return -sum(math.log(1 + math.exp(-float(gate))) for gate in gates)

    same(c.bias(), c.loop(term))


def test_forgetting_is_the_data_dependent_alibi_of_x_transformers(case) -> None:
    module = pytest.importorskip("x_transformers.x_transformers")
    c = case("forgetting", (9, 9))
    peer = module.DataDependentAlibi(C, H).double()
    linear = peer.to_forget_gates[0]
    linear.weight.data, linear.bias.data = c.encoding.w[LAYER], c.encoding.b[LAYER]
    same(c.bias(), peer(c.x).tril())


def test_near_keys_stay_exact_after_long_texts() -> None:
    """A sum of 50,000 gates in fp32 has errors of 0.01; the difference of two near sums must not."""
    shape = Shape(n_layer=1, n_head=1, n_embd=4, head_dim=4, seq_len=8)
    encoding = ENCODINGS["forgetting"](shape, Options(encoding="forgetting"))
    T = 50_000
    log_f = F.logsigmoid(torch.randn(1, 1, T, 1, generator=torch.Generator().manual_seed(0)))
    q, k, pos = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, T, 4), torch.zeros(1, T, dtype=torch.long)
    bias = encoding.scores(torch.zeros(1, 1, 4, T), q, k, At(pos[:, -4:], pos, 0, None, log_f))
    expected = log_f[0, 0, -9:, 0].sum().item()
    assert bias[0, 0, 3, T - 10].item() == pytest.approx(expected, abs=1e-5)
    assert bias.dtype == torch.float32


@pytest.mark.parametrize("name", CONTENT)
def test_a_window_sees_what_it_would_among_all_keys(name: str, case) -> None:
    """Blocks leave out keys before the window; the others must keep their positions and features."""
    c, keys = case(name, (4, 9)), slice(3, None)
    whole, here = c.encoding.scores(c.logits, c.q, c.k, c.at()), c.at()
    features = here.features[:, :, keys] if here.features is not None else None
    here = here._replace(k_pos=c.pos[:, keys], features=features)
    window = c.encoding.scores(c.logits[..., keys], c.q, c.k[:, :, keys], here)
    torch.testing.assert_close(window, whole[..., keys], atol=1e-9, rtol=1e-9)


def test_the_gradients_of_cope() -> None:
    """Against differences, second ones too; counts stay off the whole numbers, where the slope jumps."""
    logits = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = logits.requires_grad_(), products.requires_grad_()
    assert torch.autograd.gradcheck(content.AtCounts.apply, inputs)
    assert torch.autograd.gradgradcheck(content.AtCounts.apply, inputs)


def test_cope_and_forgetting_read_no_positions(tiny) -> None:
    """They use index and content only: any positions give the same logits, bit for bit."""
    x, order = tokens((1, 20)), torch.randperm(20, generator=torch.Generator().manual_seed(0))
    for name in ("cope", "forgetting"):
        model = lively(tiny(name))
        assert torch.equal(model(x, positions=order), model(x))


def test_cope_starts_as_no_encoding_and_leaves_at_once(tiny) -> None:
    torch.manual_seed(0)
    model = GPT(tiny("cope"))
    torch.manual_seed(0)
    plain = GPT(tiny("none"))
    x = tokens((2, 32))
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)
    model(x, tokens((2, 32), 1)).backward()
    assert (model.encoding.table.grad != 0).any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_tapa_is_a_product_times_a_cosine(alpha: float, shape: tuple[int, int], case) -> None:
    c = case("tapa", shape, f"position.alpha={alpha}")

    def term(b: int, h: int, i: int, j: int) -> float:
        q, k = c.q[b, h, i - c.past].tolist(), c.k[b, h, j].tolist()
        a = sum(q[n] * k[n] for n in range(D // 2)) / math.sqrt(D / 2)
        p = sum(q[n] * k[n] for n in range(D // 2, D)) / math.sqrt(D / 2)
        return a * math.cos(2 * math.pi * int(c.pos[b, i] - c.pos[b, j])**alpha * p)

    same(c.after(), c.loop(term))


def test_a_temperature_changes_tapas_product_and_not_its_phase(case) -> None:
    c = case("tapa", (4, 9))
    hot = c.encoding.scores(c.logits, c.q, c.k, c.at()._replace(temperature=torch.full((1, 1, 4, 1), 3.0)))
    torch.testing.assert_close(hot.masked_fill(hot.isneginf(), 0), 3 * c.after())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p_dim", [8, 2])
def test_grape_ap_is_the_sum_of_its_formula(p_dim: int, shape: tuple[int, int], case) -> None:
    c = case("grape_ap", shape, f"position.p_dim={p_dim}")
    slopes, half = [2**-4, 2**-8], p_dim // 2

    def step(b: int, h: int, i: int, n: int) -> float:
        w, turn = c.encoding.w[LAYER, h * p_dim:(h + 1) * p_dim], cmath.exp(-1j * int(c.pos[b, n]))
        p_i, p_n = (w @ c.x[b, t] for t in (i, n))
        p_n = p_n / p_n.square().mean().sqrt()
        product = 0.0
        for pair in range(half):
            turned = complex(p_n[pair], p_n[pair + half]) * turn
            product += float(p_i[pair]) * turned.real + float(p_i[pair + half]) * turned.imag
        return -slopes[h] * math.log(1 + math.exp(-product / p_dim))

    same(c.bias(), c.loop(lambda b, h, i, j: sum(step(b, h, i, n) for n in range(j + 1, i + 1))))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", ["alibi", "kerple_log"])
def test_dape_is_its_bias_and_a_network_over_the_heads(bias: str, shape: tuple[int, int], case) -> None:
    c = case("dape", shape, f"position.bias={bias}")
    mlp, base = c.encoding.mlps[LAYER], c.encoding.bias
    c.at()                                                              # kerple clamps its parameters
    assert mlp[0].weight.shape == (32, 2 * H) and mlp[2].weight.shape == (H, 32)

    def b_of(h: int, d: int) -> float:
        return -(2**-4, 2**-8)[h] * d if bias == "alibi" else -float(base.p[h] * math.log(1 + base.a[h] * d))

    def term(b: int, h: int, i: int, j: int) -> float:
        d = int(c.pos[b, i] - c.pos[b, j])
        given = [float(c.q[b, n, i - c.past] @ c.k[b, n, j]) / math.sqrt(D) for n in range(H)]
        given += [b_of(n, d) for n in range(H)]
        hidden = [sum(w * x for w, x in zip(row, given, strict=True)) + at_zero
                  for row, at_zero in zip(mlp[0].weight.tolist(), mlp[0].bias.tolist(), strict=True)]
        hidden = [x if x > 0 else 0.01 * x for x in hidden]
        out = sum(w * x for w, x in zip(mlp[2].weight[h].tolist(), hidden, strict=True))
        return b_of(h, d) + out + float(mlp[2].bias[h])

    same(c.bias(), c.loop(term))
