"""Position encodings by name. To add one: a class in a file beside this, a line here, a config (see README).

--help, the tests, eval.py and sample.py read this registry; nothing else knows an encoding by name.
"""

from positions.absolute import Learned, Sinusoidal
from positions.contract import At, Encoding, NoPE, Options
from positions.distance import ALiBi
from positions.rotary import RoPE

__all__ = ["ENCODINGS", "At", "Encoding", "NoPE", "Options"]

ENCODINGS: dict[str, type[Encoding]] = {
    "none": NoPE,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "alibi": ALiBi,
}
