"""The memory law: T tokens take O(T) numbers, in evaluation and for the backward pass; never T x T."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import lively, slow_except, tokens

import attention
from config import Config
from evaluation.extension import METHODS, Method, Regrouping, extended
from model import GPT
from positions import ENCODINGS, Encoding

SWITCHES = [("rope", "position.temperature=ssmax"), ("rope", "position.scale_invariant=10"),
            ("rope", "model.window=100"), ("t5", "model.chunk=100"), ("rope", "model.n_kv_head=1")]


class Memory(TorchDispatchMode):
    """Bytes of all tensors that are alive, as they are made and freed: now, at most, and the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.largest, self.alive = 0, 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage._cdata not in self.alive:        # a view has the storage of its base
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.most, self.largest = max(self.most, self.now), max(self.largest, storage.nbytes())
        return out

    def free(self, key: int, n_bytes: int) -> None:
        self.alive.discard(key)
        self.now -= n_bytes


@contextmanager
def kept() -> Iterator[dict[int, Any]]:
    """The storages, by address, of what is kept for the backward pass meanwhile."""
    saved: dict[int, Any] = {}

    def note(y: Tensor) -> Tensor:
        saved[y.untyped_storage().data_ptr()] = y.untyped_storage()
        return y

    with saved_tensors_hooks(note, lambda y: y):
        yield saved


@torch.no_grad()
def most_bytes(config: Config, T: int, *methods: Method, last: int | None = None) -> int:
    model, memory = GPT(config).eval(), Memory()
    with extended(model, config, list(methods), T), memory:
        model.hidden(tokens((1, T)), last=last)
    assert memory.now < memory.most / 10                # what was made was freed: the count is complete
    return memory.most


@pytest.mark.slow
@pytest.mark.parametrize(("name", "switch"), slow_except(
    [*((name, "") for name in ENCODINGS), *SWITCHES], ("rope", ""), ("alibi", ""), ("t5", "")))
def test_twice_the_length_takes_at_most_twice_the_memory(name: str, switch: str, tiny, monkeypatch) -> None:
    """With blocks of 2^15 logits; T x T would take four times as much, and more than all the rest."""
    monkeypatch.setattr(attention, "MOST_LOGITS", 2**15)
    monkeypatch.setattr(attention, "FUSE_FROM", 512)            # both lengths on one path
    config = tiny(name, "model.n_layer=1", "train.seq_len=1024" if name == "learned" else "train.seq_len=32",
                  *([switch] if switch else []))
    for last in (None, 450):
        assert most_bytes(config, 1024, last=last) < 2.2 * most_bytes(config, 512, last=last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_an_mlp_for_each_pair_holds_few_of_its_hidden_numbers(name: str, tiny) -> None:
    """All 32 of them would take ten times as much as the logits of a block."""
    plain, with_mlp = (most_bytes(tiny(name, "model.n_layer=1", "model.n_head=1"), 2048)
                       for name in ("kerple_log", name))
    assert with_mlp < 3 * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(
    [name for name, method in METHODS.items() if issubclass(method, Regrouping)], "rerope", "dual_chunk"))
def test_a_method_that_scores_pairs_again_does_not_hold_all_of_them(name: str, tiny, monkeypatch) -> None:
    monkeypatch.setattr(attention, "MOST_LOGITS", 2**15)
    config, method = tiny("rope", "model.n_layer=1"), METHODS[name]()
    assert most_bytes(config, 1024, method) < 2.2 * most_bytes(config, 512, method)


@pytest.mark.parametrize("name", slow_except([*ENCODINGS], "rope", "t5", "alibi", "forgetting"))
def test_what_training_keeps_grows_with_T_not_its_square(name: str, tiny, monkeypatch) -> None:
    """On the path of long texts; in blocks what is computed again is the same, also with dropout."""
    in_blocks = ENCODINGS[name].scores is not Encoding.scores and name not in ("alibi", "forgetting")
    config = tiny(name, "model.n_layer=1", "train.seq_len=512", *["model.dropout=0.2"] * in_blocks)
    model, found, sizes = lively(config).double().train(), [], []
    monkeypatch.setattr(attention, "MOST_LOGITS", 2**14)
    monkeypatch.setattr(attention, "MIN_QUERIES", 16)
    monkeypatch.setattr(attention, "FUSE_FROM", 1)
    for recompute_from, T in ((256, 256), (256, 512), (9999, 512)):
        monkeypatch.setattr(attention, "RECOMPUTE_FROM", recompute_from)
        x = tokens((1, T + 1))
        torch.manual_seed(0)
        model.zero_grad()
        documents = (x[:, :-1] < 3).cumsum(-1) if in_blocks else None
        with kept() as saved:
            loss = model(x[:, :-1], x[:, 1:], documents=documents)
        sizes.append(sum(storage.nbytes() for storage in saved.values()))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found[1:], atol=0, rtol=0)
    assert sizes[1] < 2.1 * sizes[0]
    assert not in_blocks or sizes[2] > 1.2 * sizes[1]   # so the law is not an empty one
