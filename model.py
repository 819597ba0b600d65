"""The decoder: pre-norm transformer blocks around a position encoding that it knows only by its hooks.

The default is Llama's block: RMSNorm, SwiGLU, no biases, untied output. configs/gpt2-block.toml is GPT-2's.
There is no length limit here; only an encoding may have one.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, G = n_kv_head (H by default), D
channels of a head (C // H by default), V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import attend
from positions import ENCODINGS, At, Encoding, NoPE, Shape
from positions.temperature import TEMPERATURES, Temperature
from runtime import flex
from runtime.loss import mean_loss

if TYPE_CHECKING:
    from config import Config, ModelConfig, TrainConfig


def hidden_width(model: ModelConfig) -> int:
    """Width inside the MLP: as configured, else 4 C, or 8/3 C up to a multiple of 64 for SwiGLU."""
    if model.n_hidden:
        return model.n_hidden
    return 64 * math.ceil(8 * model.n_embd / 3 / 64) if model.mlp == "swiglu" else 4 * model.n_embd


def shape_of(config: Config) -> Shape:
    """The sizes of the decoder, from which its encoding and its temperature are made."""
    model = config.model
    return Shape(model.n_layer, model.n_head, model.n_embd, model.head_width, config.train.seq_len)


def is_every(k: int, layer: int) -> bool:
    """Whether a layer, from 0, is the k-th, 2k-th, ...; none is for k = 0."""
    return k > 0 and (layer + 1) % k == 0


def encoded_layers(config: Config) -> set[int]:
    """Layers in which the encoding acts, from 0."""
    layers, named = config.position.layers, {"all": range(config.model.n_layer), "first": range(1)}
    return {layer for layer in (named[layers] if isinstance(layers, str) else layers)
            if not is_every(config.position.skip_every, layer)}


def make_norm(model: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm over C."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.n_embd, eps=model.norm_eps)
    return nn.LayerNorm(model.n_embd, eps=model.norm_eps, bias=model.bias)


class Cache:
    """Keys (before rotation), values and positions seen so far, so that decoding feeds each token once.

    Unrotated keys cost a rotation at each step and buy correctness for every encoding, those included whose
    angles change with the length.
    """

    def __init__(self, n_layer: int) -> None:
        self.positions: Tensor | None = None                            # (1 or B, Tk), or with axes
        self.layers: list[list[Tensor] | None] = [None] * n_layer

    def next_position(self) -> int:
        """One more than the largest so far; 0 where there is none."""
        return 0 if self.positions is None else int(self.positions.max()) + 1

    def append_positions(self, positions: Tensor) -> Tensor:
        """Positions of all keys after those of the new tokens are added."""
        if self.positions is not None:
            positions = torch.cat((self.positions, positions), dim=1)
        self.positions = positions
        return positions

    def append(self, layer: int, new: list[Tensor]) -> list[Tensor]:
        """All keys, values (B, G, Tk, D), features (B, H, Tk, F) of a layer after the new ones are added."""
        old = self.layers[layer]
        if old is not None:
            new = [torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)]
        self.layers[layer] = new
        return new


class Attention(nn.Module):
    """Multi-head attention: softmax(encoding(q k^T / sqrt(D))) v. Vaswani et al. 2017, section 3.2.

    With G < H heads of keys and values, H / G neighbouring heads of queries share one: grouped-query
    attention, Ainslie et al. 2023, arXiv:2305.13245. The cache holds the G.

    Causal by index, whatever the positions; `is_causal = False` lifts the mask. With a window W a query sees
    W keys at most, its own among them (Hugging Face's convention).
    """

    def __init__(self, model: ModelConfig, window: int | None) -> None:
        super().__init__()
        C, H, G, D = model.n_embd, model.n_head, model.n_kv_head or model.n_head, model.head_width
        self.head_dim, self.dropout = D, model.dropout
        self.is_causal, self.window = True, window
        self.q = nn.Linear(C, H * D, bias=model.bias or model.qkv_bias)
        self.k = nn.Linear(C, G * D, bias=model.bias or model.qkv_bias)
        self.v = nn.Linear(C, G * D, bias=model.bias or model.qkv_bias)
        self.o = nn.Linear(H * D, C, bias=model.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x: Tensor, encoding: Encoding, at: At, cache: Cache | None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for p in (self.q, self.k, self.v))                   # (B, H, T, D), (B, G, T, D) twice
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if at.temperature is not None:
            q = (q * at.temperature).to(q.dtype)
        features = encoding.features(x, at.layer)                       # (B, H, T, F) or None
        if cache is not None:
            new = [k, v] if features is None else [k, v, features]
            k, v, *rest = cache.append(at.layer, new)                   # (B, G, Tk, D)
            features = rest[0] if rest else None
        at = at._replace(features=features)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, encoding, at, self.is_causal, self.window, dropout)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU down(silu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202), or down(activation(up x))."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        C, width = model.n_embd, hidden_width(model)
        self.kind = model.mlp
        self.gate = nn.Linear(C, width, bias=model.bias) if self.kind == "swiglu" else None
        self.up = nn.Linear(C, width, bias=model.bias)
        self.down = nn.Linear(width, C, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind != "relu2":
            return self.down(F.gelu(self.up(x), approximate="tanh" if self.kind == "gelu" else "none"))
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(model), Attention(model, window)
        self.mlp_norm, self.mlp = make_norm(model), MLP(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, encoding: Encoding, at: At, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), encoding, at, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """model(tokens) -> logits (B, T, V); model(tokens, targets) -> mean loss. Targets of -100 are not scored.

    `positions` (T,) or (B, T) are any integers, by default 0 ... T - 1, or those after the cache's; (B, T, A)
    for an encoding with A axes. `cache` is what `new_cache` made. `documents` (B, T) number what tokens
    belong to, and nothing is seen of another: packed sequences, all of them new. Raises ValueError for
    positions beyond an encoding's limit or of the wrong shape.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        model, shape = config.model, shape_of(config)
        assert model.vocab_size, "the corpus' vocabulary must be filled in first"
        self.embedding = nn.Embedding(model.vocab_size, model.n_embd)
        self.dropout, self.flex = nn.Dropout(model.dropout), model.flex
        self.blocks = nn.ModuleList(Block(model, None if is_every(model.full_every, layer) else model.window)
                                    for layer in range(model.n_layer))
        self.norm = make_norm(model)
        self.head = None if model.tied else nn.Linear(model.n_embd, model.vocab_size, bias=False)
        self._init_weights()
        # after the other weights, which so are the same under every encoding
        self.encoding = ENCODINGS[config.position.encoding](shape, config.position)
        self.encoded_layers = encoded_layers(config)
        self.no_encoding: Encoding = NoPE(shape, config.position)
        self.temperature = TEMPERATURES[config.position.temperature](shape)

    def _init_weights(self) -> None:
        """Normal, std 0.02, sublayers' last matrix over sqrt(2 n_layer). Radford et al. 2019, section 2.3."""
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_last = name.endswith(("attention.o", "mlp.down"))
                nn.init.normal_(module.weight, std=residual_std if is_last else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def new_cache(self) -> Cache:
        """An empty key-value cache."""
        return Cache(len(self.blocks))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None,
                cache: Cache | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.hidden(tokens, positions, cache, documents)
        if targets is None:
            return self.logits(x)
        return mean_loss(x.flatten(0, 1), self.head_weight(), targets.flatten())

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None,
               documents: Tensor | None = None) -> Tensor:
        """Tokens (B, T) -> the normalised residual stream (B, T, C) from which logits are read."""
        assert cache is None or documents is None
        q_pos = self._positions(tokens, positions, cache)               # (1 or B, T)
        k_pos = q_pos if cache is None else cache.append_positions(q_pos)
        tables = self.encoding.tables(q_pos, k_pos)
        blocks: Any = self.blocks
        windows, masks = [block.attention.window for block in blocks], {}
        if self.flex and positions is None and cache is None and tokens.device.type in flex.DEVICES:
            masks = flex.block_masks(windows, tokens.shape[1], documents, tokens.device)
        x = self.dropout(self.encoding.embed(self.embedding(tokens), q_pos))
        temperatures = self.temperature(q_pos)
        for layer, block in enumerate(self.blocks):
            encoding = self.encoding if layer in self.encoded_layers else self.no_encoding
            at = At(q_pos, k_pos, layer, tables, in_order=positions is None, temperature=temperatures[layer],
                    documents=documents, block_mask=masks.get(windows[layer]))
            x = block(x, encoding, at, cache)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Output of `hidden` (..., C) -> logits (..., V)."""
        return F.linear(x, self.head_weight())

    def head_weight(self) -> Tensor:
        """The output matrix (V, C)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def _positions(self, tokens: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor:
        """The positions given, or those that follow the cache's, within the encoding's limit, (1 or B, T)."""
        limit = self.encoding.max_length
        if positions is None:
            first = cache.next_position() if cache is not None else 0
            last = first + tokens.shape[1] - 1
            positions = torch.arange(first, last + 1, device=tokens.device)
        else:
            last = int(positions.max()) if limit else 0
        if limit and last >= limit:
            name = type(self.encoding).__name__
            raise ValueError(f"{name} knows positions 0 ... {limit - 1} only, got {last}")
        positions = positions[None] if positions.dim() == 1 else positions
        self._check_axes(positions, cache)
        return positions

    def _check_axes(self, positions: Tensor, cache: Cache | None) -> None:
        """Refuse positions (1 or B, T) or (1 or B, T, axes) that the encoding, or the cache, cannot take."""
        n_axes, name = self.encoding.n_axes, type(self.encoding).__name__
        if positions.dim() != 2 and (positions.dim() != 3 or n_axes == 1 or positions.shape[2] != n_axes):
            axes = f" or (B, T, {n_axes})" if n_axes > 1 else ""
            raise ValueError(f"{name} takes positions (T,) or (B, T){axes}, got {tuple(positions.shape)}")
        if positions.dim() == 3 and type(self.temperature) is not Temperature:
            raise ValueError("position.temperature counts keys by their positions, which must have one axis, "
                             f"got {tuple(positions.shape)}")
        if cache is not None and cache.positions is not None and cache.positions.dim() != positions.dim():
            raise ValueError(f"the cache's positions are {tuple(cache.positions.shape)}: give positions= "
                             f"with as many axes at each step, got {tuple(positions.shape)}")

    def n_parameters(self) -> int:
        """Trained numbers, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Multiplications and additions of a training step per token at length T, forward and backward.

        6 for each weight of a matrix product, the output's V C included (2 forward, 4 backward; Kaplan et al.
        2020, arXiv:2001.08361, section 2.1), and for each layer 6 H D (T + 1) of causal attention: q k^T
        and weights v take 2 H D each for (T + 1) / 2 keys on average, times 3. PaLM and nanoGPT count the
        masked half too: twice that.
        """
        width = sum(m.o.in_features for m in self.modules() if isinstance(m, Attention))        # n_layer H D
        weights = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        return 6 * (weights + self.embedding.weight.numel()) + 6 * width * (T + 1)


def pick_device(train: TrainConfig) -> torch.device:
    """The configured device; "auto" is CUDA where there is one."""
    if train.device != "auto":
        return torch.device(train.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(train: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; "auto" is bfloat16 where the chip has it."""
    if train.dtype != "auto":
        return getattr(torch, train.dtype)
    has_bf16 = (torch.cuda.is_bf16_supported() if device.type == "cuda" else
                torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if has_bf16 else torch.float32


def autocast(train: TrainConfig, device: torch.device) -> torch.autocast:
    """The context in which matrix products run in that dtype; weights and the residual stream stay fp32."""
    dtype = pick_dtype(train, device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
