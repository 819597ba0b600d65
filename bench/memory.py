"""Peak memory of a process, for the benches that measure it in a process of its own."""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    """The most memory that this process has held, in bytes (Linux).

    Not ru_maxrss: Linux hands the parent's down to a child, and the parent may hold every model.
    """
    high_water = next(line for line in Path("/proc/self/status").read_text().splitlines()
                      if line.startswith("VmHWM:"))
    return 1024 * int(high_water.split()[1])
