"""Binds heads to a target: checks that they fit, and copies their weights into its dtype and onto its device."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.config import DraftHeadsConfig, name_of_target
from draftsmith.inference.kernels.packed_weights import pack, repack
from draftsmith.inference.targets.target import Target

M = TypeVar("M", bound=nn.Module)


def check_fit(config: DraftHeadsConfig, target: Target) -> None:
    """Refuses a target that heads with this config cannot draft for.

    Raises:
        ValueError: the target is an encoder-decoder model, has several widths, or differs from the heads' own target
            in width, vocabulary or number of layers.
    """
    name = type(target.model).__name__
    if target.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model, and trained heads draft for decoder-only targets: draft with a "
            "SmallModelDrafter or an NgramDrafter"
        )
    embedding_size = target.embed_tokens(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
    if {embedding_size, target.state_size} != {target.hidden_size}:
        raise ValueError(
            f"{name} has embeddings of width {embedding_size}, layers of {target.hidden_size} and last states of "
            f"{target.state_size} (OPT's word_embed_proj_dim), and trained heads need one width: draft with a "
            "SmallModelDrafter or an NgramDrafter, or use another target"
        )
    for what, mine, theirs in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary size", config.target_vocab_size, target.vocab_size),
        ("number of layers", config.target_num_layers, target.num_layers),
    ):
        if mine != theirs:
            raise ValueError(
                f"these {config.head_type} heads were made for a target with {what} {mine}, this target "
                f"({name_of_target(target) or name}) has {theirs}: load the target the heads were trained for "
                f"({config.target_name_or_path or 'not recorded'}), or train new heads"
            )


@dataclass(eq=False)
class WeightCopy:
    """A copy of a module's weights.

    Attributes:
        pairs: each copied tensor, kept so that no other tensor takes its place in memory, its copy, and whether that
            has the rows of `columns` only.
        state: identities, addresses and versions of the copied tensors, which tell a change; empty = not known.
        columns: the rows that LM heads keep.
        parts: the copy's `_modules`, `_parameters` and `_buffers`.
    """

    pairs: list[tuple[Tensor, Tensor, bool]]
    state: list[tuple[int, int, int]]
    columns: Tensor | None
    parts: dict[str, Any]

    def update(self) -> None:
        """Takes over the weights as they are now."""
        for original, copied, is_cut in self.pairs:
            if original is not copied:
                copied.copy_(original[self.columns.to(original.device)] if is_cut else original)  # type: ignore[union-attr]
        self.state = _describe([original for original, _, _ in self.pairs])


class WeightCopies:
    """Copies of one module's weights in other dtypes and on other devices.

    A copy is kept until the weights change: an in-place change counts up a tensor's version, and replaced memory has
    another address. Optimizers that write through `.data` show neither, so `forget` is called when training begins.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], WeightCopy] = {}
        self._all: list[weakref.ref[WeightCopy]] = []  # in their order: copies of copies come later
        self._packed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.views: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that keep some columns

    def forget(self) -> None:
        self._kept.clear()

    def pack(self, view: M) -> M:
        """A view with packed weights."""
        packed = pack(view)
        self._packed.add(packed)
        return packed

    def update(self, choose: Callable[[int], Tensor] | None) -> None:
        """Takes over the weights in all copies that somebody holds, also packed ones.

        Args:
            choose: gives the columns that copies keep, from their number; None = those of before.
        """
        self._all = [known for known in self._all if known() is not None]
        for known in self._all:
            if (each := known()) is not None:
                if choose is not None and each.columns is not None:
                    each.columns = choose(len(each.columns))
                each.update()
        for view in self._packed:
            repack(view)

    @torch.no_grad()
    def make(
        self, module: PreTrainedModel, dtype: torch.dtype, device: torch.device, columns: Tensor | None = None
    ) -> WeightCopy:
        """`module`'s weights on `device`, floating tensors in `dtype`.

        The module's config is shared, and tensors that it keeps in float32 stay so. Memory is shared where neither
        dtype nor device changes.

        Args:
            columns: [C] the rows that modules of the name `lm_head` keep; None = all.
        """
        named = [*module.named_parameters(), *module.named_buffers()]
        state = _describe([tensor for _, tensor in named])
        kept = self._kept.get((dtype, device))
        is_same = kept is not None and bool(state) and kept.state == state and _equal(kept.columns, columns)
        if kept is not None and is_same and not module.training:
            return kept
        pairs = []
        memo: dict[int, Any] = {id(module.config): module.config}
        wide = module._keep_in_fp32_modules_strict or ()
        for name, tensor in named:
            is_cast = tensor.is_floating_point() and name.rpartition(".")[2] not in wide
            is_cut = columns is not None and "lm_head" in name.split(".")
            rows = tensor[columns.to(tensor.device)] if is_cut else tensor  # type: ignore[union-attr]
            moved = rows.to(device, dtype if is_cast else tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if is_parameter else moved
            pairs.append((tensor, tensor if moved is tensor else memo[id(tensor)], is_cut))
        parts = {name: copy.deepcopy(vars(module)[name], memo) for name in ("_modules", "_parameters", "_buffers")}
        made = self._kept[dtype, device] = WeightCopy(pairs, state, columns, parts)
        self._all.append(weakref.ref(made))
        return made


def _describe(tensors: list[Tensor]) -> list[tuple[int, int, int]]:
    """What changes with the values of tensors; nothing for inference tensors, which have no versions."""
    if any(tensor.is_inference() for tensor in tensors):
        return []
    return [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
