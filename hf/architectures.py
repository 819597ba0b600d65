"""Hugging Face architectures that a config can express: names of tensors and of config.json's fields.

Each architecture is a table. hf/export.py reads it in one direction, hf/pretrained.py in the other, so that
both agree. An option that a table does not mention must have its default value; a new option therefore blocks
an export until a table mentions it. Nothing of transformers is imported; the tests compare with it.

Legend: C = n_embd, H = n_head, G = n_kv_head, D channels of a head, R of them rotate, L tokens of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import rope
from config import MOST_LAYERS, Config, ModelConfig
from hf.rope_parameters import LENGTH, ROPE_TYPES, Fields, read_rope_parameters, rope_parameters, rope_type
from model import encoded_layers, hidden_width, is_every, shape_of
from positions import Options
from positions.rotary import RoPEOptions, RotaryOptions
from runtime.errors import UserError, shortened

Tables = dict[str, Fields]      # of our config: section -> key -> value

LLAMA = {                       # Hugging Face's module -> our modules; several are stacked along the rows
    "model.embed_tokens": ["embedding"],
    "model.layers.N.input_layernorm": ["blocks.N.attention_norm"],
    "model.layers.N.self_attn.q_proj": ["blocks.N.attention.q"],
    "model.layers.N.self_attn.k_proj": ["blocks.N.attention.k"],
    "model.layers.N.self_attn.v_proj": ["blocks.N.attention.v"],
    "model.layers.N.self_attn.o_proj": ["blocks.N.attention.o"],
    "model.layers.N.post_attention_layernorm": ["blocks.N.mlp_norm"],
    "model.layers.N.mlp.gate_proj": ["blocks.N.mlp.gate"],
    "model.layers.N.mlp.up_proj": ["blocks.N.mlp.up"],
    "model.layers.N.mlp.down_proj": ["blocks.N.mlp.down"],
    "model.norm": ["norm"],
    "lm_head": ["head"],
}
SHAPE = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
         "n_embd": "hidden_size", "n_hidden": "intermediate_size", "vocab_size": "vocab_size",
         "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}


class Architecture:
    """What an architecture can express, and its names. Subclasses are the rows of the table ARCHITECTURES."""

    model_type: ClassVar[str]
    class_name: ClassVar[str]
    modules: ClassVar[Mapping[str, list[str]]] = LLAMA
    transposed: ClassVar[tuple[str, ...]] = ()          # modules with weights (in, out)
    encodings: ClassVar[Mapping[str, set[str]]]         # name -> keys of [position] with any value
    fields: ClassVar[Mapping[str, str]] = SHAPE         # key of [model] -> field; any value
    block: ClassVar[Fields] = {}                        # keys of [model] with other values than our defaults
    position: ClassVar[Fields] = {}                     # the same for [position]
    rope_types: ClassVar[set[str]] = {"default", *ROPE_TYPES.values()}      # of scalings
    constants: ClassVar[Fields] = {}                    # fields for which only this value is supported
    defaults: ClassVar[Fields] = {}                     # fields that may be missing
    optional: ClassVar[tuple[str, ...]] = ()            # fields that may be null
    length: ClassVar[str] = "max_position_embeddings"
    prefix: ClassVar[str] = "model."                    # missing if the decoder was saved without its head

    # Writing

    def obstacles(self, config: Config) -> list[str]:
        """The settings that this architecture cannot express, as `section.key = value`."""
        model, position = config.model, config.position
        found: Fields = {"position.encoding": position.encoding}
        if position.encoding in self.encodings:
            found = {f"position.{key}": getattr(position, key)
                     for key in differing(position, type(position), self.position)
                     if key not in self.encodings[position.encoding] | {"encoding", "lr_scale"}}
        free = {*self.fields, "head_dim", "dropout"}
        found |= {f"model.{key}": getattr(model, key) for key in differing(model, ModelConfig, self.block)
                  if key not in free}
        if "n_kv_head" not in self.fields and model.n_kv_head not in (None, model.n_head):
            found["model.n_kv_head"] = model.n_kv_head
        if "head_dim" not in self.fields and model.head_width * model.n_head != model.n_embd:
            found["model.head_dim"] = model.head_width
        scaling = getattr(position, "scaling", None)
        if scaling is not None and rope_type(scaling.method) not in self.rope_types:
            found["position.scaling"] = scaling.method
        if config.train.positions == "rfs":     # positions between the integers
            found["train.positions"] = "rfs"
        return [f"{key} = {value!r}" for key, value in found.items()]

    def config_json(self, config: Config) -> Fields:
        """config.json without the ids of special tokens."""
        model = config.model
        resolved = {**model.model_dump(), "n_hidden": hidden_width(model), "head_dim": model.head_width,
                    "n_kv_head": model.n_kv_head or model.n_head}
        return {"architectures": [self.class_name], "model_type": self.model_type, **self.constants,
                **{field: resolved[key] for key, field in self.fields.items()},
                **self.positions_json(config)}

    def positions_json(self, config: Config) -> Fields:
        """The fields for the position encoding and the number of positions."""
        return {self.length: config.train.seq_len}

    # Reading

    def tables(self, hf_config: Fields) -> Tables:
        """[model], [position] and train.seq_len from config.json. Raises UserError if it is not supported."""
        hf_config = {**self.defaults, **hf_config}
        for key, value in self.constants.items():
            if hf_config.get(key, value) != value:
                raise UserError(f"config.json: {key} = {hf_config[key]!r} is not supported for "
                                f"{self.class_name}; only {value!r} is")
        wrong = [name for key, name in [*self.fields.items(), ("", self.length)]
                 if not isinstance(hf_config.get(name), int | float)
                 and not (name in hf_config and hf_config[name] is None and name in self.optional)]
        if wrong:
            raise UserError(f"config.json: {', '.join(wrong)} must be present, and numbers, for "
                            f"{self.class_name}")
        model = {key: hf_config[field] for key, field in self.fields.items()}
        if model["n_layer"] > MOST_LAYERS:      # before anything is made for each of them
            raise UserError(f"config.json: {self.fields['n_layer']}: must be at most {MOST_LAYERS}, got "
                            f"{shortened(model['n_layer'])}; get it again")
        if model.get("n_kv_head") == model["n_head"]:           # our default
            del model["n_kv_head"]
        if model.get("head_dim") == model["n_embd"] / model["n_head"]:
            del model["head_dim"]
        position, L = self.position_table(hf_config)
        model = {key: value for key, value in (self.block | model).items() if value is not None}
        return {"model": model, "position": position, "train": {"seq_len": L}}

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        """[position] and L."""
        return ({"encoding": next(iter(self.encodings)), **self.position},
                hf_config.get(LENGTH) or hf_config[self.length])

    # Tensors

    def names(self, weights: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
        """For all weights of our model: Hugging Face's name -> our names; several are stacked by rows."""
        n_layer = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        for module, parts in self.modules.items():
            for n in range(n_layer) if ".N." in module else [0]:
                for kind in ("weight", "bias"):
                    sources = [f"{part.replace('.N.', f'.{n}.')}.{kind}" for part in parts]
                    if sources[0] in weights:
                        yield f"{module.replace('.N.', f'.{n}.')}.{kind}", sources

    def export_tensors(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        """Our weights under Hugging Face's names, in its layout."""
        weights = in_layout(self.position.get("layout", "half"), weights, config)
        names = list(self.names(weights))
        assert {part for _, parts in names for part in parts} == set(weights), "a weight has no name"
        return {name: self._turned(name, torch.cat([weights[part] for part in parts])).contiguous()
                for name, parts in names}

    def import_tensors(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
                       ) -> dict[str, Tensor]:
        """The tensors under our names, fp32. Raises UserError for a missing, misshapen or unknown one."""
        weights: dict[str, Tensor] = {}
        left = {self.prefix * self._is_bare(name) + name: tensor for name, tensor in tensors.items()}
        for name, parts in self.names(shapes):
            if name not in left:
                raise UserError(f"tensor {name} is missing; download the whole folder again")
            tensor = left.pop(name)
            sizes = [shapes[part][0] for part in parts]
            wanted = (sum(sizes), *shapes[parts[0]][1:])
            turned = self._turned(name, tensor)
            if turned.shape != wanted:
                raise UserError(f"tensor {name}: has shape {tuple(tensor.shape)}, but config.json asks for "
                                f"{tuple(wanted) if turned is tensor else tuple(wanted[::-1])}; take both "
                                "from the same model")
            weights.update(zip(parts, turned.float().contiguous().split(sizes), strict=True))
        # older versions saved masks, tables and the copy of a tied embedding, which our model does not have
        unknown = [name for name in left if not name.endswith(
            ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight"))]
        if unknown:
            raise UserError(f"tensor {unknown[0]} and {len(unknown) - 1} more do not fit {self.class_name}; "
                            "config.json and weights are from different models")
        return weights

    def _is_bare(self, name: str) -> bool:
        return not name.startswith((self.prefix, "lm_head."))

    def _turned(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.t() if name.endswith(self.transposed) and tensor.dim() == 2 else tensor


def differing(options: ModelConfig | Options, schema: type[ModelConfig] | type[Options],
              block: Fields) -> list[str]:
    """Keys whose value differs from the block's, or from the schema's default if the block lacks the key."""
    return [key for key, field in schema.model_fields.items()
            if getattr(options, key) != block.get(key, field.default)]


def every_kth(full: list[int], n_layer: int) -> Fields:
    """model.full_every, if it is set, for these layers with full attention. Raises UserError."""
    every = full[0] + 1 if full else 0
    if full != [n for n in range(n_layer) if is_every(every, n)]:
        raise UserError("config.json: layer_types: only every k-th layer may have full_attention, from "
                        "the k-th on (model.full_every)")
    return {"full_every": every} if every else {}


def in_layout(layout: str, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Weights with the channels of queries and keys reordered from the config's layout to this one.

    Both are reordered in the same way, so the logits stay the same.
    """
    position, model = config.position, config.model
    weights = dict(weights)
    if not isinstance(position, RotaryOptions) or position.layout == layout:
        return weights
    reorder = rope.to_half if layout == "half" else rope.to_interleaved
    R, D = position.rotary_dim(model.head_width), model.head_width
    for name, weight in weights.items():
        if name.rpartition(".")[0].endswith(("attention.q", "attention.k", "q_norm", "k_norm")):
            weights[name] = reorder(weight, len(weight) // D, R)
    return weights


class Llama(Architecture):
    """Llama 1 to 3, SmolLM 1 and 2, TinyLlama, and other models saved as Llama."""

    model_type, class_name = "llama", "LlamaForCausalLM"
    encodings = {"rope": {"base", "layout", "scaling"}}
    fields = SHAPE | {"head_dim": "head_dim", "bias": "attention_bias"}
    constants = {"hidden_act": "silu"}
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
                "mlp_bias": False, "max_position_embeddings": 2048, "num_key_value_heads": None,
                "head_dim": None, "sliding_window": None}
    optional = ("num_key_value_heads", "head_dim", "sliding_window")
    theta: ClassVar[float] = 10_000.0

    def obstacles(self, config: Config) -> list[str]:
        is_odd = config.model.n_embd % config.model.n_head      # LlamaConfig refuses it, even with head_dim
        return super().obstacles(config) + [f"model.n_head = {config.model.n_head}"] * bool(is_odd)

    def config_json(self, config: Config) -> Fields:
        biases = {"mlp_bias": config.model.bias} if "bias" in self.fields else {}
        return super().config_json(config) | biases

    def positions_json(self, config: Config) -> Fields:
        position, D, L = config.position, config.model.head_width, config.train.seq_len
        if not isinstance(position, RotaryOptions):
            return {"rope_parameters": {"rope_type": "default", "rope_theta": self.theta}, self.length: L}
        parameters, max_length = rope_parameters(position, position.rotary_dim(D), L)
        return {"rope_parameters": parameters, self.length: max_length}

    def tables(self, hf_config: Fields) -> Tables:
        in_mlp, in_attention = (hf_config.get(f"{part}_bias", False) for part in ("mlp", "attention"))
        if "bias" in self.fields and in_mlp != in_attention:
            raise UserError("config.json: attention_bias and mlp_bias differ; here either all linear "
                            "layers have biases or none (model.bias)")
        if set(hf_config.get("layer_types") or ()) - {"full_attention"}:
            raise UserError("config.json: layer_types: sliding windows in some layers are not supported, "
                            "only full_attention")
        return super().tables(hf_config)

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        position, L = read_rope_parameters(hf_config, self.theta, hf_config[self.length])
        encoding, free = next(iter(self.encodings.items()))
        if not position.keys() <= free:
            raise UserError(f"config.json: partial_rotary_factor {position['fraction']} is not "
                            f"supported for {self.class_name}, which rotates all channels")
        return {"encoding": encoding, **self.position, **position}, L


class Qwen2(Llama):
    """Llama with biases for q, k and v."""

    model_type, class_name = "qwen2", "Qwen2ForCausalLM"
    fields = SHAPE
    block = {"qkv_bias": True}
    constants = {"hidden_act": "silu", "use_sliding_window": False}
    defaults = Llama.defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32_768}


class Qwen3(Llama):
    """Llama with an RMSNorm on q and k of each head, and heads of any width."""

    model_type, class_name = "qwen3", "Qwen3ForCausalLM"
    modules = LLAMA | {"model.layers.N.self_attn.q_norm": ["blocks.N.attention.q_norm"],
                       "model.layers.N.self_attn.k_norm": ["blocks.N.attention.k_norm"]}
    fields = SHAPE | {"head_dim": "head_dim"}
    block = {"qk_norm": True}
    constants = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
    defaults = Qwen2.defaults | {"head_dim": 128}

    def obstacles(self, config: Config) -> list[str]:
        return Architecture.obstacles(self, config)


class Mistral(Llama):
    """Llama with a sliding window in all layers or in none, and heads of any width."""

    model_type, class_name = "mistral", "MistralForCausalLM"
    fields = SHAPE | {"head_dim": "head_dim", "window": "sliding_window"}
    defaults = Llama.defaults | {"num_key_value_heads": 8, "sliding_window": 4096,
                                 "max_position_embeddings": 131_072}

    def obstacles(self, config: Config) -> list[str]:
        return Architecture.obstacles(self, config)


class SmolLM3(Llama):
    """Llama with some layers that have no position encoding."""

    model_type, class_name = "smollm3", "SmolLM3ForCausalLM"
    encodings = {"rope": {"base", "layout", "scaling", "layers", "skip_every"}, "none": set()}
    fields = SHAPE | {"bias": "attention_bias"}
    constants = {"hidden_act": "silu", "use_sliding_window": False}
    defaults = Llama.defaults | {"num_key_value_heads": 4, "tie_word_embeddings": True,
                                 "max_position_embeddings": 32_768}
    theta = 2_000_000.0

    def positions_json(self, config: Config) -> Fields:
        rotates = encoded_layers(config) if isinstance(config.position, RotaryOptions) else set()
        flags = [int(layer in rotates) for layer in range(config.model.n_layer)]
        return {"no_rope_layers": flags, **super().positions_json(config)}

    def rotating(self, hf_config: Fields) -> list[int]:
        """The layers that rotate."""
        n_layer, every = hf_config["num_hidden_layers"], hf_config.get("no_rope_layer_interval", 4)
        rotates = hf_config.get("no_rope_layers") or [(layer + 1) % every for layer in range(n_layer)]
        return [layer for layer, is_on in enumerate(rotates[:n_layer]) if is_on]

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        layers = self.rotating(hf_config)
        position, L = super().position_table(hf_config)
        if not layers:
            return {"encoding": list(self.encodings)[1]}, L
        return position | ({} if len(layers) == hf_config["num_hidden_layers"] else {"layers": layers}), L


class Llama4(SmolLM3):
    """Llama 4 without experts: chunks in layers that rotate, a temperature in those that do not.

    Its L is floor_scale, the length of that temperature and of its chunks.
    """

    model_type, class_name = "llama4_text", "Llama4ForCausalLM"
    modules = {name.replace(".mlp.", ".feed_forward."): parts for name, parts in LLAMA.items()}
    encodings = {"rope": {"base", "layout", "scaling", "layers", "skip_every", "temperature",
                          "temperature_layers"}, "none": {"temperature"}}
    fields = SHAPE | {"n_hidden": "intermediate_size_mlp", "head_dim": "head_dim",
                      "chunk": "attention_chunk_size"}
    constants = {"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False, "moe_layers": [],
                 "attn_scale": 0.1}
    defaults = Llama.defaults | {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "intermediate_size_mlp": 16_384, "attention_chunk_size": 8192, "floor_scale": 8192,
        "use_qk_norm": True, "moe_layers": None}
    position = {"layout": "interleaved"}
    temperatures: ClassVar[set[str]] = {"none", "llama4"}
    theta = 500_000.0

    def obstacles(self, config: Config) -> list[str]:
        position, model = config.position, config.model
        found = [text for text in Architecture.obstacles(self, config) if "full_every" not in text]
        if position.temperature not in self.temperatures:
            found.append(f"position.temperature = {position.temperature!r}")
        elif position.temperature == "llama4" and position.temperature_layers != (
                "unencoded" if isinstance(position, RotaryOptions) else "all"):
            found.append(f"position.temperature_layers = {position.temperature_layers!r}")
        return found + ["model.chunk = None"] * (model.chunk is None)

    def positions_json(self, config: Config) -> Fields:
        local = shape_of(config).local_layers
        kinds = ["chunked_attention" if n in local else "full_attention" for n in range(config.model.n_layer)]
        return {"layer_types": kinds, "floor_scale": config.train.seq_len,
                "attn_temperature_tuning": config.position.temperature == "llama4",
                **super().positions_json(config)}

    def tables(self, hf_config: Fields) -> Tables:
        tables = super().tables({**hf_config, "layer_types": None})     # bounds the number of layers
        layers, kinds = range(hf_config["num_hidden_layers"]), hf_config.get("layer_types")
        rotating = set(self.rotating(hf_config))
        full = [n for n in layers if (kinds[n] == "full_attention" if kinds else n not in rotating)]
        tables["model"] |= every_kth(full, len(layers))
        return tables

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        position, L = super().position_table(hf_config)
        if not hf_config.get("attn_temperature_tuning", True):
            return position, L
        layers = {"temperature_layers": "unencoded"} if self.rotating(hf_config) else {}
        return position | {"temperature": "llama4"} | layers, hf_config["floor_scale"]


class Ministral3(Mistral):
    """Mistral with a temperature that grows in steps of L."""

    model_type, class_name = "ministral3", "Ministral3ForCausalLM"
    position = {"temperature": "ministral3"}
    rope_types = {"default", "yarn"}                            # those whose L is that of the temperature
    defaults = Mistral.defaults | {
        "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None, "max_position_embeddings": 262_144,
        "rope_parameters": {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, LENGTH: 16_384, "mscale": 1.0,
                            "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
                            "llama_4_scaling_beta": 0.1}}

    def obstacles(self, config: Config) -> list[str]:
        original = getattr(getattr(config.position, "scaling", None), "original_length", None)
        is_other = original not in (None, config.train.seq_len)
        return super().obstacles(config) + [f"position.scaling.original_length = {original}"] * is_other

    def positions_json(self, config: Config) -> Fields:
        fields = super().positions_json(config)
        fields["rope_parameters"] |= {LENGTH: config.train.seq_len, "llama_4_scaling_beta": 0.1}
        return fields

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        given = {"llama_4_scaling_beta": None, **hf_config["rope_parameters"]}
        given.pop(self.length, None)
        beta, L = given.pop("llama_4_scaling_beta"), given.get(LENGTH)
        if beta != 0.1 or not L:
            raise UserError("config.json: rope_parameters: must have llama_4_scaling_beta = 0.1 and "
                            f"{LENGTH}, got {beta!r} and {L!r}")
        if given.get("mscale") and given.get("mscale") == given.get("mscale_all_dim"):      # their quotient
            given = {"attention_factor": 1.0} | given
            del given["mscale"], given["mscale_all_dim"]
        position, found = super().position_table({**hf_config, "rope_parameters": given})
        if "scaling" in position and position["scaling"]["method"] not in self.rope_types:
            raise UserError(f"config.json: rope_parameters: {position['scaling']['method']} is not supported "
                            f"for {self.class_name}")
        return position, L


class Gemma3(Llama):
    """The text model of Gemma 3: norms on both sides of a sublayer, GEGLU, another base in windows.

    Its norms multiply by 1 + weight, ours by the weight. Folders with images (Gemma3ForConditionalGeneration)
    are not supported.
    """

    model_type, class_name = "gemma3_text", "Gemma3ForCausalLM"
    modules = Qwen3.modules | {
        "model.layers.N.post_attention_layernorm": ["blocks.N.attention_post_norm"],
        "model.layers.N.pre_feedforward_layernorm": ["blocks.N.mlp_norm"],
        "model.layers.N.post_feedforward_layernorm": ["blocks.N.mlp_post_norm"]}
    encodings = {"rope": {"base", "layout", "scaling", "local_base"}}
    fields = SHAPE | {"head_dim": "head_dim", "window": "sliding_window"}
    block = {"qk_norm": True, "post_norm": True, "scaled_embedding": True, "mlp": "geglu"}
    constants = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
                 "attn_logit_softcapping": None, "final_logit_softcapping": None,
                 "use_bidirectional_attention": False}
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6,
                "max_position_embeddings": 131_072}
    theta, local_theta = 1_000_000.0, 10_000.0

    def obstacles(self, config: Config) -> list[str]:
        found = [text for text in super().obstacles(config) if "full_every" not in text]
        return found + ["model.window = None"] * (config.model.window is None)

    def positions_json(self, config: Config) -> Fields:
        fields, local = super().positions_json(config), shape_of(config).local_layers
        assert isinstance(config.position, RoPEOptions)
        theta, full = config.position.local_base, fields["rope_parameters"]
        sliding = {"rope_type": "default", "rope_theta": theta} if theta else full
        kinds = ["sliding_attention" if n in local else "full_attention" for n in range(config.model.n_layer)]
        return fields | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding},
                         "layer_types": kinds, "query_pre_attn_scalar": config.model.head_width}

    def tables(self, hf_config: Fields) -> Tables:
        tables = super().tables({**hf_config, "layer_types": None})     # bounds the number of layers
        given = {**self.defaults, **hf_config}
        scalar, D = given["query_pre_attn_scalar"], given["head_dim"]
        if scalar != D:
            raise UserError(f"config.json: query_pre_attn_scalar = {scalar!r} is not supported for "
                            f"{self.class_name}; only head_dim = {D!r} is")
        layers, every = range(given["num_hidden_layers"]), given["sliding_window_pattern"]
        kinds = given.get("layer_types") or [
            "full_attention" if is_every(every, n) else "sliding_attention" for n in layers]
        tables["model"] |= every_kth([n for n in layers if kinds[n] == "full_attention"], len(layers))
        return tables

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        by_kind = hf_config.get("rope_parameters") or {}
        full, sliding = (by_kind.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
        position, L = super().position_table({**hf_config, "rope_parameters": full})
        if sliding and sliding == full:         # one base, and one scaling
            return position, L
        if sliding.get("rope_type", "default") != "default":
            raise UserError(f"config.json: rope_parameters: {sliding['rope_type']!r} in sliding_attention "
                            f"alone is not supported for {self.class_name}; only 'default' is")
        given = {"rope_theta": hf_config.get("rope_local_base_freq", self.local_theta), **sliding}
        return position | {"local_base": float(given["rope_theta"])}, L

    def export_tensors(self, weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
        tensors = super().export_tensors(weights, config)
        return {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()}

    def import_tensors(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
                       ) -> dict[str, Tensor]:
        weights = super().import_tensors(tensors, shapes)
        return {name: weight + 1 if "norm" in name else weight for name, weight in weights.items()}


class Phi3(Llama):
    """Llama with fused q, k, v and gate, up matrices, and partial rotation."""

    model_type, class_name = "phi3", "Phi3ForCausalLM"
    modules = {
        **{module: parts for module, parts in LLAMA.items() if "_proj" not in module},
        "model.layers.N.self_attn.qkv_proj": [f"blocks.N.attention.{part}" for part in "qkv"],
        "model.layers.N.self_attn.o_proj": ["blocks.N.attention.o"],
        "model.layers.N.mlp.gate_up_proj": ["blocks.N.mlp.gate", "blocks.N.mlp.up"],
        "model.layers.N.mlp.down_proj": ["blocks.N.mlp.down"],
    }
    encodings = {"rope": {"base", "layout", "scaling", "fraction"}}
    fields = SHAPE | {"window": "sliding_window"}
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
        return position | ({} if R == D else {"fraction": R / D}), L


class GPT2(Architecture):
    """GPT-2."""

    model_type, class_name = "gpt2", "GPT2LMHeadModel"
    modules = {
        "transformer.wte": ["embedding"],
        "transformer.wpe": ["encoding.table"],
        "transformer.h.N.ln_1": ["blocks.N.attention_norm"],
        "transformer.h.N.attn.c_attn": [f"blocks.N.attention.{part}" for part in "qkv"],
        "transformer.h.N.attn.c_proj": ["blocks.N.attention.o"],
        "transformer.h.N.ln_2": ["blocks.N.mlp_norm"],
        "transformer.h.N.mlp.c_fc": ["blocks.N.mlp.up"],
        "transformer.h.N.mlp.c_proj": ["blocks.N.mlp.down"],
        "transformer.ln_f": ["norm"],
        "lm_head": ["head"],
    }
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    encodings = {"learned": set()}
    fields = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_hidden": "n_inner",
              "vocab_size": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"}
    block = {"norm": "layernorm", "mlp": "gelu", "bias": True}
    constants = {"activation_function": "gelu_new", "scale_attn_weights": True,
                 "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024, "n_inner": None}
    optional = ("n_inner",)
    length, prefix = "n_positions", "transformer."

    def config_json(self, config: Config) -> Fields:
        names = ("attn_pdrop", "embd_pdrop", "resid_pdrop")     # GPT2Config's defaults are 0.1
        return super().config_json(config) | dict.fromkeys(names, config.model.dropout)


class MPT(Architecture):
    """MPT: ALiBi, no biases in linear layers, and the exact GELU."""

    model_type, class_name = "mpt", "MptForCausalLM"
    modules = {
        "transformer.wte": ["embedding"],
        "transformer.blocks.N.norm_1": ["blocks.N.attention_norm"],
        "transformer.blocks.N.attn.Wqkv": [f"blocks.N.attention.{part}" for part in "qkv"],
        "transformer.blocks.N.attn.out_proj": ["blocks.N.attention.o"],
        "transformer.blocks.N.norm_2": ["blocks.N.mlp_norm"],
        "transformer.blocks.N.ffn.up_proj": ["blocks.N.mlp.up"],
        "transformer.blocks.N.ffn.down_proj": ["blocks.N.mlp.down"],
        "transformer.norm_f": ["norm"],
        "lm_head": ["head"],
    }
    encodings = {"alibi": set()}
    fields = {"n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "vocab_size": "vocab_size",
              "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"}
    block = {"norm": "layernorm", "mlp": "gelu_exact"}
    constants = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_seq_len": 2048}
    length, prefix = "max_seq_len", "transformer."
    attention: ClassVar[Fields] = {"alibi": True, "alibi_bias_max": 8, "qk_ln": False, "clip_qkv": None,
                                   "softmax_scale": None, "prefix_lm": False,
                                   "attn_type": "multihead_attention"}
    reach: ClassVar[int] = 64       # MPT stores its bias as a table; 64 L is the longest that eval.py tries

    def obstacles(self, config: Config) -> list[str]:
        width = hidden_width(config.model)
        return super().obstacles(config) + ([] if width == 4 * config.model.n_embd
                                            else [f"model.n_hidden = {width}"])

    def positions_json(self, config: Config) -> Fields:
        L = config.train.seq_len
        return {"attn_config": self.attention, self.length: self.reach * L, LENGTH: L}

    def position_table(self, hf_config: Fields) -> tuple[Fields, int]:
        for key, value in (hf_config.get("attn_config") or {}).items():
            if key in self.attention and value != self.attention[key]:
                raise UserError(f"config.json: attn_config.{key} = {value!r} is not supported for "
                                f"{self.class_name}; only {self.attention[key]!r} is")
        return super().position_table(hf_config)


# the first that fits is chosen, so the most widely supported come first
ARCHITECTURES: dict[str, Architecture] = {
    a.model_type: a for a in (Llama(), Qwen2(), Qwen3(), Mistral(), SmolLM3(), Phi3(), GPT2(), MPT(),
                              Llama4(), Ministral3(), Gemma3())}


def choose(config: Config) -> Architecture:
    """The first architecture that can express this config. Raises UserError with every setting in the way."""
    def distance(architecture: Architecture) -> tuple[bool, int]:
        return config.position.encoding not in architecture.encodings, len(architecture.obstacles(config))

    nearest = min(ARCHITECTURES.values(), key=distance)         # the first of equals
    obstacles = nearest.obstacles(config)
    if obstacles:
        raise UserError(f"no supported Hugging Face architecture fits this model; the nearest, "
                        f"{nearest.class_name}, does not support {', '.join(obstacles)}")
    return nearest
