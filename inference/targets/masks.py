"""The nodes of a pass, who is whose ancestor, and their attention masks over the cache, with each layer type's sliding
window.

Masks are additive, or packed (`kernels/packed_masks.py`) where the model takes those.

Legend: B batch, N tokens of one pass, M slots of the tree, S cache slots, W of them that a layer sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.cache.shared_rows import SharedRows
from draftsmith.inference.kernels.attention import REPEATED
from draftsmith.inference.kernels.packed_masks import pack_chain, pack_tree

NEARLY_EVEN = 1.1  # with so few padded nodes more than real ones, a padded pass takes less than a packed one
FEW_SLOTS = 1024  # up to here an additive mask, made once for all layers, is faster on a CPU


@dataclass
class Nodes:
    """Tokens that a pass reads as trees. `TokenTree`, which has what was drafted, shows an example.

    Attributes:
        token_ids: [B, N] long.
        parents: [B, N] long, node indices; a parent stands before its children, -1 = none.
        depths: [B, N] long, edges between the root and the node.
        max_depth: a bound of `depths` that the host knows (it sizes paths without a synchronisation); None = N - 1.
        widths: how many nodes of each row, the first ones, are real; None = all.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    max_depth: int | None = field(default=None, kw_only=True)
    widths: list[int] | None = field(default=None, kw_only=True)

    @property
    def num_read(self) -> int:
        """Nodes that a pass reads: padding, too, where there is so little of it that packing would not pay."""
        padded, real = self.token_ids.numel(), sum(self.widths or ())
        return real if self.widths is not None and padded > NEARLY_EVEN * real else padded

    @property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: row i is True at j if j is i or an ancestor of i."""
        # The bound itself, even where fewer nodes cannot reach it: so it is the same for all numbers of nodes.
        return compute_ancestors(self.parents, max_depth=self.max_depth)


def plant(token_ids: Tensor, parents: Sequence[int]) -> Nodes:
    """The tree in which node i follows node parents[i] < i, or the text (-1). Each row has tokens [N] of its own."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    shape = torch.tensor([[parents], [depths]], device=token_ids.device)
    return Nodes(token_ids, *shape.expand(-1, len(token_ids), -1))


def compute_ancestors(parents: Tensor, *, max_depth: int | None = None) -> Tensor:
    """The ancestors of every node: bool [..., N, N] from `parents` [..., N], -1 = none (worked example: TokenTree).

    Every node points at an ancestor, at first its parent. In each round a node adds the ancestors of this ancestor to
    its own, and then points at the node at which this ancestor points. The number of rounds is the number of binary
    digits of `max_depth` (default N - 1).
    """
    num_nodes = parents.shape[-1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = (nodes[:, None] == nodes).expand(*parents.shape, num_nodes)
    target = torch.where(parents < 0, nodes, parents)
    longest = num_nodes - 1 if max_depth is None else max_depth
    for _ in range(longest.bit_length()):
        reach = reach | reach.gather(-2, target[..., None].expand(reach.shape))
        target = target.gather(-1, target)
    return reach


@dataclass(frozen=True)
class TreeMasks:
    """Makes the masks of one model.

    Attributes:
        windows: sliding window in positions, or None for full attention, per layer type.
        dtype: the model's, which its additive masks must have.
        without: types of layers without attention, which get None as their mask.
        packs_prompts: the masks of prompts of one length are packed if there are more than `FEW_SLOTS` slots.
        packs_all: all masks are packed, since the Triton kernels read them.
    """

    windows: dict[str, int | None]
    dtype: torch.dtype
    without: tuple[str, ...] = ()
    packs_prompts: bool = False
    packs_all: bool = False

    def from_allowed(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor) -> Any:
        """Additive masks; sliding windows are applied here.

        Args:
            allowed: [B, N, S] bool, which keys each query may see apart from windows.
            query_positions, key_positions: [B, N] and [B, S]. A key is in the window if key > query - window.

        Returns:
            One [B, 1, N, S] tensor of 0 or the dtype's minimum (eager attention would ADD a boolean), or a dict of
            such tensors per layer type for models with several types.
        """
        return self.make_each(lambda window: self._make_mask(allowed, query_positions, key_positions, window))

    def in_view(self, cache: KVCache | SharedRows, positions: Tensor, node_positions: Tensor, ancestors: Tensor) -> Any:
        """Masks over the W slots that each type of layer sees: additive [B, 1, N, W], or packed.

        A query sees the committed tokens and its ancestors.

        Args:
            positions: [B, N], of the queries.
            node_positions: [B, M], of the M slots of the tree.
            ancestors: [B, N, M] bool.
        """
        batch, num_queries = positions.shape

        def make(window: int | None) -> Tensor:
            slots_seen, places = cache.slots_seen(window)
            if self.packs_all:
                origin = slots_seen[:1]
                first = places[:, :1] + origin
                return pack_tree(ancestors, cache.lengths[:, None], first, origin=origin, window=window)
            key_positions = slots_seen.expand(batch, -1)
            committed = key_positions < cache.lengths[:, None]
            allowed = committed[:, None, :].repeat(1, num_queries, 1)
            allowed.scatter_(2, places[:, None, :].expand(-1, num_queries, -1), ancestors)
            key_positions = key_positions.scatter(1, places, node_positions)
            return self._make_mask(allowed, positions, key_positions, window)

        return self.make_each(make)

    def of_prompts(self, cache: KVCache, positions: Tensor) -> Any:
        """`in_view` for prompts, in which each of the N open tokens sees all before it."""
        (batch, num_tokens), (shortest, longest) = positions.shape, cache.span
        is_even = shortest == longest
        if not (self.packs_all or (self.packs_prompts and is_even and cache.view > FEW_SLOTS)):
            steps = cache.first_slots(num_tokens)
            causal = (steps[:, None] >= steps).expand(batch, -1, -1)
            return self.in_view(cache, positions, positions, causal)
        lengths = cache.lengths.new_full((1, 1), longest) if is_even else cache.lengths[:, None]
        return self.make_each(
            lambda window: pack_chain(lengths, num_tokens, origin=cache.slots_seen(window)[0][:1], window=window)
        )

    def make_each(self, make: Callable[[int | None], Tensor]) -> Any:
        """One mask, or a dict per layer type for models with several types, from each type's window; None for models
        without attention."""
        masks = {}
        for layer_type, window in self.windows.items():
            masks[layer_type] = make(window)
        return {**dict.fromkeys(self.without), **masks} if len(masks) > 1 else next(iter(masks.values()), None)

    def _make_mask(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
        seen = allowed
        if window is not None:
            seen = allowed & (key_positions[:, None, :] > query_positions[:, :, None] - window)
        shut = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=seen.device)
        mask = torch.where(seen, torch.zeros_like(shut), shut)[:, None]
        if not torch.compiler.is_compiling():
            vars(mask)[REPEATED] = {}
        return mask
