"""Hugging Face architectures that a config can express: names of tensors and of config.json's fields.

Each architecture is a table. hf/export.py reads it in one direction, hf/pretrained.py in the other, so that
both agree. An option that a table does not mention must have its default value; a new option therefore blocks
an export until a table mentions it. Nothing of transformers is imported; the tests compare with it.

Legend: C = n_embd, H = n_head, G = n_kv_head, D channels of a head, R of them rotate, L tokens of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import rope
from base.errors import UserError, warn
from config import Config, ModelConfig
from hf.rope_parameters import LENGTH, ROPE_TYPES, Fields, read_rope_parameters, rope_parameters
from model import hidden_width, shape_of
from positions import Options
from positions.rotary import RoPEOptions, RotaryOptions

Tables = dict[str, Fields]      # of our config: section -> key -> value

QKV = "blocks.N.attention.q blocks.N.attention.k blocks.N.attention.v"
LLAMA = {                       # Hugging Face's module -> our modules; several are stacked along the rows
    "model.embed_tokens": "embedding",
    "model.layers.N.input_layernorm": "blocks.N.attention_norm",
    "model.layers.N.self_attn.q_proj": "blocks.N.attention.q",
    "model.layers.N.self_attn.k_proj": "blocks.N.attention.k",
    "model.layers.N.self_attn.v_proj": "blocks.N.attention.v",
    "model.layers.N.self_attn.o_proj": "blocks.N.attention.o",
    "model.layers.N.post_attention_layernorm": "blocks.N.mlp_norm",
    "model.layers.N.mlp.gate_proj": "blocks.N.mlp.gate",
    "model.layers.N.mlp.up_proj": "blocks.N.mlp.up",
    "model.layers.N.mlp.down_proj": "blocks.N.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}
SIZES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd",
         "intermediate_size": "n_hidden", "vocab_size": "vocab_size", "tie_word_embeddings": "tied"}
SHAPE = SIZES | {"num_key_value_heads": "n_kv_head", "rms_norm_eps": "norm_eps"}
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "n_inner")


class Architecture:
    """What an architecture can express, and its names. Subclasses are the rows of the table ARCHITECTURES."""

    model_type: ClassVar[str]
    class_name: ClassVar[str]
    modules: ClassVar[Mapping[str, str]] = LLAMA
    encodings: ClassVar[Mapping[str, set[str]]]         # name -> keys of [position] with any value
    fields: ClassVar[Mapping[str, str]] = SHAPE         # field -> key of [model]; any value
    free: ClassVar[set[str]] = {"head_dim", "dropout", "flex"}      # keys of [model] with any value
    block: ClassVar[Fields] = {}                        # keys of [model] with other values than our defaults
    needs_window: ClassVar[bool] = False
    rope_types: ClassVar[set[str]] = {*ROPE_TYPES.values()}     # of scalings
    constants: ClassVar[Fields] = {}                    # fields for which only this value is supported
    defaults: ClassVar[Fields] = {}                     # fields that may be missing
    length: ClassVar[str] = "max_position_embeddings"
    head: ClassVar[str] = "lm_head"
    layout: ClassVar[Literal["half", "interleaved"]] = "half"       # which channels of q and k form a pair

    # Writing

    def obstacles(self, config: Config) -> list[str]:
        """The settings that this architecture cannot express, as `section.key = value`."""
        model, position = config.model, config.position
        found: Fields = {"position.encoding": position.encoding}
        if position.encoding in self.encodings:
            free = {"encoding", "lr_scale", *self.encodings[position.encoding]}
            found = differing("position", position, {}, free)
        found |= differing("model", model, self.block, {*self.fields.values(), *self.free})
        if "head_dim" not in self.fields and model.head_width * model.n_head != model.n_embd:
            found["model.head_dim"] = model.head_width
        if self.needs_window and model.window is None:
            found["model.window"] = None
        scaling = getattr(position, "scaling", None)
        if scaling is not None and ROPE_TYPES.get(scaling.method) not in self.rope_types:
            found["position.scaling"] = scaling.method
        return [f"{key} = {value!r}" for key, value in found.items()]

    def config_json(self, config: Config) -> Fields:
        """config.json without the ids of special tokens."""
        model = config.model
        resolved = {**model.model_dump(), "n_hidden": hidden_width(model), "head_dim": model.head_width,
                    "n_kv_head": model.n_kv_head or model.n_head}
        fields = {field: resolved[key] for field, key in self.fields.items()}
        return {"architectures": [self.class_name], "model_type": self.model_type, **self.constants, **fields,
                **self.positions_json(config)}

    def positions_json(self, config: Config) -> Fields:
        """The fields for the position encoding and the number of positions."""
        return {self.length: config.train.seq_len}

    # Reading

    def tables(self, hf_config: Fields) -> Tables:
        """[model], [position] and train.seq_len from config.json. Raises UserError if it is not supported."""
        given = {**self.defaults, **hf_config}
        for field, value in self.constants.items():
            if given.get(field, value) != value:
                raise self.unsupported(f"{field} = {given[field]!r}", repr(value))
        model: Fields = {}
        for field, key in self.fields.items():
            value = given.get(field)
            if value is None and field not in MAY_BE_NULL:
                raise UserError(f"{field} must be present for {self.class_name}")
            if model.setdefault(key, value) != value:
                raise self.unsupported(f"{field} = {value!r}", f"{key} = {model[key]!r}")
        for key, default in (("n_kv_head", model["n_head"]), ("head_dim", model["n_embd"] / model["n_head"])):
            if model.get(key) == default:
                model[key] = None
        position, L = self.position_table(given)
        model = {key: value for key, value in (self.block | model).items() if value is not None}
        return {"model": model, "position": position, "train": {"seq_len": L}}

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        """[position] and L, from config.json with its defaults."""
        return {"encoding": next(iter(self.encodings))}, hf_config.get(LENGTH) or hf_config[self.length]

    def unsupported(self, found: str, supported: str) -> UserError:
        """The error about something in config.json."""
        return UserError(f"{found} is not supported for {self.class_name}; only {supported} is")

    # Tensors

    def write_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        """A tensor of this name, several of ours in one, as Hugging Face stores it."""
        return tensor

    def read_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        """The inverse of write_tensor."""
        return tensor

    def names(self, weights: Mapping[str, Any], n_layer: int) -> Iterator[tuple[str, list[str]]]:
        """For all weights of our model: Hugging Face's name -> our names; several are stacked by rows."""
        for module, parts in self.modules.items():
            for n in range(n_layer if ".N." in module else 1):
                for kind in ("weight", "bias"):
                    name, *ours = (f"{text}.{kind}".replace(".N.", f".{n}.")
                                   for text in (module, *parts.split()))
                    if ours[0] in weights:
                        yield name, ours

    def export_tensors(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Our weights under Hugging Face's names, in its layout."""
        m, tensors = config.model, {}
        weights = in_layout(self.layout, weights, config)
        for name, parts in self.names(weights, m.n_layer):
            stacked = torch.cat([weights.pop(part) for part in parts])
            tensors[name] = self.write_tensor(name, stacked, m.n_head).contiguous()
        assert not weights, "a weight has no name"
        return tensors

    def import_tensors(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: Config,
                       hf_config: Fields) -> dict[str, Tensor]:
        """The tensors under our names, fp32. Raises UserError for a missing, misshapen or unknown one."""
        m, weights = config.model, dict[str, Tensor]()
        # a decoder that was saved without its head lacks the prefix
        embedding, head = f"{next(iter(self.modules))}.weight", f"{self.head}.weight"
        prefix = embedding.partition(".")[0] + "."
        left = {name if name.startswith((prefix, self.head)) else prefix + name: tensor
                for name, tensor in tensors.items()}
        copy = left.pop(head, None) if m.tied else None                 # some folders hold a tied head, too
        if copy is not None and not torch.equal(copy, left[embedding]):
            raise UserError(f"tensor {head} differs from the embedding: transformers does not tie them; in "
                            "config.json, set tie_word_embeddings to false")
        for name, parts in self.names(shapes, m.n_layer):
            if name not in left:
                raise UserError(f"tensor {name} is missing; download the whole folder again")
            tensor = self.read_tensor(name, left.pop(name).float(), m.n_head)
            sizes = [shapes[part][0] for part in parts]
            wanted = (sum(sizes), *shapes[parts[0]][1:])
            if tensor.shape != wanted:
                raise UserError(f"tensor {name}: has shape {tuple(tensor.shape)}, but config.json asks for "
                                f"{wanted}; take both from the same model")
            weights.update(zip(parts, tensor.contiguous().split(sizes), strict=True))
        # older versions saved masks and tables, which our model does not have
        unknown = [name for name in left if not name.endswith(
            ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias"))]
        if unknown:
            raise UserError(f"tensor {unknown[0]} and {len(unknown) - 1} more do not fit {self.class_name}; "
                            "config.json and weights are from different models")
        return weights


def differing(section: str, options: ModelConfig | Options, block: Fields, free: set[str]) -> Fields:
    """section.key -> value of all keys but free ones, where it is not the block's, or else the default."""
    return {f"{section}.{key}": getattr(options, key) for key, field in type(options).model_fields.items()
            if key not in free and getattr(options, key) != block.get(key, field.default)}


def in_layout(layout: str, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Weights with the channels of queries and keys in this layout.

    Both are reordered in the same way, so the logits stay the same.
    """
    position, D = config.position, config.model.head_width
    weights = dict(weights)
    if isinstance(position, RotaryOptions) and position.layout != layout:
        reordered = rope.to_half if layout == "half" else rope.to_interleaved
        for name, weight in weights.items():
            if name.rpartition(".")[0].endswith(("attention.q", "attention.k", "q_norm", "k_norm")):
                weights[name] = reordered(weight, len(weight) // D, position.rotary_dim(D))
    return weights


def layer_types(full_every: int, n_layer: int) -> list[str]:
    """layer_types: full attention in each `full_every`-th layer, in none for 0; a window in the others."""
    return ["sliding_attention" if not full_every or (layer + 1) % full_every else "full_attention"
            for layer in range(n_layer)]


class Llama(Architecture):
    """Llama 1 to 3, SmolLM 1 and 2, TinyLlama, and other models saved as Llama."""

    model_type, class_name = "llama", "LlamaForCausalLM"
    encodings = {"rope": {"base", "layout", "scaling"}, "p_rope": {"base", "layout", "p"}}
    fields = SHAPE | {"head_dim": "head_dim", "attention_bias": "bias", "mlp_bias": "bias"}
    constants = {"hidden_act": "silu"}
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
                "mlp_bias": False, "max_position_embeddings": 2048, "rope_theta": 10_000.0}

    def positions_json(self, config: Config) -> Fields:
        position, D, L = config.position, config.model.head_width, config.train.seq_len
        if not isinstance(position, RotaryOptions):
            parameters = {"rope_type": "default", "rope_theta": self.defaults["rope_theta"]}
            return {"rope_parameters": parameters, self.length: L}
        parameters, max_length = rope_parameters(position, position.rotary_dim(D), L)
        return {"rope_parameters": parameters, self.length: max_length}

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        position, L = read_rope_parameters(hf_config, hf_config[self.length])
        for encoding, free in self.encodings.items():
            if position.keys() <= free:
                return {"encoding": encoding, **position}, L
        share = position.get("fraction", position.get("p"))
        raise self.unsupported(f"partial_rotary_factor {share}", "1.0")


class Qwen2(Llama):
    """Llama with biases for q, k and v."""

    model_type, class_name = "qwen2", "Qwen2ForCausalLM"
    fields = SHAPE
    block = {"qkv_bias": True}
    constants = {"hidden_act": "silu", "use_sliding_window": False}
    defaults = Llama.defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32_768}


class SeedOss(Qwen2):
    """Llama with biases for q, k and v, for other tokenizers: with Qwen2, transformers builds its own."""

    model_type, class_name = "seed_oss", "SeedOssForCausalLM"
    fields = SHAPE | {"head_dim": "head_dim"}
    constants = {"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    defaults = Qwen2.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 524_288,
                                 "head_dim": 128, "attention_bias": True}


class Qwen3(Llama):
    """Llama with an RMSNorm on q and k of each head, and heads of any width."""

    model_type, class_name = "qwen3", "Qwen3ForCausalLM"
    modules = LLAMA | {"model.layers.N.self_attn.q_norm": "blocks.N.attention.q_norm",
                       "model.layers.N.self_attn.k_norm": "blocks.N.attention.k_norm"}
    fields = SHAPE | {"head_dim": "head_dim"}
    block = {"qk_norm": True}
    constants = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
    defaults = Qwen2.defaults | {"head_dim": 128}


class Mistral(Llama):
    """Llama with a sliding window in all layers or in none, and heads of any width."""

    model_type, class_name = "mistral", "MistralForCausalLM"
    fields = SHAPE | {"head_dim": "head_dim", "sliding_window": "window"}
    defaults = Llama.defaults | {"num_key_value_heads": 8, "sliding_window": 4096,
                                 "max_position_embeddings": 131_072}

    def tables(self, hf_config: Fields) -> Tables:
        tables = super().tables(hf_config)
        kind = "sliding_attention" if tables["model"].get("window") else "full_attention"
        kinds = hf_config.get("layer_types") or [kind]
        if {*kinds} != {kind}:                                          # transformers takes it for Ministral
            raise self.unsupported("layer_types", f"{kind} in all layers")
        return tables


class Windowed(Llama):
    """Llama with a window in all layers but every k-th, or in none. Subclasses are architectures."""

    fields = SHAPE | {"sliding_window": "window"}
    free = Architecture.free | {"full_every"}

    def positions_json(self, config: Config) -> Fields:
        m = config.model
        full_every = m.full_every if m.window else 1
        return {**super().positions_json(config), "layer_types": layer_types(full_every, m.n_layer)}

    def tables(self, hf_config: Fields) -> Tables:
        tables = super().tables(hf_config)
        given = {**self.defaults, **hf_config}
        kinds = given.get("layer_types") or layer_types(
            given["sliding_window_pattern"], tables["model"]["n_layer"])
        full_every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        if kinds != layer_types(full_every, len(kinds)):
            raise self.unsupported("layer_types", "full_attention in every k-th layer (model.full_every)")
        if full_every == 1 and self.needs_window:
            raise self.unsupported("layer_types without a window", "sliding_attention in some layers")
        if full_every == 1:
            tables["model"].pop("window", None)
        elif full_every:
            tables["model"]["full_every"] = full_every
        return tables


class SmolLM3(Windowed):
    """Llama with some layers that have no position encoding, and some that have a window."""

    model_type, class_name = "smollm3", "SmolLM3ForCausalLM"
    encodings = {**{name: free | {"layers", "skip_every"} for name, free in Llama.encodings.items()},
                 "none": set()}
    fields = Windowed.fields | {"attention_bias": "bias", "mlp_bias": "bias"}
    constants = {"hidden_act": "silu"}
    defaults = Llama.defaults | {"num_key_value_heads": 4, "tie_word_embeddings": True,
                                 "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0}

    def positions_json(self, config: Config) -> Fields:
        p, layers = config.position, range(config.model.n_layer)
        flags = [int(isinstance(p, RotaryOptions) and p.is_encoded(layer)) for layer in layers]
        return {"no_rope_layers": flags, "use_sliding_window": config.model.window is not None,
                **super().positions_json(config)}

    def tables(self, hf_config: Fields) -> Tables:
        if not hf_config.get("layer_types"):
            if hf_config.get("use_sliding_window"):
                raise UserError(f"layer_types must be present for {self.class_name} with windows")
            hf_config = {**hf_config, "layer_types": ["full_attention"]}
        return super().tables(hf_config)

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        n_layer, every = hf_config["num_hidden_layers"], hf_config.get("no_rope_layer_interval", 4)
        flags = hf_config.get("no_rope_layers") or [(layer + 1) % every for layer in range(n_layer)]
        layers = [layer for layer in range(n_layer) if flags[layer]]
        position, L = super().position_table(hf_config)
        if not layers:
            return {"encoding": "none"}, L
        if len(layers) < n_layer:
            position["layers"] = layers
        return position, L


class Cohere2(Windowed):
    """Command R7B: windows with RoPE, full layers without an encoding, attention and MLP beside each other.

    Both read one norm. We have two, and none has a bias: an export puts their weights into the matrices that
    read them. Pairs of channels are neighbours. logit_scale becomes a part of the last norm.
    """

    model_type, class_name = "cohere2", "Cohere2ForCausalLM"
    modules = {module: parts for module, parts in LLAMA.items() if "post_attention" not in module}
    encodings = {"rope": {"base", "layout", "scaling", "layers", "skip_every"}}
    fields = SIZES | {"num_key_value_heads": "n_kv_head", "layer_norm_eps": "norm_eps",
                      "sliding_window": "window"}
    block = {"norm": "layernorm", "parallel": True}
    needs_window = True
    constants = {"hidden_act": "silu", "attention_bias": False}
    defaults = Llama.defaults | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625,
                                 "sliding_window": 4096, "sliding_window_pattern": 4,
                                 "max_position_embeddings": 8192}
    layout = "interleaved"
    readers: ClassVar = {"attention_norm": ("attention.q", "attention.k", "attention.v"),
                         "mlp_norm": ("mlp.gate", "mlp.up")}

    def obstacles(self, config: Config) -> list[str]:
        obstacles = super().obstacles(config)
        encoded = {layer for layer in range(config.model.n_layer) if config.position.is_encoded(layer)}
        if encoded != shape_of(config).local_layers:
            obstacles.append("position.layers or skip_every beside windows in other layers")
        return obstacles

    def positions_json(self, config: Config) -> Fields:
        return {**super().positions_json(config), "logit_scale": 1.0}

    def tables(self, hf_config: Fields) -> Tables:
        tables = super().tables(hf_config)
        tables["position"] |= {"layout": self.layout, "skip_every": tables["model"].get("full_every", 0)}
        return tables

    def export_tensors(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        weights = dict(weights)
        for n in range(config.model.n_layer):
            for norm, parts in self.readers.items():
                scale = weights.pop(f"blocks.{n}.{norm}.weight")
                for part in parts:
                    weights[f"blocks.{n}.{part}.weight"] = weights[f"blocks.{n}.{part}.weight"] * scale
            weights[f"blocks.{n}.attention_norm.weight"] = torch.ones_like(scale)
        return super().export_tensors(weights, config)

    def import_tensors(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: Config,
                       hf_config: Fields) -> dict[str, Tensor]:
        weights = super().import_tensors(tensors, shapes, config, hf_config)
        for n in range(config.model.n_layer):
            weights[f"blocks.{n}.mlp_norm.weight"] = weights[f"blocks.{n}.attention_norm.weight"].clone()
        weights["norm.weight"] *= hf_config.get("logit_scale", self.defaults["logit_scale"])
        return weights


class Olmo2(Llama):
    """Llama with norms after each sublayer, not before, and of all heads' q and k together."""

    model_type, class_name = "olmo2", "Olmo2ForCausalLM"
    modules = {**{module: parts for module, parts in Qwen3.modules.items() if "layernorm" not in module},
               "model.layers.N.post_attention_layernorm": "blocks.N.attention_post_norm",
               "model.layers.N.post_feedforward_layernorm": "blocks.N.mlp_post_norm"}
    fields = SHAPE
    block = {"qk_norm": "whole", "pre_norm": False, "post_norm": True}
    constants = {"hidden_act": "silu", "attention_bias": False}
    defaults = Llama.defaults | {"rms_norm_eps": 1e-5}


class Gemma3(Windowed):
    """The text model of Gemma 3: norms on both sides of a sublayer, GEGLU, another base in windows.

    Its norms multiply by 1 + weight, ours by the weight. Folders with images (Gemma3ForConditionalGeneration)
    are not supported.
    """

    model_type, class_name = "gemma3_text", "Gemma3ForCausalLM"
    modules = Qwen3.modules | {
        "model.layers.N.post_attention_layernorm": "blocks.N.attention_post_norm",
        "model.layers.N.pre_feedforward_layernorm": "blocks.N.mlp_norm",
        "model.layers.N.post_feedforward_layernorm": "blocks.N.mlp_post_norm"}
    encodings = {"rope": {"base", "layout", "scaling", "local_base"}, "p_rope": {"base", "layout", "p"}}
    fields = Windowed.fields | {"head_dim": "head_dim", "query_pre_attn_scalar": "head_dim"}
    block = {"qk_norm": True, "post_norm": True, "scaled_embedding": True, "mlp": "geglu"}
    needs_window = True
    constants = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
                 "attn_logit_softcapping": None, "final_logit_softcapping": None,
                 "use_bidirectional_attention": False}
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6,
                "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0}

    def positions_json(self, config: Config) -> Fields:
        fields = super().positions_json(config)
        full = fields["rope_parameters"]
        sliding = full
        if isinstance(config.position, RoPEOptions) and config.position.local_base:
            sliding = {"rope_type": "default", "rope_theta": config.position.local_base}
        both = {"full_attention": full, "sliding_attention": sliding}
        if "truncate" in full:      # which transformers looks for beside the two kinds
            both["truncate"] = full["truncate"]
        return fields | {"rope_parameters": both}

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        by_kind = hf_config.get("rope_parameters") or {}
        plain = {"rope_type": "default"}
        # merged as in transformers: rope_scaling is of the full layers; truncate is read beside the two kinds
        full = {"rope_theta": hf_config["rope_theta"], **(by_kind.get("full_attention") or plain),
                **(hf_config.get("rope_scaling") or {})}
        sliding = {"rope_theta": hf_config["rope_local_base_freq"],
                   **(by_kind.get("sliding_attention") or plain)}
        for parameters in (full, sliding):
            parameters.pop("truncate", None)
        is_one = sliding == full                # one base, and one scaling
        if "truncate" in by_kind:
            full["truncate"] = by_kind["truncate"]
        position, L = super().position_table({**hf_config, "rope_scaling": None, "rope_parameters": full})
        if is_one:
            return position, L
        if sliding.get("rope_type", sliding.get("type", "default")) != "default" or "p" in position:
            raise self.unsupported(f"rope_parameters = {by_kind}", "scaling in full_attention alone")
        return position | {"local_base": float(sliding["rope_theta"])}, L

    def write_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return tensor - 1 if "norm" in name else tensor

    def read_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return tensor + 1 if "norm" in name else tensor


class Phi3(Llama):
    """Llama with fused q, k, v and gate, up matrices, and partial rotation."""

    model_type, class_name = "phi3", "Phi3ForCausalLM"
    modules = {
        **{module: parts for module, parts in LLAMA.items() if "_proj" not in module},
        "model.layers.N.self_attn.qkv_proj": QKV,
        "model.layers.N.self_attn.o_proj": "blocks.N.attention.o",
        "model.layers.N.mlp.gate_up_proj": "blocks.N.mlp.gate blocks.N.mlp.up",
        "model.layers.N.mlp.down_proj": "blocks.N.mlp.down",
    }
    encodings = {"rope": {"base", "layout", "scaling", "fraction"}}
    fields = SHAPE | {"sliding_window": "window"}
    defaults = Llama.defaults | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    rope_types = {"default", "longrope"}

    def positions_json(self, config: Config) -> Fields:
        position, D = config.position, config.model.head_width
        assert isinstance(position, RoPEOptions)
        fields = super().positions_json(config)
        R, share = position.rotary_dim(D), position.fraction
        # transformers rounds D times the share down
        fields["rope_parameters"]["partial_rotary_factor"] = share if int(D * share) == R else (R + 0.5) / D
        # Phi3Config prefers this field to that of rope_parameters
        fields[LENGTH] = fields["rope_parameters"].get(LENGTH, config.train.seq_len)
        return fields

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        position, L = super().position_table(hf_config)
        D = hf_config["hidden_size"] // hf_config["num_attention_heads"]
        R = int(D * position.pop("fraction", 1.0))
        if R < D:
            position["fraction"] = R / D
        return position, L


class GPTNeoX(Phi3):
    """GPT-NeoX and Pythia: partial rotation, attention beside the MLP, q, k and v of a head side by side."""

    model_type, class_name = "gpt_neox", "GPTNeoXForCausalLM"
    modules = {
        "gpt_neox.embed_in": "embedding",
        "gpt_neox.layers.N.input_layernorm": "blocks.N.attention_norm",
        "gpt_neox.layers.N.attention.query_key_value": QKV,
        "gpt_neox.layers.N.attention.dense": "blocks.N.attention.o",
        "gpt_neox.layers.N.post_attention_layernorm": "blocks.N.mlp_norm",
        "gpt_neox.layers.N.mlp.dense_h_to_4h": "blocks.N.mlp.up",
        "gpt_neox.layers.N.mlp.dense_4h_to_h": "blocks.N.mlp.down",
        "gpt_neox.final_layer_norm": "norm",
        "embed_out": "head",
    }
    fields = SIZES | {"layer_norm_eps": "norm_eps", "use_parallel_residual": "parallel"}
    block = {"norm": "layernorm", "mlp": "gelu_exact", "bias": True}
    constants = {"hidden_act": "gelu", "attention_bias": True}
    defaults = {"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "use_parallel_residual": True,
                "max_position_embeddings": 2048}
    rope_types = Architecture.rope_types - {"longrope"}
    head = "embed_out"

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        older = {"rope_theta": hf_config.get("rotary_emb_base", 10_000.0),
                 "partial_rotary_factor": hf_config.get("rotary_pct", 0.25)}
        return super().position_table({**hf_config, **older})           # transformers reads these names alone

    def write_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return swapped(tensor, 3, n_head) if "query_key_value" in name else tensor

    def read_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return swapped(tensor, n_head, 3) if "query_key_value" in name else tensor


def swapped(tensor: Tensor, m: int, n: int) -> Tensor:
    """The rows, m times n groups of them, as n times m groups: by q, k and v first, or by heads first."""
    return tensor.unflatten(0, (m, n, -1)).transpose(0, 1).flatten(0, 2)


class GPT2(Architecture):
    """GPT-2."""

    model_type, class_name = "gpt2", "GPT2LMHeadModel"
    modules = {
        "transformer.wte": "embedding",
        "transformer.wpe": "encoding.table",
        "transformer.h.N.ln_1": "blocks.N.attention_norm",
        "transformer.h.N.attn.c_attn": QKV,
        "transformer.h.N.attn.c_proj": "blocks.N.attention.o",
        "transformer.h.N.ln_2": "blocks.N.mlp_norm",
        "transformer.h.N.mlp.c_fc": "blocks.N.mlp.up",
        "transformer.h.N.mlp.c_proj": "blocks.N.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    }
    encodings = {"learned": set()}
    fields = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_inner": "n_hidden",
              "vocab_size": "vocab_size", "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied"}
    block = {"norm": "layernorm", "mlp": "gelu", "bias": True}
    constants = {"activation_function": "gelu_new", "scale_attn_weights": True,
                 "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024}
    length = "n_positions"

    def write_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return tensor.t() if ".c_" in name and tensor.dim() == 2 else tensor    # weights (in, out)

    def read_tensor(self, name: str, tensor: Tensor, n_head: int) -> Tensor:
        return self.write_tensor(name, tensor, n_head)


class MPT(Architecture):
    """MPT: ALiBi, no biases in linear layers, and the exact GELU."""

    model_type, class_name = "mpt", "MptForCausalLM"
    modules = {
        "transformer.wte": "embedding",
        "transformer.blocks.N.norm_1": "blocks.N.attention_norm",
        "transformer.blocks.N.attn.Wqkv": QKV,
        "transformer.blocks.N.attn.out_proj": "blocks.N.attention.o",
        "transformer.blocks.N.norm_2": "blocks.N.mlp_norm",
        "transformer.blocks.N.ffn.up_proj": "blocks.N.mlp.up",
        "transformer.blocks.N.ffn.down_proj": "blocks.N.mlp.down",
        "transformer.norm_f": "norm",
        "lm_head": "head",
    }
    encodings = {"alibi": set()}
    fields = {"n_layers": "n_layer", "n_heads": "n_head", "d_model": "n_embd", "vocab_size": "vocab_size",
              "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied"}
    block = {"norm": "layernorm", "mlp": "gelu_exact"}
    constants = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None, "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "qk_ln": False, "clip_qkv": None, "softmax_scale": None,
        "prefix_lm": False, "attn_type": "multihead_attention"}}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_seq_len": 2048}
    length = "max_seq_len"

    def positions_json(self, config: Config) -> Fields:
        L = config.train.seq_len
        # MPT stores its bias as a table; 64 L is the longest that eval.py tries
        return {self.length: 64 * L, LENGTH: L}

    def tables(self, hf_config: Fields) -> Tables:
        wanted = self.constants["attn_config"]
        given = wanted | (hf_config.get("attn_config") or {})
        return super().tables({**hf_config, "attn_config": {key: given[key] for key in wanted}})


def warn_of_llama_cpp(fields: Fields) -> None:
    """Print which fields of a config.json llama.cpp (by its code of 2026) reads as something else."""
    kind = fields["model_type"]
    n_layer = fields.get("num_hidden_layers", 0)
    period = {"cohere2": 4, "gemma3_text": 6}.get(kind, 1)              # 1: windows in no layer
    read: Fields = {"layer_types": layer_types(period, n_layer),
                    "no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(n_layer)]}
    if kind in ("mistral", "phi3"):
        read["sliding_window"] = None
    misread = [field for field, value in read.items() if fields.get(field, value) != value]
    parameters = fields.get("rope_parameters", {})
    rope_type = parameters.get("full_attention", parameters).get("rope_type", "default")
    if rope_type not in ("default", "linear", "yarn", "llama3") and kind != "phi3":
        misread.append(f"rope_type {rope_type}")
    if misread:
        warn(f"llama.cpp does not read {' and '.join(misread)} of config.json as transformers does; run this "
             "folder by transformers")


# the first that fits is chosen, so the most widely supported come first
ARCHITECTURES: dict[str, Architecture] = {
    kind.model_type: kind() for kind in (Llama, Qwen2, SeedOss, Qwen3, Mistral, SmolLM3, Phi3, Olmo2, Cohere2,
                                         GPTNeoX, GPT2, MPT, Gemma3)}


def choose(config: Config, among: Iterable[Architecture] = ARCHITECTURES.values()) -> Architecture:
    """The first architecture that can express this config. Raises UserError with every setting in the way."""
    def distance(architecture: Architecture) -> tuple[bool, int]:
        return config.position.encoding not in architecture.encodings, len(architecture.obstacles(config))

    nearest = min(among, key=distance)          # the first of equals
    obstacles = nearest.obstacles(config)
    if obstacles:
        raise UserError(f"no supported Hugging Face architecture fits this model; the nearest, "
                        f"{nearest.class_name}, does not support {', '.join(obstacles)}")
    return nearest
