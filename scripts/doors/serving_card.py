"""The model card of exported heads: what they are, and the commands that serve them."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCardData

from heads.formats.format import Exported


def fill_commands(exported: Exported, *, heads: str, target: str) -> list[str]:
    """The commands that serve the heads, with their names in place."""
    return [command.replace("{heads}", heads).replace("{target}", target) for command in exported.commands]


def render_serving_card(exported: Exported, *, name: str, kind: str, heads: str, target: str) -> str:
    """The card as Markdown.

    Args:
        name: of the format.
        heads, target: as the user names them, folders or hub ids.
    """
    is_hub_id = target.count("/") == 1 and not target.startswith(("/", ".", "~")) and not Path(target).exists()
    front = ModelCardData(
        license="unknown",
        base_model=target if is_hub_id else None,
        tags=["speculative-decoding", "draft-heads", kind],
    )
    commands = "\n".join(fill_commands(exported, heads=heads, target=target))
    notes = "".join(f"- {note}\n" for note in exported.notes)
    return (
        f"---\n{front.to_yaml()}\n---\n\n"
        f"# Draft heads for {target}\n\n"
        f"{kind} heads, written by draftsmith in the format `{name}`. They draft for `{target}`, which verifies the "
        "drafted tokens.\n\n"
        + (f"## Serve\n\n```bash\n{commands}\n```\n\n" if commands else "")
        + (f"## Notes\n\n{notes}\n" if notes else "")
        + "## Decode with draftsmith\n\n"
        "```python\n"
        "from heads import DraftHeads\n"
        "from inference import generate\n\n"
        f'heads = DraftHeads.from_pretrained("{heads}", target=model)\n'
        "output = generate(model, heads, **inputs)\n"
        "```\n"
    )
