"""Heads from a checkpoint of another project: built as the kind that it holds, and bound to their target."""

import logging
from functools import reduce
from typing import Any

import torch

from draftsmith.heads.checkpoint import read_dtype
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import open_published, refuse
from draftsmith.heads.formats.registry import recognize
from draftsmith.heads.registration import find_kind
from draftsmith.inference.targets.target import Target

logger = logging.getLogger(__name__)


def import_heads(path: str, target: Target, dtype: torch.dtype | str | None, kind: type[Any], **hub: Any) -> Any:
    """Reads heads in another project's format (see `build_heads`).

    Args:
        kind: a class that the heads must be of.
    """
    published = open_published(path, **hub)
    if (found := recognize(published)) is None:
        raise ValueError(
            f"{path} holds no heads in a format that is known here: give the folder of the heads themselves, with "
            "their config.json, or their GGUF file"
        )
    imported = found.read(published, target)
    for note in imported.notes:
        logger.warning("%s: %s", path, note)
    check_kind(imported.kind, path, kind)
    return build_heads(imported, target, path, dtype=dtype)


def check_kind(name: str, path: str, kind: type[Any]) -> type[Any]:
    """The class of the kind of this name. Refuses heads that are not of the class `kind`."""
    if not issubclass(found := find_kind(name), kind):
        raise ValueError(f"{path} holds {name} heads, not {kind.__name__}: load it with DraftHeads.from_pretrained")
    return found


def build_heads(imported: Imported, target: Target, path: str, *, dtype: torch.dtype | str | None = None) -> Any:
    """Heads made of the tensors of another project's checkpoint, bound to the target.

    Args:
        path: where the checkpoint came from, for messages.
        dtype: None or "auto" = the dtype of the checkpoint's tensors.

    Raises:
        ValueError: the settings or the tensors do not fit the heads.
    """
    kind_class = find_kind(imported.kind)
    try:
        config = kind_class.config_class.from_target(target, **imported.settings)
    except (TypeError, ValueError) as error:
        refuse(path, str(error))
    with torch.device("meta"):  # a wrong size in a config may ask for more memory than there is
        imported.check(kind_class(config), path)
    heads: Any = kind_class(config)
    wide = {name for name in imported.tensors if name.rpartition(".")[2] in (heads._keep_in_fp32_modules_strict or ())}
    dtypes = {x.dtype for name, x in imported.tensors.items() if x.is_floating_point() and name not in wide}
    # Without another word: the narrowest dtype that holds all values.
    heads.to(read_dtype(dtype) or reduce(torch.promote_types, sorted(dtypes, key=str) or [torch.float32]))
    for name, buffer in heads.named_buffers():
        if name in wide:
            buffer.data = buffer.float()
    heads.load_state_dict(imported.tensors)
    heads.bind(target)
    return heads.eval()
