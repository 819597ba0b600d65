"""What transformers computes from a folder is what we compute, in both directions, for all architectures."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace as One

import pytest
import torch
from toys import lively, tokens

import export as export_command
from data.tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer
from evaluation.extension import extended, parse
from hf.architectures import ARCHITECTURES
from hf.export import export
from hf.pretrained import pretrained_tables
from hf.tokenizer import rebuilt_parts, tokenizer_json
from positions.scaling import YaRN
from runtime.checkpoint import load_run
from sample import generate

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients")]

LONG = [1.0 + i / 4 for i in range(8)]
GPT_BLOCK = ("model.norm=layernorm", "model.bias=true", "model.mlp=gelu")
NEOX_BLOCK = ("model.norm=layernorm", "model.bias=true", "model.mlp=gelu_exact")
MPT_BLOCK = ("model.norm=layernorm", "model.mlp=gelu_exact")
GEMMA = ("model.qk_norm=true", "model.post_norm=true", "model.scaled_embedding=true", "model.mlp=geglu",
         "model.tied=true")
COHERE = ("model.norm=layernorm", "model.parallel=true", "model.n_layer=4", "model.window=9",
          "model.full_every=2", "position.skip_every=2")
GQA = ("model.n_head=4", "model.n_kv_head=2", "model.n_embd=64")
RUNS = {        # name -> architecture, encoding, what else
    "llama": ("llama", "rope"),
    "tied": ("llama", "rope", "model.tied=true"),
    "biases": ("llama", "rope", "model.bias=true"),
    "grouped": ("llama", "rope", *GQA),
    "interleaved": ("llama", "rope", *GQA, "position.layout=interleaved", "position.base=500.0"),
    "base": ("llama", "rope", 'position.scaling={method="base",base=500000.0}'),
    "ntk": ("llama", "rope", 'position.scaling={method="ntk",factor=4.0}'),
    "pi": ("llama", "rope", 'position.scaling={method="pi",factor=4.0}'),
    "dynamic": ("llama", "rope", 'position.scaling={method="dynamic_ntk",factor=2.0,original_length=16}'),
    "yarn": ("llama", "rope", "position.layout=interleaved",
             'position.scaling={method="yarn",factor=4.0,original_length=16,beta_fast=2.0}'),
    "yarn, all": ("llama", "rope", 'position.scaling={method="yarn",factor=8.0,attention_factor=1.25,'
                                   "truncate=false,beta_fast=3.0,beta_slow=0.5}"),
    "llama3": ("llama", "rope", 'position.scaling={method="llama3",factor=8.0}'),
    "longrope": ("llama", "rope", f'position.scaling={{method="longrope",factor=4.0,short_factor={[1.0] * 8},'
                                  f"long_factor={LONG}}}"),
    "window": ("mistral", "rope", "model.window=7", "model.head_dim=12"),
    "qwen2": ("qwen2", "rope", *GQA, "model.qkv_bias=true", "model.tied=true"),
    "seed_oss": ("seed_oss", "rope", *GQA, "model.qkv_bias=true", "model.head_dim=12"),
    "qwen3": ("qwen3", "rope", *GQA, "model.qk_norm=true", "model.head_dim=24",
              "position.layout=interleaved"),
    "gemma3": ("gemma3_text", "rope", *GQA, *GEMMA, "model.n_layer=4", "model.window=9", "model.full_every=2",
               "position.base=2000.0", "position.local_base=300.0", "model.head_dim=20",
               'position.scaling={method="pi",factor=4.0}'),
    "gemma3, one base": ("gemma3_text", "rope", *GEMMA, "model.window=11", "position.layout=interleaved",
                         'position.scaling={method="yarn",factor=4.0,original_length=64,beta_fast=4.0,'
                         'truncate=false}'),
    "gemma3, unscaled": ("gemma3_text", "rope", *GEMMA, "model.n_layer=4", "model.window=9",
                         "model.full_every=2"),
    "layers": ("smollm3", "rope", *GQA, "model.n_layer=3", "position.layers=[0, 2]"),
    "skip": ("smollm3", "rope", "model.n_layer=3", "position.skip_every=2",
             'position.scaling={method="yarn",factor=4.0,beta_fast=2.0}'),
    "first": ("smollm3", "rope", "position.layers=first", "position.layout=interleaved"),
    "windows": ("smollm3", "rope", *GQA, "model.n_layer=4", "model.window=9", "model.full_every=2"),
    "rnope-swa": ("smollm3", "rope", "model.n_layer=4", "model.window=9", "model.full_every=2",
                  "position.skip_every=2", "position.layout=interleaved", "model.tied=true"),
    "cohere2": ("cohere2", "rope", *GQA, *COHERE, "model.tied=true", "position.base=500.0"),
    "cohere2, half": ("cohere2", "rope", *COHERE, "position.layout=half", "model.n_hidden=48",
                      'position.scaling={method="pi",factor=4.0}'),
    "p_rope": ("llama", "p_rope", *GQA, "position.p=0.6", "position.layout=interleaved"),
    "p_rope, q and k norms": ("qwen3", "p_rope", "model.qk_norm=true", "model.head_dim=20",
                              "position.base=300.0"),
    "p_rope, layers": ("smollm3", "p_rope", "model.n_layer=4", "model.window=9", "model.full_every=2",
                       "position.skip_every=2", "position.p=0.5"),
    "p_rope, windows": ("gemma3_text", "p_rope", *GEMMA, "model.n_layer=4", "model.window=9",
                        "model.full_every=2", "position.p=0.25"),
    "none": ("smollm3", "none", "model.tied=true"),
    "partial": ("phi3", "rope", *GQA, "position.fraction=0.5", "position.layout=interleaved"),
    "partial longrope": ("phi3", "rope", "position.fraction=0.25", "model.window=9", "model.n_head=1",
                         f'position.scaling={{method="longrope",factor=4.0,short_factor={[1.0] * 4},'
                         f"long_factor={LONG[:4]}}}"),
    "olmo2": ("olmo2", "rope", *GQA, "model.qk_norm=whole", "model.pre_norm=false", "model.post_norm=true",
              "position.layout=interleaved"),
    "neox": ("gpt_neox", "rope", *NEOX_BLOCK, "model.parallel=true", "position.fraction=0.25",
             'position.scaling={method="pi",factor=4.0}'),
    "neox in turn": ("gpt_neox", "rope", *NEOX_BLOCK, "model.n_head=1", "position.layout=interleaved",
                     "position.fraction=0.5", "model.tied=true", "model.n_hidden=48"),
    "learned": ("gpt2", "learned", *GPT_BLOCK, "model.tied=true", "train.seq_len=224"),
    "learned untied": ("gpt2", "learned", *GPT_BLOCK, "model.n_hidden=48"),
    "alibi": ("mpt", "alibi", *MPT_BLOCK, "model.n_head=4", "model.tied=true"),
    "alibi untied": ("mpt", "alibi", *MPT_BLOCK, "model.n_head=3", "model.n_embd=48"),
}
ORIGINAL = "original_max_position_embeddings"
every_case = pytest.mark.parametrize("case", RUNS)
made: dict[str, One] = {}


def tokenizer_of(architecture: str, folder: Path) -> Tokenizer:
    """Bytes; with Qwen2's words where the architecture needs them."""
    if architecture != "qwen2":
        return ByteTokenizer()
    content = tokenizer_json(ByteTokenizer()) | rebuilt_parts(None)["Qwen2Tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return PretrainedTokenizer(folder / "tokenizer.json", 256)


def theirs_of(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_equal_logits(ours: torch.nn.Module, theirs: torch.nn.Module, *lengths: int) -> None:
    for T in lengths:
        if (ours.encoding.max_length or T) >= T:
            x = tokens((2, T), seed=T)
            torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=0)


@pytest.fixture
def one(case: str, tiny, tmp_path_factory: pytest.TempPathFactory) -> One:
    """Our model with random weights, its folder, and the folder that transformers saves, in several files."""
    if case not in made:
        architecture, encoding, *overrides = RUNS[case]
        config, folder = tiny(encoding, *overrides), tmp_path_factory.mktemp("case")
        ours = lively(config)
        for weight in ours.parameters():        # rounding grows with the weights, from layer to layer
            weight.copy_(weight / 2 if weight.dim() > 1 else 1 + 0.3 * weight)
        tokenizer = tokenizer_of(architecture, folder)
        name = export(folder / "run", folder / "ours", ours, config, tokenizer)
        theirs = theirs_of(folder / "ours")
        theirs.save_pretrained(folder / "theirs", max_shard_size="60KB")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "ours" / file, folder / "theirs")
        made[case] = One(config=config, ours=ours, folder=folder, name=name, theirs=theirs)
    return made[case]


@every_case
def test_logits_within_and_far_beyond_the_training_length(case: str, one: One) -> None:
    assert one.name == type(one.theirs).__name__ == ARCHITECTURES[RUNS[case][0]].class_name
    assert_equal_logits(one.ours, one.theirs, 1, 16, 17, 32, 33, 600)


@every_case
def test_what_transformers_wrote_is_what_we_wrote(case: str, one: One) -> None:
    """To the bit."""
    assert len(list((one.folder / "theirs").glob("*.safetensors"))) > 1
    ours, theirs = load_run(one.folder / "ours"), load_run(one.folder / "theirs")
    assert ours[1].model == theirs[1].model and ours[1].position == theirs[1].position
    L = getattr(getattr(one.config.position, "scaling", None), "original_length", None)
    assert ours[1].train.seq_len == theirs[1].train.seq_len == (L or one.config.train.seq_len)
    torch.testing.assert_close(ours[0](tokens((2, 32))), one.ours(tokens((2, 32))), atol=2e-5, rtol=0)
    for name, weight in ours[0].state_dict().items():
        assert torch.equal(weight, theirs[0].state_dict()[name]), name


@every_case
def test_greedy_tokens_are_the_same(case: str, one: One) -> None:
    """With both caches, unless the frequencies change with the length: transformers keeps rotated keys."""
    prompt, n = torch.tensor([[256, *b"The cat"]]), min(30, (one.ours.encoding.max_length or 999) - 8)
    is_cached = case != "dynamic" and "longrope" not in case
    found = one.theirs.generate(prompt, max_new_tokens=n, do_sample=False, use_cache=is_cached,
                                eos_token_id=None, attention_mask=torch.ones_like(prompt))
    expected = generate(one.ours, prompt, n, temperature=0) if is_cached else prompt
    while expected.shape[1] < found.shape[1]:
        expected = torch.cat((expected, one.ours(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, expected)


# -----------------------------------------------------------------------------------------------------------
# Other ways to say the same


def changed(folder: Path, to: Path, **fields) -> Path:
    """A copy of a folder with other fields in config.json; None removes one."""
    shutil.copytree(folder, to)
    content = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(
        {key: value for key, value in content.items() if value is not None or key not in fields}))
    return to


BOTH_PLAIN = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
BOTH = {"full_attention": {"rope_type": "default", "rope_theta": 2000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}


@pytest.mark.parametrize(("case", "fields", "expected"), [
    ("yarn", {"rope_theta": 10_000, "rope_scaling": {"type": "yarn", "factor": 4, ORIGINAL: 16,
                                                     "finetuned": True}}, {}),
    # no pair turns beta_slow times within 16 tokens
    ("yarn", {"rope_theta": 10_000, "rope_scaling": {"type": "yarn", "factor": 4, ORIGINAL: 16,
                                                     "beta_slow": 9}}, {}),
    ("neox", {"rotary_pct": 0.5, "rotary_emb_base": 500.0}, {"base": 500.0, "fraction": 0.5}),
    ("yarn", {"rope_theta": 500_000.0}, {"base": 500_000.0}),
    # rope_type wins over the older type
    ("yarn", {"rope_theta": 10_000, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4,
                                                     ORIGINAL: 16}}, {}),
    ("yarn", {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4}},
     {"base": 500.0}),
    ("gemma3", {"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_theta": 70_000, "rope_local_base_freq": 300}, {"base": 7e4, "local_base": 300.0}),
    ("gemma3", {"sliding_window_pattern": None, "rope_theta": 70_000, "rope_local_base_freq": 300},
     {"base": 7e4, "local_base": 300.0}),                           # every 6th layer, of 4
    ("gemma3", {"rope_theta": 70_000, "rope_scaling": {"type": "linear", "factor": 8}}, {"scaling": None}),
    ("gemma3", {"rope_parameters": BOTH_PLAIN}, {"base": 1e6, "local_base": 1e4}),
    ("gemma3", {"rope_parameters": BOTH, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
     {"base": 2000.0, "local_base": 300.0}),
    ("neox", {"rope_theta": 77.0, "rotary_pct": 0.5}, {"base": 10_000.0, "fraction": 0.5}),
    ("cohere2", {"logit_scale": 0.25}, {}),
    # layer_types decide, whatever the flag says
    ("layers", {"use_sliding_window": False, "sliding_window": 9, "rope_theta": 10_000.0,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, {}),
])
def test_rotary_parameters_as_before_5_0(case: str, fields: dict, expected: dict, one: One,
                                         tmp_path: Path) -> None:
    old = changed(one.folder / "theirs", tmp_path / "old",
                  **{"rope_parameters": None, "layer_types": None, **fields})
    ours, config, _ = load_run(old)
    assert expected.items() <= config.position.model_dump().items()
    assert_equal_logits(ours, theirs_of(old), 100)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("L", "beta_fast", "beta_slow", "base"), [
    (4096, 32.0, 1.0, 10_000.0), (16, 32.0, 9.0, 10_000.0), (4, 3.0, 0.6366197723675814, 10_000.0),
    (8192, 2.0, 1.0, 3.0)])
def test_yarns_frequencies_are_those_of_transformers(L: int, beta_fast: float, beta_slow: float, base: float,
                                                     truncate: bool) -> None:
    """Also where no pair turns beta_slow times within L, and where all turn more than beta_fast times."""
    keys = {"factor": 4.0, "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    theirs = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2, rope_parameters={
        "rope_type": "yarn", "rope_theta": base, ORIGINAL: L, **keys})
    expected = transformers.modeling_rope_utils._compute_yarn_parameters(theirs)
    f, factor = YaRN(**keys).frequencies(16, base, L, torch.arange(L))
    torch.testing.assert_close(f, expected[0], rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected[1])


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads")
FIRST = {RUNS[case][0]: case for case in reversed(RUNS)}
LONG_OLD = {"rope_scaling": {"type": "longrope", "short_factor": LONG[:4], "long_factor": LONG[:4]},
            "partial_rotary_factor": 0.5, "max_position_embeddings": 64, ORIGINAL: 16}


@pytest.mark.parametrize(("case", "more"), [
    *((case, {}) for case in FIRST.values() if case != "gemma3"), ("partial", LONG_OLD),
    *((case, {"num_key_value_heads": None}) for case in ("llama", "layers", "qwen2", "qwen3", "partial",
                                                         "seed_oss", "cohere2"))])
def test_what_config_json_leaves_out_is_what_transformers_takes(case: str, more: dict, one: One,
                                                                tmp_path: Path) -> None:
    content = json.loads((one.folder / "theirs" / "config.json").read_text())
    fields = {key: value for key, value in content.items() if key in (*NEEDED, "model_type")}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **more}))
    completed = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert pretrained_tables(tmp_path) == ARCHITECTURES[RUNS[case][0]].tables(completed)


@pytest.mark.parametrize(("case", "spec"), [
    ("gemma3, unscaled", "yarn:factor=4"), ("gemma3, unscaled", "ntk:factor=4"),
    *(("grouped", spec) for spec in ("yarn:factor=4", "ntk:factor=4", "pi:factor=4", "dynamic_ntk",
                                     "llama3:factor=4", "base:base=50000")), ("partial", "ntk:factor=4")])
def test_what_extend_writes_is_what_eval_measures(case: str, spec: str, one: One, tmp_path: Path,
                                                  monkeypatch) -> None:
    """At 4 L, in both. The share of channels that Phi-3 rotates stays, where transformers 4 has it too.

    So do the frequencies of Gemma 3's layers with a window.
    """
    folder, x = one.folder / "theirs", tokens((1, 128))
    with extended(one.ours, one.config, parse(spec).methods, 128):
        expected = one.ours(x)
    assert (expected - one.ours(x)).abs().max() > 1e-3
    inside = json.loads((folder / "config.json").read_text())["rope_parameters"]
    sources = [folder]
    if "sliding_attention" not in inside:       # which transformers 4 wrote otherwise
        sources.append(changed(folder, tmp_path / "older", rope_parameters=None, **{
            key: value for key, value in inside.items() if key != "rope_type"}))
    for number, source in enumerate(sources):
        out = tmp_path / str(number)
        monkeypatch.setattr("sys.argv", ["export.py", str(source), str(out), "--extend", spec])
        export_command.main()
        torch.testing.assert_close(load_run(out)[0](x), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs_of(out)(x).logits, expected, atol=1e-4, rtol=0)
