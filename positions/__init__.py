"""Position encodings: one class each, and the registry of their names.

contract.py     what an encoding is: its hooks, its options, and the Shape from which it is made
absolute.py     added to the embeddings: learned, integer, binary, sinusoidal; to q and k: sinusoidal_qk
rotary.py       queries and keys rotated: rope, rope_2d, p_rope, xpos, pope, fope
scaling.py      RoPE's frequencies for longer contexts: pi, ntk, dynamic_ntk, yarn, llama3, longrope, mrrope,
                base
bias.py         biases by distance: alibi, t5, kerple, bam, fire, sandwich
relative.py     products of content with a distance: relative_key, relative_key_query, transformer_xl
gates.py        penalties set by content: forgetting, log_forgetting, grape_ap, dape
reflections.py  of the query by the tokens in between: path, path_fox
chosen.py       positions chosen by content: cope, selective_rope, repo
switches.py     under any encoding: temperatures, scale-invariant attention
parts.py        what several encodings are made of

To add one: a class in a file here, a line in ENCODINGS, a config (see the README). Everything else, even
--help and the tests, reads this registry, in its order.
"""

from positions.absolute import Binary, Integer, IntegerNormalised, Learned, Sinusoidal, SinusoidalQK
from positions.bias import BAM, FIRE, T5, ALiBi, KerpleLog, KerplePower, Sandwich
from positions.chosen import CoPE, RePo, SelectiveRoPE
from positions.contract import At, Encoding, NoPE, Options, Shape
from positions.gates import DAPE, GRAPEAP, Forgetting, LogForgetting
from positions.reflections import PaTH, PaTHFoX
from positions.relative import RelativeKey, RelativeKeyQuery, TransformerXL
from positions.rotary import FoPE, PoPE, PRoPE, RoPE, RoPE2D, XPos

__all__ = ["ENCODINGS", "At", "Encoding", "NoPE", "Options", "Shape"]

ENCODINGS: dict[str, type[Encoding]] = {
    "none": NoPE,
    "learned": Learned,
    "integer": Integer,
    "integer_normalised": IntegerNormalised,
    "binary": Binary,
    "sinusoidal": Sinusoidal,
    "sinusoidal_qk": SinusoidalQK,
    "rope": RoPE,
    "rope_2d": RoPE2D,
    "p_rope": PRoPE,
    "xpos": XPos,
    "pope": PoPE,
    "fope": FoPE,
    "alibi": ALiBi,
    "t5": T5,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "bam": BAM,
    "fire": FIRE,
    "sandwich": Sandwich,
    "relative_key": RelativeKey,
    "relative_key_query": RelativeKeyQuery,
    "transformer_xl": TransformerXL,
    "cope": CoPE,
    "forgetting": Forgetting,
    "log_forgetting": LogForgetting,
    "grape_ap": GRAPEAP,
    "dape": DAPE,
    "path": PaTH,
    "path_fox": PaTHFoX,
    "selective_rope": SelectiveRoPE,
    "repo": RePo,
}
