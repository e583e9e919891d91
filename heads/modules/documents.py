"""Batches whose rows hold several documents each, run so that no document sees another.

Each document becomes a right-padded row, in one of a few groups of similar lengths. This is exact for every model and
every kind of heads, needs no [T, T] mask, and computes no attention between documents.

Legend: B rows of the batch, T tokens of a row, R documents of a group, L length of a group's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.heads.modules.host_tensors import OnHost, read_on_host, send

# Cost of one more group, in tokens of padding: a pass has a fixed cost, however few tokens it reads.
TOKENS_PER_GROUP = 128
MULTIPLE_OF = 8  # row lengths are rounded up to a multiple of this, which matrix kernels prefer


@dataclass(frozen=True)
class DocumentGroup:
    """Documents of similar lengths as right-padded rows. Both tensors are on the host.

    Attributes:
        places: [R, L] int64, each token's index among the batch's B * T; padding repeats the last one.
        mask: [R, L] int64, 1 on real tokens.
    """

    places: Tensor
    mask: Tensor

    def read(self, values: Tensor) -> Tensor:
        """[B, T, ...] of the batch, on any device, as [R, L, ...]."""
        return values.flatten(0, 1)[send(self.places, values.device)]


def gather_documents(groups: Sequence[DocumentGroup], states: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Puts the groups' states, each [R, L, ...], into [B, T, ...] for a batch of `shape` [B, T]; zero at padding."""
    batch = states[0].new_zeros(shape.numel(), *states[0].shape[2:])
    for group, values in zip(groups, states, strict=True):
        rows = group.mask.flatten().nonzero()[:, 0]
        places, rows = (send(x, batch.device) for x in (group.places.flatten()[rows], rows))
        batch[places] = values.flatten(0, 1)[rows]
    return batch.view(*shape, *batch.shape[1:])


def split_documents(document_ids: Tensor | OnHost, *, num_groups: int | None = None) -> list[DocumentGroup]:
    """Cuts a batch into groups of documents, so that groups and padding together cost least.

    Args:
        document_ids: [B, T] int64, equal on neighbouring tokens of one document; -1 on padding. The host reads them.
        num_groups: the exact number of groups; an empty group gets one row of padding. Processes that share a sharded
            model need it, because they must all run the model equally often. None = the cheapest number.

    Worked example: rows [0, 0, 0, 1, 1] and [0, 0, 2, -1, -1] hold documents of 3, 2, 2 and 1 tokens, at the places
    (0, 1, 2), (3, 4), (5, 6) and (7). All fit into one group, whose rows are rounded up to 8 tokens.
    """
    ids = read_on_host(document_ids)
    edge = torch.full_like(ids[:, :1], -1)
    is_real = ids >= 0
    starts = (is_real & (ids != torch.cat([edge, ids[:, :-1]], dim=1))).flatten().nonzero()[:, 0]
    ends = (is_real & (ids != torch.cat([ids[:, 1:], edge], dim=1))).flatten().nonzero()[:, 0] + 1
    lengths, order = (ends - starts).sort(stable=True)
    starts = starts[order]
    groups, first = [], 0
    for end in cut_lengths(lengths.tolist(), num_groups):
        sizes = lengths[first:end, None]
        columns = torch.arange(-(-int(sizes.max()) // MULTIPLE_OF) * MULTIPLE_OF)
        places = starts[first:end, None] + torch.minimum(columns, sizes - 1)
        groups.append(DocumentGroup(places, (columns < sizes).long()))
        first = end
    for _ in range(len(groups), num_groups or 1):
        nothing = ids.new_zeros(1, MULTIPLE_OF)
        groups.append(DocumentGroup(nothing, nothing))
    return groups


def cut_lengths(lengths: Sequence[int], num_groups: int | None = None) -> list[int]:
    """Cuts ascending lengths into groups (at most `num_groups`); returns the index after the last of each group.

    A document costs as much as the longest of its group, and each group costs `TOKENS_PER_GROUP` more.

    >>> cut_lengths([100, 110, 120, 500, 520]), cut_lengths([100, 110, 120, 500, 520], 1)
    ([3, 5], [5])
    """
    price = TOKENS_PER_GROUP
    while len(cuts := _find_cheapest_cuts(lengths, price)) > (num_groups or len(lengths)):
        price *= 2  # a higher price of groups gives fewer of them
    return cuts


def _find_cheapest_cuts(lengths: Sequence[int], price: int) -> list[int]:
    """The cheapest cuts, by the shortest path; only lengths that differ when rounded are cut apart."""
    rounded = [-(-length // MULTIPLE_OF) for length in lengths]
    ends = [i for i in range(1, len(lengths) + 1) if i == len(lengths) or rounded[i] != rounded[i - 1]]
    best = {0: (0, 0)}  # end -> (cost of all documents before it, begin of the last group)
    for end in ends:
        costs = ((cost + (end - begin) * lengths[end - 1] + price, begin) for begin, (cost, _) in best.items())
        best[end] = min(costs)
    cuts, end = [], len(lengths)
    while end:
        cuts.append(end)
        end = best[end][1]
    return cuts[::-1]
