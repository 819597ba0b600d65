"""A model trained here under YaRN, exported, converted to GGUF and run by llama.cpp: the same perplexity.

Skipped where the packages are missing: pip install --no-deps gguf cyllama. The conversion is that of
llama.cpp's own script: the same names, and pairs of queries and keys next to each other.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hf.export import export
from runtime.checkpoint import load_run
from runtime.files import read_json
from train import train

gguf, cpp = (pytest.importorskip(name) for name in ("gguf", "cyllama.llama.llama_cpp"))
pytestmark = pytest.mark.slow

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down"}


def write_gguf(folder: Path, out: Path) -> None:
    """A Hugging Face folder of a Llama model under YaRN as GGUF, without its vocabulary."""
    config, writer = read_json(folder / "config.json"), gguf.GGUFWriter(out, "llama")
    rope, heads = config["rope_parameters"], (config["num_attention_heads"], config["num_key_value_heads"])
    for key, value in {
            "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
            "head_count": heads[0], "head_count_kv": heads[1], "layer_norm_rms_eps": config["rms_norm_eps"],
            "rope_freq_base": rope["rope_theta"], "vocab_size": config["vocab_size"],
            "rope_dimension_count": config["hidden_size"] // heads[0], "tokenizer_model": "no_vocab",
            "rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": rope["factor"],
            "rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"]}.items():
        getattr(writer, f"add_{key}")(value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, prefix = name.removesuffix(".weight"), ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if stem.endswith(("q_proj", "k_proj")):
            pairs = tensor.view(heads["k_proj" in stem], 2, -1, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{prefix}{NAMES[stem]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def perplexity_of_llama_cpp(path: Path, ids: torch.Tensor, n_vocab: int) -> float:
    """Of ids (T,), whose first one opens the text."""
    # cyllama 0.2.18 asks its model for an attribute that it lacks
    has_vocab = type("HasVocab", (cpp.LlamaModel,), {"n_vocab": n_vocab})
    parameters = cpp.LlamaContextParams()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = len(ids)
    parameters.type_k = parameters.type_v = 0                       # fp32
    context = cpp.LlamaContext(has_vocab(str(path), cpp.LlamaModelParams()), parameters)
    batch = cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for t, token in enumerate(ids.tolist()):
        batch.add(token, t, [0], True)
    context.decode(batch)
    rows = [list(context.get_logits_ith(t)) for t in range(len(ids) - 1)]
    return math.exp(F.cross_entropy(torch.tensor(rows), ids[1:]).item())


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_llama_cpp_finds_our_perplexity_under_yarn(layout: str, tiny, tmp_path: Path) -> None:
    L = 64
    config = tiny("rope", f"train.seq_len={L}", "train.steps=60", "train.lr=1e-2", "model.n_embd=64",
                  "model.n_head=4", "model.n_kv_head=2", f"position.layout={layout}",
                  f"position.scaling={{method='yarn', factor=4.0, original_length={L}}}")
    assert train(config, []) == 0
    model, _, tokenizer = load_run(config.run.dir)
    export(Path(config.run.dir), tmp_path / "hf", model, config, tokenizer)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    text = tokenizer.encode(b"the dog chased another cat a b\n" * 20).tolist()
    for T in (L, 2 * L, 4 * L):
        ids = torch.tensor([tokenizer.eot, *text])[:T + 1]
        with torch.no_grad():
            ours = math.exp(F.cross_entropy(model(ids[None])[0, :-1], ids[1:]).item())
        theirs = perplexity_of_llama_cpp(tmp_path / "model.gguf", ids, config.model.vocab_size)
        assert theirs == pytest.approx(ours, rel=1e-3)
