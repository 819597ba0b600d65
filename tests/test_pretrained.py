"""Hugging Face folders as models: older forms, what is refused, fine-tuning, the commands, the hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from test_export import GPT_BLOCK, YARN, saved
from toys import call

from base.errors import UserError
from config import load_config
from hf.architectures import ARCHITECTURES
from hf.pretrained import pretrained_tables, pulled
from runtime.checkpoint import load_run
from train import train

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A Llama with YaRN, L = 32."""
    return saved(tiny("rope", *YARN), tmp_path / "llama")


def change(path: Path, **fields: object) -> None:
    """Other fields in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def split(folder: Path) -> None:
    """Store the weights in two files and an index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def test_names_and_files_of_older_folders(tiny, tmp_path: Path) -> None:
    """GPT-2 without its prefix, with its masks, and its head beside the embedding; in parts; in bf16."""
    folder = saved(tiny("learned", *GPT_BLOCK), tmp_path / "gpt2")
    before = load_run(folder)[0].state_dict()
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / WEIGHTS).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": weights["wte.weight"].clone()}
    for dtype in (torch.float32, torch.bfloat16):
        save_file({name: w.to(dtype) for name, w in weights.items()}, folder / WEIGHTS)
        split(folder)
        after = load_run(folder)[0].state_dict()
        assert before.keys() == after.keys() and all(w.dtype == torch.float32 for w in after.values())
        assert all(torch.equal(after[name], w.to(dtype).float()) for name, w in before.items())


def test_a_tied_folder_with_another_head_is_refused(tiny, tmp_path: Path) -> None:
    """transformers would not tie them; without tie_word_embeddings we load what it loads."""
    folder = saved(tiny("rope", "model.tied=true"), tmp_path / "tied")
    weights = load_file(folder / WEIGHTS)
    head = weights["model.embed_tokens.weight"] + 1
    save_file(weights | {"lm_head.weight": head}, folder / WEIGHTS)
    with pytest.raises(UserError, match="lm_head.weight differs .* set tie_word_embeddings to false"):
        load_run(folder)
    change(folder / "config.json", tie_word_embeddings=False)
    assert torch.equal(load_run(folder)[0].state_dict()["head.weight"], head)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_field_with_one_value_that_we_compute_has_no_other(kind: str) -> None:
    constants = ARCHITECTURES[kind].constants
    assert kind != "qwen2" or "use_sliding_window" in constants
    for field in constants:
        value = {"alibi": "other"} if field == "attn_config" else "other"
        with pytest.raises(UserError, match=f"{field} = .*'other'.* is not supported"):
            ARCHITECTURES[kind].tables({field: value})


@pytest.mark.parametrize(("fields", "expected"), [      # of config.json; or a file and its content
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
    ({"model_type": "gpt_oss"}, ".its MLPs are mixtures of experts.; supported are"),
    ({"model_type": "gemma4_text"}, "values pass a norm of their own"),
    ({"model_type": "gemma3_text", "query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default"}}}, "only scaling in full_attention alone is"),
    ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
     "rope_type 'proportional' is not supported"),
    ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9,
      "layer_types": ["full_attention", "sliding_attention"]},
     "every k-th layer"),
    ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9},
     "layer_types must be present"),
    ({"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
     "only sliding_attention in all layers is"),
    ({"is_causal": False}, "not causal"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"attention_bias": True}, "mlp_bias = False is not supported"),
    ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [1]}}, "rope_type 'mrope' is not supported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"hidden_size": None}, "hidden_size must be present"),
    ({"vocab_size": 256}, "has shape"),
    ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 1}, "more do not fit LlamaForCausalLM"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ((WEIGHTS, None), "model.safetensors is missing; get the model as safetensors"),
    ((WEIGHTS, "cut"), "damaged"),
    (("config.json", "{"), "config.json: damaged"),
    (("tokenizer.json", None), "tokenizer.json"),
    ({"rope_parameters": [1]}, "damaged, or not supported"),
    ({"model_type": "gemma3_text", "query_pre_attn_scalar": 168}, "only head_dim = 16 is"),
    ({"model_type": "gemma3_text", "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0},
     "final_logit_softcapping = 30.0 is not supported"),
])
def test_what_does_not_fit_is_named(fields: dict | tuple, expected: str, folder: Path) -> None:
    if isinstance(fields, dict):
        change(folder / "config.json", **fields)
    elif fields[1] is None:
        (folder / fields[0]).unlink()
    else:
        (folder / fields[0]).write_text(fields[1])
    with pytest.raises(UserError, match=expected) as caught:
        load_run(folder)
    assert all(str(folder) in problem for problem in caught.value.problems)


def test_init_from_takes_model_encoding_and_length_from_the_folder(folder: Path, tmp_path: Path,
                                                                   corpus_dir: Path) -> None:
    path, run = tmp_path / "tune.toml", tmp_path / "tuned"
    path.write_text(f'[data]\ndir = "{corpus_dir}"\n[train]\ninit_from = "{folder}"\nlr = 0.001\n')
    before, theirs, _ = load_run(folder)
    for override in ("model.n_layer=1", "position.encoding=alibi"):
        with pytest.raises(UserError, match="its model differs") as caught:
            train(load_config(path, [override, f"run.dir={tmp_path / 'other'}"], pretrained_tables), [])
        assert override.partition("=")[0] in str(caught.value)
    config = load_config(path, ["train.steps=2", f"run.dir={run}", "train.batch_size=4", "train.compile=off",
                                "train.dtype=float32", "model.dropout=0.5"], pretrained_tables)
    assert config.model == theirs.model.model_copy(update={"dropout": 0.5})
    assert (config.position, config.train.seq_len, config.train.lr) == (theirs.position, 32, 0.001)
    assert train(config, []) == 0
    folder.rename(tmp_path / "elsewhere")                               # a run needs it no more
    model, again, _ = load_run(run)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert again == config and all(0 < (a - b).abs().max() < 0.01 for a, b in pairs)    # two steps away


@pytest.mark.slow
def test_eval_and_sample_take_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"The cat sat on the mat. " * 12)
    how = (folder, "--lengths", "16,64", "--extend", "pi", "--windows", "2")
    refused = call("eval", *how)
    assert refused.code == 2 and "--data: missing; a Hugging Face folder has no corpus" in refused.err
    assert call("eval", *how, "--data", tmp_path / "a.txt").code == 0
    content = json.loads((folder / "eval" / "a.json").read_text())
    assert content["seq_len"] == 32 and {r["extend"] for r in content["records"]} == {None, "pi"}
    sampled = call("sample", folder, "--prompt", "The", "--tokens", "5", "--top-k", "1")
    assert sampled.code == 0 and sampled.out.startswith("The")


def test_sampling_ends_at_eos(folder: Path, monkeypatch) -> None:
    change(folder / "generation_config.json", eos_token_id=[99, 256])
    drawn = iter(torch.tensor([[[97]], [[98]], [[99]], [[100]]]))
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: next(drawn))
    assert call("sample", folder, "--prompt", "hi").out == "hiab\n"
    assert next(drawn).item() == 100            # nothing is drawn after the end


def test_a_model_of_the_hub_is_downloaded_without_code(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """A download that breaks is one line; edited files stay until the model on the hub changes."""
    on_hub = ["config.json", "modeling.py", "pytorch_model.bin", WEIGHTS, "tokenizer.json", "chat.jinja",
              f"fp8/{WEIGHTS}"]
    asked = []

    def snapshot_download(name: str, revision: str, **patterns: list[str]) -> str:
        asked.append((name, revision))
        cached = tmp_path / "cache" / f"commit{len(asked) // 4}"
        cached.mkdir(parents=True, exist_ok=True)
        for file in filter_repo_objects(on_hub, **patterns):
            (cached / file).write_text(cached.name)
        if len(asked) == 1:
            raise ConnectionError("lost")
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert pulled("runs/quick") == "runs/quick"
    with pytest.raises(UserError, match="hf:o/m@v1: cannot be downloaded .*lost.*hf:ORG/NAME"):
        pulled("hf:o/m@v1")
    assert pulled("hf:o/m@v1") == "models/o/m@v1" and asked == [("o/m", "v1")] * 2
    own = Path("models/o/m@v1")
    assert {path.name for path in own.iterdir()} == {
        "config.json", WEIGHTS, "tokenizer.json", "chat.jinja", ".commit"}
    (own / "config.json").write_text("edited")
    assert pulled("hf:o/m@v1") and (own / "config.json").read_text() == "edited"
    assert (tmp_path / "cache" / "commit0" / "config.json").read_text() == "commit0"
    on_hub.remove("chat.jinja")
    assert pulled("hf:o/m@v1") and not (own / "chat.jinja").exists()
    assert {(own / name).read_text() for name in ("config.json", WEIGHTS)} == {"commit1"}
