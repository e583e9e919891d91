"""What the EAGLE formats share: keys of a Llama config, RoPE, the draft vocabulary, copies of the target's embeddings.

Legend: D hidden size, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from draftsmith.heads.config import DEFAULT_ROPE, SLIDING, decoder_settings
from draftsmith.heads.formats.eagle.config_keys import find_unread
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import OWN_KEY, Published, refuse
from draftsmith.heads.formats.tensors import as_wide_as, count_rows, is_targets_table
from draftsmith.heads.modules.vocabulary import map_tensors
from draftsmith.inference.targets.target import Target

# The types of RoPE that are read -> the keys that they need.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}

# Keys of a Llama config that are settings of ours under the same names.
COPIED = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass
class Reading:
    """A checkpoint while it is read.

    Attributes:
        published, target: what is read, and for which target.
        tensors: by our names.
        names: our name -> the checkpoint's, where they differ.
        notes: as in `Imported`.
    """

    published: Published
    target: Target
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number of the config; without a default it must be there."""
        value = self.published.setting(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self._refuse_value(name, value, "a positive integer")
        return value

    def number(self, name: str) -> float:
        """A positive number of the config, which must be there."""
        value = self.published.setting(name)
        if not is_number(value) or value <= 0:
            self._refuse_value(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.published.setting(name, False)
        if not isinstance(value, bool):
            self._refuse_value(name, value, "true or false")
        return value

    def layers(self, name: str, first: int, last: int) -> list[int]:
        """Numbers of layers of the target."""
        value = self.published.setting(name)
        is_list = isinstance(value, list) and bool(value) and all(isinstance(one, int) for one in value)
        if not is_list or not all(first <= one <= last for one in value):
            self._refuse_value(name, value, f"a list of layers from {first} to {last}")
        return list(value)

    def expect(self, name: str, wanted: Any, *, may_lack: bool = False) -> None:
        """A key with one value that is read."""
        value = self.published.setting(name)
        if value != wanted and not (value is None and may_lack):
            self._refuse_value(name, value, repr(wanted))

    def _refuse_value(self, name: str, value: Any, wanted: str) -> NoReturn:
        where = "the metadata" if self.published.is_gguf else "config.json"
        self.refuse(f"{where} has no {name}" if value is None else f"{name} is {value!r}, and should be {wanted}")

    def refuse(self, problem: str) -> NoReturn:
        """Raises ValueError with what is wrong with the checkpoint, in one sentence."""
        refuse(self.published.path, problem)

    def finish(self, kind: str, settings: dict[str, Any]) -> Imported:
        problems, notes = find_unread(self.published, settings["head_dim"])
        if problems := self.published.find_contradictions() + problems:
            refuse(self.published.path, *problems)
        return Imported(kind, settings, self.tensors, self.names, self.notes + notes)


def read_decoder(reading: Reading, num_layers: int) -> dict[str, Any]:
    """Settings of `DecoderConfig` from a Llama config, whose sizes must be the target's.

    Args:
        num_layers: how many layers the checkpoint's tensors have.
    """
    published, target = reading.published, reading.target
    for name, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (found := reading.integer(name)) != wanted:
            reading.refuse(f"{name} is {found}, and the target's is {wanted}: these heads are for another target")
    reading.expect("target_hidden_size", target.hidden_size, may_lack=True)
    reading.expect("mlp_bias", False, may_lack=True)
    if (stated := reading.integer("num_hidden_layers")) != num_layers:
        reading.refuse(f"num_hidden_layers is {stated}, and the tensors are of {num_layers} layers")
    num_heads = reading.integer("num_attention_heads")
    activation = published.setting("hidden_act", published.setting("hidden_activation", "silu"))
    if not isinstance(activation, str) or activation not in ACT2FN:
        reading.refuse(f"hidden_act is {activation!r}, which transformers does not know")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": reading.integer("num_key_value_heads", num_heads),
        "head_dim": reading.integer("head_dim", max(1, target.hidden_size // num_heads)),
        "intermediate_size": reading.integer("intermediate_size"),
        "hidden_act": activation,
        "rms_norm_eps": reading.number("rms_norm_eps"),
        "rope_parameters": _read_rope(reading),
        "max_position_embeddings": reading.integer("max_position_embeddings", 2048),
        **_read_windows(reading),
    }


def _read_windows(reading: Reading) -> dict[str, Any]:
    """Settings of `WindowedConfig`, which checks them. Configs of other models keep a number that no layer uses."""
    published = reading.published
    types, is_used = published.setting("layer_types", []), published.setting("use_sliding_window", True)
    if not isinstance(types, list):
        reading.refuse(f"layer_types is {types!r}, and should be a list")
    has_window = published.setting("sliding_window") is not None and is_used
    window = reading.integer("sliding_window") if has_window else None
    if window is not None and not types:
        reading.refuse(
            f"sliding_window is {window}, and no layer_types says which layers have it: add them to the config"
        )
    is_unused = SLIDING not in types if window is None else {*types} == {"full_attention"}
    return {} if is_unused else {"sliding_window": window, "layer_types": types}


def _read_rope(reading: Reading) -> dict[str, Any]:
    """RoPE as the checkpoint states it. The original trainer always had 10000 and wrote nothing, so the target's base
    is never inherited."""
    stated: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(value := reading.published.setting(name, {}), dict):
            reading.refuse(f"{name} is {value!r}, and should be a table")
        stated |= {key: one for key, one in value.items() if one is not None}
    rope: dict[str, Any] = {"rope_type": stated.pop("type", "default"), **stated}
    kind = rope["rope_type"]
    if str(kind) not in ROPE_TYPES:
        reading.refuse(f"RoPE of type {kind!r} is not read; allowed are {', '.join(ROPE_TYPES)}")
    if lost := [key for key in ROPE_TYPES[kind] if not is_number(rope.get(key))]:
        reading.refuse(f"RoPE of type {kind!r} has no number for {', '.join(lost)}")
    if (share := rope.pop("partial_rotary_factor", 1.0)) != 1:
        reading.refuse(f"RoPE turns {share!r} of each head, and heads here turn all of it")
    theta = reading.published.setting("rope_theta")
    if "rope_theta" not in rope:
        rope["rope_theta"] = DEFAULT_ROPE["rope_theta"] if theta is None else theta
        theirs = target_rope(reading.target)["rope_theta"]
        if theta is None and theirs != rope["rope_theta"]:
            reading.notes.append(
                f"config.json has no rope_theta: read as {rope['rope_theta']:g}, as the authors train; the target has "
                f"{theirs:g}"
            )
    if not is_number(rope["rope_theta"]) or rope["rope_theta"] <= 0:
        reading.refuse(f"rope_theta is {rope['rope_theta']!r}, and should be a positive number")
    return rope


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def target_rope(target: Target) -> dict[str, Any]:
    """RoPE that draft layers would inherit from the target."""
    rope: dict[str, Any] = decoder_settings(target.text_config)["rope_parameters"]
    return rope


def write_decoder(config: Any, num_layers: int = 1) -> dict[str, Any]:
    """The inverse of `read_decoder`: keys of a Llama config. RoPE stands there as old and as new readers know it."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    window, types = config.sliding_window, config.layer_types or [SLIDING] * num_layers
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in COPIED},
        "vocab_size": config.target_vocab_size,
        "num_hidden_layers": num_layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        **({} if window is None else {"sliding_window": window, "use_sliding_window": True, "layer_types": types}),
    }


def read_own_settings(reading: Reading, names: tuple[str, ...]) -> dict[str, Any]:
    """Numbers of ours that an export has left in the config."""
    found = {name: reading.published.own_setting(name) for name in names}
    for name, value in found.items():
        if value is not None and not is_number(value):
            reading.refuse(f"{OWN_KEY}.{name} is {value!r}, and should be a number")
    return {name: value for name, value in found.items() if value is not None}


def read_biases(reading: Reading, layer: str) -> dict[str, bool]:
    """Settings of attention biases: what the config says, or what the tensors of `layer` have."""
    has_all, has_qkv = reading.flag("attention_bias"), reading.flag("qkv_bias")
    names = {name: f"{layer}self_attn.{name}_proj.bias" for name in "qkvo"}
    return {
        "qkv_bias": has_all or has_qkv or any(names[name] in reading.tensors for name in "qkv"),
        "o_bias": has_all or names["o"] in reading.tensors,
    }


def read_embedding(reading: Reading) -> bool:
    """Whether the heads have token embeddings of their own. A copy of the target's is left out."""
    table = reading.tensors.pop("embed_tokens.weight", None)
    if table is None or is_targets_table(table, reading.target):
        return False
    reading.tensors["embed_tokens.weight"] = table
    return True


def drop_rope_tables(reading: Reading, settings: dict[str, Any]) -> None:
    """Old checkpoints hold RoPE's frequencies; they are left out if they are those of the config."""
    size, theta = settings["head_dim"], settings["rope_parameters"]["rope_theta"]
    expected = float(theta) ** (-torch.arange(0, size, 2).float() / size)
    for name in [name for name in reading.tensors if name.endswith("rotary_emb.inv_freq")]:
        found = reading.tensors.pop(name).float()
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2):
            reading.refuse(f"tensor {reading.names.get(name, name)} is not RoPE with rope_theta {theta:g}")


def read_draft_vocabulary(reading: Reading) -> dict[str, Any]:
    """Settings of the draft vocabulary, from the LM head's rows; its maps must fit each other.

    Worked example: V = 6 and d2t = [1, 3, 3] are the target ids [1, 4, 5], so t2d is True at 1, 4 and 5.
    """
    head, total = reading.tensors.get("lm_head.weight"), reading.target.vocab_size
    head_name = reading.names.get("lm_head.weight", "lm_head.weight")
    stated = reading.published.setting("draft_vocab_size")
    is_ours = OWN_KEY in reading.published.config  # then it must be there: exports always write it
    if head is None and not is_ours and stated in (None, total) and "d2t" not in reading.tensors:
        head = as_wide_as(reading.target.lm_head_weight().detach().cpu(), reading.tensors.get("fc.weight"))
        reading.tensors["lm_head.weight"] = head
        reading.notes.append("the checkpoint has no lm_head.weight: the heads get a copy of the target's")
    size = total if head is None else count_rows(head)
    if size != total and stated is None and not reading.published.is_gguf:
        reading.refuse(f"config.json has no draft_vocab_size, and lm_head.weight has {size} rows of {total}")
    if stated is not None and stated != size:
        reading.refuse(f"draft_vocab_size is {stated}, and lm_head.weight has {size} rows")
    d2t, t2d = (reading.tensors.pop(name, None) for name in ("d2t", "t2d"))
    if size == total and d2t is None and t2d is None:
        return {"draft_vocab_size": None}
    if d2t is None:
        reading.refuse(f"tensor d2t is missing, and {head_name} has {size} rows of {total}")
    if (problem := _find_wrong_map(d2t, t2d, size, total)) is not None:
        reading.refuse(f"{problem} ({head_name} has {size} rows)")
    ids = d2t.long() + torch.arange(size)
    if size == total:  # every token at its own place, or `_find_wrong_map` would have said so
        return {"draft_vocab_size": None}
    reading.tensors["d2t"], reading.tensors["t2d"] = map_tensors(ids, total)
    return {"draft_vocab_size": size}


def _find_wrong_map(d2t: Tensor, t2d: Tensor | None, size: int, total: int) -> str | None:
    if d2t.shape != (size,) or d2t.is_floating_point():
        return f"tensor d2t is {list(d2t.shape)} of {d2t.dtype} and should be [{size}] of whole numbers"
    ids = d2t.long() + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= total or len(ids.unique()) < size:
        absolute = d2t.long()
        if int(absolute.min()) >= 0 and int(absolute.max()) < total and len(absolute.unique()) == size:
            return "tensor d2t holds token ids, and should hold their distances from the draft ids (d2t[i] = id - i)"
        return f"tensor d2t leads to tokens outside the target's {total}, or to one token twice"
    if size == total and bool(d2t.any()):
        return "tensor d2t reorders a full vocabulary, and should be 0 or left out"
    if t2d is None:
        return None  # some exporters leave it out: d2t says all of it
    if t2d.shape != (total,):
        return f"tensor t2d is {list(t2d.shape)} and should be [{total}]"
    marked = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
    if not torch.equal(t2d.bool(), marked):
        return f"t2d and d2t disagree: t2d marks {int(t2d.bool().sum())} tokens, and should mark those of arange + d2t"
    return None


SILU = {"hidden_act": "silu"}  # the only activation that the engines know in these heads


def authors_code(*, is_eagle3: bool) -> str:
    """Python that decodes with heads in the authors' own repository. Their web page and their scripts disagree about
    the flag that tells EAGLE-3 from EAGLE-1."""
    return (
        "import torch\n"
        "from eagle.model.ea_model import EaModel  # github.com/SafeAILab/EAGLE\n\n"
        "model = EaModel.from_pretrained(\n"
        "    base_model_path={target},\n"
        "    ea_model_path={heads},\n"
        f"    use_eagle3={is_eagle3},\n"
        '    torch_dtype="auto",\n'
        '    device_map="auto",\n'
        ")\n"
        'input_ids = torch.tensor([model.tokenizer("Hello").input_ids], device=model.base_model.device)\n'
        "print(model.tokenizer.decode(model.eagenerate(input_ids, max_new_tokens=64)[0]))"
    )


def authors_limits(config: Any) -> tuple[tuple[bool, str], ...]:
    """What the authors' code cannot do, EAGLE-1's and EAGLE-3's: (whether the heads have it, the reason)."""
    size, num_heads, kind = config.hidden_size, config.num_attention_heads, config.rope_parameters["rope_type"]
    return (
        (
            config.head_dim * num_heads != size,
            f"their code computes head_dim, and {config.head_dim} is not {size} / {num_heads}",
        ),
        (kind != "default", f"their code does not know RoPE of type {kind}; choose vllm"),
        window_limit(config, "their code"),
    )


def window_limit(config: Any, reader: str) -> tuple[bool, str]:
    """That a reader knows no sliding windows."""
    return config.sliding_window is not None, f"{reader} knows no sliding_window; choose vllm or speculators"


def refuse_unwritable(title: str, *reasons: tuple[bool, str]) -> None:
    """Raises ValueError with every reason that holds."""
    if found := [reason for holds, reason in reasons if holds]:
        raise ValueError(f"these heads cannot be written as {title}: " + "; ".join(found))


def name_dtype(tensors: dict[str, Tensor]) -> str:
    """The dtype of the weights, as configs name it."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
