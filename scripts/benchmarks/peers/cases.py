"""What is compared: heads, the authors' settings, and the same tree here."""

from dataclasses import dataclass, replace
from typing import Any

from draftsmith.inference import DynamicTree
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

PEERS = ("eagle", "medusa")  # whose code it is; also their formats, as `draftsmith export` names them


class AuthorsTree(DynamicTree):
    """EAGLE-2's tree as its authors grow it: the root has `top_k` children, and scores are log q at temperature 1.

    Args:
        depth: the authors' depth counts the levels after the root's children, so that this one is theirs + 1.
    """

    def __init__(self, depth: int, top_k: int, num_nodes: int) -> None:
        super().__init__(depth, top_k, num_nodes, root_factor=1)

    def grow(self, *args: Any) -> TokenTree:
        *given, sampling = args
        return super().grow(*given, replace(sampling, greedy_temperature=1.0))


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        heads: folder below --heads. peer: whose code, one of `PEERS`.
        job: options of the peer's worker.
        tree: the same tree here; None = the rank paths that the worker names.
        own_tree: a tree of the same size as this library grows it.
        is_sampled: it is also compared at temperature 1.
    """

    title: str
    heads: str
    peer: str
    job: dict[str, Any]
    tree: TreePolicy | None
    own_tree: TreePolicy
    is_sampled: bool = False


def eagle_case(title: str, heads: str, nodes: int, *, has_fused_features: bool, is_sampled: bool = False) -> Case:
    """The authors' depth 7 and top_k 10, their defaults."""
    tree = {"total_token": nodes, "depth": 7, "top_k": 10}
    return Case(
        f"{title}, {nodes} nodes",
        heads,
        "eagle",
        {"is_eagle3": has_fused_features, "tree": tree},
        AuthorsTree(8, 10, nodes),
        DynamicTree(8, 10, nodes),
        is_sampled,
    )


CASES = {
    "eagle3-60": eagle_case("EAGLE-3", "eagle3", 60, has_fused_features=True, is_sampled=True),
    "eagle3-16": eagle_case("EAGLE-3", "eagle3", 16, has_fused_features=True),
    "eagle-60": eagle_case("EAGLE-1", "eagle", 60, has_fused_features=False),
    "medusa-64": Case("Medusa, 64 nodes", "medusa", "medusa", {}, None, DynamicTree(4, 10, 64)),
}
