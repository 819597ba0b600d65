"""Scaling methods: RoPE's frequencies f_i for contexts s times as long as those in training.

`scaling = { method = "yarn", factor = 4.0 }` under [position] trains with one. To apply one to a trained
model, set its encoding's `scaling`: it is not in the checkpoint. To add one: a class here, and in AnyScaling.

Legend: T time, R rotated channels, L original length, s factor. Frequencies in radians per position. At s = 1
each method but longrope and base returns RoPE's to the last bit.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

import rope

Factor = Annotated[float, Field(
    ge=1, le=1e6, description="s: how many times longer contexts become; 1: no change")]
LongRoPEFactors = list[Annotated[float, Field(ge=1)]]


class Scaling(BaseModel):
    """A method and its options: the frequencies of the pairs, and a factor on cos and sin."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    is_dynamic: ClassVar[bool] = False  # do the frequencies depend on the length of the text?

    method: str = Field(description="which method; --help lists them")
    original_length: int | None = Field(
        None, ge=2, description="L: tokens of the training before the extension (default: train.seq_len)")

    @classmethod
    def for_context(cls, L: int, T: int, given: dict[str, Any]) -> Scaling:
        """The method for T tokens after training at L. Defaults: original_length L, and factor T / L.

        The factor is set only if the method requires one. Raises pydantic's ValidationError.
        """
        known: dict[str, Any] = {"original_length": L}
        if "factor" in cls.model_fields and cls.model_fields["factor"].is_required():
            known["factor"] = max(1.0, T / L)
        return cls.model_validate(known | given)

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        """Frequency of each pair of `dim` = R channels, (R/2,), and a factor on cos and sin.

        L is the training length; `original_length` overrides it. k_pos, of any shape, holds the positions of
        the keys. Methods that depend on the length take T = its maximum + 1, which waits for the device.
        """
        raise NotImplementedError

    def problem(self, dim: int) -> str | None:
        """What is wrong with these options for `dim` channels, or None."""
        return None

    def problem_of_order(self, upper: str, lower: str) -> str | None:
        """The problem if the option `upper` is not above the option `lower`."""
        high, low = getattr(self, upper), getattr(self, lower)
        return None if high > low else f"{upper} must be above {lower} = {low:g}, got {high:g}"

    def warning(self, dim: int, base: float, L: int) -> str | None:
        """One line about options that are allowed but probably a mistake, if any."""
        return None


class PI(Scaling):
    """Position interpolation: f_i / s for all pairs. Chen et al. 2023, arXiv:2306.15595, section 2.3.

    `linear` in Hugging Face. Up to s L every angle was seen in training, but neighbours differ by less.
    """

    method: Literal["pi"] = "pi"
    factor: Factor

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        return rope.inv_freq(dim, base, device=k_pos.device) / self.factor, 1.0


def enlarged(base: float, dim: int, factor: float) -> float:
    """The base of the two NTK methods, s = factor: s^(R / (R - 2)) times as large (R = 2: any will do)."""
    return base * factor ** (dim / max(dim - 2, 1))


class NTK(Scaling):
    """NTK-aware: base s^(R / (R - 2)). bloc97 2023; Peng et al. 2023, arXiv:2309.00071, section 3.1.

    The fastest pair keeps frequency 1, the slowest gets f / s as in PI.
    """

    method: Literal["ntk"] = "ntk"
    factor: Factor

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        return rope.inv_freq(dim, enlarged(base, dim, self.factor), device=k_pos.device), 1.0


class DynamicNTK(Scaling):
    """NTK-aware for T > L tokens: s = a T / L - (a - 1). emozilla 2023; arXiv:2309.00071, section 3.3.

    Up to L it is RoPE itself. In deeper layers cached keys were computed with earlier frequencies: for
    comparisons use full forward passes.
    """

    is_dynamic = True

    method: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = Field(
        1.0, ge=1, le=1e6,
        description="a; 1: T tokens are rotated as by ntk with s = T / L; larger stretches more")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        T = int(k_pos.max()) + 1
        L = self.original_length or L
        factor = 1 + self.factor * max(0, T - L) / L                    # this order: exactly 1 at T <= L
        return rope.inv_freq(dim, enlarged(base, dim, factor), device=k_pos.device), 1.0


def pair_that_turns(times: float, dim: int, base: float, L: int) -> float:
    """Real-valued index of the pair that makes `times` turns in L: R ln(L / (2 pi times)) / (2 ln base).

    YaRN, section 3.2. From L f / (2 pi) = times and f = base^(-2i / R); below 0 if no pair is that fast.
    """
    return dim * math.log(L / (2 * math.pi * times)) / (2 * math.log(base))


def yarn_attention_factor(factor: float) -> float:
    """0.1 ln s + 1, on both cos and sin, so its square is on the logits. YaRN, section 3.4."""
    return 0.1 * math.log(factor) + 1


class YaRN(Scaling):
    """Fast pairs kept, slow ones f_i / s; cos, sin times 0.1 ln s + 1. Peng 2023, arXiv:2309.00071, 3.2, 3.4.

    NTK-by-parts: f' = (1 - g) f + g f / s, g = clamp((i - low) / (high - low), 0, 1). low and high are the
    indices of the pairs that turn beta_fast and beta_slow times within L. `truncate` rounds them outwards;
    then low is at least 0, and high at most R - 1. The default betas were tuned at L = 2048 ... 4096. At L of
    some hundreds few pairs turn 32 times. Where no pair turns beta_slow times, high is 0 or negative. If it
    is 0, all pairs but the first are interpolated; below 0 none is. All of this is as in the authors' code
    and transformers.
    """

    method: Literal["yarn"] = "yarn"
    factor: Factor
    beta_fast: float = Field(
        32.0, gt=0, le=1e6, description="pairs with at least this many turns within L keep their frequency")
    beta_slow: float = Field(
        1.0, gt=0, le=1e6,
        description="pairs with at most this many turns within L are interpolated; between the two, a mix "
                    "that is linear in the pair's index")
    truncate: bool = Field(True, description="widen that mix to whole pairs, as the authors' code does")
    attention_factor: float | None = Field(
        None, gt=0, description="factor on cos and sin (default: 0.1 ln s + 1)")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        L = self.original_length or L
        low = pair_that_turns(self.beta_fast, dim, base, L)
        high = pair_that_turns(self.beta_slow, dim, base, L)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low
        if width == 0:
            width = 1e-3                                                # g is a step
        f = rope.inv_freq(dim, base, device=k_pos.device)
        i = torch.arange(dim // 2, dtype=f.dtype, device=f.device)
        g = ((i - low) / width).clamp(0, 1)
        f = torch.lerp(f, f / self.factor, g)
        return f, self.attention_factor or yarn_attention_factor(self.factor)

    def problem(self, dim: int) -> str | None:
        return self.problem_of_order("beta_fast", "beta_slow")

    def warning(self, dim: int, base: float, L: int) -> str | None:
        L = self.original_length or L
        if pair_that_turns(self.beta_fast, dim, base, L) >= 1:
            return None
        i = dim // 8                                                    # after a quarter of the R/2 pairs
        turns = L / (2 * math.pi) * base ** (-2 * i / dim)
        return (f"beta_fast = {self.beta_fast:g} keeps only the fastest pair at L = {L}; lower it, to "
                f"{turns:.2g} for a quarter of the pairs, and keep beta_slow below that")


class Llama3(Scaling):
    """Long wavelengths f_i / s, short ones kept, a mix between. Llama 3.1, meta-llama/llama-models.

    f' = (1 - g) f / s + g f, g = clamp((turns - low) / (high - low), 0, 1), turns = L f / (2 pi), low and
    high = low_freq_factor and high_freq_factor. In Meta's code s = 8 and L = 8192; its paper,
    arXiv:2407.21783, does not have it.
    """

    method: Literal["llama3"] = "llama3"
    factor: Factor
    low_freq_factor: float = Field(
        1.0, gt=0, le=1e6, description="pairs with at most this many turns within L are interpolated")
    high_freq_factor: float = Field(
        4.0, gt=0, description="pairs with at least this many turns within L keep their frequency; between "
                               "the two, a mix that is linear in the number of turns")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        f = rope.inv_freq(dim, base, device=k_pos.device)
        turns = (self.original_length or L) * f / (2 * math.pi)
        g = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(f / self.factor, f, g.clamp(0, 1)), 1.0

    def problem(self, dim: int) -> str | None:
        return self.problem_of_order("high_freq_factor", "low_freq_factor")


class LongRoPE(Scaling):
    """f_i / lambda_i, given for T <= L and T > L; cos, sin times sqrt(1 + ln s / ln L). arXiv:2402.13753.

    Ding et al. 2024. The length alone, not s, decides between the two lists of lambdas: up to L it is
    short_factor for any s. The paper searches for the lambdas; here the config gives them.
    """

    is_dynamic = True

    method: Literal["longrope"] = "longrope"
    factor: Factor
    short_factor: LongRoPEFactors = Field(description="lambda_i at T <= L, one for each of the R/2 pairs")
    long_factor: LongRoPEFactors = Field(description="lambda_i at T > L, one for each of the R/2 pairs")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        T = int(k_pos.max()) + 1
        L = self.original_length or L
        f = rope.inv_freq(dim, base, device=k_pos.device)
        factors = self.long_factor if T > L else self.short_factor
        return f / f.new_tensor(factors), math.sqrt(1 + math.log(self.factor) / math.log(L))

    def problem(self, dim: int) -> str | None:
        for key in ("short_factor", "long_factor"):
            n = len(getattr(self, key))
            if n != dim // 2:
                return f"{key} must have {dim // 2} numbers, one for each pair, got {n}"
        return None


class MrRoPE(Scaling):
    """MrRoPE-Pro: from f_i for fast pairs to f_i / s, ever more steeply; cos, sin as yarn. arXiv:2601.22181.

    f'_i = f_i / s^(m (m + 1) / (n (n + 1))), m = clamp(i - low, 0, n). low is the last pair with more than
    beta_fast turns in L, or 0; low + n is the first with fewer than beta_slow. 2026, training-free.
    """

    method: Literal["mrrope"] = "mrrope"
    factor: Factor
    beta_fast: float = Field(
        32.0, gt=0, le=1e6, description="pairs with more turns within L keep their frequency")
    beta_slow: float = Field(
        1.0, gt=0, le=1e6, description="pairs with fewer turns within L are interpolated")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        f = rope.inv_freq(dim, base, device=k_pos.device)
        turns = (self.original_length or L) * f / (2 * math.pi)         # falls with i
        low = (turns > self.beta_fast).sum().sub(1).clamp(min=0)
        n = ((turns >= self.beta_slow).sum() - low).clamp(min=1)
        m = (torch.arange(len(f), device=f.device) - low).clamp(min=0).minimum(n)
        f = f / self.factor ** (m * (m + 1) / (n * (n + 1))).to(f.dtype)
        return f, yarn_attention_factor(self.factor)

    def problem(self, dim: int) -> str | None:
        return self.problem_of_order("beta_fast", "beta_slow")


class Base(Scaling):
    """A different base, so different frequencies. Xiong et al. 2023, arXiv:2309.16039, section 2.1 (ABF)."""

    method: Literal["base"] = "base"
    base: float = Field(gt=1, description="replaces the base used in training; ABF replaces 10000 by 500000")

    def frequencies(self, dim: int, base: float, L: int, k_pos: Tensor) -> tuple[Tensor, float]:
        return rope.inv_freq(dim, self.base, device=k_pos.device), 1.0


AnyScaling = PI | NTK | DynamicNTK | YaRN | Llama3 | LongRoPE | MrRoPE | Base

SCALINGS: dict[str, type[Scaling]] = {s.model_fields["method"].default: s for s in get_args(AnyScaling)}
