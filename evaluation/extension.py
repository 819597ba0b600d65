"""Longer contexts for a trained model, without training: `eval.py RUN --extend METHOD[:key=value,...]`.

A method changes a loaded model in place for evaluation at one length; the weights stay the same. There are
three kinds: RoPE rotates at other frequencies (positions/scaling.py); far pairs of query and key get other
positions or are masked (rerope to lm_infinite); queries are scaled (log_n, drope). `METHOD+METHOD` applies
several.

Legend: B batch, Tq queries, Tk keys, H = n_head, D channels of a head; L training, T evaluation length.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from base.errors import UserError, did_you_mean, warn
from base.schema import Section, describe_choice, explain
from config import Config
from evaluation.results import NO_METHOD
from model import GPT, shape_of
from positions import At, Encoding, NoPE
from positions.rotary import RoPE
from positions.scaling import SCALINGS, Scaling
from positions.switches import Constant, LogN, NoTemperature, Temperature, Wrapper


class Method(Section):
    """A method and its options; `extended` applies it."""

    changes: ClassVar[str] = "distances"        # two methods in one --extend must differ in this
    needs_rotary: ClassVar[bool] = False
    needs_relative: ClassVar[bool] = False

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        """Why it cannot be applied to this model, or None."""
        if self.needs_rotary and not isinstance(model.active(), RoPE):
            return "needs a rotary encoding"
        if self.needs_relative and not model.active().is_relative:
            return "needs an encoding that depends on distances alone"
        return None

    def warning(self, model: GPT, config: Config, T: int) -> str | None:
        """One line about options that are allowed but probably a mistake, if any."""
        return None

    def apply(self, model: GPT, config: Config, T: int) -> None:
        """Change the model for evaluation at T tokens."""
        raise NotImplementedError


class Rescaled(Method):
    """RoPE with the frequencies of a method of positions/scaling.py; the default factor is T / L."""

    changes, needs_rotary = "frequencies", True
    method: type[Scaling]
    given: dict[str, Any]           # the options in the command; defaults fill in the others

    def scaling(self, model: GPT, config: Config, T: int) -> Scaling:
        """The method for T tokens, from the frequencies before any scaling that the run was trained with."""
        L = self.given.get("original_length") or getattr(rotary(model).scaling, "original_length", None)
        return self.method.for_context(L or config.train.seq_len, T, self.given)

    def apply(self, model: GPT, config: Config, T: int) -> None:
        rotary(model).scaling = self.scaling(model, config, T)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        if problem := super().problem(model, config, T):
            return problem
        encoding = rotary(model)
        rotates_far = any(config.position.is_encoded(layer) and not is_local
                          for layer, is_local in enumerate(encoding.is_local))
        if encoding.spectrum == "rope_id" or not rotates_far:
            return ("changes the frequencies of position.base in layers that see further than "
                    "train.seq_len, and this run has none")
        return self.scaling(model, config, T).problem(encoding.rotary_dim)

    def warning(self, model: GPT, config: Config, T: int) -> str | None:
        encoding = rotary(model)
        scaling = self.scaling(model, config, T)
        return scaling.warning(encoding.rotary_dim, encoding.base, config.train.seq_len)


class Regrouping(Method):
    """Pairs of query and key that are not near, see `first_near`, get other positions, or are masked."""

    hides: ClassVar[str] = ""   # if it masks keys: the name of its option for how many first keys all see

    def near(self, L: int) -> int:
        """Distance in tokens below which every pair is near."""
        raise NotImplementedError

    def first_near(self, m: Tensor, L: int) -> Tensor:
        """Positions of queries m -> the first position of a key that is near to each; it grows with m."""
        return m - self.near(L) + 1

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        """Positions of queries m (1 or B, Tq), keys n (1 or B, Tk) -> those for far pairs: `near` apart."""
        return torch.full_like(m, self.near(L)), torch.zeros_like(n)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        scaling = getattr(model.active(), "scaling", None)
        if scaling is not None and scaling.is_dynamic:
            return f"cannot be combined with {scaling.method}, whose frequencies depend on the length"
        if model.active().turns_values:
            return "cannot be combined with position.rotate_values"
        if self.hides and any(a.window or a.chunk for a in model.attentions()):
            return "needs model.window and model.chunk unset: no token before a window is seen"
        return super().problem(model, config, T)

    def apply(self, model: GPT, config: Config, T: int) -> None:
        regrouped = {}                          # layers that share an encoding share the wrapper
        for encoding in model.encodings:
            plain = encoding
            while isinstance(plain, Wrapper):
                plain = plain.inner
            regrouped[encoding] = encoding
            if self.hides or not isinstance(plain, NoPE):
                regrouped[encoding] = Regrouped(encoding, self, config.train.seq_len, T)
        model.encodings = [regrouped[encoding] for encoding in model.encodings]


class Regrouped(Wrapper):
    """An encoding whose far pairs are scored at the positions that a Regrouping gives them.

    Each pair is scored at most twice: first at the usual positions, then some at the special ones.
      A method that hides nothing: the usual positions are the far ones, and near pairs are special.
      A method that hides far pairs: the usual positions are a pair's own, and the first keys are special.
    Special pairs are scored together with all others where the encoding has `scores`, which may count the
    keys that it sees, or features of all keys.
    """

    def __init__(self, inner: Encoding, method: Regrouping, L: int, T: int) -> None:
        super().__init__(inner)
        self.method, self.L, self.T = method, L, T

    def far(self, at: At) -> At:
        """The same pairs at their far positions, with the tables as they are."""
        q_pos, k_pos = self.method.far(at.q_pos, at.k_pos, self.L, self.T)
        return at._replace(q_pos=q_pos, k_pos=k_pos, first_distance=None)

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        if not self.method.hides:
            q_pos, k_pos = self.method.far(q_pos, k_pos, self.L, self.T)
        return self.inner.tables(q_pos, k_pos)

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, at if self.method.hides else self.far(at))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        n = at.k_pos[:, None, None]                                     # (1 or B, 1, 1, Tk)
        first_near = self.method.first_near(at.q_pos, self.L)[:, None, :, None]         # (1 or B, 1, Tq, 1)
        is_near = n >= first_near                                       # (1 or B, 1, Tq, Tk)
        # every pair is scored at its usual positions, then special keys at the other ones, except for pairs
        # that keep their first score
        if self.method.hides:
            is_special = n < getattr(self.method, self.method.hides)
            # masked before `scores`: an encoding may count the keys that it sees
            logits = logits.masked_fill(~(is_special | is_near), -torch.inf)
            usual, special = at, self.far(at)
            is_kept = is_near
            needs_all = self.inner.has_scores or at.features is not None
        else:
            is_special = is_near
            usual, special = self.far(at), at
            is_kept = ~is_near
            needs_all = False
        scored = self.inner.scores(logits, q, k, usual)                 # (B, H, Tq, Tk)
        # to an encoding that is not relative, other positions would say something else than a distance
        if not self.is_relative or not is_special.any():
            return scored

        # score again only the keys from the first to the last that is special in any row
        keys = slice(None)
        if not needs_all:
            indices = is_special.flatten(0, 2).any(0).nonzero()[:, 0].tolist()
            keys = slice(indices[0], indices[-1] + 1)
        k = k[:, :, keys]
        special = special.block(slice(None), keys)
        special = special._replace(tables=self.inner.tables(special.q_pos, special.k_pos))
        q_rotated, k_rotated = self.inner.rotate(q, k, special)
        rescored = (q_rotated @ k_rotated.mT).to(logits.dtype) / q.shape[-1]**0.5
        rescored = rescored.masked_fill(logits[..., keys].isneginf(), -torch.inf)
        rescored = self.inner.scores(rescored, q, k, special)
        scored[..., keys] = torch.where(is_kept[..., keys], scored[..., keys], rescored)
        return scored


class ReRoPE(Regrouping):
    """All distances from `window` on become `window`. Su 2023, github.com/bojone/rerope.

    As in the author's code, this applies at every length above the window, even at the training length. That
    code always multiplies by the factor of log_n too: rerope+log_n.
    """

    needs_rotary = needs_relative = True
    step: ClassVar[str] = ""            # the option whose default keeps the longest distance below L
    window: int | None = Field(None, ge=1, description="distances below it stay exact (default L / 4)")

    def near(self, L: int) -> int:
        return self.window or max(1, L // 4)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        largest = config.train.seq_len - 2      # above it, the default step has no far distance below L
        window = self.near(config.train.seq_len)
        if self.step and getattr(self, self.step) is None and window > largest:
            return f"window must be at most L - 2 = {largest}, got {window}"
        return super().problem(model, config, T)


class LeakyReRoPE(ReRoPE):
    """Distances d from `window` w on become w + (d - w) / k. Su 2023, github.com/bojone/rerope."""

    step = "k"
    k: float | None = Field(None, ge=1, description="divisor of far distances (default: the least that "
                                                    "keeps the longest below L); 1: plain RoPE")

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        w = self.near(L)
        k = self.k or max(1.0, (T - 1 - w) / (L - 1 - w))
        return (m - w) / k + w, n / k                                   # not whole positions


class SelfExtend(ReRoPE):
    """Far pairs get positions floor(m / G) + W - floor(W / G), floor(n / G). Jin 2024, arXiv:2401.01325, 3.2.

    G = group, W = window. Near tokens keep their positions; far tokens share one in groups of G.
    """

    step = "group"
    group: int | None = Field(None, ge=1, description="tokens that share a position (default: the least that "
                                                      "keeps the longest distance below L); 1: plain RoPE")

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        W = self.near(L)
        G = self.group or next(G for G in range(1, T + 1) if (T - 1) // G + W - W // G < L)
        return m // G + W - W // G, n // G


class DualChunk(ReRoPE):
    """Distances repeat from chunk to chunk, so that none exceeds L - 1. An et al. 2024, arXiv:2402.17463, 3.

    Dual Chunk Attention, as in Qwen2.5-1M. s = chunk, w = window. A key at n is placed at n mod s. A query at
    m is placed at m mod s for keys of its own chunk; at m mod s + s for keys of the chunk before, if m mod s
    < w; else, and for all older keys, at L - 1. In the first two cases the distance is m - n. The authors'
    code places far queries at s + w, with s = 5 L / 8 and w = L / 8, and scales cos and sin beyond L by
    0.05 ln(T / L) + 1, which the paper does not have.
    """

    window: int | None = Field(None, ge=1, description="first queries of a chunk for which distances to the "
                                                       "chunk before stay exact (default L - chunk, the "
                                                       "most that keeps all distances below L)")
    chunk: int | None = Field(None, ge=1, description="tokens of a chunk (default 3 L / 4)")

    def size(self, L: int) -> int:
        """Tokens of a chunk."""
        return self.chunk or max(1, 3 * L // 4)

    def near(self, L: int) -> int:
        s = self.size(L)
        return min(self.window or L - s, s)

    def first_near(self, m: Tensor, L: int) -> Tensor:
        s = self.size(L)
        return (m - self.near(L)) // s * s              # the start of the query's chunk or of the one before

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        return torch.full_like(m, L - 1), n % self.size(L)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        L = config.train.seq_len
        if self.size(L) + max(1, self.window or 0) > L:
            return f"chunk and window, both at least 1, must be at most L = {L} together"
        return super().problem(model, config, T)

    def apply(self, model: GPT, config: Config, T: int) -> None:
        if self.first_near(torch.tensor(T - 1), config.train.seq_len) > 0:      # otherwise all are near
            super().apply(model, config, T)


class SlidingWindow(Method):
    """Sliding window: a query sees the last `size` keys, its own included."""

    size: int | None = Field(None, ge=1, description="number of keys that a query sees (default L)")

    def apply(self, model: GPT, config: Config, T: int) -> None:
        for layer in model.attentions():
            layer.window = min(self.size or config.train.seq_len, layer.window or T)


class Sinks(Regrouping):
    """A query sees the first `sinks` and the last `window` tokens, numbered as in a cache of that size.

    StreamingLLM, Xiao et al. 2023, arXiv:2309.17453, section 3.2. A far pair is a query at the end of the
    cache, min(m, sinks + window - 1), and a sink at its beginning, n. For encodings that do not depend on
    distances alone, only the mask applies. A full forward pass sees the same tokens as a rolling cache, but
    its keys were computed from a longer context.
    """

    hides = "sinks"
    sinks: int = Field(4, ge=1, description="first tokens that stay visible")
    window: int | None = Field(None, ge=1, description="last tokens that stay visible (default L - sinks)")

    def near(self, L: int) -> int:
        return self.window or max(1, L - self.sinks)

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        return m.clamp(max=self.sinks + self.near(L) - 1), n


class LMInfinite(Regrouping):
    """A query sees the first `first` and the last `window` tokens, at distances of at most `window`.

    Han et al. 2023, arXiv:2308.16137, section 4: a Lambda-shaped mask, and distances clamped to the window.
    """

    hides, needs_relative = "first", True
    first: int = Field(10, ge=1, description="first tokens that every query sees")
    window: int | None = Field(None, ge=1, description="last tokens, and the largest distance (default L)")

    def near(self, L: int) -> int:
        return self.window or L


class LogNTemperature(Method):
    """Queries that see n > L keys are multiplied by ln n / ln L. Su, github.com/bojone/rerope.

    Keys that another method hides count too.
    """

    changes = "temperature"
    replaces: ClassVar[tuple[type[Temperature], ...]] = (NoTemperature, LogN)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        is_free = type(model.temperature) in self.replaces
        return None if is_free else "would replace the temperature of this run"

    def apply(self, model: GPT, config: Config, T: int) -> None:
        model.temperature = LogN(shape_of(config))
        model.choose_encodings()


class DropeTemperature(LogNTemperature):
    """All queries are multiplied by 1 + c ln(T / L), beyond L. DroPE, Gelberg 2025, arXiv:2512.12167.

    The paper tunes c: 0.412 for a model from scratch (position.drop_at), 0.103 for SmolLM.
    """

    replaces = (NoTemperature,)
    c: float = Field(0.412, gt=0, description="how fast the factor grows with the length")

    def apply(self, model: GPT, config: Config, T: int) -> None:
        factor = 1 + self.c * math.log(max(1.0, T / config.train.seq_len))
        model.temperature = Constant(shape_of(config), factor)
        model.choose_encodings()


METHODS: dict[str, type[Method]] = {
    **dict.fromkeys(SCALINGS, Rescaled),
    "rerope": ReRoPE,
    "leaky_rerope": LeakyReRoPE,
    "self_extend": SelfExtend,
    "dual_chunk": DualChunk,
    "window": SlidingWindow,
    "sinks": Sinks,
    "lm_infinite": LMInfinite,
    "log_n": LogNTemperature,
    "drope": DropeTemperature,
}


class Combination(NamedTuple):
    """The methods of one `--extend`, which are applied together."""

    spec: str                       # its name in tables: as typed, with a checksum for each list
    methods: list[Method]


PLAIN = Combination(NO_METHOD, [])  # the model without a method


def parse(spec: str) -> Combination:
    """Parse `METHOD[:key=value,...]`, several joined by +, values as in TOML. Raises UserError."""
    methods = []
    for part in re.split(r"\+(?=[a-z])", spec):     # not at the + of 1e+3
        method, _, arguments = part.partition(":")
        methods.append(make(method, arguments, spec))
    changes = [m.changes for m in methods]
    if len(set(changes)) < len(changes):
        raise UserError(f"--extend {spec}: two methods change the same thing; give each its own --extend")
    if "distances" in changes and any(isinstance(m, Rescaled) and m.method.is_dynamic for m in methods):
        raise UserError(f"--extend {spec}: frequencies that depend on the length need their own --extend")
    methods.sort(key=lambda m: isinstance(m, Regrouping))               # last: they wrap the encoding
    name = re.sub(r"(?<=\[)[^]]*", lambda x: sha256(x[0].encode()).hexdigest()[:6], spec)
    return Combination(name, methods)


def make(name: str, arguments: str, spec: str) -> Method:
    """Make the method `name` of an --extend from arguments `key=value,...`."""
    if name not in METHODS:
        hint = did_you_mean(name, METHODS) or f"; choose from {', '.join(METHODS)}"
        raise UserError(f"--extend {spec}: unknown method {name!r}{hint}")
    schema: type[BaseModel] = SCALINGS.get(name, METHODS[name])
    try:
        given = tomllib.loads(f"x = {{{arguments}}}")["x"]
        if name not in SCALINGS:
            return METHODS[name].model_validate(given)
        SCALINGS[name].for_context(2, 2, given)
        return Rescaled(method=SCALINGS[name], given=given)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--extend {spec}: {arguments!r} must be key=value,... with numbers or lists of "
                        "them, such as factor=4 or long_factor=[1.0,2.0]") from error
    except ValidationError as error:
        raise UserError(*explain(error, name, schema, {}, f"in --extend {spec}")) from error


def rotary(model: GPT) -> RoPE:
    """The encoding of a model, which must be rotary."""
    assert isinstance(model.encoding, RoPE)
    return model.encoding


@contextmanager
def extended(model: GPT, config: Config, methods: list[Method], T: int) -> Iterator[None]:
    """Apply these methods for evaluation at T tokens; the model is restored afterwards."""
    scaling, before = getattr(model.encoding, "scaling", None), (model.encodings, model.temperature)
    windows = [(layer, layer.window) for layer in model.attentions()]
    try:
        for method in methods:
            method.apply(model, config, T)
        yield
    finally:
        model.encodings, model.temperature = before
        if isinstance(model.encoding, RoPE):
            model.encoding.scaling = scaling
        for layer, window in windows:
            layer.window = window


def open_extensions(specs: Sequence[str], model: GPT, config: Config, lengths: Sequence[int],
                    skip_unfit: bool = False) -> list[Combination]:
    """The methods of the --extend flags; prints warnings.

    Raises UserError for a method that does not fit the model; with skip_unfit skips it and prints one line.
    """
    fitting: list[Combination] = []
    for extend in map(parse, dict.fromkeys(specs)):
        problems = [method.problem(model, config, length) for length in lengths for method in extend.methods]
        problems = [problem for problem in problems if problem]
        if problems:
            about = (f"--extend {extend.spec}: {problems[0]}; this run has "
                     f"{config.position.encoding} at L = {config.train.seq_len}")
            if not skip_unfit:
                raise UserError(f"{about}, leave the method out or change it")
            print(f"skipped {about}", flush=True)
            continue
        fitting.append(extend)
        for method in extend.methods:
            warning = method.warning(model, config, max(lengths))
            if warning:
                warn(f"--extend {extend.spec}: {warning}")
    return fitting


def describe_extension(name: str) -> str:
    """A method and its options, for --help."""
    schema: type[BaseModel] = SCALINGS.get(name, METHODS[name])
    doc = inspect.getdoc(schema) or ""
    lines = [f"{name}: {doc}", *describe_choice(name, schema, schema, ["method"])[1:]]
    return re.sub("( factor .*); required", r"\1; default T / L", "\n".join(lines))
