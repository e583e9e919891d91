"""LoRA adapters of the target for joint training: new ones, and stored ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn

from heads import DraftHeads
from heads.adapter import WEIGHTS_FILE, load_adapter
from training.options.joint_options import JointArguments

_INSTALL_HINT = "lora_r trains adapters of the target, which needs peft: pip install 'draftsmith[peft]'"


def add_adapter(model: nn.Module, args: JointArguments) -> nn.Module:
    """Wraps a frozen `model` in PEFT. Only its LoRA adapters train; they are float32 and change no output yet.

    Raises:
        ValueError: no layer has such a name, the LM head or the embeddings are among them, or peft is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(_INSTALL_HINT) from error
    assert args.lora_r is not None
    names = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=cast(int, args.lora_alpha),
        lora_dropout=args.lora_dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(cast(Any, model), config)
    borrowed = (adapted.get_input_embeddings(), adapted.get_base_model().get_output_embeddings())
    if any(hasattr(module, "lora_A") for module in borrowed):
        raise ValueError(
            f"got lora_target_modules {names}, which name the LM head or the token embeddings: heads borrow both "
            "without adapters; leave them out"
        )
    adapted.eval()
    return cast(nn.Module, adapted)


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Loads stored weights into the adapters of `model`, a PEFT model.

    Raises:
        ValueError: the stored adapter has another rank, scale or set of layers.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    stored, own = PeftConfig.from_pretrained(str(folder)), model.peft_config["default"]
    for name in ("r", "lora_alpha", "target_modules"):
        one, other = getattr(stored, name), getattr(own, name)
        if one != other:
            raise ValueError(
                f"{folder} has an adapter with {name} {one} (now {other}): give the options it was trained with, or "
                "train in another output_dir"
            )
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS_FILE))


def adapt_target(model: nn.Module, heads: DraftHeads | None, args: JointArguments) -> nn.Module:
    """Returns `model` with the adapters of this run.

    Joint training: trainable adapters, which start from those stored with `heads`, if any. Otherwise: the adapters
    stored with `heads`, frozen, or the model itself.
    """
    stored = heads.find_adapter() if heads is not None and heads.config.target_adapter else None
    if args.is_on:
        model = add_adapter(model, args)
        if stored is not None:
            load_adapter_weights(model, stored)
    elif stored is not None:
        model = load_adapter(model, stored, merge=False)
    return model
