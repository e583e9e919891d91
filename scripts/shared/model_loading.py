"""Shared by the programs that decode: loads targets and drafters, fits trees, turns messages into token ids."""

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from draftsmith.heads import DraftHeads
from draftsmith.heads.checkpoint import SCRATCH, read_head_type
from draftsmith.heads.formats.transformers_dflash import MODEL_TYPE as DFLASH_ASSISTANT
from draftsmith.inference import Drafter, DynamicTree, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.kernels.packed_weights import can_pack, has_bfloat16
from draftsmith.inference.request.chat_template import encode_prompt
from draftsmith.inference.targets.files import is_gguf, is_missing, load_causal_lm, read_config, read_tokenizer
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.shared.draft_vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_HELP = "Dtype of the weights; auto = as saved, or float32 on a CPU without bfloat16."
PACK_HELP = (
    "On a CPU: pack the weights for faster steps. It takes their memory once more; none = where they have 100 MB or "
    "more, and less than a quarter of what is free (compiled steps pack by themselves)."
)
TREE_HELP = (
    "auto (the default) chooses the fastest size of a tree, gamma that of a chain; dynamic, dynamic:DEPTH,TOP_K,NODES, "
    "chain and chain:LENGTH are fixed, and so are files (configs/trees)"
)

LEAST_PACKED = 100_000_000  # bytes of weights; smaller ones stay in the processor's caches
CGROUP = Path("/sys/fs/cgroup")

# By model: the adapter that is merged into its weights; None = some heads need the model without an adapter.
_ADAPTERS: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def load_target(
    name: str, *, dtype: str = "auto", device: str | None = None, keeps_dtype: bool = False
) -> tuple[Target, Any]:
    """A frozen target and its tokenizer.

    Args:
        name: folder, hub id or GGUF file.
        dtype: one of `DTYPES`; auto = the one its weights were saved in, or float32 where that is slow: on a CPU
            without instructions for bfloat16.
        device: None = cuda if there is one, else cpu.
        keeps_dtype: auto = the saved dtype on every CPU, for programs that write weights of that dtype.

    Raises:
        ValueError: no such folder, dtype or device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"got dtype {dtype!r}; allowed are {', '.join(DTYPES)}")
    disable_progress_bar()  # a bar for each file of weights would clutter a chat
    check_folder(name)
    device = check_device(device)
    if not keeps_dtype:
        dtype = resolve_dtype(name, dtype, device)
    model = load_causal_lm(name, dtype=dtype).requires_grad_(False).eval().to(device)
    return Target(model), read_tokenizer(name)


def packs_weights(target: Target, choice: bool | None) -> bool:
    """Whether to decode with packed weights; choice: None = where it gains, and memory is plenty."""
    if choice is not None or not can_pack(target.model):
        return bool(choice)
    num_bytes: int = target.model.get_memory_footprint()
    return LEAST_PACKED <= num_bytes < _find_free_memory() / 4


def _find_free_memory() -> int:
    """Bytes that this process may still take."""
    import psutil

    free: int = psutil.virtual_memory().available
    try:  # a container's own limit (control groups, version 2)
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is none
        return free
    return min(free, limit - used + int(counts.get("inactive_file", 0)))  # pages of files are given up


def resolve_dtype(name: str, dtype: str, device: str) -> str:
    """float32 in place of auto, for a target in bfloat16 on a CPU that cannot multiply it; else `dtype`.

    The processes of one run must agree, so several keep auto, the saved dtype.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if dtype != "auto" or torch.device(device).type != "cpu" or has_bfloat16() or not is_alone:
        return dtype
    if is_gguf(name):  # its weights have no dtype
        return dtype
    config = read_config(name)
    if config.dtype != torch.bfloat16 or getattr(config, "quantization_config", None) is not None:
        return dtype
    logger.warning(
        "this CPU has no instructions for bfloat16, so %s runs in float32, with twice the memory; --dtype bfloat16 "
        "keeps the dtype of its weights",
        name,
    )
    return "float32"


def check_folder(name: str) -> None:
    """Refuses a folder that does not exist. transformers would look up its name on the hub.

    >>> check_folder("organisation/a-model-of-the-hub")
    """
    if is_missing(name):
        raise ValueError(f"got {name or repr(name)}: there is no such folder; give a folder or a hub id")


def check_new_folder(name: str) -> Path:
    """The path of a folder to write, in full: it is not there yet, or empty.

    Raises:
        ValueError: it holds something, or is a file.
    """
    folder = Path(name).resolve()
    if folder.is_file():
        raise ValueError(f"--output {name} is a file: give a folder")
    if folder.is_dir() and any(file.name != SCRATCH for file in folder.iterdir()):
        raise ValueError(f"--output {name} is not empty: give another folder, or empty it")
    return folder


def check_device(name: str | None) -> str:
    """The named device; without a name, cuda if there is one, else cpu. Of several processes, each takes the GPU of its
    own number on its machine."""
    if name is None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"got --device {name}: give cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"got --device {name}: torch finds {torch.cuda.device_count()} CUDA devices; give another one")
    return name


def load_heads(name: str, target: Target) -> DraftHeads:
    """Heads of any kind from a folder, hub id or GGUF file, bound to the target, in its dtype and on its device (see
    `bind_heads`). Heads in another project's format are imported."""
    check_folder(name)
    owner = {"target": target} if read_head_type(name) is None else {}
    heads: DraftHeads = DraftHeads.from_pretrained(name, dtype=target.dtype, **owner)
    return bind_heads(heads, target).to(target.device)


def bind_heads(heads: DraftHeads, target: Target) -> DraftHeads:
    """Binds heads to the target. If the heads were trained with an adapter of the target (Medusa-2), the adapter is
    merged into the target's weights: from then on every decoder runs the adapted target.

    Raises:
        ValueError: the heads do not fit the target, or they need another adapter than heads that were bound before.
    """
    adapter = str(heads.find_adapter()) if heads.config.target_adapter else None
    if _ADAPTERS.get(target.model, adapter) != adapter:
        raise ValueError(
            "these heads were trained for different adapters of the target, or some of them without an adapter: run "
            "the program for each of them by itself"
        )
    if adapter is not None:
        heads.apply_adapter(target, merge=True)
    heads.bind(target)
    _ADAPTERS[target.model] = adapter
    return heads


def find_merged_adapter(target: Target) -> str | None:
    """The folder of the adapter that heads have merged into the target's weights."""
    return _ADAPTERS.get(target.model)


def load_drafter(
    target: Target,
    tokenizer: Any,
    *,
    heads: str | None = None,
    drafter_model: str | None = None,
    staged: bool = False,
    ngrams: bool = False,
    vocabulary: DraftVocabulary | None = None,
) -> Drafter | None:
    """The drafter: heads, a small model or n-grams of the text; None = plain decoding.

    Args:
        heads, drafter_model: folders or hub ids.
        vocabulary: of the heads.
        staged: n-grams draft for the small model.

    Raises:
        ValueError: the heads do not fit the target, or the small model has another tokenizer.
    """
    if heads is not None:
        loaded = load_heads(heads, target)
        if vocabulary is not None:
            vocabulary.limit(loaded, tokenizer)
        return loaded
    if drafter_model is not None:
        model, own = load_assistant(drafter_model, target), read_tokenizer(drafter_model)
        small = SmallModelDrafter(model, tokenizer=own, target_tokenizer=tokenizer).for_target(target)
        return StagedDrafter(small) if staged else small
    return NgramDrafter() if ngrams else None


def load_assistant(name: str, target: Target) -> PreTrainedModel:
    """A small causal LM, or a DFlash assistant of transformers, in the target's dtype and on its device."""
    is_dflash = read_config(name).model_type == DFLASH_ASSISTANT
    model: PreTrainedModel = load_causal_lm(
        name, auto_class=AutoModel if is_dflash else AutoModelForCausalLM, dtype=target.dtype
    )
    return model.requires_grad_(False).eval().to(target.device)


def fit_tree(text: str, max_depth: int | None) -> str:
    """The tree, cut for a drafter that drafts at most `max_depth` levels. A dynamic tree keeps its number of nodes, and
    becomes wider if they would not fit. Tree files stay as they are.

    >>> fit_tree("dynamic:4,4,16", 2), fit_tree("dynamic:4,4,16", 1), fit_tree("chain:7", 4)
    ('dynamic:2,4,16', 'dynamic:1,8,16', 'chain:4')
    """
    name = text.partition(":")[0]
    if max_depth is None or name not in ("dynamic", "chain", "gamma"):
        return text
    policy = resolve_policy(text, None)
    if isinstance(policy, DynamicTree) and policy.max_depth > max_depth:
        size = policy.num_nodes
        widths = (k for k in itertools.count(policy.top_k) if DynamicTree(max_depth, k, size).num_nodes == size)
        return f"dynamic:{max_depth},{next(widths)},{size}"
    return f"{name}:{max_depth}" if text != name and policy.max_depth > max_depth else text


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Tensor:
    """[1, L] int64: the messages under the tokenizer's chat template, ending where the assistant's reply begins.

    Raises:
        ConversationError: the template rejects them.
    """
    return torch.tensor([encode_prompt(tokenizer, list(messages))])
