"""What production models of 2026 add to attention is what transformers computes with the same weights."""

import os

import pytest
import torch
from torch import Tensor, nn
from toys import ROOT, TINY, lively

import rope
from attention import Mask
from config import Config, load_config
from model import GPT, Attention
from positions import At

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients")]

B, T, C, H, G, D = 2, 19, 64, 4, 2, 16
HEADS = {"hidden_size": C, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D,
         "num_hidden_layers": 4, "attn_implementation": "eager", "rope_parameters": {"rope_theta": 500.0}}
CAUSAL = torch.full((T, T), -torch.inf).triu(1)


def recipe(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml", [
        *TINY, "model.vocab_size=257", f"model.n_embd={C}", f"model.n_head={H}", f"model.n_kv_head={G}",
        "position.base=500.0", *overrides])


def copied(ours: Attention, theirs: nn.Module) -> None:
    """Give their layer the weights of ours."""
    for name in "qkvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
        if ours.q.bias is not None:
            getattr(theirs, f"{name}_proj").bias.copy_(getattr(ours, name).bias)


def both(model: GPT, layer: int, theirs: nn.Module, fraction: float = 1.0) -> tuple[Tensor, Tensor]:
    """The results of our layer and of theirs, which gets its cos and sin."""
    x = torch.randn(B, T, C)
    positions = torch.arange(T)[None]
    encoding = model.encodings[layer]
    at = At(positions, positions, layer, encoding.tables(positions, positions))
    angle = rope.angles(positions, rope.inv_freq(round(fraction * D), 500.0)).float()
    cos = angle.cos()
    sin = angle.sin()
    if theirs.__class__.__name__ != "GptOssAttention":
        cos, sin = (torch.cat((each, each), dim=-1) for each in (cos, sin))
    mask = CAUSAL
    if window := getattr(theirs, "sliding_window", None):
        mask = CAUSAL + torch.full((T, T), -torch.inf).tril(-window)
    return (model.blocks[layer].attention(x, encoding, at, Mask(has_plain_positions=True)),
            theirs(x, (cos, sin), mask)[0])


def test_sinks_and_windows_in_every_second_layer_are_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig
    model = lively(recipe("gpt-oss", "model.window=5"))
    config = GptOssConfig(**HEADS, sliding_window=5)
    for layer in range(2):
        ours = model.blocks[layer].attention
        theirs = GptOssAttention(config, layer)
        copied(ours, theirs)
        ours.sink.normal_()
        theirs.sinks.copy_(ours.sink)
        assert theirs.sliding_window == ours.window == (5 if layer == 0 else None)
        torch.testing.assert_close(*both(model, layer, theirs), rtol=1e-5, atol=1e-5)


def test_gated_attention_is_qwen3_5() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention
    model = lively(recipe("qwen3-gated", "model.norm_eps=1e-6"))
    ours = model.blocks[0].attention
    theirs = Qwen3_5Attention(Qwen3_5TextConfig(**HEADS), 0)
    for norm in (ours.q_norm, ours.k_norm):
        norm.weight.normal_(1, 0.3)
    for name in "kvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
    pair = [module.weight.unflatten(0, (H, D)) for module in (ours.q, ours.gate)]
    theirs.q_proj.weight.copy_(torch.cat(pair, dim=1).flatten(0, 1))       # a head's queries, then its gate
    theirs.q_norm.weight.copy_(ours.q_norm.weight - 1)
    theirs.k_norm.weight.copy_(ours.k_norm.weight - 1)
    torch.testing.assert_close(*both(model, 0, theirs, fraction=0.25), rtol=1e-5, atol=1e-5)


def test_rotated_values_are_deepseek_v4() -> None:
    """Keys and values before attention, and results after it; they rotate a slice at the end of each head."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb
    model = GPT(recipe("rope", "position.rotate_values=true", "position.layout=interleaved"))
    encoding = model.encodings[0]
    positions = torch.arange(T)[None]
    at = At(positions, positions, 0, encoding.tables(positions, positions))
    angle = rope.angles(positions, rope.inv_freq(D, 500.0)).float()
    v = torch.randn(B, G, T, D)
    y = torch.randn(B, H, T, D)
    torch.testing.assert_close(encoding.turn_values(v, at), apply_rotary_pos_emb(v, angle.cos(), angle.sin()))
    torch.testing.assert_close(encoding.turn_back(y, at), apply_rotary_pos_emb(y, angle.cos(), -angle.sin()))
