"""The model card of exported heads: what they are, and the commands that serve them."""

import json
import re
import shlex

from huggingface_hub import ModelCardData

from draftsmith.heads.config import is_hub_id
from draftsmith.heads.formats.format import Exported


def fill_commands(exported: Exported, *, heads: str, target: str) -> list[str]:
    """The commands that serve the heads, with their names in place, quoted for a shell."""

    def fill(word: str) -> str:
        is_json = word.startswith('{"')
        names = {
            mark: json.dumps(name, ensure_ascii=False)[1:-1] if is_json else name
            for mark, name in (("heads", heads), ("target", target))
        }
        return re.sub(r"\{(heads|target)\}", lambda match: names[match[1]], word)

    return [shlex.join(map(fill, shlex.split(command))) for command in exported.commands]


def fill_python(exported: Exported, *, heads: str, target: str) -> str:
    """The Python that decodes with the heads, with their names in place as strings."""
    names = {"heads": repr(heads), "target": repr(target)}
    return re.sub(r"\{(heads|target)\}", lambda match: names[match[1]], exported.python)


def render_serving_card(exported: Exported, *, name: str, kind: str, heads: str, target: str) -> str:
    """The card as Markdown.

    Args:
        name: of the format.
        heads, target: as the user names them, folders or hub ids.
    """
    front = ModelCardData(
        license="unknown",
        base_model=target if is_hub_id(target) else None,
        tags=["speculative-decoding", "draft-heads", kind],
    )
    commands = "\n".join(fill_commands(exported, heads=heads, target=target))
    python = fill_python(exported, heads=heads, target=target)
    notes = "".join(f"- {note}\n" for note in exported.notes)
    return (
        f"---\n{front.to_yaml()}\n---\n\n"
        f"# Draft heads for {target}\n\n"
        f"{kind} heads, written by draftsmith in the format `{name}`. They draft for `{target}`, which verifies the "
        "drafted tokens.\n\n"
        + (f"## Serve\n\n```bash\n{commands}\n```\n\n" if commands else "")
        + (f"## Run\n\n```python\n{python}\n```\n\n" if python else "")
        + (f"## Notes\n\n{notes}\n" if notes else "")
        + "## Decode with draftsmith\n\n"
        "```python\n"
        "from draftsmith.heads import DraftHeads\n"
        "from draftsmith.inference import generate\n\n"
        f"heads = DraftHeads.from_pretrained({heads!r}, target=model)\n"
        "output = generate(model, heads, **inputs)\n"
        "```\n"
    )
