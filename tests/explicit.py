"""Attention the explicit way, in fp64: logits from an encoding's hooks, and one softmax over all pairs.

The tests of encodings compare the model, or formulas, with these. Models are made once, so no test may change
the model that it gets from `model_of`.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from toys import ROOT, TINY, lively

import rope
from config import Config, load_config
from model import GPT
from positions import ENCODINGS, At, Encoding

# a temperature multiplies all that these add to the logits, not the queries alone
TEMPERED_BIASES = {"bam", *(name for name, encoding in ENCODINGS.items() if encoding.tempers_bias)}


@cache
def config_of(name: str, overrides: str = "") -> Config:
    """A tiny config, of two layers and two heads of 16 channels; overrides are separated by spaces."""
    return load_config(ROOT / "configs" / "none.toml", [
        *TINY, "model.vocab_size=257", f"position.encoding={name}", *overrides.split()])


@cache
def model_of(name: str, overrides: str = "", dtype: torch.dtype = torch.float64) -> GPT:
    """A model with large random parameters. Every test gets the same one."""
    return lively(config_of(name, overrides)).to(dtype)


def causal(Tq: int, Tk: int) -> Tensor:
    """The keys (Tq, Tk) that each query, of the last Tq tokens, sees."""
    return torch.ones(Tq, Tk, dtype=torch.bool).tril(Tk - Tq)


def logits_of(encoding: Encoding, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, x: Tensor | None = None,
              layer: int = 1, documents: Tensor | None = None, seen: Tensor | None = None,
              factor: Tensor | float = 1.0) -> Tensor:
    """Logits (B, H, Tq, Tk) of q (B, H, Tq, D) and k (B, G, Tk, D), before any switch; -inf where masked.

    A temperature's `factor` multiplies all products with q.
    x (B, Tk, C) is the layer's input, which `features` gets; `seen` (Tq, Tk) is causal by default.
    """
    features = None if x is None else encoding.features(x, layer)
    if features is not None:                                            # (B, H, Tk, F)
        documents = torch.zeros(x.shape[:2]) if documents is None else documents
        lengths = documents[0].unique_consecutive(return_counts=True)[1].tolist()
        alone = features.split(lengths, dim=2)                          # each document mixes its own tokens
        features = torch.cat([encoding.mix(part, layer, None) for part in alone], dim=2)
    at = At(q_pos, k_pos, layer, encoding.tables(q_pos, k_pos), features)
    turned_q, turned_k = encoding.rotate(q, k, at)
    k, turned_k = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, turned_k))
    hidden = ~(causal(q.shape[2], k.shape[2]) if seen is None else seen)
    logits = (turned_q @ turned_k.mT / math.sqrt(q.shape[3]) * factor).masked_fill(hidden, -torch.inf)
    after = encoding.scores(logits, q * factor, k, at)
    assert torch.equal(after.isneginf(), hidden.expand_as(after))
    assert not after.isnan().any()
    return after


def temperature_of(model: GPT, config: Config, layer: int, seen: Tensor, documents: Tensor | None) -> Tensor:
    """The factor of each query, (1, 1 or H, T, 1), from the formulas; a query sees some keys (T, T)."""
    m = torch.arange(len(seen))
    L = config.train.seq_len
    m = (m if documents is None else m - torch.searchsorted(documents, documents)).double()[:, None]
    n = seen.sum(-1)[None, None, :, None].double()
    own = dict(model.named_parameters())
    return {"none": lambda: torch.ones_like(n),
            "log_n": lambda: (n.log() / math.log(L)).clamp(min=1),
            "ssmax": lambda: own["temperature.s"][layer, :, None, None] * n.log(),
            "affine": lambda: own["temperature.s"][layer, :, None, None] * n.log()
            + own["temperature.b"][layer, :, None, None],
            "llama4": lambda: 1 + 0.1 * (1 + ((m + 1) / L).floor()).log(),
            }[config.position.temperature]()


def scale_invariant(logits: Tensor, distance: Tensor, tau: float) -> Tensor:
    """Equation 16 of Anson 2025, with a(0) = 1 and m(0) = 0."""
    a = (2 * (distance.double() / tau + 1).log() + 1).sqrt()
    return a * logits + 1 - a**2


def layers_of(config: Config) -> tuple[set[int], set[int]]:
    """The layers that have the encoding, and those that have the temperature."""
    p = config.position
    every = set(range(config.model.n_layer))
    named = {"all": every, "first": {0}}[p.layers] if isinstance(p.layers, str) else set(p.layers)
    encoded = {n for n in named if not p.skip_every or (n + 1) % p.skip_every}
    return encoded, {"all": every, "encoded": encoded, "unencoded": every - encoded}[p.temperature_layers]


def visible(config: Config, layer: int, T: int, documents: Tensor | None) -> Tensor:
    """The keys (T, T) that each query sees. documents (T,)."""
    m = config.model
    i = torch.arange(T)[:, None]
    j = torch.arange(T)
    seen = j <= i
    start = torch.zeros(T, dtype=torch.long)
    if documents is not None:
        seen = seen & (documents[:, None] == documents)
        start = torch.searchsorted(documents, documents)                # chunks begin anew in each document
    if m.full_every and (layer + 1) % m.full_every == 0:
        return seen
    if m.window:
        seen = seen & (i - j < m.window)
    if m.chunk:
        own = (torch.arange(T) - start) // m.chunk
        seen = seen & (own[:, None] == own)
    return seen


def normalised(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """x over the root mean square of its last axis, times the norm's weights."""
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def attention_of(model: GPT, config: Config, layer: int, x: Tensor, pos: Tensor,
                 documents: Tensor | None = None, farthest: int | None = None) -> Tensor:
    """What a layer's attention returns, (B, T, C), for its normalised input x at pos (1 or B, T).

    documents (B, T), the same in each row. Pairs further apart than `farthest` are as if at that distance.
    All switches are applied here, by their formulas.
    """
    a = model.blocks[layer].attention
    p = config.position
    name = config.position.encoding
    q = a.q(x)
    k = a.k(x)
    if config.model.qk_norm == "whole":
        q = normalised(q, a.q_norm)
        k = normalised(k, a.k_norm)
    q, k, v = (y.unflatten(-1, (-1, config.model.head_width)).transpose(1, 2) for y in (q, k, a.v(x)))
    if config.model.qk_norm is True:
        q = normalised(q, a.q_norm)
        k = normalised(k, a.k_norm)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    encoded, tempered = layers_of(config)
    is_encoded = layer in encoded and p.drop_at > 0
    encoding = model.encoding if is_encoded else ENCODINGS["none"](None, config_of("none").position)
    seen = visible(config, layer, x.shape[1], None if documents is None else documents[0])
    factor = torch.ones(())
    after = torch.ones(())
    if layer in tempered:
        factor = temperature_of(model, config, layer, seen, None if documents is None else documents[0])
    if is_encoded and name in TEMPERED_BIASES:
        factor, after = after, factor
    logits = logits_of(encoding, q, k, pos, pos, x, layer, documents, seen, factor)
    distance = (pos[:, :, None] - pos[:, None]).clamp(min=0)[:, None]
    if farthest is not None:
        far = torch.full_like(pos, farthest), torch.zeros_like(pos)
        of_far = logits_of(encoding, q, k, *far, x, layer, documents, seen, factor)
        logits = logits.where(distance < farthest, of_far)
        distance = distance.clamp(max=farthest)
    logits = logits.masked_fill(~seen, 0) * after
    if p.scale_invariant:
        logits = scale_invariant(logits, distance, p.scale_invariant)
    logits = logits.masked_fill(~seen, -torch.inf)
    sink = logits.new_full((), -torch.inf) if a.sink is None else a.sink[:, None, None]
    weights = torch.cat((logits, sink.expand(*logits.shape[:3], 1)), -1).softmax(-1)[..., :-1]
    if getattr(p, "rotate_values", False):      # a value's rotation by the distance to each query
        turns = [[rope.rotate(v[:, :, j], rope.angles((pos[:, j] - pos[:, i])[:, None], frequencies(model)))
                  for j in range(x.shape[1])] for i in range(x.shape[1])]
        y = torch.stack([sum(weights[:, :, i, j, None] * turns[i][j] for j in range(i + 1))
                         for i in range(x.shape[1])], 2)
    else:
        y = weights @ v
    y = y.transpose(1, 2).flatten(2)
    return a.o(y * a.gate(x).sigmoid() if hasattr(a.gate, "weight") else y)


def frequencies(model: GPT) -> Tensor:
    return model.encoding.layer_frequencies(False, torch.zeros(1, 1, dtype=torch.long))[0].double()


def watched(model: GPT, *args: Tensor, **arguments: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The normalised input and the output of each layer's attention in one forward."""
    found: list[tuple[Tensor, Tensor]] = []
    handles = [block.attention.register_forward_hook(lambda _, given, out: found.append((given[0], out)))
               for block in model.blocks]
    model(*args, **arguments)
    for handle in handles:
        handle.remove()
    return found
