"""Runs as Hugging Face folders: round trips are equal to the bit, and what has no equivalent is named.

tests/peers/test_transformers.py compares the logits with those of transformers.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from toys import TINY, call, lively, tokens

import export as export_command
from base.errors import UserError
from config import Config, load_config
from data.prepare import prepare
from data.tokenizer import ByteTokenizer
from hf.architectures import choose
from hf.export import export, rope_fields, write_extended
from hf.pretrained import pretrained_config, pretrained_tables
from hf.rope_parameters import rope_parameters
from hf.tokenizer import tokenizer_json
from positions import ENCODINGS
from positions.scaling import YaRN
from runtime.checkpoint import load_run
from train import train

GPT_BLOCK = ("model.norm=layernorm", "model.bias=true", "model.mlp=gelu", "model.tied=true")
FITS = {        # encodings that can leave, and with which block
    "rope": (), "p_rope": (), "none": (), "learned": GPT_BLOCK,
    "alibi": ("model.norm=layernorm", "model.mlp=gelu_exact")}
GEMMA = ("model.qk_norm=true", "model.post_norm=true", "model.scaled_embedding=true", "model.mlp=geglu")
EXPORTS = {     # architecture -> encoding and overrides of a small run that becomes it
    "llama": ("rope",),
    "qwen2": ("rope", "model.qkv_bias=true"),
    "qwen3": ("rope", "model.qk_norm=true"),
    "mistral": ("rope", "model.window=9"),
    "smollm3": ("none",),
    "phi3": ("rope", "position.fraction=0.5"),
    "cohere2": ("rope", "model.norm=layernorm", "model.parallel=true", "model.window=9", "model.full_every=2",
                "position.skip_every=2"),
    "olmo2": ("rope", "model.qk_norm=whole", "model.pre_norm=false", "model.post_norm=true"),
    "gpt_neox": ("rope", "model.norm=layernorm", "model.bias=true", "model.mlp=gelu_exact"),
    "gpt2": ("learned", *GPT_BLOCK),
    "mpt": ("alibi", *FITS["alibi"]),
    "gemma3_text": ("rope", *GEMMA, "model.window=9"),
}
YARN = ("model.n_kv_head=1", 'position.scaling={method="yarn",factor=4.0,original_length=32,beta_fast=2.0}')


def saved(config: Config, out: Path) -> Path:
    """A folder with random weights."""
    export(out.with_name("run"), out, lively(config), config, ByteTokenizer())
    return out


@pytest.mark.parametrize(("encoding", "overrides"), [("rope", YARN), ("learned", GPT_BLOCK)])
def test_there_and_back_is_the_same_bits(encoding: str, overrides: tuple[str, ...], tiny,
                                         tmp_path: Path) -> None:
    """Llama and GPT-2."""
    config = tiny(encoding, *overrides)
    model, folder = lively(config), saved(config, tmp_path / "hf")
    back, config_back, tokenizer = load_run(folder)
    assert config_back.position == config.position and config_back.train.seq_len == config.train.seq_len
    assert back.state_dict().keys() == model.state_dict().keys() and isinstance(tokenizer, ByteTokenizer)
    assert all(torch.equal(weight, back.state_dict()[name]) for name, weight in model.state_dict().items())
    assert torch.equal(back(tokens((2, 32))), model(tokens((2, 32))))
    export(folder, tmp_path / "again", back, config_back, tokenizer)
    for path in {*folder.iterdir()} - {folder / "README.md"}:
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_leaves_or_is_refused_by_name(encoding: str, tiny) -> None:
    if encoding in FITS:        # at any learning rate
        choose(tiny(encoding, *FITS[encoding], "position.lr_scale=3.0"))
        return
    with pytest.raises(UserError, match=rf"does not support position.encoding = '{encoding}'$"):
        choose(tiny(encoding))


@pytest.mark.parametrize(("encoding", "overrides", "named"), [
    ("rope", ["position.scale_invariant=10.0", "position.drop_at=0.5"],
     ["position.scale_invariant = 10.0", "position.drop_at = 0.5"]),
    ("rope", ["model.window=5", "model.full_every=2", "model.qk_norm=true"], ["model.qk_norm = True"]),
    ("rope", ["model.window=5", "model.full_every=2", "position.layers=[1]", "model.norm=layernorm",
              "model.parallel=true"], ["position.layers or skip_every beside windows in other layers"]),
    ("rope", ["model.sink=head"], ["model.sink = 'head'"]),
    ("p_rope", ['position.scaling={method="pi",factor=2.0}'], ["position.scaling"]),
    ("rope", ["model.norm=layernorm", "model.mlp=relu2"], ["model.norm = 'layernorm', model.mlp = 'relu2'"]),
    ("rope", ["position.fraction=0.5", 'position.scaling={method="pi",factor=2.0}'],
     ["does not support position."]),
    ("rope", ["position.spectrum=hope", 'position.scaling={method="mrrope",factor=2.0}'],
     ["position.spectrum = 'hope'", "position.scaling = 'mrrope'"]),
    ("rope", ["model.qkv_bias=true", "position.layers=first"], ["position.layers = 'first'"]),
    ("alibi", [*FITS["alibi"], "position.learned=true"], ["position.learned = True"]),
])
def test_every_setting_in_the_way_is_named(encoding: str, overrides: list[str], named: list[str],
                                           tiny) -> None:
    with pytest.raises(UserError) as caught:
        choose(tiny(encoding, *overrides))
    (problem,) = caught.value.problems
    assert all(text in problem for text in named), problem


@pytest.mark.parametrize(("overrides", "misread"), [
    ([], ""), (["position.skip_every=4"], ""), (["position.skip_every=2"], "no_rope_layers"),
    (["position.layers=first"], "no_rope_layers"), (["model.window=5"], "sliding_window"),
    (["position.skip_every=4", "model.window=5", "model.full_every=4"], "layer_types"),
    ([*GEMMA, "model.window=5", "model.full_every=6"], ""),
    ([*GEMMA, "model.window=5", "model.full_every=2"], "layer_types"),
    (['position.scaling={method="yarn",factor=4.0}'], ""),
    (['position.scaling={method="dynamic_ntk",factor=4.0}'], "rope_type dynamic")])
def test_what_llama_cpp_reads_differently_is_told(overrides: list[str], misread: str, tiny, tmp_path: Path,
                                                  capsys) -> None:
    """It has windows for Gemma 3 and Cohere2 alone, and for SmolLM3 no encoding in every fourth layer."""
    saved(tiny("rope", "model.n_layer=6", *overrides), tmp_path / "out")
    told = re.search("llama.cpp does not read (.*) of config.json", capsys.readouterr().err)
    assert (told[1] if told else "") == misread


def test_a_copy_with_a_scaling_is_whole_or_not_there(tiny, tmp_path: Path, monkeypatch) -> None:
    folder, out = saved(tiny("rope"), tmp_path / "hf"), tmp_path / "out"
    assert "copy it, or give --extend" in call("export", folder, out).err

    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", interrupted)
        write_extended(folder, out, {"rope_parameters": {}})
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "rope.toml"}
    assert call("export", folder, out, "--extend", "pi:factor=4").code == 0
    content = json.loads((out / "config.json").read_text())
    assert content["rope_parameters"]["factor"] == 4 and (out / "model.safetensors").exists()


def test_special_tokens_are_those_of_the_source_even_without_its_other_files(tiny, tmp_path: Path) -> None:
    """transformers takes what generation_config.json lacks from config.json: bos is not eos."""
    config = tiny("rope", "model.vocab_size=300")
    source = saved(config, tmp_path / "hf")
    for name in ("generation_config.json", "tokenizer_config.json"):
        (source / name).unlink()
    special = {"bos_token_id": 256, "eos_token_id": [257, 258], "pad_token_id": 258}
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, **special}))
    model, config, tokenizer = load_run(source)
    export(source, tmp_path / "out", model, config, tokenizer)
    assert special.items() <= json.loads((tmp_path / "out" / "config.json").read_text()).items()
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert "eos_token" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(("overrides", "is_written"), [
    ([], True), (["model.window=5"], False), (["model.window=99"], True),
    (["model.n_layer=4", "model.window=5", "model.full_every=2"], False),
    (["model.n_layer=4", "model.window=99", "model.full_every=2"], True),
    ([*GEMMA, "model.window=5", "model.full_every=2"], True),
    ([*GEMMA, "model.window=5", "model.full_every=2", 'position.scaling={method="pi",factor=2.0}'], False),
    (["model.norm=layernorm", "model.parallel=true", "model.window=5", "model.full_every=2",
      "position.skip_every=2"], False)])
def test_windows_that_keep_their_frequencies_are_written_or_refused(overrides: list[str], is_written: bool,
                                                                    tiny) -> None:
    """Under --extend, layers whose windows are within L keep theirs: Gemma 3's config.json alone says so."""
    config = tiny("rope", *overrides)
    model = lively(config)
    if is_written:
        assert export_command.extended_fields("yarn:factor=4", model, config)
    else:
        with pytest.raises(UserError, match="--extend yarn:factor=4: "):
            export_command.extended_fields("yarn:factor=4", model, config)


def test_extend_warns_of_options_that_do_not_suit_L(tiny, capsys) -> None:
    """YaRN's default beta_fast is for an L in the thousands."""
    config = tiny("rope")
    export_command.extended_fields("yarn:factor=4", lively(config), config)
    assert "warning: --extend yarn:factor=4: beta_fast = 32" in capsys.readouterr().err
    export_command.extended_fields("yarn:factor=4,beta_fast=0.5,beta_slow=0.1", lively(config), config)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("scaling", "L", "longest"), [
    ('{method="yarn",factor=4.0}', 32, 128),
    ('{method="llama3",factor=2.5,original_length=32}', 32, 80),
    ('{method="yarn",factor=4.0,original_length=32}', 512, 512),        # trained on beyond the extension
    ('{method="dynamic_ntk",factor=4.0,original_length=16}', 32, 16),   # it scales from there on
    ('{method="pi",factor=4.0,original_length=8}', 32, 32)])
def test_the_longest_context_is_that_of_the_scaling(scaling: str, L: int, longest: int, tiny) -> None:
    position = tiny("rope", f"position.scaling={scaling}", f"train.seq_len={L}").position
    assert rope_parameters(position, 16, L)[1] == longest


def test_an_option_that_no_table_knows_is_in_the_way(tiny, monkeypatch) -> None:
    """New keys of [model] and of encodings are refused until a table mentions them."""
    config = tiny("rope")
    for section, known in (("model", "norm_eps"), ("position", "base")):
        part = getattr(config, section)
        with monkeypatch.context() as patch:
            fields = {**type(part).model_fields, "dream": type(part).model_fields[known]}
            patch.setattr(type(part), "__pydantic_fields__", fields)
            object.__setattr__(part, "dream", 0.5)
            with pytest.raises(UserError, match=f"{section}.dream = 0.5"):
                choose(config)
            object.__delattr__(part, "dream")


def test_a_scaling_that_the_architecture_of_the_folder_lacks_is_not_written(tiny, tmp_path: Path) -> None:
    """Phi3 has no YaRN, although with all channels rotated its config is Llama's."""
    folder = saved(tiny("rope"), tmp_path / "hf")
    for kind, is_written in (("llama", True), ("phi3", False)):
        content = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
        (folder / "config.json").write_text(json.dumps(content))
        assert bool(rope_fields(pretrained_config(folder), YaRN(factor=4.0), 128)) == is_written


def test_a_fine_tuned_instruct_model_keeps_its_tokens_template_and_length(tiny, tmp_path: Path) -> None:
    """bos is not eos, and the tokenizer is not ours. With --extend the run has a scaling, too."""
    config = tiny("rope", "train.seq_len=512", "model.vocab_size=300")
    source, run = saved(config, tmp_path / "instruct"), tmp_path / "tuned"
    content = tokenizer_json(ByteTokenizer())
    content["model"]["vocab"] |= {"th": 257}
    content["model"]["merges"] = [["t", "h"]]
    content["added_tokens"].append({**content["added_tokens"][0], "id": 258, "content": "<|im_end|>"})
    kept = {"tokenizer.json": json.dumps(content), "chat_template.jinja": "{{ messages }}",
            "tokenizer_config.json": '{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}',
            "generation_config.json": '{"eos_token_id": [258, 256], "temperature": 0.2}'}
    for name, text in kept.items():
        (source / name).write_text(text)
    special = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 258}
    (source / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()),
                                                    **special}))
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the other mat\n\n" * 100)
    prepare(str(tmp_path / "text.txt"), tmp_path / "corpus", str(source))
    path = tmp_path / "tune.toml"
    path.write_text(f'[data]\ndir = "{tmp_path / "corpus"}"\n[train]\ninit_from = "{source}"\n')
    tiny_run = [key for key in TINY if not key.startswith(("model.", "train.steps"))]
    train(load_config(path, [*tiny_run, "train.steps=1", f"run.dir={run}"], pretrained_tables), [])
    for name, longest, extend in (("plain", 512, []), ("longer", 2048, ["--extend", "ntk:factor=64"])):
        assert call("export", run, tmp_path / name, *extend).code == 0
        assert all((tmp_path / name / file).read_text() == text for file, text in kept.items())
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert special.items() <= written.items() and written["max_position_embeddings"] == longest
        assert "\nscaling" not in (tmp_path / name / "README.md").read_text()   # the config of the training
    content["model"]["vocab"] |= {"a": 98, "b": 97}                     # not the ids of the run
    (source / "tokenizer.json").write_text(json.dumps(content))
    for name in ("changed", "gone"):
        ended = call("export", run, tmp_path / name)
        assert ended.code == 0
        warning = f"warning: {source}, from which the run began, is gone or has another tokenizer now"
        assert warning in ended.err
        assert json.loads((tmp_path / name / "tokenizer.json").read_text())["model"]["vocab"]["a"] == 97
        shutil.rmtree(source, ignore_errors=True)
