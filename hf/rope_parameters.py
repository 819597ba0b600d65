"""Rotary scalings to and from rope_parameters, the form in which config.json writes them.

Legend: R = rotated channels, L tokens of training before any extension.
"""

from __future__ import annotations

from typing import Any

from base.errors import UserError
from positions.rotary import PRoPEOptions, RotaryOptions
from positions.scaling import NTK, Base, enlarged

Fields = dict[str, Any]         # of a config.json
LENGTH = "original_max_position_embeddings"
# what config.json calls a scaling; ntk and base only change the base
ROPE_TYPES = {"pi": "linear", "ntk": "default", "dynamic_ntk": "dynamic", "yarn": "yarn", "llama3": "llama3",
              "longrope": "longrope", "base": "default"}
PROPORTIONAL = "proportional"                   # rope_type of p_rope
STORE_L = ("yarn", "llama3", "longrope")        # types that store the length before the extension


def rope_parameters(position: RotaryOptions, dim: int, L: int) -> tuple[Fields, int]:
    """rope_parameters for R = dim channels, and max_position_embeddings, of a model trained at L tokens."""
    scaling = position.scaling
    if isinstance(position, PRoPEOptions):
        share = {"partial_rotary_factor": position.p}
        return {"rope_type": PROPORTIONAL, "rope_theta": position.base, **share}, L
    if scaling is None or isinstance(scaling, NTK | Base):      # the last two only change the base
        theta = position.base
        if isinstance(scaling, Base):
            theta = scaling.base
        elif scaling is not None:
            theta = enlarged(theta, dim, scaling.factor)
        return {"rope_type": "default", "rope_theta": theta}, L
    original = scaling.original_length or L
    fields = scaling.model_dump(exclude_none=True, exclude={"method", "original_length"})
    fields |= {"rope_type": ROPE_TYPES[scaling.method], "rope_theta": position.base}
    if fields["rope_type"] in STORE_L:
        return {**fields, LENGTH: original}, max(L, round(scaling.factor * original))
    max_length = original if scaling.is_dynamic else L     # a dynamic one scales from max_position_embeddings
    return fields, max_length


def read_rope_parameters(hf_config: Fields, max_length: int) -> tuple[Fields, int]:
    """Keys of [position], and L, from rope_parameters, or rope_theta and rope_scaling (transformers 4).

    Where somebody has added rope_scaling to rope_parameters, transformers takes rope_scaling.
    """
    parameters = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    given = {key: value for key, value in parameters.items() if value is not None}
    base = float(given.pop("rope_theta", hf_config["rope_theta"]))
    fraction = given.pop("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    older = given.pop("type", "default")
    kind = given.pop("rope_type", older)                                # as in transformers, rope_type wins
    kind = {"su": "longrope"}.get(kind, kind)
    given.pop("finetuned", None)                                        # of YaRN's authors; changes nothing
    original = given.pop(LENGTH, None)
    L = max_length
    if kind in STORE_L:
        L = int(hf_config.get(LENGTH, original) or max_length)
        given.setdefault("factor", max_length / L)
    position: Fields = {"base": base}
    if fraction != 1.0:
        position["p" if kind == PROPORTIONAL else "fraction"] = fraction
    if kind == PROPORTIONAL and given.pop("factor", 1.0) == 1.0:
        kind = "default"
    if kind != "default":
        methods = {rope_type: method for method, rope_type in ROPE_TYPES.items()}
        if kind not in methods:
            raise UserError(f"rope_parameters: rope_type {kind!r} is not supported; supported are "
                            f"{', '.join(methods)}")
        position["scaling"] = {"method": methods[kind], "original_length": L, **given}
    return position, L
