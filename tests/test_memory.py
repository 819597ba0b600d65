"""The memory law: evaluation at T tokens holds O(T) numbers at a time, under every encoding; never T x T."""

import weakref
from typing import Any

import pytest
from conftest import slow_except, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
from config import Config
from evaluation.extension import EXTENSIONS, Extension, Regrouping, extended
from model import GPT
from positions import ENCODINGS

pytestmark = pytest.mark.usefixtures("no_gradients")

FAST = ("rope", "alibi", "t5")      # each of another way to compute attention, but for `path`, `wall` ...
SWITCHES = {"temperature": ("rope", "position.temperature=ssmax"),
            "scale-invariant": ("rope", "position.scale_invariant=10"),
            "window": ("rope", "model.window=100"), "chunks": ("t5", "model.chunk=100"),
            "grouped": ("rope", "model.n_kv_head=1")}


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, as they are made and freed, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.alive = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage._cdata not in self.alive:        # a view has the storage of its base
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def free(self, key: int, n_bytes: int) -> None:
        self.alive.discard(key)
        self.now -= n_bytes


def most_bytes(config: Config, T: int, *methods: Extension) -> int:
    model, memory = GPT(config).eval(), Memory()
    with extended(model, config, list(methods), T), memory:
        model.hidden(tokens((1, T)))
    assert memory.now < memory.most / 20                # what was made was freed: the count is complete
    return memory.most


@pytest.mark.parametrize(("name", "switch"), slow_except(
    [*((name, "") for name in ENCODINGS), *SWITCHES.values()], *((name, "") for name in FAST)))
def test_twice_the_length_takes_at_most_twice_the_memory(name: str, switch: str, tiny, monkeypatch) -> None:
    """With blocks of 2^16 logits; T x T would take four times as much, and more than all the rest."""
    monkeypatch.setattr(attention, "MAX_BLOCK", 2**16)
    config = tiny(name, "model.n_layer=1", "train.seq_len=2048" if name == "learned" else "train.seq_len=32",
                  *([switch] if switch else []))
    assert most_bytes(config, 2048) < 2.2 * most_bytes(config, 1024)


@pytest.mark.parametrize("name", ["fire", "dape"])
def test_an_mlp_for_each_pair_holds_few_of_its_hidden_numbers(name: str, tiny) -> None:
    """All 32 of them would take ten times as much as the logits of a block."""
    plain, with_mlp = (most_bytes(tiny(name, "model.n_layer=1", "model.n_head=1"), 2048)
                       for name in ("kerple_log", name))
    assert with_mlp < 3 * plain


@pytest.mark.parametrize("name", slow_except(
    [name for name, method in EXTENSIONS.items() if issubclass(method, Regrouping)], "rerope", "dual_chunk"))
def test_a_method_that_scores_pairs_again_does_not_hold_all_of_them(name: str, tiny, monkeypatch) -> None:
    monkeypatch.setattr(attention, "MAX_BLOCK", 2**16)
    config, method = tiny("rope", "model.n_layer=1"), EXTENSIONS[name]()
    assert most_bytes(config, 2048, method) < 2.2 * most_bytes(config, 1024, method)
