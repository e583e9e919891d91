"""The tree of four tokens that every target must compute, and the check of the answer.

Legend: D hidden, or the vocabulary where logits are compared; Hkv key/value heads, Dk channels of a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from draftsmith.inference.cache.kv_cache import KVSpec, LayerSpec
from draftsmith.inference.cache.recurrent_states import RecurrentStates
from draftsmith.inference.kernels.packed_masks import pack_tree
from draftsmith.inference.targets.masks import TreeMasks
from draftsmith.inference.targets.refusals import CannotRollBackError, WrongNumbersError, is_single

# Empty slots between the tree's first token and the others: more than any window that a model applies by itself.
_GAP = 4200


@dataclass(frozen=True)
class ProbeTree:
    """A root, a child, another child, and the first child's twin.

    The twins must get equal states. They do not if the model ignores the mask (the second would see its siblings) or
    the position ids (it would stand two positions later). The states must also equal those of the same two tokens in a
    plain pass; they do not if the model reads the mask in another way. The twins' keys must be equal too: positions
    change keys even where weak weights hardly change the last states. Thousands of empty slots follow the root, so a
    model that applies its own windows or distances to slots fails as well.

    Attributes:
        token_ids, positions: [1, 4].
        key_positions: [1, S], of all slots, empty slots included.
        masks: over S slots, as the model takes them.
    """

    token_ids: Tensor
    positions: Tensor
    key_positions: Tensor
    masks: Any

    @classmethod
    def of_tokens(cls, token_ids: Tensor, masks: TreeMasks) -> ProbeTree:
        """The tree of tokens from `draw_ids`."""
        positions = torch.tensor([[0, 1, 1, 1]], device=token_ids.device)
        allowed = torch.eye(4, dtype=torch.bool, device=token_ids.device)[None].clone()
        allowed[..., 0] = True
        key_positions = _insert_gap(positions, 1)
        seen = masks.from_allowed(_insert_gap(allowed, 2), positions, key_positions)
        return cls(token_ids, positions, key_positions, seen)

    def pack_masks(self, masks: TreeMasks) -> Any:
        """The same tree as packed masks: a committed token, and three nodes after the gap."""
        allowed = torch.eye(4, dtype=torch.bool, device=self.token_ids.device)[None, :, 1:]
        one = self.positions.new_ones(1, 1)
        return masks.make_each(lambda window: pack_tree(allowed, one, one + _GAP, origin=0 * one[0], window=window))

    @property
    def parents(self) -> Tensor:
        """[1, 4] long."""
        return self.positions - 1


class RecordingCache(Cache):
    """Returns keys and values with empty slots after the first token's; keeps their shapes and the twins' keys.
    Refuses any other kind of state, unless placed mixers have it in `states`."""

    def __init__(self, name: str, states: RecurrentStates | None = None) -> None:
        super().__init__(layers=[])
        self.name = name
        self.states = states
        self.specs: dict[int, LayerSpec] = {}
        self.twin_keys: dict[int, Tensor] = {}  # [2, Hkv * Dk] per layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            KVSpec(rows.shape[1], rows.shape[3], rows.dtype, rows.device) for rows in (key_states, value_states)
        )
        self.specs[layer_idx] = LayerSpec(keys, values)
        self.twin_keys[layer_idx] = key_states[0][:, [1, 3]].transpose(0, 1).flatten(1)
        return _insert_gap(key_states, 2), _insert_gap(value_states, 2)

    def list_specs(self, layer_types: Sequence[str], windows: Mapping[str, int | None]) -> tuple[LayerSpec | None, ...]:
        """The layers' specs, with the window of each type that has attention; None for layers without."""
        if missing := [i for i, kind in enumerate(layer_types) if kind in windows and i not in self.specs]:
            raise ValueError(
                f"layers {missing} of {self.name} never write keys and values into the cache (shared, recurrent or "
                f"cross-attention layers), so they cannot be rolled back after a rejected draft"
            )
        return tuple(
            replace(self.specs[i], window=windows.get(kind)) if i in self.specs else None
            for i, kind in enumerate(layer_types)
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotRollBackError(
            f"{self.name} keeps a state besides keys and values (recurrent, convolution or index), which cannot be "
            f"rolled back after a rejected draft"
        )

    update_conv_state = update_recurrent_state = update_indexer = _refuse
    get_conv_state = get_recurrent_state = _refuse

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return True if self.states is not None else self._refuse()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return 4 + _GAP, 0


def _insert_gap(rows: Tensor, dim: int) -> Tensor:
    """Inserts zeros (False) after the first of the four tokens on this dimension."""
    first, others = rows.split([1, 3], dim)
    shape = [*rows.shape[:dim], _GAP, *rows.shape[dim + 1 :]]
    return torch.cat([first, rows.new_zeros(shape), others], dim)


def check_finite(model: Any, what: str, plain: Sequence[Tensor], tree: Tensor | None = None) -> None:
    """Refuses (ValueError) a model whose values are NaN or infinite, before the values are compared.

    Args:
        what: the values' name.
        plain: values of passes over plain texts.
        tree: values of the pass over the tree. Broken keys may show only here: attention kernels can lose a NaN. If no
            weight is broken, the model's masks are the cause, and `check_branches` says so.
    """
    is_plain_finite = all(map(_is_finite, plain))
    if is_plain_finite and (tree is None or _is_finite(tree)):
        return
    broken = next((name for name, weight in model.named_parameters() if _is_broken(weight)), None)
    if is_plain_finite and broken is None:
        return
    cause = (
        f"so do its weights ({broken}), broken or too large for float16: load them again, or in bfloat16"
        if broken is not None
        else "no readable weight does, so a number overflows (float16: load the model in bfloat16)"
    )
    raise ValueError(
        f"the {what} of {type(model).__name__} in {plain[0].dtype} hold NaN or infinite numbers for a text of a few "
        f"tokens; {cause}"
    )


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _is_broken(weight: Tensor) -> bool:
    is_readable = type(weight) is nn.Parameter and not weight.is_meta  # packed and offloaded weights are not
    return is_readable and weight.is_floating_point() and weight.dtype.itemsize > 1 and not _is_finite(weight)


def check_branches(model: Any, cache: RecordingCache, tree_hidden: Tensor, plain_hidden: Tensor, noise: float) -> None:
    """Checks the tree pass [4, D] against a plain pass [2, D] (see `ProbeTree`).

    Rows 0, 1 and 3 of the tree must be rows 0, 1 and 1 of the plain pass, up to rounding and the `noise` between
    passes. Both hold hidden states, or both hold logits.
    """
    # Rows of one pass differ by little.
    within, between = (1e-4, 1e-3) if is_single(plain_hidden, model) else (1e-2, 0.1)
    compared = [
        ("twins", tree_hidden[3], tree_hidden[1], within),
        *(("keys of twins", keys[1], keys[0], 3 * within) for keys in cache.twin_keys.values()),
        ("roots", tree_hidden[0], plain_hidden[0], max(between, 3 * noise)),
        ("children", tree_hidden[1], plain_hidden[1], max(between, 3 * noise)),
    ]
    for rows, found, wanted, tolerance in compared:
        difference, size = (float(row.float().norm()) for row in (found - wanted, wanted))
        if not difference <= tolerance * size:
            raise WrongNumbersError(
                f"{cache.name} does not compute a tree as separate continuations ({rows} differ by {difference:.2g} of "
                f"{size:.2g}): it reads 4-D masks or counts positions in its own way"
            )
