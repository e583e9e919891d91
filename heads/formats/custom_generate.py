"""Heads of ours with a `custom_generate` folder beside them, which runs them inside transformers' `generate`."""

import json
import re
from importlib.metadata import version
from typing import Any

from torch import Tensor

from draftsmith.heads.config import public_name
from draftsmith.heads.formats.format import Exported, Format
from draftsmith.heads.formats.published import Published
from draftsmith.inference.targets.target import Target

_CODE = '''"""Decodes with draft heads: the text of the model itself, in fewer of its passes.

    model.generate(**inputs, custom_generate="THIS/REPOSITORY", trust_remote_code=True, max_new_tokens=64)

Arguments of draftsmith's decoder are taken as well: tree="dynamic:5,6,24", seed=1, heads="another/repository". A folder
that is not on the hub needs the place of its heads: heads="FOLDER".
"""

from draftsmith.heads.custom_generate import generate_with_heads

HEADS = {heads}


def generate(model, **arguments):
    return generate_with_heads(model, default_heads=HEADS, **arguments)
'''


class CustomGenerateFolder(Format):
    """For people who stay with transformers. Heads of every kind; they are loaded as heads of this library are."""

    name = "custom_generate"
    title = "heads with a custom_generate folder"
    kinds = ("block", "dflash2", "eagle", "eagle3", "hydra", "kangaroo", "medusa", "mtp", "parallel")
    needs_this_library = True

    def matches(self, published: Published) -> bool:
        return False  # its weights and config are those of this library

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        if config.target_adapter:
            raise ValueError(
                "these heads draft for a target with an adapter, which model.generate would not have: merge the "
                "adapter into the target, and train heads for the result"
            )
        files = {
            "custom_generate/generate.py": _CODE,
            "custom_generate/requirements.txt": _require_this_release(),
        }
        # transformers copies the code elsewhere before it runs, so the code cannot find heads beside it.
        call = "model.generate(**inputs, custom_generate={heads}, heads={heads}, trust_remote_code=True)"
        settings = json.loads(config.to_json_string(use_diff=False))
        settings["target_name_or_path"] = public_name(config.target_name_or_path)
        return Exported(settings, tensors, python=call, files=files)


def _require_this_release() -> str:
    """transformers reads versions of digits and dots only. For others, such as development versions, the release is the
    nearest bound."""
    installed = version("draftsmith")
    release = re.sub(r"[^\d.].*", "", installed).rstrip(".")
    is_before = re.search(r"(a|b|rc|dev)\d", installed.partition("+")[0])
    return f"draftsmith{'==' if release == installed else '<=' if is_before else '>='}{release}\n"
