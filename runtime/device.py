"""Settings that depend on the machine: device, dtype, memory, compiling."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from base.errors import UserError
from config import TrainConfig
from model import GPT

# On two CPU cores compiling takes 20 to 90 s, then saves a fifth of a step: it pays after 2 to 8 minutes.
COMPILE_WORTH_FLOPS = 2e13
CPU_INFO = Path("/proc/cpuinfo")        # on Linux


def pick_device(name: str) -> torch.device:
    """The device of train.device or --device; "auto" is CUDA, else MPS, else the CPU. Raises UserError."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if gpu is None else [gpu.type, "cpu"]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        raise UserError(f"train.device or --device {name}: PyTorch finds no such device here; give auto or "
                        f"{' or '.join(available)}")
    return torch.device(name)


@functools.cache
def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; "auto" is bfloat16 where they are faster than in float32.

    That is on CPUs with AMX, and on AMD's with the AVX-512 instruction for it. Intel executes that
    instruction at no more than the rate of float32's: without AMX, or where a virtual machine hides it, we
    measured half the speed. Without any support bfloat16 is 2 to 4 times slower. GPUs take bfloat16, or
    float16 where they would only emulate it (T4, V100); Apple's take float32. Raises UserError for less
    there: PyTorch's causal attention in 16 bits is reported to see future tokens on MPS (September 2026).
    """
    if device.type == "mps" and name not in ("auto", "float32"):
        raise UserError(f"train.dtype or --dtype {name}: on MPS attention in 16 bits may see future tokens; "
                        "give float32")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    is_fast = False
    if device.type == "cpu":
        is_fast = torch.cpu._is_amx_tile_supported()
        if not is_fast and torch.cpu._is_avx512_bf16_supported() and CPU_INFO.exists():
            is_fast = "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8", errors="replace")
    return torch.bfloat16 if is_fast else torch.float32


def dtype_name(train: TrainConfig, device: torch.device) -> str:
    """That dtype as a config names it, such as "float32"."""
    return str(pick_dtype(train.dtype, device)).removeprefix("torch.")


def autocast(train: TrainConfig, device: torch.device) -> torch.autocast:
    """The context in which matrix products run in that dtype; weights and the residual stream stay fp32."""
    dtype = pick_dtype(train.dtype, device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def should_compile(model: GPT, t: TrainConfig, device: torch.device) -> bool:
    """Whether to use torch.compile: depends on config and machine alone, so a resumed run does the same.

    Prints a line if the compiler is missing.
    """
    # 6 per weight and token: 2 forward, 4 backward; Kaplan et al. 2020, arXiv:2001.08361, section 2.1
    total_flops = 6 * model.n_parameters() * t.seq_len * t.batch_size * t.steps
    pays = device.type == "cuda" or (device.type == "cpu" and total_flops > COMPILE_WORTH_FLOPS)
    if t.compile == "off" or (t.compile == "auto" and not pays):
        return False
    compilers = [os.environ.get("CXX", "g++"), "clang++", "cl"]
    has_compiler = any(map(shutil.which, compilers))
    if device.type == "cuda":
        has_compiler = has_compiler and importlib.util.find_spec("triton") is not None
    if not has_compiler:
        print("torch.compile needs a C++ compiler, such as g++, and on CUDA Triton: training without it",
              flush=True)
    return has_compiler


def set_up_cpu() -> None:
    """Two settings of the process, to be made before its first computation, so that its threads inherit them.

    Numbers below 1.2e-38 become 0: far keys have such weights under steep biases, and a product with them
    takes a CPU several times as long. And glibc keeps freed blocks of up to 1 GB instead of returning each to
    the system: every step allocates and frees the same blocks, and mapping them anew, page by page, costs a
    tenth of a step. Other C libraries have no equivalent.
    """
    torch.set_flush_denormal(True)
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
