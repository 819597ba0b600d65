"""The positions of production models, a config each: transformers' own model, a double loop, and the laws."""

import math
import os

import pytest
import torch
from conftest import ROOT, TINY, lively, tokens
from torch import nn

import rope
from attention import Mask
from config import Config, load_config
from evaluation.extension import EXTENSIONS, extended, parse
from hf.architectures import ARCHITECTURES, choose
from model import GPT
from positions import At

pytestmark = pytest.mark.usefixtures("no_gradients")

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

L = 16
WINDOW, CHUNK = "model.window=11", "model.chunk=11"
RECIPES = {     # config -> overrides; of each layer: base (None: no encoding), limit, is there a temperature
    "llama4": ((CHUNK,), [(1e4, "chunk", 0)] * 3 + [(None, "", 1)]),
    "ministral3": ((), [(1e4, "", 1)] * 4),
    "gemma3": ((WINDOW,), [(1e4, "window", 0)] * 3 + [(1e6, "", 0)]),
    "swan-gpt": ((WINDOW,), [(1e4, "window", 0)] * 3 + [(None, "", 1)]),
    "rope-interleaved": ((), [(1e4, "", 0)] * 3 + [(None, "", 0)]),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def recipe(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml", [
        *TINY, "model.vocab_size=257", "model.n_layer=4", "model.n_head=4", "model.n_kv_head=2",
        "model.n_embd=48", f"train.seq_len={L}", *RECIPES[name][0], *overrides])


def theirs_of(name: str, model: GPT, config: Config) -> nn.Module:
    """transformers' model with the weights of ours."""
    architecture = choose(config)
    named = {"llama4": "llama4_text", "gemma3": "gemma3_text", "rope-interleaved": "smollm3"}.get(name, name)
    assert architecture is ARCHITECTURES[named]
    fields = transformers.AutoConfig.for_model(**architecture.config_json(config), pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(fields)
    weights = architecture.export_tensors(model.state_dict(), config)
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"]} if config.model.tied else {}
    theirs.load_state_dict(weights | tied)
    return theirs.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "ministral3", "gemma3", "rope-interleaved"])
def test_a_recipe_is_transformers_own_model(name: str) -> None:
    """Logits to 12 L; in fp64 too, where transformers still has its norms and angles in fp32."""
    config = recipe(name)
    model, x = lively(config), tokens((2, 12 * L))
    for p in model.parameters():        # rounding grows with the weights, from layer to layer
        p.copy_(0.5 * p if p.dim() > 1 else 1 + 0.3 * p)
    theirs = theirs_of(name, model, config)
    for dtype in (torch.float32, torch.float64):
        found, expected = model.to(dtype)(x), theirs.to(dtype)(x).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def seen(kind: str, i: int, j: int) -> bool:
    """In documents of 17 tokens."""
    return {"": True, "window": i - j < 11, "chunk": i % 17 // 11 == j % 17 // 11}[kind]


def temperature(name: str, m: int) -> float:
    if name == "swan-gpt":
        return max(1.0, math.log(m + 1) / math.log(L))
    return 1 + 0.1 * math.log(1 + (m + 1 if name == "llama4" else m) // L)


@every_recipe
def test_a_layer_is_its_formula_at_positions_that_skip_and_in_packed_documents(name: str) -> None:
    """Chunks are counted in tokens from the start of the document, whatever the positions."""
    model = lively(recipe(name)).double()
    positions = torch.arange(40) + torch.arange(40) // 7 * 23           # 0 ... 154
    x = torch.randn(1, 40, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    at, documents = positions[None], (torch.arange(40) // 17)[None]
    for layer, (base, kind, is_tempered) in enumerate(RECIPES[name][1]):
        attention = model.blocks[layer].attention
        encoding = model.encoding if layer in model.encoded_layers else model.no_encoding
        factor = model.temperature(at)[layer] if layer in model.tempered_layers else None
        found = attention(x, encoding, At(at, at, layer, encoding.tables(at, at)),
                          Mask(documents=documents), factor)
        q, k, v = (p(x)[0].unflatten(-1, (-1, 12)) for p in (attention.q, attention.k, attention.v))
        q, k = attention.q_norm(q), attention.k_norm(k)
        mixed = torch.zeros(40, 4, 12, dtype=torch.float64)
        for h in range(4):
            for i in range(40):
                keys = [j for j in range(i + 1) if seen(kind, i, j) and i // 17 == j // 17]
                turned = q[i, h].expand(len(keys), 12)
                if base:
                    turned = rope.rotate(turned, rope.angles(
                        positions[i] - positions[keys], rope.inv_freq(12, base, dtype=torch.float64)))
                logits = (turned * k[keys, h // 2]).sum(-1) / math.sqrt(12)
                logits = logits * (temperature(name, int(positions[i])) if is_tempered else 1.0)
                mixed[i, h] = logits.softmax(0) @ v[keys, h // 2]
        torch.testing.assert_close(found[0], attention.o(mixed.flatten(1)), atol=1e-4, rtol=1e-4)


@every_recipe
def test_cached_decoding_equals_the_full_forward(name: str) -> None:
    model, x = lively(recipe(name)), tokens((2, 60))
    whole, cache = model(x), model.new_cache()
    parts = [model(x[:, i:j], cache=cache) for i, j in ((0, 6), (6, 7), (7, 25), (25, 59), (59, 60))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=5e-4, rtol=5e-4)
    last = model.logits(model.hidden(x, last=20))
    torch.testing.assert_close(last, whole[:, -20:], atol=5e-4, rtol=5e-4)


@every_recipe
def test_every_method_extends_a_recipe_or_says_why_not(name: str) -> None:
    """Where layers have their own base, a method that changes frequencies leaves theirs as they are."""
    config = recipe(name)
    model, x = lively(config), tokens((1, 100))
    before, local = model(x), []
    for spec in {**{name: name for name in EXTENSIONS}, "base": "base:base=50000", "longrope":
                 f"longrope:short_factor={[1.0] * 6},long_factor={[2.0] * 6}"}.values():
        methods = parse(spec).methods
        problem = methods[0].problem(model, config, 100)
        if problem:
            assert spec in ("log_n", "drope", "sinks", "lm_infinite"), problem
            continue
        with extended(model, config, methods, 100):
            is_same = spec == config.position.temperature               # log_n under log_n
            assert ((model(x) - before).abs().max() > 1e-3) != is_same, spec
            if name == "gemma3" and hasattr(model.encoding, "scaling"):
                at = torch.arange(100)[None]
                local.append(torch.stack(model.encoding.tables(at, at)[4:]))
        assert torch.equal(model(x), before)
    assert all(torch.equal(tables, local[0]) for tables in local) and (len(local) > 5) == (name == "gemma3")
