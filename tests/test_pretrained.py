"""Folders of Hugging Face as models of ours: we make of random weights what transformers makes of them."""

import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import slow_except, tokens, words
from safetensors.torch import load_file, save_file

import eval as eval_command
import export as export_command
import sample
from config import load_config
from data.prepare import prepare
from data.tokenizer import ByteTokenizer
from evaluation import advice, results
from evaluation.extension import EXTENSIONS, extended, parse
from evaluation.windows import open_text
from hf.architectures import ARCHITECTURES
from hf.export import export
from hf.pretrained import pretrained_tables, read_tables
from hf.tokenizer import chat_ids, eos_ids, tokenizer_json
from runtime.checkpoint import load_run
from runtime.device import autocast
from runtime.errors import UserError
from sample import generate
from train import train

pytestmark = pytest.mark.usefixtures("no_gradients")

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZE = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
GROUPED = SIZE | {"num_key_value_heads": 2}


def rope_parameters(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


LLAMA3 = rope_parameters("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position_embeddings=32)
YARN = rope_parameters("yarn", factor=4.0, original_max_position_embeddings=16)
FACTORS = {"short_factor": [1.0] * 3, "long_factor": [1.5, 2.0, 4.0]}
LLAMA4 = GROUPED | {"intermediate_size_mlp": 88, "head_dim": 16, "use_qk_norm": False, "moe_layers": [],
                    "attention_chunk_size": 11, "floor_scale": 7}
CASES = {       # name -> class, config, L
    "llama": ("Llama", SIZE | {"tie_word_embeddings": False}, 64),
    "llama, tied, grouped, llama3": ("Llama", GROUPED | LLAMA3 | {"tie_word_embeddings": True}, 32),
    "llama, grouped, yarn": ("Llama", GROUPED | YARN, 16),
    "llama, linear": ("Llama", GROUPED | rope_parameters("linear", factor=2.0), 64),
    "llama, head_dim, biases": ("Llama", GROUPED | {"head_dim": 16, "attention_bias": True,
                                                    "mlp_bias": True}, 64),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 11, "head_dim": 10}, 64),
    "smollm3": ("SmolLM3", GROUPED | YARN | {"no_rope_layers": [1, 0, 1]}, 16),
    "llama4_text": ("Llama4", LLAMA4 | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}, 7),
    "llama4, untuned": ("Llama4", LLAMA4 | {"no_rope_layers": [1, 1, 0], "attn_temperature_tuning": False,
                                            "layer_types": ["chunked_attention"] * 3}, 64),
    "ministral3": ("Ministral3", GROUPED | {"head_dim": 16, "sliding_window": 13} | rope_parameters(
        "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1), 16),
    "ministral3, plain": ("Ministral3", GROUPED | {"head_dim": 12} | rope_parameters(
        "default", original_max_position_embeddings=8, llama_4_scaling_beta=0.1), 8),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}, 64),
    "qwen3": ("Qwen3", GROUPED | YARN | {"head_dim": 16}, 16),
    "gemma3_text": ("Gemma3", GROUPED | {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11, "sliding_window_pattern": 2,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}, 64),
    "gemma3, untied": ("Gemma3", GROUPED | {
        "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 9, "tie_word_embeddings": False}, 64),
    "phi3": ("Phi3", GROUPED | {"sliding_window": 13, "original_max_position_embeddings": 64}
             | rope_parameters("default", partial_rotary_factor=0.5), 64),
    "phi3, longrope": ("Phi3", GROUPED | {"original_max_position_embeddings": 16} | rope_parameters(
        "longrope", partial_rotary_factor=0.5, **FACTORS), 16),
    "gpt2": ("GPT2", {"vocab_size": 300, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 4,
                      "initializer_range": 0.1, "bos_token_id": 256, "eos_token_id": 256}, 256),
    "mpt": ("Mpt", {"vocab_size": 300, "max_seq_len": 640, "d_model": 48, "n_layers": 3, "n_heads": 6,
                    "initializer_range": 0.1, "bos_token_id": 256, "eos_token_id": 256}, 640),
}
every_case = pytest.mark.parametrize("case", slow_except(
    [*CASES], "llama, grouped, yarn", "gemma3_text", "gpt2", "mpt"))
Saved = Callable[[str], tuple[Path, torch.nn.Module]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """case -> (folder, their model), random weights saved once, in several files."""
    done: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(case: str) -> tuple[Path, torch.nn.Module]:
        if case not in done:
            name, config, _ = CASES[case]
            torch.manual_seed(0)
            kind = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")
            theirs = kind(kind.config_class(**config)).eval()
            for weight in theirs.parameters():          # norms and biases that do nothing would hide mistakes
                if weight.dim() == 1:                   # bf16, as published: Gemma's plus 1 is exact
                    weight.copy_((weight + 0.3 * torch.randn_like(weight)).bfloat16())
            folder = tmp_path_factory.mktemp("theirs")
            theirs.save_pretrained(folder, max_shard_size="60KB")
            assert len(list(folder.glob("*.safetensors"))) > 1
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(ByteTokenizer())))
            done[case] = folder, theirs
        return done[case]
    return make


@every_case
def test_logits_inside_and_far_beyond_the_training_length(case: str, saved: Saved) -> None:
    folder, theirs = saved(case)
    ours, config, tokenizer = load_run(folder)
    assert config.train.seq_len == CASES[case][2] and config.model.vocab_size == 300
    assert isinstance(tokenizer, ByteTokenizer)
    for T in (1, 16, 17, 64, 65, 600):
        if (ours.encoding.max_length or T) >= T:
            x = tokens((2, T), seed=T, vocab_size=300)
            torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=0)


@every_case
def test_in_bf16_the_likeliest_token_is_the_same(case: str, saved: Saved) -> None:
    """Ours as eval.py runs it, theirs as it is served, where one token is likelier by more than rounding."""
    folder, theirs = saved(case)
    ours, config, _ = load_run(folder)
    x = tokens((16, 64), vocab_size=300)
    best, second = ours(x).topk(2).values.unbind(-1)
    is_decided = best - second > 0.1 * ours(x).std()
    with autocast(config.train.model_copy(update={"dtype": "bfloat16"}), torch.device("cpu")):
        found = ours(x).argmax(-1)
    is_same = found == copy.deepcopy(theirs).bfloat16()(x).logits.argmax(-1)
    assert is_decided.float().mean() > 0.7 and is_same[is_decided].float().mean() >= 0.999


@pytest.mark.parametrize(("case", "n"), [("llama", 12), ("gpt2", 12), *(    # longrope: see test_export.py
    pytest.param(case, 200, marks=pytest.mark.slow) for case in CASES if "longrope" not in case)])
def test_greedy_tokens_are_the_same(case: str, n: int, saved: Saved) -> None:
    folder, theirs = saved(case)
    ours, prompt = load_run(folder)[0], torch.tensor([[256, *b"The cat"]])
    found = theirs.generate(prompt, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0,
                            attention_mask=torch.ones_like(prompt))
    assert found.shape[1] == 8 + n and torch.equal(found, generate(ours, prompt, n, temperature=0))


@every_case
def test_there_and_back_is_the_same_bits(case: str, saved: Saved, tmp_path: Path) -> None:
    folder, theirs = saved(case)
    assert export(folder, tmp_path / "back", *load_run(folder)) == type(theirs).__name__
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    x = tokens((2, 40), vocab_size=300)
    assert torch.equal(theirs(x).logits, back.eval()(x).logits)


# -----------------------------------------------------------------------------------------------------------
# Other ways to say the same


def changed(folder: Path, to: Path, **fields) -> Path:
    """A copy of a folder with other fields in config.json; None removes one."""
    shutil.copytree(folder, to)
    theirs = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps({k: v for k, v in theirs.items() if v is not None}))
    return to


def test_rotary_parameters_as_before_5_0(saved: Saved, tmp_path: Path) -> None:
    folder, theirs = saved("llama, grouped, yarn")
    old = changed(folder, tmp_path / "old", rope_parameters=None, rope_theta=10_000, rope_scaling={
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 16})
    assert load_run(old)[1].position == load_run(folder)[1].position
    plain = changed(folder, tmp_path / "plain", rope_parameters=None, rope_theta=500_000.0, rope_scaling=None)
    position = load_run(plain)[1].position
    assert position.base == 500_000 and position.scaling is None and load_run(plain)[1].train.seq_len == 64


def test_gemma_3_as_before_5_0(saved: Saved, tmp_path: Path) -> None:
    """The first folders name two bases, and every how many layers has full attention; some only the bases."""
    folder, _ = saved("gemma3_text")
    for number, (fields, full_every) in enumerate((
            ({"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 3),
            ({"sliding_window_pattern": None}, 0))):        # every 6th, of 3 layers
        old = changed(folder, tmp_path / str(number), rope_parameters=None, layer_types=None,
                      rope_theta=70_000, rope_local_base_freq=300, **fields)
        ours, config, _ = load_run(old)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(old).eval()
        assert config.model.full_every == full_every
        assert (config.position.base, config.position.local_base) == (70_000, 300)
        x = tokens((2, 100), vocab_size=300)
        torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=0)


def test_where_a_folder_says_two_things_we_take_what_transformers_takes(saved: Saved, tmp_path: Path) -> None:
    """rope_scaling added to rope_parameters, and one file of weights beside an index of others."""
    folder, theirs = saved("llama, grouped, yarn")
    both = changed(folder, tmp_path / "both", rope_scaling={"type": "linear", "factor": 8.0})
    weights = {name: torch.zeros_like(w) for path in folder.glob("*.safetensors")
               for name, w in load_file(path).items()}
    save_file(weights, both / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(both)
    assert model.config.rope_parameters["rope_type"] == "linear" and not model.lm_head.weight.any()
    ours, config, _ = load_run(both)
    assert config.position.scaling.model_dump(exclude_none=True)["method"] == "pi"
    assert config.position.scaling.factor == 8 and not any(p.any() for p in ours.parameters())


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads")
LONG_OLD = {"rope_scaling": {"type": "longrope", **FACTORS}, "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5, "max_position_embeddings": 64,
            "original_max_position_embeddings": 16}


@pytest.mark.parametrize("more", [{}, {"num_key_value_heads": None}, LONG_OLD])
@pytest.mark.parametrize("case", ["llama", "mistral", "ministral3", "smollm3", "qwen2", "qwen3", "phi3",
                                  "gpt2", "mpt"])
def test_what_config_json_leaves_out_is_what_transformers_takes(case: str, more: dict,
                                                                tmp_path: Path) -> None:
    null_is_no_number = case in ("mistral", "ministral3")
    if more is LONG_OLD and case != "phi3" or more and null_is_no_number:
        return
    fields = {key: value for key, value in CASES[case][1].items() if key in NEEDED}
    kind = ARCHITECTURES[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": case, **fields, **more}))
    completed = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert read_tables(tmp_path) == kind.tables(completed)


def test_names_and_files_of_older_folders(saved: Saved, tmp_path: Path) -> None:
    """One file in place of many; GPT-2 without its prefix, with its masks; a tied head in it; bf16."""
    folder, _ = saved("gpt2")
    old = changed(folder, tmp_path / "old")
    weights = {name.removeprefix("transformer."): w for path in sorted(old.glob("*.safetensors"))
               for name, w in load_file(path).items()}
    for path in old.glob("model*"):
        path.unlink()
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 8, 8) for n in range(3)}
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights | masks, old / "model.safetensors")
    before, after = load_run(folder)[0].state_dict(), load_run(old)[0].state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    save_file({name: w.bfloat16() for name, w in weights.items()}, old / "model.safetensors")
    for name, weight in load_run(old)[0].state_dict().items():
        assert weight.dtype == torch.float32 and torch.equal(weight, before[name].bfloat16().float())


# -----------------------------------------------------------------------------------------------------------
# What is refused, in one line


def problem_of(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_run(folder)
    (problem,) = caught.value.problems
    assert "\n" not in problem and str(folder) in problem, problem
    return problem


@pytest.mark.parametrize(("case", "fields", "expected"), [
    ("llama4_text", {"moe_layers": [1]}, r"moe_layers = \[1\] is not supported .*; only \[\] is"),
    ("llama4_text", {"moe_layers": None}, "moe_layers = None is not supported"),
    ("llama4_text", {"layer_types": ["chunked_attention"] + ["full_attention"] * 3}, "only every k-th layer"),
    ("ministral3", rope_parameters("default"), "llama_4_scaling_beta = 0.1 and .* got None and None"),
    ("ministral3", rope_parameters("linear", factor=2.0, llama_4_scaling_beta=0.1,
                                   original_max_position_embeddings=8), "pi is not supported"),
    ("gemma3_text", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar = 168 .* only head_dim = 16 is"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
    ("gemma3_text", {"layer_types": ["full_attention"] + ["sliding_attention"] * 2}, "only every k-th layer"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "'linear' in sliding_attention alone is not supported"),
    ("gemma3_text", {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
     "architecture Gemma3ForConditionalGeneration is not supported; supported are .*, Gemma3ForCausalLM$"),
])
def test_what_some_architectures_cannot_be_is_named(case: str, fields: dict, expected: str, saved: Saved,
                                                   tmp_path: Path) -> None:
    folder, _ = saved(case)
    assert re.search(expected, problem_of(changed(folder, tmp_path / "changed", **fields)))


@pytest.mark.parametrize(("fields", "expected"), [
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
    ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [1]}}, "rope_type 'mrope' is not supported"),
    ({"rope_parameters": {**YARN["rope_parameters"], "mscale": 0.7}}, "mscale of yarn is not supported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"hidden_size": None}, "hidden_size must be present"),
    ({"hidden_size": "48"}, "hidden_size must be present, and numbers"),
    ({"num_key_value_heads": 3}, "n_kv_head"),
    ({"hidden_size": 96}, "has shape"),
    ({"num_hidden_layers": 4}, "tensor model.layers.3.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 2}, "more do not fit LlamaForCausalLM"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"vocab_size": 299}, "has shape"),
    ({"num_attention_heads": 0}, "division by zero"),
    ({"rope_parameters": [1]}, "a value that LlamaForCausalLM cannot have"),
    ({"rms_norm_eps": 2.0}, "model.norm_eps"),
])
def test_a_config_that_does_not_fit_is_named(fields: dict, expected: str, saved: Saved,
                                             tmp_path: Path) -> None:
    folder, _ = saved("llama, grouped, yarn")
    assert expected in problem_of(changed(folder, tmp_path / "changed", **fields))


def test_files_that_are_not_there_or_not_read_are_named(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("llama, grouped, yarn")
    broken = changed(folder, tmp_path / "broken")
    first = sorted(broken.glob("model-*"))[0]
    first.write_bytes(first.read_bytes()[:100])
    assert "damaged" in problem_of(broken)
    (broken / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "lists" in problem_of(broken)
    (broken / "model.safetensors.index.json").write_text(
        (folder / "model.safetensors.index.json").read_text().replace("model-00001", "../model-00001"))
    assert "lists ../model-00001" in problem_of(broken)
    shutil.copy(folder / "model.safetensors.index.json", broken)
    first.unlink()
    assert "lists model-00001" in problem_of(broken)
    for path in broken.glob("model*"):
        path.unlink()
    assert "no weights at all" in problem_of(broken)
    (broken / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, a pickle" in problem_of(broken)
    (broken / "config.json").write_text("{")
    assert "not JSON" in problem_of(broken)
    broken = changed(folder, tmp_path / "words")
    (broken / "tokenizer.json").write_text("{}")
    assert "not a file of the tokenizers package" in problem_of(broken)
    (broken / "tokenizer.json").unlink()
    assert "tokenizer.json: missing" in problem_of(broken)


# -----------------------------------------------------------------------------------------------------------
# Fine-tuning


def test_init_from_takes_model_encoding_and_length_from_the_folder(saved: Saved, tmp_path: Path,
                                                                   corpus_dir: Path) -> None:
    folder = changed(saved("llama, grouped, yarn")[0], tmp_path / "llama")
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{folder}"\nlr = 0.001\n')
    config = load_config(path, ["train.steps=2", f"run.dir={tmp_path / 'tuned'}", "train.batch_size=4",
                                "train.compile=off", "train.dtype=float32", "model.dropout=0.5"],
                         pretrained_tables)
    theirs = load_run(folder)[1]
    assert config.model == theirs.model.model_copy(update={"dropout": 0.5})
    assert (config.position, config.train.seq_len, config.train.lr) == (theirs.position, 16, 0.001)
    assert load_config(path, ["train.seq_len=64"], pretrained_tables).train.seq_len == 64
    with torch.enable_grad():
        assert train(config, []) == 0
    model, again, _ = load_run(tmp_path / "tuned")
    pairs = zip(model.parameters(), load_run(folder)[0].parameters(), strict=True)
    assert again == config and all(0 < (a - b).abs().max() < 0.01 for a, b in pairs)    # two steps away
    shutil.rmtree(folder)
    assert load_run(tmp_path / "tuned")[1] == config                    # a run needs it no more


def test_a_corpus_of_the_folders_own_tokenizer(saved: Saved, tmp_path: Path) -> None:
    """prepare, train, evaluate, export: each keeps the tokenizer.json that came with the model.

    But for a special token for which the model has no embedding, as Gemma 3's for images.
    """
    folder = changed(saved("llama, grouped, yarn")[0], tmp_path / "llama", bos_token_id=300, vocab_size=300)
    content = tokenizer_json(ByteTokenizer())
    content["model"]["vocab"] |= {"Ċ" * 2: 257, "th": 258}
    content["model"]["merges"] = [["Ċ", "Ċ"], ["t", "h"]]
    content["added_tokens"].append({**content["added_tokens"][0], "id": 259, "content": "<s>"})
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<image>"})
    content["post_processor"] = {                                       # as Llama 2's, which opens documents
        "type": "TemplateProcessing", "pair": [], "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|endoftext|>"}')
    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on the other mat\n\n" * 40)
    meta = prepare(str(text), tmp_path / "corpus", str(folder))
    assert meta["tokenizer"]["name"] == "hf:259" and meta["eot"] == 259 and meta["vocab_size"] == 260
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["val"]["bytes"] == text.stat().st_size
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{tmp_path / "corpus"}"\n[train]\ninit_from = "{folder}"\n')
    with torch.enable_grad():
        train(load_config(path, ["train.steps=1", f"run.dir={tmp_path / 'run'}", "train.batch_size=2",
                                 "train.compile=off"], pretrained_tables), [])
    _, config, tokenizer = load_run(tmp_path / "run")
    assert tokenizer.name == "hf:259" and tokenizer.encode(b"the\n\n").tolist() == [258, *b"e", 257]
    open_text(None, config.data.dir, tokenizer)
    export(tmp_path / "run", tmp_path / "out", *load_run(tmp_path / "run"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the\n\n").input_ids == [259, 258, *b"e", 257]        # as the card says: opened once
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "<|endoftext|>")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the tokenizer adds it to a prompt" in card and 'tokenizer("Once"' in card
    open_text(None, config.data.dir, load_run(tmp_path / "out")[2])
    (tmp_path / "run" / "tokenizer.json").write_text(json.dumps(tokenizer_json(ByteTokenizer())))
    with pytest.raises(UserError, match="made with another hf:259 tokenizer"):
        load_run(tmp_path / "run")


def test_init_from_another_model_is_refused_by_what_differs(saved: Saved, tmp_path: Path,
                                                            corpus_dir: Path) -> None:
    folder = saved("llama, grouped, yarn")[0]
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{folder}"\n')
    for override in ("model.n_layer=2", "position.encoding=alibi"):
        config = load_config(path, [override, f"run.dir={tmp_path / 'run'}"], pretrained_tables)
        key = override.split("=")[0]
        with pytest.raises(UserError) as caught:
            train(config, [])
        assert key in caught.value.problems[0] and "its model differs" in caught.value.problems[0]
    wrong = changed(folder, tmp_path / "wrong", model_type="mamba")
    path.write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{wrong}"\nstep = 1\n')
    with pytest.raises(UserError) as caught:
        load_config(path, (), pretrained_tables)
    assert ["is not supported" in problem for problem in caught.value.problems].count(True) == 1
    assert any("train.step" in problem for problem in caught.value.problems)


# -----------------------------------------------------------------------------------------------------------
# The commands


def test_eval_sample_and_export(saved: Saved, tmp_path: Path, monkeypatch, capsys) -> None:
    folder = changed(saved("llama, grouped, yarn")[0], tmp_path / "llama")
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_bytes(b"The cat sat on the mat. " * 12)

    def call(module, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    how = ("--lengths", "8,64", "--extend", "pi", "--windows", "2")
    with pytest.raises(UserError, match="--data: missing; a Hugging Face folder has no corpus"):
        call(eval_command, folder, *how)
    assert "trained at L = 16, on a:" in call(eval_command, folder, *how, "--data", text)
    content = json.loads((folder / "eval" / "a.json").read_text())
    assert content["seq_len"] == 16 and {r["extend"] for r in content["records"]} == {None, "pi"}
    assert call(sample, folder, "--prompt", "The", "--tokens", "5", "--top-k", "1").startswith("The")
    assert "out: LlamaForCausalLM" in call(export_command, folder, out)
    with pytest.raises(UserError, match="not empty"):
        call(export_command, folder, out)


def test_every_way_to_extend_applies(saved: Saved) -> None:
    model, config, _ = load_run(saved("llama")[0])
    x = tokens((1, 200), vocab_size=300)
    plain = model(x)
    factors = f"short_factor={[1.0] * 6},long_factor={[4.0] * 6}"
    given = {"base": "base:base=1e6", "longrope": f"longrope:{factors}"}
    for name in EXTENSIONS:
        extend = parse(given.get(name, name))
        assert all(method.problem(model, config, 200) is None for method in extend.methods)
        with extended(model, config, extend.methods, 200):
            assert (model(x) - plain).abs().max() > 1e-3, name
        assert torch.equal(model(x), plain)


@pytest.mark.slow
def test_the_advice_is_in_one_table_and_what_it_writes_has_the_same_loss(saved: Saved, tmp_path: Path, capsys,
                                                                        monkeypatch) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(words(3, 4000))
    folder = shutil.copytree(saved("llama")[0], tmp_path / "model")

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, arguments)])
        eval_command.main()
        return capsys.readouterr().out

    common = ("--data", book, "--windows", "8", "--dtype", "float32")
    for chosen in ("yarn", "ntk", "pi", "dynamic_ntk", "llama3"):
        out = tmp_path / chosen
        said = call(folder, *common, "--advise", "--extend", chosen, "--write", out, "--replace")
        assert f"wrote {out}: {chosen} for 256 tokens" in said
        wanted = {r["length"]: r["nll_sum"] for r in results.read(folder / "eval" / "book.json").records
                  if (r["extend"], r["protocol"]) == (chosen, "fixed")}
        # the folder's own L may be that of the extension, and a factor of 4 serves 256 tokens alone
        call(out, *common, "--protocol", "fixed", "--lengths", "256", "--train-length", "64")
        (written,) = results.read(out / "eval" / "book.json").records
        assert written["nll_sum"] == pytest.approx(wanted[256], rel=1e-6), chosen
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        x = tokens((1, 256), vocab_size=300)
        torch.testing.assert_close(load_run(out)[0](x), theirs(x).logits, atol=1e-4, rtol=0)
    said = call(folder, *common, "--advise", "--replace")
    rows = [line.split()[:2] for line in said.split("in config.json\n")[1].splitlines()]
    assert {method for length, method in rows if length == "256"} == {"plain", *advice.METHODS}
    assert said.splitlines()[-1].startswith("at 256 tokens ")
    with pytest.raises(UserError, match="config.json has no form for any of these methods"):
        call(folder, *common, "--advise", "--extend", "window", "--write", tmp_path / "no", "--replace")
    with pytest.raises(UserError, match="--write .*: needs --advise; add it"):
        call(folder, *common, "--write", tmp_path / "no")


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True], ids=["transformers 5", "transformers 4"])
def test_the_rotated_share_survives_what_the_advice_writes(is_old: bool, saved: Saved, tmp_path: Path,
                                                           monkeypatch) -> None:
    """Phi-3 turns half of the channels. transformers 4 has the share and the base outside rope_parameters."""
    book, folder, out = tmp_path / "book.txt", tmp_path / "model", tmp_path / "out"
    book.write_bytes(words(3, 4000))
    shutil.copytree(saved("phi3")[0], folder)
    if is_old:
        content = json.loads((folder / "config.json").read_text())
        inside = content.pop("rope_parameters")
        content |= {key: inside[key] for key in ("rope_theta", "partial_rotary_factor")}
        (folder / "config.json").write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", [
        "eval.py", str(folder), "--data", str(book), "--windows", "8", "--dtype", "float32", "--advise",
        "--extend", "ntk", "--write", str(out)])
    eval_command.main()
    written = json.loads((out / "config.json").read_text())
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5
    before, after = (load_run(path)[0] for path in (folder, out))
    assert after.encoding.rotary_dim == before.encoding.rotary_dim == before.blocks[0].attention.head_dim // 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    x = tokens((1, 100), vocab_size=300)
    torch.testing.assert_close(after(x), theirs(x).logits, atol=1e-4, rtol=0)
    assert (after(x) - before(x)).abs().max() > 1e-3


@pytest.mark.parametrize("text", ["7", "[]", "null", '"eos_token_id"'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json",
                                  "generation_config.json"])
def test_a_json_file_of_a_folder_that_holds_no_object(saved: Saved, tmp_path: Path, name: str,
                                                      text: str) -> None:
    folder = shutil.copytree(saved("llama")[0], tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=rf"model.*{name}"):
        eos_ids(folder)
        load_run(folder)


@pytest.mark.parametrize("found", ['"</s>"', "[[1]]", "{}", "1.5"])
def test_an_end_that_is_no_id_is_an_error(tmp_path: Path, found: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {found}}}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id: must be an id or a list"):
        eos_ids(tmp_path)


def test_chat_uses_the_template_and_sampling_ends_at_eos(saved: Saved, tmp_path: Path, monkeypatch,
                                                         capsys) -> None:
    folder = shutil.copytree(saved("llama")[0], tmp_path / "model")
    content = tokenizer_json(ByteTokenizer())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<|im_end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 256]}')
    tokenizer = load_run(folder)[2]
    with pytest.raises(UserError, match="has no chat template; leave --chat out"):
        chat_ids(folder, tokenizer, "hi")
    template = ("{% for m in messages %}\n{{ bos_token + m['role'] }}: {{ m['content'] + eos_token }}\n"
                "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template([{"role": "user", "content": "hé"}], add_generation_prompt=True,
                                          return_dict=False)
    assert chat_ids(folder, tokenizer, "hé") == expected and expected[0] == 256 and 257 in expected
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="its chat template fails .*; leave --chat out"):
        chat_ids(folder, tokenizer, "hi")
    (folder / "chat_template.jinja").write_text(template)
    for flags, expected in (([], "hiab\n"), (["--chat"], "ab\n")):      # the prompt of a chat is not repeated
        drawn = iter(torch.tensor([[[97]], [[98]], [[257]], [[99]]]))
        monkeypatch.setattr(sample, "stream", lambda *_, drawn=drawn: drawn)
        monkeypatch.setattr(sys, "argv", ["sample.py", str(folder), "--prompt", "hi", *flags])
        sample.main()
        assert capsys.readouterr().out == expected
        assert next(drawn).item() == 99         # nothing is drawn after the end
