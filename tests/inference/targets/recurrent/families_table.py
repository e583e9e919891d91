"""The table of families with recurrent layers in docs/targets.md, from what `Target` finds:

python -m tests.inference.targets.recurrent.families_table prints it.
"""

from __future__ import annotations

from tests.heads.formats.test_native_mtp import CASES
from tests.tiny_targets import RECURRENT_FAMILIES, target_of

BEGIN, END = "<!-- recurrent families: begin -->", "<!-- recurrent families: end -->"
HEAD = ("family", "states", "attention", "prompts", "drafts on a CPU", "own MTP modules")


def describe_family(family: str) -> tuple[str, ...]:
    """The row of a family."""
    target = target_of(family, initializer_range=0.3)
    recurrence = target.capabilities.recurrence
    assert recurrence is not None
    kinds = {spec.name[0] for specs in recurrence.specs.values() for spec in specs}
    with_attention = {layer for layer, spec in enumerate(target.capabilities.layer_specs) if spec is not None}
    return (
        family,
        " and ".join(name for kind, name in (("conv", "convolution"), ("recurrent", "recurrence")) if kind in kinds),
        ("in the same layers" if with_attention & set(recurrence.mixers) else "in other layers")
        if with_attention
        else "none",
        "in chunks" if recurrence.continues else "in one pass",
        "in one call" if recurrence.drafts_in_one else "token by token",
        "tested" if family in CASES else "",
    )


def render_table() -> str:
    rows = [HEAD, ("---",) * len(HEAD), *map(describe_family, RECURRENT_FAMILIES)]
    return "\n".join([BEGIN, "", *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows), "", END])


if __name__ == "__main__":
    print(render_table())
