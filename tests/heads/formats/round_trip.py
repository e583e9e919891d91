"""What tests of every format ask: heads come back bit for bit, draft as before, and damage is named."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.registry import find_format, recognize
from draftsmith.heads.importing import build_heads
from draftsmith.inference import Target
from tests.heads.test_contract import assert_same_tensors
from tests.heads.tiny_heads import AS_PUBLISHED, tiny_heads
from tests.tiny_targets import random_prompt

# The authors' EAGLE-3 taps layers that are distinct in targets of seven layers and more.
NUM_LAYERS = 8
# Name -> (format, kind, settings) of checkpoints that tests change before they are read.
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "eagle", {"fc_bias": True}),
    "eagle3": ("vllm", "eagle3", {"draft_vocab_size": 40, "feature_layers": [1, 4, 6], **AS_PUBLISHED}),
    "full vocabulary": ("eagle", "eagle3", AS_PUBLISHED),
    "speculators": (
        "speculators",
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": False},
    ),
    "p-eagle": ("vllm", "parallel", {"draft_vocab_size": 40}),
}


def write(exported: Exported, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    exported.save(folder)
    return folder


def import_heads(known: Format, published: Published, target: Target) -> DraftHeads:
    return build_heads(known.read(published, target), target, published.path)


def export_heads(known: Format, heads: DraftHeads) -> Exported:
    assert heads.config.head_type in known.kinds
    return known.write(heads.config, heads.state_dict(), heads.target)


def publish(known: Format, heads: DraftHeads) -> Published:
    """Exported heads as they are opened, without files."""
    exported = export_heads(known, heads)
    return Published(
        "somewhere", exported.config, exported.file, {name: x.detach() for name, x in exported.tensors.items()}
    )


def heads_of(name: str, target: Target) -> DraftHeads:
    """Of one of `CHECKPOINTS`."""
    _, kind, settings = CHECKPOINTS[name]
    return tiny_heads(kind, target, **settings)


def publish_as(name: str, target: Target) -> Published:
    return publish(find_format(*CHECKPOINTS[name][:2]), heads_of(name, target))


def read(published: Published, target: Target) -> tuple[Imported, DraftHeads]:
    imported = recognize(published).read(published, target)
    return imported, build_heads(imported, target, published.path)


def assert_same_heads(found: DraftHeads, heads: DraftHeads) -> None:
    """The same tensors bit for bit, and the same drafts."""
    assert_same_tensors(heads.state_dict(), found.state_dict())
    assert found.feature_layers == heads.feature_layers
    input_ids, features = random_prompt(9), torch.randn(1, 9, len(heads.feature_layers) * heads.target.hidden_size)
    for one, other in zip(found.unroll(features, input_ids), heads.unroll(features, input_ids), strict=True):
        assert torch.equal(one.score(one.hidden), other.score(other.hidden))


def damages(name: str, tensor: Tensor) -> dict[str, dict[str, Tensor]]:
    """Ways to damage a tensor -> what takes its place."""
    ways: dict[str, dict[str, Tensor]] = {
        "missing": {},
        "renamed": {f"{name}.old": tensor},
        "cut": {name: tensor[:-1]},
        "scalar": {name: tensor.flatten()[0]},
        "flat": {name: tensor.flatten()[:-1]},
    }
    if tensor.is_floating_point():
        broken = tensor.detach().clone()
        broken.view(-1)[0] = torch.nan
        ways |= {"NaN": {name: broken}, "quantized": {name: tensor.detach().to(torch.int8)}}
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        ways["transposed"] = {name: tensor.T.contiguous()}
    return ways


def is_named(name: str, message: str) -> bool:
    """Whether a message has this name, and not only a longer one that begins or ends with it.

    >>> is_named("fc.weight", "tensor fc.weight is missing"), is_named("fc.weight", "tensor fc.weight.old is unknown")
    (True, False)
    """
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", message) is not None


def assert_damage_is_named(known: Format, published: Published, target: Target, may_lack: tuple[str, ...] = ()) -> None:
    """Every tensor, damaged in one way, is refused by its name. Neighbours are damaged in different ways, and small
    checkpoints begin with different ones.

    Args:
        may_lack: tensors that can be left out, since something else says the same.
    """
    assert published
    allowed = {(name, "missing") for name in may_lack}
    for number, (name, tensor) in enumerate(published.items(), start=len(published)):
        ways = [(how, instead) for how, instead in damages(name, tensor).items() if (name, how) not in allowed]
        how, instead = ways[number % len(ways)]
        message = refusal_of(known, change(published, {name: None, **instead}), target)
        is_stray_named = how == "renamed" and is_named(f"{name}.old", message)
        assert is_named(name, message) or is_stray_named, f"{name}, {how}: {message}"


# Settings that published configs leave out where they have the usual value, so that a lost key cannot be seen.
_USUAL = {"max_position_embeddings", "norm_before_residual", "is_causal", "predicts_at_anchor", "dtype"}


def assert_lost_keys_are_refused(known: Format, published: Published, heads: DraftHeads) -> None:
    """Without any key of its config, a checkpoint gives the same heads, or it is refused by the name of the key, of a
    key in its table, or of a tensor that does not fit any more."""
    expected = heads.config.to_dict()
    for key, value in published.config.items():
        cut = change(published, config={key: None})
        if key.startswith(OWN_KEY) or not known.matches(cut):
            continue
        if (message := refusal_or_none(known, cut, heads.target)) is not None:
            named = [key, *(value if isinstance(value, dict) else ()), "tensor ", "keys"]
            assert any(name in message for name in named), f"without {key}: {message}"
            continue
        found = import_heads(known, cut, heads.target)
        changed = {one for one, value in found.config.to_dict().items() if value != expected[one]}
        assert changed <= _USUAL, f"without {key}: {changed}"


def refusal_of(known: Format, published: Published, target: Target) -> str:
    message = refusal_or_none(known, published, target)
    assert message is not None, f"{sorted(published)} was read"
    return message


def refusal(published: Published, target: Target) -> str:
    found = recognize(published)
    assert found is not None
    return refusal_of(found, published, target)


def refusal_or_none(known: Format, published: Published, target: Target) -> str | None:
    """The message with which a checkpoint is refused; None = it was read."""
    try:
        import_heads(known, published, target)
    except ValueError as error:
        return str(error)
    return None


def change(
    published: Published, tensors: Mapping[str, Tensor | None] | None = None, config: dict[str, Any] | None = None
) -> Published:
    """With other tensors, and other keys of the config and of its tables; None leaves one out."""
    return Published(
        published.path, merge(published.config, config or {}), published.file, merge(published, tensors or {})
    )


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: merge(old.get(key) or {}, x) if isinstance(x, dict) else x for key, x in new.items()}
    return {key: x for key, x in {**old, **changed}.items() if x is not None}
