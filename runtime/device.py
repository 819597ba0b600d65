"""Settings that depend on the machine: torch.compile, asynchronous copies to a GPU, glibc's freed memory."""

from __future__ import annotations

import ctypes
import os
import shutil

import torch
from torch import Tensor

from config import TrainConfig
from model import GPT

# On two CPU cores compiling takes 20 to 60 s, then saves a fifth of each step: it pays after about 5 minutes.
COMPILE_WORTH_FLOPS = 1e14


def should_compile(model: GPT, t: TrainConfig, device: torch.device) -> bool:
    """Whether to use torch.compile: depends on config and machine alone, so a resumed run does the same."""
    if t.compile != "auto" or device.type == "cuda":
        return t.compile != "off"
    total_flops = model.flops_per_token(t.seq_len) * t.seq_len * t.batch_size * t.steps
    return total_flops > COMPILE_WORTH_FLOPS and shutil.which(os.environ.get("CXX", "g++")) is not None


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; to a GPU from pinned memory, so that the CPU does not wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 1 GB instead of returning each to the system.

    Every step allocates and frees the same blocks. Mapping them anew, page by page, costs a tenth of a step
    on a CPU. Other C libraries have no equivalent.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
