"""Longer contexts for a trained model, without training: `eval.py RUN --extend METHOD[:key=value,...]`.

A method changes a loaded model in place, for evaluation at one length, and what it needs is known then: L,
the length of training, and T, that of evaluation. Weights stay as they are. There are three kinds: RoPE turns
at other frequencies (positions/scaling.py); far pairs of query and key are seen at other positions than their
own, or not at all (Regrouped); or queries are made sharper (log_n). `METHOD+METHOD` applies several.

Legend: B batch, Tq queries, Tk keys, H = n_head, D = C // H, m a query's position, n a key's.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from config import Config
from model import GPT, Attention
from positions.contract import At, Encoding
from positions.rotary import RoPE
from positions.scaling import SCALINGS, Scaling
from positions.temperature import LogN, Temperature
from runtime.errors import UserError, did_you_mean
from runtime.schema import describe_choice, explain


class Extension(BaseModel):
    """A method and its options; `extended` applies it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        """Why it cannot be applied to this model, if so."""
        return None

    def warning(self, model: GPT, config: Config, T: int) -> str | None:
        """What is allowed but hardly meant, in one line, if anything."""
        return None

    def apply(self, model: GPT, config: Config, T: int) -> None:
        """Change the model for evaluation at T tokens."""
        raise NotImplementedError


class Rotary(Extension):
    """A method for models that turn their queries and keys."""

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        return super().problem(model, config, T) or (
            None if isinstance(model.encoding, RoPE) else "needs a rotary encoding")


class Rescaled(Rotary):
    """RoPE with the frequencies of one of positions/scaling.py's methods; its factor is T / L by default."""

    method: type[Scaling]
    given: dict[str, Any]           # its options, as far as they were given

    def scaling(self, model: GPT, config: Config, T: int) -> Scaling:
        """The method for T tokens; a run trained under a scaling starts from its frequencies before that."""
        L = getattr(rotary(model).scaling, "original_length", None) or config.train.seq_len
        return self.method.for_context(L, T, self.given)

    def apply(self, model: GPT, config: Config, T: int) -> None:
        rotary(model).scaling = self.scaling(model, config, T)

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        return super().problem(model, config, T) or self.scaling(model, config, T).problem(
            rotary(model).rotary_dim)

    def warning(self, model: GPT, config: Config, T: int) -> str | None:
        encoding = rotary(model)
        return self.scaling(model, config, T).warning(encoding.rotary_dim, encoding.base,
                                                      config.train.seq_len)


class Regrouping(Extension):
    """Pairs of query and key that are `near` tokens apart or more are seen at other positions, or hidden."""

    def near(self, L: int) -> int:
        """Distance from which a pair is far."""
        raise NotImplementedError

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        """Positions of queries (1 or B, Tq) and keys (1 or B, Tk) at which far pairs meet: `near` apart."""
        return torch.full_like(m, self.near(L)), torch.zeros_like(n)

    def is_seen(self, n: Tensor) -> Tensor | None:
        """Which keys (1 or B, Tk) a query sees from afar; None for all."""
        return None

    def hides(self) -> bool:
        """Whether some keys are not seen."""
        return type(self).is_seen is not Regrouping.is_seen

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        scaling = getattr(model.encoding, "scaling", None)
        if scaling is not None and scaling.is_dynamic:
            return f"{scaling.method} turns by the length, which far pairs do not tell"
        if self.hides() and any(a.window for a in attentions(model)):
            return "needs layers without a window of their own, behind which no sink is seen"
        return super().problem(model, config, T)

    def apply(self, model: GPT, config: Config, T: int) -> None:
        L = config.train.seq_len
        model.encoding = Regrouped(model.encoding, self, L, T)
        if self.hides():        # hidden in layers without encoding too
            model.no_encoding = Regrouped(model.no_encoding, self, L, T)


class Regrouped(Encoding):
    """An encoding of which far pairs are scored at positions that a Regrouping tells."""

    def __init__(self, inner: Encoding, method: Regrouping, L: int, T: int) -> None:
        nn.Module.__init__(self)
        self.inner, self.method, self.L, self.T = inner, method, L, T
        self.max_length = inner.max_length
        self.embed, self.tables = inner.embed, inner.tables     # type: ignore[method-assign]
        self.features, self.rotate = inner.features, inner.rotate   # type: ignore[method-assign]

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        is_near = at.distance() < self.method.near(self.L)              # (1 or B, 1, Tq, Tk)
        is_seen = self.method.is_seen(at.k_pos)
        if is_seen is not None:         # hidden before scoring: an encoding may count the keys it sees
            logits = logits.masked_fill(~(is_near | is_seen[:, None, None]), -torch.inf)
        near = self.inner.scores(logits, q, k, at)                      # (B, H, Tq, Tk)
        if not self.inner.is_relative:                                  # a position means itself alone
            return near
        q_pos, k_pos = self.method.far(at.q_pos, at.k_pos, self.L, self.T)
        far_at = at._replace(q_pos=q_pos, k_pos=k_pos, tables=self.inner.tables(q_pos, k_pos))
        far_q, far_k = self.inner.rotate(q, k, far_at)
        far = (far_q @ far_k.mT).to(logits.dtype) / q.shape[-1]**0.5
        far = self.inner.scores(far.masked_fill(logits.isneginf(), -torch.inf), q, k, far_at)
        return torch.where(is_near, near, far)


class ReRoPE(Regrouping, Rotary):
    """Distances from `window` on are all seen as `window`. Su 2023, github.com/bojone/rerope.

    The angle of a far pair is that of the window, whatever lies between: no distance is new to the model.
    Acts at every length above the window, the training length too, as the author's code does.
    """

    window: int | None = Field(None, ge=1, description="distances below it are exact (default L / 4)")

    def near(self, L: int) -> int:
        return self.window or max(1, L // 4)

    def problem_of_room(self, step: float | None, L: int) -> str | None:
        """What is wrong with a window that leaves a step, to be found, no room below L for far distances."""
        is_wrong = step is None and (self.window or 0) > L - 2
        return f"window must be at most L - 2 = {L - 2}, got {self.window}" if is_wrong else None


class LeakyReRoPE(ReRoPE):
    """Distances d from `window` w on are seen as w + (d - w) / k. Su 2023, github.com/bojone/rerope."""

    k: float | None = Field(None, ge=1, description="steps of a far distance (default: the least that keeps "
                                                    "the longest below L); 1: RoPE as it was")

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        w = self.near(L)
        k = self.k or max(1.0, (T - 1 - w) / (L - 1 - w))
        return (m - w) / k + w, n / k                                   # fractions of a position

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        return super().problem(model, config, T) or self.problem_of_room(
            self.k, config.train.seq_len)


class SelfExtend(ReRoPE):
    """Far pairs meet at floor(m / G) + W - floor(W / G) and floor(n / G). Jin 2024, arXiv:2401.01325, 3.2.

    G = group, W = window: neighbours as they are, far tokens in groups that share a position.
    """

    group: int | None = Field(None, ge=1, description="tokens that share a position (default: the least that "
                                                      "keeps the longest distance below L); 1: as it was")

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        W = self.near(L)
        G = self.group or next(G for G in itertools.count(1) if (T - 1) // G + W - W // G < L)
        return m // G + W - W // G, n // G

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        return super().problem(model, config, T) or self.problem_of_room(
            self.group, config.train.seq_len)


class Window(Extension):
    """Sliding window: a query sees the last `size` keys, its own among them, and nothing before."""

    size: int | None = Field(None, ge=1, description="keys that a query sees (default L)")

    def apply(self, model: GPT, config: Config, T: int) -> None:
        for attention in attentions(model):
            attention.window = min(self.size or config.train.seq_len, attention.window or T)


class Sinks(Regrouping):
    """The first `sinks` tokens and the last `window` are seen, numbered as in a cache of that size.

    StreamingLLM, Xiao et al. 2023, arXiv:2309.17453, section 3.2: a far pair is a query at the cache's end
    and a sink at its beginning, min(m, sinks + window - 1) and n. Where an encoding does not depend on
    distances alone, sinks are a mask alone. Full forwards see the text of a rolling cache, but their keys
    were themselves made with a longer past.
    """

    sinks: int = Field(4, ge=1, description="first tokens that stay")
    window: int | None = Field(None, ge=1, description="last tokens that stay (default L - sinks)")

    def near(self, L: int) -> int:
        return self.window or max(1, L - self.sinks)

    def far(self, m: Tensor, n: Tensor, L: int, T: int) -> tuple[Tensor, Tensor]:
        return m.clamp(max=self.sinks + self.near(L) - 1), n

    def is_seen(self, n: Tensor) -> Tensor:
        return n < self.sinks


class LMInfinite(Regrouping):
    """The first `first` and the last `window` tokens are seen, at distances of at most `window`.

    Han et al. 2023, arXiv:2308.16137, section 4: a Lambda-shaped mask and a ceiling on the distance.
    """

    first: int = Field(10, ge=1, description="first tokens that every query sees")
    window: int | None = Field(None, ge=1, description="last tokens, and the largest distance (default L)")

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        return super().problem(model, config, T) or (
            None if model.encoding.is_relative else "needs an encoding of distances alone")

    def near(self, L: int) -> int:
        return self.window or L

    def is_seen(self, n: Tensor) -> Tensor:
        return n < self.first


class LogNTemperature(Extension):
    """Queries beyond L look more sharply, by ln(m + 1) / ln L. Su, github.com/bojone/rerope."""

    def problem(self, model: GPT, config: Config, T: int) -> str | None:
        is_free = type(model.temperature) in (Temperature, LogN)
        return None if is_free else "would take the place of the temperature that was trained"

    def apply(self, model: GPT, config: Config, T: int) -> None:
        model.temperature = LogN(config)


EXTENSIONS: dict[str, type[Extension]] = {
    **dict.fromkeys(SCALINGS, Rescaled),
    "rerope": ReRoPE,
    "leaky_rerope": LeakyReRoPE,
    "self_extend": SelfExtend,
    "window": Window,
    "sinks": Sinks,
    "lm_infinite": LMInfinite,
    "log_n": LogNTemperature,
}


class Extend(NamedTuple):
    """What one `--extend` asks for."""

    spec: str                       # the name of the curve: as given, with [...] for lists
    methods: list[Extension]


def parse(spec: str) -> Extend:
    """`METHOD[:key=value,...]`, several joined by +, values as in TOML. Raises UserError for a mistake."""
    methods = []
    for part in spec.split("+"):
        name, _, arguments = part.partition(":")
        if name not in EXTENSIONS:
            hint = did_you_mean(name, EXTENSIONS) or f"; choose from {', '.join(EXTENSIONS)}"
            raise UserError(f"--extend {spec}: unknown method {name!r}{hint}")
        methods.append(make(name, arguments, spec))
    kinds = [next(what for kind, what in ((Rescaled, "frequencies"), (Regrouping, "distances"),
                                          (Window, "distances"), (LogNTemperature, "temperature"))
                  if isinstance(method, kind)) for method in methods]
    if len(set(kinds)) < len(kinds):
        raise UserError(f"--extend {spec}: two methods change the same thing; give them one by one")
    if "distances" in kinds and any(isinstance(m, Rescaled) and m.method.is_dynamic for m in methods):
        raise UserError(f"--extend {spec}: frequencies that depend on the length cannot be combined with "
                        "other distances; give them one by one")
    methods.sort(key=lambda method: isinstance(method, Regrouping))     # they wrap what the others change
    return Extend(re.sub(r"\[[^]]*\]", "[...]", spec), methods)


def make(name: str, arguments: str, spec: str) -> Extension:
    """The method of that name with arguments `key=value,...`."""
    try:
        given = tomllib.loads(f"x = {{{arguments}}}")["x"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--extend {spec}: {arguments!r} must read key=value,key=value, with numbers or "
                        "[lists of numbers]") from error
    try:
        if name not in SCALINGS:
            return EXTENSIONS[name].model_validate(given)
        SCALINGS[name].for_context(2, 2, given)
        return Rescaled(method=SCALINGS[name], given=given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(explain(f"--extend {name}.{first['loc'][0]}", [first], f"in {spec!r}",
                                SCALINGS.get(name, EXTENSIONS[name]), name)) from error


def rotary(model: GPT) -> RoPE:
    """Its encoding, of which it is known that it rotates."""
    assert isinstance(model.encoding, RoPE)
    return model.encoding


def attentions(model: GPT) -> list[Attention]:
    """Those of all layers."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@contextmanager
def extended(model: GPT, config: Config, methods: list[Extension], T: int) -> Iterator[None]:
    """The model under these methods for evaluation at T tokens; as it was afterwards."""
    scaling = getattr(model.encoding, "scaling", None)
    before = model.encoding, model.no_encoding, model.temperature
    windows = [attention.window for attention in attentions(model)]
    try:
        for method in methods:
            method.apply(model, config, T)
        yield
    finally:
        model.encoding, model.no_encoding, model.temperature = before
        if isinstance(model.encoding, RoPE):
            rotary(model).scaling = scaling
        for attention, window in zip(attentions(model), windows, strict=True):
            attention.window = window


def describe_extensions() -> str:
    """Every method and its options, for --help."""
    lines = ["methods of --extend:"]
    for name, extension in EXTENSIONS.items():
        schema: type[BaseModel] = SCALINGS.get(name, extension)
        lines += ["", *describe_choice(name, schema, schema, ["method"])]
    return "\n".join(lines)
