"""The positions of production models, a config each: a double loop, and transformers' own model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import ROOT, TINY, lively, tokens

import rope
from config import Config, load_config
from model import GPT

pytestmark = pytest.mark.usefixtures("no_gradients")

L = 16
RECIPES = {     # config -> overrides; of each layer: base (None: no encoding), limit, is there a temperature
    "llama4": (("model.chunk=11",), [(1e4, "chunk", 0)] * 3 + [(None, "", 1)]),
    "gemma3": (("model.window=11",), [(1e4, "window", 0)] * 3 + [(1e6, "", 0)]),
    "swan-gpt": (("model.window=11",), [(1e4, "window", 0)] * 3 + [(None, "", 1)]),
    "rope-interleaved": ((), [(1e4, "", 0)] * 3 + [(None, "", 0)]),
    "granite-swa": (("model.window=11",), [(1e4, "window", 0)] * 3 + [(None, "", 0)]),
}


def recipe(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml", [
        *TINY, "model.vocab_size=257", "model.n_layer=4", "model.n_head=4", "model.n_kv_head=2",
        "model.n_embd=48", f"train.seq_len={L}", *RECIPES[name][0], *overrides])


def seen(kind: str, i: int, j: int) -> bool:
    """In documents of 17 tokens; chunks are counted from the start of each, whatever the positions."""
    return {"": True, "window": i - j < 11, "chunk": i % 17 // 11 == j % 17 // 11}[kind]


def temperature(name: str, m: int, n: int) -> float:
    if name == "swan-gpt":
        return max(1.0, math.log(n) / math.log(L))
    return 1 + 0.1 * math.log(1 + (m + 1) // L)


def mixed(name: str, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor,
          sink: Tensor | None) -> Tensor:
    """Attention (T, H D) of one layer by its formula: q (T, H, D), k and v (T, G, D), sink (H,)."""
    base, kind, is_tempered = RECIPES[name][1][layer]
    found = torch.zeros_like(q)
    for h in range(4):
        for i in range(len(q)):
            keys = [j for j in range(i + 1) if seen(kind, i, j) and i // 17 == j // 17]
            turned = q[i, h].expand(len(keys), 12)
            if base:
                turned = rope.rotate(turned, rope.angles(
                    positions[i] - positions[keys], rope.inv_freq(12, base, dtype=torch.float64)))
            logits = (turned * k[keys, h // 2]).sum(-1) / math.sqrt(12)
            logits = logits * (temperature(name, i % 17, len(keys)) if is_tempered else 1.0)
            weights = logits.softmax(0) if sink is None else torch.cat((logits, sink[h:h + 1])).softmax(0)
            found[i, h] = weights[:len(keys)] @ v[keys, h // 2]
    return found.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_formula_at_positions_that_skip_and_in_packed_documents(name: str) -> None:
    config = recipe(name)
    model, m = lively(config).double(), config.model
    w, x = model.state_dict(), tokens((1, 40))
    positions = torch.arange(40) + torch.arange(40) // 7 * 23           # 0 ... 154

    def norm(x: Tensor, key: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[key], m.norm_eps) if key in w else x

    y = w["embedding.weight"][x[0]] * (math.sqrt(48) if m.scaled_embedding else 1)
    for layer in range(4):
        at = f"blocks.{layer}."
        a = norm(y, f"{at}attention_norm.weight")
        q, k, v = ((a @ w[f"{at}attention.{part}.weight"].T).unflatten(-1, (-1, 12)) for part in "qkv")
        q, k = norm(q, f"{at}attention.q_norm.weight"), norm(k, f"{at}attention.k_norm.weight")
        sink = w.get(f"{at}attention.sink")
        a = mixed(name, layer, q, k, v, positions, sink) @ w[f"{at}attention.o.weight"].T
        y = y + norm(a, f"{at}attention_post_norm.weight")
        a = norm(y, f"{at}mlp_norm.weight")
        gate, up = (a @ w[f"{at}mlp.{part}.weight"].T for part in ("gate", "up"))
        gate = F.silu(gate) if m.mlp == "swiglu" else F.gelu(gate, approximate="tanh")
        y = y + norm((gate * up) @ w[f"{at}mlp.down.weight"].T, f"{at}mlp_post_norm.weight")
    expected = norm(y, "norm.weight") @ w["embedding.weight" if m.tied else "head.weight"].T
    found = model(x, positions=positions, documents=(torch.arange(40) // 17)[None])
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)       # the model's angles are fp32


NAMES = {"embedding.": "model.embed_tokens.", "blocks.": "model.layers.", "head.": "lm_head.",
         "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
         "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
         "attention.v": "self_attn.v_proj", "attention.o": "self_attn.o_proj",
         "attention.sink": "self_attn.sinks", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
         "mlp.down": "mlp.down_proj"}


def their_name(name: str, kind: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    name = name.replace("mlp.", "feed_forward.") if kind == "llama4" else name
    return f"model.{name}" if name == "norm.weight" else name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "granite-swa"])
def test_a_recipe_is_transformers_own_model(name: str) -> None:
    """Logits to 12 L, whose models transformers alone can load."""
    transformers = pytest.importorskip("transformers")
    config = recipe(name, *["position.layout=interleaved"] * (name == "llama4"))
    model: GPT = lively(config)
    for p in model.parameters():        # rounding grows with the weights, from layer to layer
        p.copy_(0.5 * p if p.dim() > 1 else 1 + 0.3 * p)
    width = model.state_dict()["blocks.0.mlp.up.weight"].shape[0]
    fields = {"vocab_size": 257, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": width, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": False, "pad_token_id": None, "max_position_embeddings": 12 * L,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if name == "llama4":
        fields |= {"intermediate_size_mlp": width, "attention_chunk_size": 11, "floor_scale": L,
                   "attn_scale": 0.1, "attn_temperature_tuning": True, "use_qk_norm": False, "moe_layers": [],
                   "no_rope_layers": [1, 1, 1, 0],
                   "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
                   "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if name == "granite-swa":
        fields |= {"sliding_window": 11, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                   "layer_rope_theta": [1e4, 1e4, 1e4, 0.0], "attention_multiplier": 12**-0.5}
    kind = {"llama4": "llama4_text", "granite-swa": "granite_swa"}.get(name, name)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **fields)).eval()
    theirs.load_state_dict({their_name(key, name): x for key, x in model.state_dict().items()})
    x = tokens((2, 12 * L))
    torch.testing.assert_close(model(x), theirs(x).logits, rtol=0, atol=1e-5)
