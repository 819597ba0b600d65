"""What production models of 2026 add to attention is what transformers computes with the same weights."""

import os
from collections.abc import Callable
from types import SimpleNamespace as One

import pytest
import torch
from conftest import lively, tokens
from torch import Tensor, nn

import rope
from attention import Mask, attend
from model import GPT, Attention
from positions import At

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients")]

B, T, C, H, G, D = 2, 19, 64, 4, 2, 16
SHAPE = [f"model.n_embd={C}", f"model.n_head={H}", f"model.n_kv_head={G}"]
HEADS = {"hidden_size": C, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D,
         "num_hidden_layers": 4, "attn_implementation": "eager", "rope_parameters": {"rope_theta": 500.0}}
CAUSAL = torch.full((T, T), -torch.inf).triu(1)


def copied(ours: Attention, theirs: nn.Module) -> None:
    """Give their layer the weights of ours."""
    for name in "qkvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
        if ours.q.bias is not None:
            getattr(theirs, f"{name}_proj").bias.copy_(getattr(ours, name).bias)


def both(model: GPT, layer: int, theirs: nn.Module, fraction: float = 1.0) -> tuple[Tensor, Tensor]:
    """The results of our layer and of theirs, which gets its cos and sin."""
    x, positions, encoding = torch.randn(B, T, C), torch.arange(T)[None], model.encodings[layer]
    at = At(positions, positions, layer, encoding.tables(positions, positions))
    angle = rope.angles(positions, rope.inv_freq(round(fraction * D), 500.0)).float()
    cos, sin = angle.cos(), angle.sin()
    if theirs.__class__.__name__ != "GptOssAttention":
        cos, sin = (torch.cat((each, each), dim=-1) for each in (cos, sin))
    mask = CAUSAL
    if window := getattr(theirs, "sliding_window", None):
        mask = CAUSAL + torch.full((T, T), -torch.inf).tril(-window)
    return (model.blocks[layer].attention(x, encoding, at, Mask(in_order=True)),
            theirs(x, (cos, sin), mask)[0])


def test_sinks_and_windows_in_every_second_layer_are_gpt_oss(tiny: Callable) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig
    model = lively(tiny("rope", *SHAPE, "model.sink=head", "model.window=5", "model.full_every=2",
                            "model.bias=true", "position.base=500.0"))
    config = GptOssConfig(**HEADS, sliding_window=5)
    for layer in range(2):
        ours, theirs = model.blocks[layer].attention, GptOssAttention(config, layer)
        copied(ours, theirs)
        ours.sink.normal_()
        theirs.sinks.copy_(ours.sink)
        assert theirs.sliding_window == ours.window == (5 if layer == 0 else None)
        torch.testing.assert_close(*both(model, layer, theirs), rtol=1e-5, atol=1e-5)


def test_gated_attention_is_qwen3_5(tiny: Callable) -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention
    model = lively(tiny("rope", *SHAPE, "model.gate=true", "model.qk_norm=true", "position.fraction=0.25",
                            "position.base=500.0", "model.norm_eps=1e-6"))
    ours, theirs = model.blocks[0].attention, Qwen3_5Attention(Qwen3_5TextConfig(**HEADS), 0)
    for norm in (ours.q_norm, ours.k_norm):
        norm.weight.normal_(1, 0.3)
    for name in "kvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
    pair = [module.weight.unflatten(0, (H, D)) for module in (ours.q, ours.gate)]
    theirs.q_proj.weight.copy_(torch.cat(pair, dim=1).flatten(0, 1))       # a head's queries, then its gate
    theirs.q_norm.weight.copy_(ours.q_norm.weight - 1)
    theirs.k_norm.weight.copy_(ours.k_norm.weight - 1)
    torch.testing.assert_close(*both(model, 0, theirs, fraction=0.25), rtol=1e-5, atol=1e-5)


def test_a_base_per_layer_and_sinks_are_granite_swa(tiny: Callable) -> None:
    """The whole model: logits. A base of 0 is no encoding, and every third layer sees all."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM
    bases = [300.0, 0.0, 20_000.0]
    model = lively(tiny("rope", *SHAPE, "model.n_layer=3", "model.sink=head", "model.window=6",
                            "model.full_every=3", f"position.bases={bases}"))
    c = model.blocks[0].mlp
    theirs = GraniteSWAForCausalLM(GraniteSWAConfig(**{
        **HEADS, "num_hidden_layers": 3, "vocab_size": 257, "intermediate_size": c.up.out_features,
        "rms_norm_eps": 1e-5, "sliding_window": 6, "layer_rope_theta": bases, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "attention_multiplier": D**-0.5,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0})).eval()
    theirs.model.embed_tokens.weight.copy_(model.embedding.weight)
    theirs.model.norm.weight.copy_(model.norm.weight)
    theirs.lm_head.weight.copy_(model.head.weight)
    for block, layer in zip(model.blocks, theirs.model.layers, strict=True):
        copied(block.attention, layer.self_attn)
        block.attention.sink.normal_()
        layer.self_attn.sinks.copy_(block.attention.sink)
        for name in ("gate", "up", "down"):
            getattr(layer.mlp, f"{name}_proj").weight.copy_(getattr(block.mlp, name).weight)
        layer.input_layernorm.weight.copy_(block.attention_norm.weight)
        layer.post_attention_layernorm.weight.copy_(block.mlp_norm.weight)
    text = tokens((2, 40))
    torch.testing.assert_close(model(text), theirs(text).logits, rtol=1e-4, atol=1e-4)


def test_sinks_by_token_are_inkling2() -> None:
    from transformers.models.inkling2.modeling_inkling2 import eager_attention_forward
    q, k, v = torch.randn(B, H, T, D), *torch.randn(2, B, G, T, D)
    sinks = torch.randn(B, H, T, 1)
    theirs, _ = eager_attention_forward(One(num_key_value_groups=H // G, training=False), q, k, v, CAUSAL,
                                        D**-0.5, sinks=sinks)
    ours = attend(q, k, v, Mask(in_order=True), sink=sinks)
    torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-5, atol=1e-5)


def test_rotated_values_are_deepseek_v4(tiny: Callable) -> None:
    """Keys and values before attention, and results after it; they rotate a slice at the end of each head."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb
    model = GPT(tiny("rope", *SHAPE, "position.rotate_values=true", "position.layout=interleaved",
                     "position.base=500.0"))
    encoding, positions = model.encodings[0], torch.arange(T)[None]
    at = At(positions, positions, 0, encoding.tables(positions, positions))
    angle = rope.angles(positions, rope.inv_freq(D, 500.0)).float()
    v, y = torch.randn(B, G, T, D), torch.randn(B, H, T, D)
    torch.testing.assert_close(encoding.turn_values(v, at), apply_rotary_pos_emb(v, angle.cos(), angle.sin()))
    torch.testing.assert_close(encoding.turn_back(y, at), apply_rotary_pos_emb(y, angle.cos(), -angle.sin()))
