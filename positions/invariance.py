"""Scale-invariant attention: a factor and a bias on each logit by its distance, under any encoding.

Legend: B batch, Tq queries, Tk keys, H = n_head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_invariant(logits: Tensor, distance: Tensor, tau: float) -> Tensor:
    """a(d) logits + m(d), a(d) = sqrt(2 ln(1 + d / tau) + 1), m(d) = 1 - a(d)^2. Anson, arXiv:2505.17083.

    Anson, Wang and Aitchison 2025, equation 16, with their boundary values a(0) = 1 and m(0) = 0. If logits
    are independent with mean 0 and variance 1, the expected exp(logit) is e^0.5 / (1 + d / tau): beyond tau,
    the range from d to 2 d gets the same attention for every d, however long the context. Larger distances
    get larger factors, so that attention to them is sparser. The paper uses it with RMSNorm on q and k, for
    the variance, and with rotations that leave the slow pairs still (p_rope); on plain RoPE it did not help.

    Logits (B, H, Tq, Tk) and integer distances (1 or B, 1, Tq, Tk) -> as logits. tau > 0 in tokens. Masked
    logits stay -inf. It has no parameters, and depends on distances alone.
    """
    a, m = factor_and_bias(distance.to(logits.dtype), tau)              # (1 or B, 1, Tq, Tk) each
    return torch.addcmul(m, a, logits)


def factor_and_bias(distance: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The a and m of `scale_invariant` at distances of a floating-point type, in that type and shape."""
    m = -2 * torch.log1p(distance / tau)
    return (1 - m).sqrt(), m
