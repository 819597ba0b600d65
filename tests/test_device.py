"""The settings that depend on the machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import ROOT

from base.errors import UserError
from runtime import device


@pytest.mark.parametrize(("has_amx", "has_bf16", "vendor", "expected"), [
    (True, True, "GenuineIntel", torch.bfloat16), (False, True, "GenuineIntel", torch.float32),
    (False, True, "AuthenticAMD", torch.bfloat16), (False, False, "AuthenticAMD", torch.float32)])
def test_a_cpu_gets_the_dtype_that_it_multiplies_faster(has_amx: bool, has_bf16: bool, vendor: str,
                                                        expected: torch.dtype, tmp_path: Path,
                                                        monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    device.pick_dtype.cache_clear()
    assert device.pick_dtype("auto", torch.device("cpu")) == expected
    device.pick_dtype.cache_clear()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bits_are_refused_on_mps(name: str) -> None:
    mps = torch.device("mps")
    with pytest.raises(UserError, match="on MPS .* give float32"):
        device.pick_dtype(name, mps)
    assert device.pick_dtype("auto", mps) == device.pick_dtype("float32", mps) == torch.float32


@pytest.mark.slow
def test_every_thread_flushes_denormals() -> None:
    """The products of a process's own threads too, which inherit the setting if it is made before them."""
    code = ("import torch\nfrom runtime.device import set_up_cpu\ntorch.set_num_threads(2)\nset_up_cpu()\n"
            "tiny = torch.full((2**20,), 1e-30) * 1e-9\nprint(tiny.count_nonzero().item())")
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"
