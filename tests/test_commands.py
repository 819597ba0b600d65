"""Help, dry runs and samples. What goes wrong is in test_mistakes.py and test_promises.py."""

import math
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import call, every_encoding_slowly, lively, tokens

from config import to_toml
from data.tokenizer import ByteTokenizer
from model import GPT
from runtime.errors import UserError
from sample import generate, text_of


def test_help_fits_a_screen_and_has_topics() -> None:
    page = call("train", "--help")
    assert page.code == 0 and page.out.count("\n") <= 50 and "--help train" in page.out
    topics = {topic: call("train", "--help", topic).out for topic in ("train", "rope", "yarn", "all")}
    assert "beta_fast" in topics["yarn"] and len(topics["all"]) == max(map(len, topics.values()))
    for name in ("eval", "compare", "sweep", "sample", "export", "data.prepare"):
        page = call(name, "--help")
        assert page.code == 0 and page.out.count("\n") > 10, name


@every_encoding_slowly
def test_a_dry_run_prints_config_and_size_and_writes_nothing(name: str, tiny, tmp_path: Path) -> None:
    """As TOML, in any order of the arguments; the size is that of the model which a run would train."""
    model, path = GPT(tiny(name)), tmp_path / "config.toml"
    path.write_text(to_toml(tiny(name)))
    before = list(tmp_path.rglob("*"))
    ended = call("train", path, "--dry-run", "train.lr=0.25")
    assert ended.code == 0 and ended == call("train", "--dry-run", "train.lr=0.25", path)
    assert tomllib.loads(ended.out)["train"]["lr"] == 0.25
    assert f"{model.n_parameters():,} parameters, {model.flops_per_token(32):,} FLOPs per token" in ended.out
    assert list(tmp_path.rglob("*")) == before


@every_encoding_slowly
def test_greedy_sampling_with_a_cache_is_the_argmax_of_full_forwards(name: str, tiny) -> None:
    model, x = lively(tiny(name)), tokens((1, 5))
    sampled = generate(model, x, 20, temperature=0)
    for _ in range(20):
        x = torch.cat((x, model(x)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(sampled, x)


def test_top_k_and_temperature(tiny) -> None:
    model, x = lively(tiny()), tokens((1, 5))
    assert torch.equal(generate(model, x, 9, 1.0, top_k=1), generate(model, x, 9, 0))
    assert torch.equal(generate(model, x, 9, 1e-4, seed=3), generate(model, x, 9, 0))
    draws = {generate(model, x, 1, 5.0, top_k=3, seed=seed)[0, -1].item() for seed in range(40)}
    assert draws == set(model(x)[0, -1].topk(3).indices.tolist())


@pytest.mark.parametrize("n_tokens", [1, 4, 9])
def test_a_model_of_nans_gives_no_sample(n_tokens: int, tiny) -> None:
    model = GPT(tiny()).eval()
    model.embedding.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        generate(model, tokens((1, n_tokens)), 1)


def test_sampled_text_comes_in_whole_characters() -> None:
    """A character whose bytes are tokens comes in one piece; bytes that are not UTF-8 become U+FFFD."""
    tokenizer = ByteTokenizer()
    pieces = text_of(tokenizer, iter([tokenizer.eot, *"aä日🙂".encode(), 0xC3, ord("b"), 999, 0xE6]))
    assert [piece for piece in pieces if piece] == [*"aä日🙂", "\ufffdb", "\ufffd"]
