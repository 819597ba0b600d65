"""The decoder: pre-norm transformer blocks with hooks for a position encoding. Fork this file.

The default is Llama's block: RMSNorm, SwiGLU, no biases, untied output. configs/gpt2-block.toml has GPT-2's,
configs/gemma3.toml Gemma 3's.
The model itself has no length limit; an encoding may have one.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, G = n_kv_head (H by default), D
channels of a head (C // H by default), V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Mask, ScoreInputs, attend, may_use_flex, with_block_masks
from base.errors import UserError
from base.loss import cross_entropy
from config import Config, ModelConfig
from positions import ENCODINGS, At, Encoding, NoPE, Shape
from positions.contract import starts_of
from positions.switches import TEMPERATURES, encodings_of

GATED = ("swiglu", "geglu")     # kinds of MLP with three matrices
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_exact": F.gelu,
}


def shape_of(config: Config) -> Shape:
    """The sizes from which an encoding and a temperature are made."""
    c = config.model
    local_layers: set[int] = set()
    if c.window or c.chunk:
        local_layers = set(range(c.n_layer))
    if c.full_every:
        local_layers -= set(range(c.full_every - 1, c.n_layer, c.full_every))
    return Shape(
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        head_dim=c.head_width,
        seq_len=config.train.seq_len,
        local_layers=frozenset(local_layers),
        window=c.window,
        chunk=c.chunk,
    )


def hidden_width(config: ModelConfig) -> int:
    """Width inside the MLP: n_hidden, by default 4 C, or with a gate 8/3 C rounded up to a multiple of 64."""
    if config.n_hidden:
        return config.n_hidden
    if config.mlp in GATED:
        return 64 * math.ceil(8 * config.n_embd / 3 / 64)
    return 4 * config.n_embd


def make_norm(config: ModelConfig, is_on: bool = True) -> nn.Module:
    """RMSNorm or LayerNorm over C, or nothing."""
    if not is_on:
        return nn.Identity()
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class QKNorm(nn.RMSNorm):
    """RMSNorm of queries or keys, (B, T, n * width) -> (B, T, n, width): of each head, or of all at once.

    It casts x to the weight's dtype, because the CPU kernel takes one dtype only; on CUDA autocast does so.
    """

    def forward(self, x: Tensor) -> Tensor:
        x_in_groups = x.unflatten(-1, (-1, *self.normalized_shape))
        return super().forward(x_in_groups.to(self.weight.dtype)).to(x.dtype)


class Cache:
    """Keys (before `rotate`), values and positions of all tokens so far, so that each is computed only once.

    All keys are rotated at each step, so that they have the angles of this step even if these depend on the
    length (dynamic_ntk). What deeper layers cached before came from the angles of its own step.
    """

    def __init__(self, n_layer: int) -> None:
        self.positions: Tensor | None = None                            # (1 or B, Tk)
        self.layers: list[tuple[Any, ...] | None] = [None] * n_layer    # k, v and features of each layer

    def append_positions(self, positions: Tensor) -> Tensor:
        """Add the positions (1 or B, T) of new tokens. -> the positions of all keys, (1 or B, Tk)."""
        if self.positions is not None:
            B = max(len(self.positions), len(positions))
            positions = torch.cat((self.positions.expand(B, -1), positions.expand(B, -1)), dim=1)
        self.positions = positions
        return positions

    def append(self, layer: int, k: Tensor, v: Tensor, features: Tensor | None) -> tuple[Any, ...]:
        """Add a layer's keys, values (B, G, T, D), features (B, H, T, F) or None. -> those of all tokens."""
        old = self.layers[layer]
        if old is not None:
            old_k, old_v, old_features = old
            k = torch.cat((old_k, k), dim=2)
            v = torch.cat((old_v, v), dim=2)
            if features is not None:
                features = torch.cat((old_features, features), dim=2)
        self.layers[layer] = (k, v, features)
        return k, v, features


class Attention(nn.Module):
    """Multi-head attention: softmax(encoding(q k^T / sqrt(D))) v. Vaswani et al. 2017, section 3.2.

    With G < H heads of keys and values, H / G neighbouring query heads share one: grouped-query attention,
    Ainslie et al. 2023, arXiv:2305.13245. The cache then holds G heads.

    The mask is causal by index, for any positions. With a window W a query sees at most W keys, its own
    included (Hugging Face's convention). With chunks, the row, or each packed document, is cut after every
    `chunk` tokens, and a query sees its own chunk alone (Llama 4). `is_local = False` ignores both.

    x has T tokens; only the last Tq of them, those in at.q_pos, become queries: (B, T, C) -> (B, Tq, C).
    """

    def __init__(self, config: ModelConfig, is_local: bool) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_width
        H = config.n_head
        G = config.n_kv_head or H
        self.head_dim = D
        self.dropout = config.dropout
        self.window = config.window if is_local else None
        self.chunk = config.chunk if is_local else None
        has_bias = config.bias or config.qkv_bias
        self.q = nn.Linear(C, H * D, bias=has_bias)
        self.k = nn.Linear(C, G * D, bias=has_bias)
        self.v = nn.Linear(C, G * D, bias=has_bias)
        self.o = nn.Linear(H * D, C, bias=config.bias)
        self.gate = nn.Linear(C, H * D, bias=False) if config.gate else None
        self.sink = nn.Parameter(torch.zeros(H)) if config.sink == "head" else None
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm == "whole":                                   # all heads together
            self.q_norm = QKNorm(H * D, eps=config.norm_eps)
            self.k_norm = QKNorm(G * D, eps=config.norm_eps)
        elif config.qk_norm:                                            # each head alone
            self.q_norm = QKNorm(D, eps=config.norm_eps)
            self.k_norm = QKNorm(D, eps=config.norm_eps)

    def forward(self, x: Tensor, encoding: Encoding, at: At, mask: Mask,
                cache: Cache | None = None) -> Tensor:
        # queries of the last Tq tokens; keys and values of all
        B, T, _ = x.shape
        Tq, D = at.q_pos.shape[1], self.head_dim
        x_q = x[:, T - Tq:]         # not x[:, -Tq:], which adds a copy to the backward pass even if Tq == T
        q = self.q_norm(self.q(x_q)).reshape(B, Tq, -1, D).transpose(1, 2)      # (B, H, Tq, D)
        k = self.k_norm(self.k(x)).reshape(B, T, -1, D).transpose(1, 2)         # (B, G, T, D)
        v = self.v(x).reshape(B, T, -1, D).transpose(1, 2)                      # (B, G, T, D)
        features = encoding.features(x, at.layer)                       # (B, H, T, F) or None
        if cache is not None:
            k, v, features = cache.append(at.layer, k, v, features)     # now of all tokens, cached ones too
        if features is not None:
            at = at._replace(features=encoding.mix(features, at.layer, mask.documents))
        mask = mask._replace(window=self.window, chunk=self.chunk)
        score_inputs = ScoreInputs(encoding, q, k, at) if encoding.has_scores else None
        q, k = encoding.rotate(q, k, at)                                # RoPE happens here
        v = encoding.turn_values(v, at)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, mask, score_inputs, dropout, self.sink)     # (B, H, Tq, D)
        y = encoding.turn_back(y, at)
        y = y.transpose(1, 2).flatten(2)                                # (B, Tq, H D)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x_q))
        return self.o(y)


class MLP(nn.Module):
    """SwiGLU down(silu(gate x) * up x), GEGLU with gelu (Shazeer 2020, arXiv:2002.05202), or without gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, width = config.n_embd, hidden_width(config)
        self.kind = config.mlp
        self.gate = nn.Linear(C, width, bias=config.bias) if self.kind in GATED else None
        self.up = nn.Linear(C, width, bias=config.bias)
        self.down = nn.Linear(width, C, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.kind]
        if self.gate is None:
            inner = activation(self.up(x))                              # (B, T, width)
        else:
            inner = activation(self.gate(x)) * self.up(x)
        return self.down(inner)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with model.parallel both of the same x.

    model.pre_norm and post_norm choose whether a sublayer's input, its result or both are normalised.
    """

    def __init__(self, config: ModelConfig, is_local: bool) -> None:
        super().__init__()
        self.mlp_reads_block_input = config.parallel
        self.attention_norm = make_norm(config, config.pre_norm)
        self.attention = Attention(config, is_local)
        self.mlp_norm = make_norm(config, config.pre_norm)
        self.mlp = MLP(config)
        self.attention_post_norm = make_norm(config, config.post_norm)
        self.mlp_post_norm = make_norm(config, config.post_norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, encoding: Encoding, at: At, mask: Mask, cache: Cache | None) -> Tensor:
        attended = self.attention(self.attention_norm(x), encoding, at, mask, cache)    # (B, Tq, C)
        x = x[:, x.shape[1] - attended.shape[1]:]       # the last layer may compute the last Tq tokens alone
        mlp_input = x
        x = x + self.dropout(self.attention_post_norm(attended))
        if not self.mlp_reads_block_input:
            mlp_input = x
        mlp_result = self.mlp(self.mlp_norm(mlp_input))
        return x + self.dropout(self.mlp_post_norm(mlp_result))


class GPT(nn.Module):
    """model(tokens) -> logits (B, T, V); model(tokens, targets) -> mean loss. Targets of -100 are ignored.

    With reduction="sum" it returns the sum of the losses.
    `positions` (T,) or (B, T) are any integers, by default 0 ... T - 1, or in each row those after its cache.
    `cache` comes from `new_cache`. `documents` (B, T) numbers packed documents, which do not see one another;
    it excludes a cache. Under data.positions = "document" each document begins where its row's positions do.
    Raises ValueError for wrong positions.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config.model
        shape = shape_of(config)
        if not c.vocab_size:
            raise ValueError("model.vocab_size: unset; set it, as prepared corpora do")
        self.embedding = nn.Embedding(c.vocab_size, c.n_embd)
        self.embedding_scale = math.sqrt(c.n_embd) if c.scaled_embedding else 1.0
        self.dropout = nn.Dropout(c.dropout)
        self.flex = c.flex
        self.positions_restart = config.data.positions == "document"
        self.blocks = nn.ModuleList()
        for layer in range(c.n_layer):
            self.blocks.append(Block(c, is_local=layer in shape.local_layers))
        self.norm = make_norm(c)
        self.head = None if c.tied else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.init_weights()
        # made last: with equal seeds all other weights are equal under every encoding
        p = config.position
        self.encoding = ENCODINGS[p.encoding](shape, p)
        self.no_encoding = NoPE(shape, p)
        self.temperature = TEMPERATURES[p.temperature](shape)
        self.encoding.clamp()
        # the steps drop_step, drop_step + 1 ... have no encoding; with drop_at < 1 the last one is among them
        self.drop_step = math.inf
        if p.drop_at < 1:
            self.drop_step = min(round(p.drop_at * config.train.steps), config.train.steps - 1)
        self.is_dropped = self.drop_step <= 0
        self.choose_encodings()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the matrices from normal distributions; biases are 0. Norms and sinks start as they are made.

        | matrix                                                | standard deviation     |
        |-------------------------------------------------------|------------------------|
        | attention.o, mlp.down: the last ones of the sublayers | 0.02 / sqrt(2 n_layer) |
        | all others: embedding, q, k, v, gates, up, head       | 0.02                   |

        So the residual stream's variance does not grow with the depth: Radford et al. 2019, section 2.3.
        An encoding and a temperature have distributions of their own, in positions/. A parameter outside
        nn.Linear and nn.Embedding, such as the stacked matrices of experts (E, C, F), stays as it was made:
        draw it here too.
        """
        last_matrices: set[nn.Module] = set()
        for module in self.modules():
            if isinstance(module, Attention):
                last_matrices.add(module.o)
            elif isinstance(module, MLP):
                last_matrices.add(module.down)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02
                if module in last_matrices:
                    std = 0.02 / math.sqrt(2 * len(self.blocks))
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def set_step(self, step: int) -> None:
        """After `step` steps: clamp the encoding's parameters; from drop_step on drop it all (DroPE)."""
        self.encoding.clamp()
        is_dropped = step >= self.drop_step
        if is_dropped != self.is_dropped:
            self.is_dropped = is_dropped
            self.choose_encodings()

    def active(self) -> Encoding:
        """The encoding, or none after position.drop_at has dropped it. `encodings` has it for each layer."""
        return self.no_encoding if self.is_dropped else self.encoding

    def choose_encodings(self) -> None:
        """Set `encodings`, one for each layer. To be called after a change of the temperature."""
        self.encodings = encodings_of(self.active(), self.no_encoding, self.temperature, len(self.blocks))

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def new_cache(self) -> Cache:
        """An empty key-value cache."""
        return Cache(len(self.blocks))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None,
                cache: Cache | None = None, documents: Tensor | None = None,
                reduction: str = "mean") -> Tensor:
        x = self.hidden(tokens, positions, cache, documents)            # (B, T, C)
        if targets is None:
            return self.logits(x)                                       # (B, T, V)
        # A fork adds an auxiliary loss of its blocks here, `if self.training`, so that validation reports
        # cross entropy alone. Under reduction = "sum" (as in train.py) multiply a mean over tokens by the
        # number of scored targets, (targets != IGNORED).sum(). A loss of each token, such as a z-loss, has to
        # leave out those whose target is IGNORED (base/loss.py), as cross_entropy does.
        return cross_entropy(x.flatten(0, 1), self.output_matrix(), targets.flatten(), reduction)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None,
               documents: Tensor | None = None, last: int | None = None) -> Tensor:
        """Tokens (B, T) -> the normalised residual stream (B, T, C), the input of `logits`.

        With `last` only that of the last tokens, (B, last, C): the last layer skips the others' queries and
        MLP. It excludes documents.
        """
        T = tokens.shape[1]
        assert documents is None or (cache is None and last is None)
        q_pos = self._positions(tokens, positions, cache)               # (1 or B, T)
        k_pos = q_pos if cache is None else cache.append_positions(q_pos)
        # tokens before each query: its index among all keys, cached ones too, or in its document
        n_before = torch.arange(k_pos.shape[1], device=tokens.device)[None, -T:]
        if documents is not None:
            n_before = n_before - starts_of(documents)                  # (1 or B, T)
            if self.positions_restart:
                # each document takes the first positions of its row. Under train.positions = "pose" the gap
                # is thus after as many tokens of each document as in the row; shorter documents have none
                q_pos = k_pos = q_pos.expand_as(n_before).gather(1, n_before)
        # one set of tables for all layers of an encoding
        tables: dict[Encoding, Any] = {}
        for encoding in self.encodings:
            if encoding not in tables:
                tables[encoding] = encoding.tables(q_pos, k_pos)
        mask = Mask(documents=documents, has_plain_positions=positions is None)
        if cache is None and may_use_flex(self.flex, mask, tokens.device):
            localities = {(attention.window, attention.chunk) for attention in self.attentions()}
            mask = with_block_masks(mask, localities, T, tokens.device)
        x = self.embedding(tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        x = self.active().embed(x, q_pos)       # once, by the encoding itself: wrappers are for the layers
        x = self.dropout(x)                                             # (B, T, C)
        for layer, (block, encoding) in enumerate(zip(self.blocks, self.encodings, strict=True)):
            is_last_layer = layer == len(self.blocks) - 1
            if last and last < T and is_last_layer:
                # from here on all of this is of the `last` queries; block masks are of all T
                q_pos = q_pos[:, -last:]
                n_before = n_before[:, -last:]
                mask = mask._replace(block_masks={})
                tables = {encoding: encoding.tables(q_pos, k_pos)}
            at = At(q_pos, k_pos, layer, tables[encoding], n_before=n_before)
            x = block(x, encoding, at, mask, cache)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Output of `hidden` (..., C) -> logits (..., V).

        Training takes this product in base/loss.py, in chunks: change both.
        """
        return F.linear(x, self.output_matrix())

    def output_matrix(self) -> Tensor:
        """(V, C); the embedding's, if they are tied."""
        return (self.head or self.embedding).weight

    def _positions(self, tokens: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor:
        """The given positions, or those that follow the cache's, (1 or B, T); checked."""
        B, T = tokens.shape
        max_length = self.active().max_length
        if positions is None:
            positions = torch.arange(T, device=tokens.device)[None]
            if cache is not None and cache.positions is not None:
                # each row goes on from its own end
                positions = cache.positions.amax(dim=1, keepdim=True) + 1 + positions
            elif max_length is None or max_length >= T:
                return positions        # the usual case, known to be right without waiting for the device
        if positions.dim() == 1:
            positions = positions[None]
        if positions.shape not in ((1, T), (B, T)):
            raise ValueError(f"give a position for each of the tokens {(B, T)}, got {tuple(positions.shape)}")
        if max_length is not None:
            lowest, highest = map(int, positions.aminmax())             # waits for the device
            if lowest < 0 or highest >= max_length:
                name = type(self.active()).__name__
                wrong = lowest if lowest < 0 else highest
                raise UserError(f"{name} is defined at positions 0 ... {max_length - 1} only, got {wrong}; "
                                "give fewer tokens, or use another encoding")
        return positions

    def n_parameters(self) -> int:
        """Number of trained parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())
