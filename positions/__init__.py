"""Position encodings by name. To add one: a class in a file beside this, a line here, a config (see README).

--help, the tests, eval.py and sample.py read this registry; nothing else knows an encoding by name.
"""

from positions.absolute import Binary, Integer, IntegerNormalised, Learned, Sinusoidal
from positions.content import CoPE, Forgetting, RelativeKey, RelativeKeyQuery, TransformerXL
from positions.contract import At, Encoding, NoPE, Options, Shape
from positions.distance import FIRE, T5, ALiBi, KerpleLog, KerplePower, Sandwich
from positions.rotary import PRoPE, RoPE, RoPE2D, XPos

__all__ = ["ENCODINGS", "At", "Encoding", "NoPE", "Options", "Shape"]

ENCODINGS: dict[str, type[Encoding]] = {
    "none": NoPE,
    "learned": Learned,
    "integer": Integer,
    "integer_normalised": IntegerNormalised,
    "binary": Binary,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "rope_2d": RoPE2D,
    "p_rope": PRoPE,
    "xpos": XPos,
    "alibi": ALiBi,
    "t5": T5,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "fire": FIRE,
    "sandwich": Sandwich,
    "relative_key": RelativeKey,
    "relative_key_query": RelativeKeyQuery,
    "transformer_xl": TransformerXL,
    "cope": CoPE,
    "forgetting": Forgetting,
}
