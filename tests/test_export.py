"""Runs as folders of Hugging Face: what transformers makes of them is what we make of them."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, tokens
from safetensors.torch import load_file

import rope
from config import load_config
from data.prepare import Options, prepare
from data.tokenizer import ByteTokenizer
from hf.architectures import ARCHITECTURES, choose
from hf.export import export
from hf.pretrained import load_pretrained, resolve_config
from hf.tokenizer import tokenizer_json
from positions import ENCODINGS
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

LONG = [1.0 + i / 4 for i in range(8)]
GPT_BLOCK = ("model.norm=layernorm", "model.tied=true", "model.bias=true", "model.mlp=gelu")
GEMMA = ("model.qk_norm=true", "model.post_norm=true", "model.scaled_embedding=true", "model.mlp=geglu",
         "model.tied=true")
GQA = ("model.n_head=4", "model.n_kv_head=2", "model.n_embd=64")
CASES = {       # name -> architecture, encoding, what else
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
    "yarn, all said": ("llama", "rope", 'position.scaling={method="yarn",factor=8.0,attention_factor=1.25,'
                                        "truncate=false,beta_fast=3.0,beta_slow=0.5}"),
    "llama3": ("llama", "rope", 'position.scaling={method="llama3",factor=8.0}'),
    "longrope": ("llama", "rope", f'position.scaling={{method="longrope",factor=4.0,short_factor={[1.0] * 8},'
                                  f"long_factor={LONG}}}"),
    "window": ("mistral", "rope", "model.window=7", "model.head_dim=12"),
    "chunks": ("llama4_text", "rope", *GQA, "model.n_layer=3", "model.chunk=9", "model.full_every=2",
               "position.skip_every=2", "position.temperature=llama4",
               "position.temperature_layers=unencoded"),
    "steps": ("ministral3", "rope", *GQA, "model.window=40", "position.temperature=ministral3",
              'position.scaling={method="yarn",factor=4.0,beta_fast=2.0,attention_factor=1.0}'),
    "qwen2": ("qwen2", "rope", *GQA, "model.qkv_bias=true", "model.tied=true"),
    "qwen3": ("qwen3", "rope", *GQA, "model.qk_norm=true", "model.head_dim=24",
              "position.layout=interleaved"),
    "gemma3": ("gemma3_text", "rope", *GQA, *GEMMA, "model.n_layer=4", "model.window=9", "model.full_every=2",
               "position.base=2000.0", "position.local_base=300.0", "model.head_dim=20",
               'position.scaling={method="pi",factor=4.0}'),
    "gemma3, one base": ("gemma3_text", "rope", *GEMMA, "model.window=11", "position.layout=interleaved",
                         'position.scaling={method="yarn",factor=4.0,original_length=16,beta_fast=2.0}'),
    "layers": ("smollm3", "rope", *GQA, "model.n_layer=3", "position.layers=[0, 2]"),
    "skip": ("smollm3", "rope", "model.n_layer=3", "position.skip_every=2",
             'position.scaling={method="yarn",factor=4.0,beta_fast=2.0}'),
    "first": ("smollm3", "rope", "position.layers=first", "position.layout=interleaved"),
    "none": ("smollm3", "none", "model.tied=true"),
    "partial": ("phi3", "rope", *GQA, "position.fraction=0.5", "position.layout=interleaved"),
    "partial longrope": ("phi3", "rope", "position.fraction=0.25", "model.window=9", "model.n_head=1",
                         f'position.scaling={{method="longrope",factor=4.0,short_factor={[1.0] * 4},'
                         f"long_factor={LONG[:4]}}}"),
    "learned": ("gpt2", "learned", *GPT_BLOCK, "train.seq_len=224", "train.batch_size=1"),
    "learned untied": ("gpt2", "learned", *GPT_BLOCK, "model.tied=false", "model.n_hidden=48"),
    "alibi": ("mpt", "alibi", "model.norm=layernorm", "model.mlp=gelu_exact", "model.n_head=4",
              "model.tied=true"),
    "alibi untied": ("mpt", "alibi", "model.norm=layernorm", "model.mlp=gelu_exact", "model.n_head=3",
                     "model.n_embd=48"),
}
FAST = {"llama", "yarn", "learned untied", "alibi untied"}
every_case = pytest.mark.parametrize("case", [
    case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
LENGTH_CHANGES_ALL = {"dynamic", "longrope", "partial longrope"}        # but not keys that they cached
BF16 = {"grouped": 60, "window": 60, "qwen2": 60, "qwen3": 60, "layers": 60, "partial longrope": 60,
        "learned untied": 120, "alibi": 100}                            # steps: until the text is learned

Exported = Callable[[str], tuple[Path, Path]]
loaded: dict[Path, tuple] = {}


def export_run(run: Path, out: Path) -> str:
    return export(run, out, *load_run(run))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """case -> (run, folder), trained and exported once, on text that can be learned by heart."""
    source = tmp_path_factory.mktemp("source")
    for i in range(24):
        text = b"The dog chased another dog. " * 80
        (source / f"{i:02}.txt").write_bytes(text[3 * i:])
    prepare(str(source), source / "corpus", "byte")
    done: dict[str, tuple[Path, Path]] = {}

    def make(case: str) -> tuple[Path, Path]:
        if case in done:
            return done[case]
        folder = tmp_path_factory.mktemp("case")
        architecture, encoding, *overrides = CASES[case]
        path, steps = folder / "run.toml", BF16.get(case, 8)
        path.write_text(f'[data]\ndir = "{source / "corpus"}"\n[position]\nencoding = "{encoding}"\n')
        config = load_config(path, [*TINY, f"run.dir={folder / 'run'}", "train.batch_size=8", "train.lr=1e-2",
                                    f"train.steps={steps}", "run.save_every=999", "run.eval_every=999",
                                    "run.log_every=999", "train.val_windows=1", *overrides])
        with torch.enable_grad():
            assert train(config, []) == 0
        assert export_run(folder / "run", folder / "hf") == ARCHITECTURES[architecture].class_name
        done[case] = folder / "run", folder / "hf"
        return done[case]
    return make


def theirs_of(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def both(folders: tuple[Path, Path]) -> tuple:
    """Our model, its config and tokenizer, and their model, each read once."""
    if folders[1] not in loaded:
        loaded[folders[1]] = *load_run(folders[0]), theirs_of(folders[1])
    return loaded[folders[1]]


@every_case
def test_logits_are_ours_inside_and_far_beyond_the_training_length(case: str, exported: Exported) -> None:
    ours, _, _, theirs = both(exported(case))
    for T in (1, 16, 17, 32, 33, 600):
        if (ours.encoding.max_length or T) >= T:
            x = tokens((2, T), seed=T)
            torch.testing.assert_close(theirs(x).logits, ours(x), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16)
def test_in_bf16_the_likeliest_token_is_the_same(case: str, exported: Exported) -> None:
    """Ours as eval.py runs it, theirs as it is served. A window's first bytes leave open which word it is."""
    ours, config, tokenizer, theirs = both(exported(case))
    theirs = copy.deepcopy(theirs).bfloat16()
    text = tokenizer.encode(b"The dog chased another dog. " * 84)
    x = torch.tensor(text[:32 * 73].reshape(73, 32).astype(int))
    settings = config.train.model_copy(update={"dtype": "bfloat16"})
    with autocast(settings, torch.device("cpu")):
        found = ours(x).argmax(-1)
    is_same = (found == theirs(x).logits.argmax(-1))[:, 8:]
    assert is_same.float().mean() >= 0.999
    assert (found[:, 8:-1] == x[:, 9:]).float().mean() > 0.9            # it was learned


@pytest.mark.parametrize(("case", "n"), [("grouped", 12), ("alibi untied", 12), *(
    pytest.param(case, 200, marks=pytest.mark.slow) for case in CASES)])
def test_greedy_tokens_are_the_same(case: str, n: int, exported: Exported) -> None:
    ours, _, tokenizer, theirs = both(exported(case))
    n = min(n, (ours.encoding.max_length or 999) - 8)
    assert n in (12, 200) or case == "learned untied"   # L = 32 there
    prompt = torch.tensor([[tokenizer.eot, *b"The cat"]])
    is_cached = case not in LENGTH_CHANGES_ALL
    found = theirs.generate(prompt, max_new_tokens=n, do_sample=False, use_cache=is_cached, eos_token_id=None,
                            attention_mask=torch.ones_like(prompt))
    expected = generate(ours, prompt, n, temperature=0) if is_cached else prompt
    while expected.shape[1] < found.shape[1]:
        expected = torch.cat((expected, ours(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, expected)


@every_case
def test_there_and_back_is_the_same_bits(case: str, exported: Exported) -> None:
    _, folder = exported(case)
    ours, config, tokenizer, theirs = both(exported(case))
    back, config_back, tokenizer_back = load_pretrained(folder)
    assert tokenizer_back.sha256 == tokenizer.sha256
    before, after = ours.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    mine, hf = (getattr(c.position, "layout", "half") for c in (config, config_back))
    if mine != hf:
        D, R = config.model.head_width, ours.encoding.rotary_dim
        reorder = rope.to_interleaved if mine == "interleaved" else rope.to_half
        for name in after:
            if name.split(".")[-2] in ("q", "k", "q_norm", "k_norm"):
                after[name] = reorder(after[name], len(after[name]) // D, R)
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    x = tokens((2, 32))
    torch.testing.assert_close(back(x), ours(x), atol=2e-5, rtol=0)     # the same but for the order of sums
    assert config_back.train.seq_len == getattr(
        getattr(config.position, "scaling", None), "original_length", None) or config.train.seq_len
    again = folder.parent / "again"
    export_run(folder, again)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((again / name).read_text()) == json.loads((folder / name).read_text())
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@every_case
def test_the_folder_needs_nothing_of_ours_and_opens_documents_as_we_do(case: str, exported: Exported) -> None:
    _, folder = exported(case)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "README.md"}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        text = (folder / name).read_text()
        assert "nanorope" not in text and "auto_map" not in text
    theirs, tokenizer = both(exported(case))[3], transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 256
    assert theirs.generation_config.bos_token_id == theirs.generation_config.eos_token_id == 256
    assert tokenizer("dog").input_ids == list(b"dog")
    assert tokenizer("<|endoftext|>dog").input_ids == [256, *b"dog"]
    assert f"{sum(p.numel() for p in theirs.parameters()):,} parameters" in (folder / "README.md").read_text()


# -----------------------------------------------------------------------------------------------------------
# What has no equivalent

FITS = {        # encodings that can leave, and with what
    "rope": (), "none": (), "learned": GPT_BLOCK, "alibi": ("model.norm=layernorm", "model.mlp=gelu_exact")}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_leaves_or_is_refused_by_name(encoding: str, tiny) -> None:
    if encoding in FITS:        # at any learning rate
        choose(tiny(encoding, *FITS[encoding]))
        choose(tiny(encoding, *FITS[encoding], "position.lr_scale=3.0"))
        return
    with pytest.raises(UserError, match=rf"does not support position.encoding = '{encoding}'$") as caught:
        choose(tiny(encoding))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("overrides", "named"), [
    (["position.temperature=log_n"], ["position.temperature = 'log_n'"]),
    (["position.scale_invariant=10.0", "position.drop_at=0.5"],
     ["position.scale_invariant = 10.0", "position.drop_at = 0.5"]),
    (["model.window=5", "model.full_every=2"], ["model.full_every = 2"]),
    (["model.window=5", "position.local_base=9.0"], ["position.local_base = 9.0"]),
    (["model.chunk=5", "position.temperature=llama4"], ["position.temperature_layers = 'all'"]),
    (["model.chunk=5", "position.temperature=log_n"], ["position.temperature = 'log_n'"]),
    (["model.norm=layernorm", "model.mlp=relu2"], ["model.norm = 'layernorm'", "model.mlp = 'relu2'"]),
    (["position.fraction=0.5", "model.qk_norm=true"], ["position.fraction = 0.5"]),
    (["position.fraction=0.5", 'position.scaling={method="pi",factor=2.0}'], []),
    (["position.spectrum=hope", 'position.scaling={method="mrrope",factor=2.0}'],
     ["position.spectrum = 'hope'", "position.scaling = 'mrrope'"]),
    (["model.qkv_bias=true", "position.layers=first"], ["position.layers = 'first'"]),
])
def test_what_stands_in_the_way_is_named_all_at_once(overrides: list[str], named: list[str], tiny) -> None:
    with pytest.raises(UserError) as caught:
        choose(tiny("rope", *overrides))
    (problem,) = caught.value.problems
    assert "\n" not in problem and all(text in problem for text in named), problem


def test_a_temperature_and_a_scaling_must_have_the_same_l_for_ministral(tiny) -> None:
    for L, expected in ((8, ["position.scaling.original_length = 8"]), (32, [])):
        config = tiny("rope", "position.temperature=ministral3",
                      f'position.scaling={{method="yarn",factor=2.0,original_length={L}}}')
        assert ARCHITECTURES["ministral3"].obstacles(config) == expected


@pytest.mark.parametrize("encoding", ["learned", "alibi"])
def test_a_block_that_is_not_theirs_is_refused(encoding: str, tiny) -> None:
    with pytest.raises(UserError, match="does not support model.norm = 'rmsnorm', model.mlp = 'swiglu'"):
        choose(tiny(encoding))
    with pytest.raises(UserError, match="does not support position.learned = True$"):
        choose(tiny("alibi", *FITS["alibi"], "position.learned=true"))


def test_an_option_that_no_table_knows_stands_in_the_way(tiny, monkeypatch) -> None:
    """New keys of [model] and of encodings are refused until they are thought about."""
    config = tiny("rope")
    for owner, key in ((type(config.model), "model.dream"), (type(config.position), "position.dream")):
        fields = {**owner.model_fields, "dream": owner.model_fields["norm_eps" if "model" in key else "base"]}
        part = config.model if "model" in key else config.position
        with monkeypatch.context() as patch:
            patch.setattr(owner, "__pydantic_fields__", fields)
            object.__setattr__(part, "dream", 0.5)
            with pytest.raises(UserError, match=f"{key} = 0.5"):
                choose(config)
            object.__delattr__(part, "dream")


def test_out_dir_is_never_overwritten(tiny, tmp_path: Path) -> None:
    with torch.enable_grad():
        train(tiny("rope", "train.steps=1"), [])
    (tmp_path / "out").mkdir()
    export_run(tmp_path / "run", tmp_path / "out")                          # empty: fine
    with pytest.raises(UserError, match="not empty"):
        export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match="no run there"):
        export_run(tmp_path / "nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


def test_a_fine_tuned_instruct_model_keeps_its_tokens_template_and_length(tmp_path: Path, capsys) -> None:
    """bos is not eos; the tokenizer adds bos; what is copied is what transformers reads there."""
    source, run = tmp_path / "instruct", tmp_path / "run"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=257)
    ).save_pretrained(source)
    content = tokenizer_json(ByteTokenizer())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<|im_end|>"})
    (source / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    (source / "generation_config.json").write_text('{"eos_token_id": [257, 256], "temperature": 0.2}')
    prepare("parity", tmp_path / "corpus", str(source),
            Options(length=32, limit_tokens=4000))
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{tmp_path / "corpus"}"\n[train]\ninit_from = "{source}"\n')
    yarn = 'position.scaling={method="yarn",factor=4.0,original_length=512}'
    for name, overrides, longest in (("plain", (), 512), ("yarn", (yarn,), 2048)):
        tiny = [one for one in TINY if not one.startswith(("model.", "train.steps"))]
        with torch.enable_grad():
            train(resolve_config(path, [*tiny, "train.steps=1", f"run.dir={run}-{name}", *overrides]), [])
        out = tmp_path / name
        export_run(Path(f"{run}-{name}"), out)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                     "generation_config.json"):
            assert (out / file).read_bytes() == (source / file).read_bytes(), file
        written = json.loads((out / "config.json").read_text())
        assert [written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [256, 257, 257]
        assert written["max_position_embeddings"] == longest
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.eos_token == "<|im_end|>"
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi<|im_end|>"
        x = tokens((1, 40))
        ours = load_run(f"{run}-{name}")[0](x)
        torch.testing.assert_close(theirs_of(out)(x).logits, ours, atol=1e-4, rtol=0)
    export(Path(f"{run}-plain"), tmp_path / "asked", *load_run(f"{run}-plain"), max_length=64)
    assert json.loads((tmp_path / "asked" / "config.json").read_text())["max_position_embeddings"] == 64
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    a, b, *_ = ids
    ids[a], ids[b] = ids[b], ids[a]
    for number, content in enumerate((json.dumps(vocabulary), "{")):    # those ids are not the run's
        (source / "tokenizer.json").write_text(content)
        out = tmp_path / f"changed-{number}"
        export_run(Path(f"{run}-plain"), out)
        assert f"warning: {source}: has another tokenizer now, or is damaged" in capsys.readouterr().out
        assert json.loads((out / "tokenizer.json").read_text())["model"]["vocab"][a] == ids[b]
    source.rename(tmp_path / "elsewhere")
    export_run(Path(f"{run}-plain"), tmp_path / "lost")
    assert f"warning: {source}: is gone" in capsys.readouterr().out
