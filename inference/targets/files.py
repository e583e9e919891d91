"""A target's files, from which transformers loads it: a folder, a hub id, or a GGUF file.

A GGUF file is a whole model in one file, most often quantized. It is loaded with its weights dequantized.
"""

import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import transformers
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.import_utils import is_gguf_available

from draftsmith.inference.targets.model_config import find_auto_class


def is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


@functools.cache
def settle_connection() -> None:
    """Without the hub's address its cache is read, as with HF_HUB_OFFLINE=1. Its client would try for a minute."""
    if not (constants.HF_HUB_OFFLINE or getproxies()):
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True


def is_missing(name: str) -> bool:
    """Whether a name looks like a path of this machine, and nothing is there, or can be no name of the hub.

    Libraries would ask the hub for it, as for any other name that is not here: then `settle_connection` is called.

    >>> is_missing("organisation/of-the-hub"), is_missing("gpt2"), is_missing("./nowhere"), is_missing("a/b/c")
    (False, False, True, True)
    >>> is_missing(""), is_missing("my model")
    (True, True)
    """
    path = Path(name or " ").expanduser()
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.is_dir())
    if is_path or path.exists():
        return not path.exists()
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    settle_connection()
    return False


def _find(name: str) -> tuple[str, dict[str, Any]]:
    """What transformers' `from_pretrained` takes for a target: a folder or hub id, and keywords."""
    file = Path(name).expanduser()
    if is_missing(name) or (is_gguf(name) and not file.is_file()):
        raise ValueError(f"got {name or repr(name)}: nothing is there; give a folder, a hub id or a GGUF file")
    if not is_gguf(name):
        return name, {}
    if not is_gguf_available():
        raise ValueError(f"got {name}, and GGUF files need the package gguf: pip install 'draftsmith[gguf]'")
    return str(file.parent), {"gguf_file": file.name}


@contextmanager
def naming_place(name: str) -> Iterator[None]:
    """Raises ValueError with the name, for libraries' errors of a connection: the place is neither here nor in the
    hub's cache."""
    try:
        yield
    except OSError as error:
        if error.errno is not None or Path(name).expanduser().exists():
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"there is no file or folder {name} here, and no repository of that name could be read from the hub. Check "
            f"the spelling; for the hub, also the connection and the login ({reason})"
        ) from error


def read_config(name: str, **options: Any) -> Any:
    """The config of a target (`AutoConfig`)."""
    folder, more = _find(name)
    with naming_place(name):
        return AutoConfig.from_pretrained(folder, **more, **options)


def read_tokenizer(name: str, **options: Any) -> Any:
    """The tokenizer of a target (`AutoTokenizer`)."""
    folder, more = _find(name)
    with naming_place(name):
        return AutoTokenizer.from_pretrained(folder, **more, **options)


def read_generation_config(name: str) -> GenerationConfig:
    """The generation config that a target has after loading."""
    if is_gguf(name):
        return GenerationConfig.from_model_config(read_config(name))
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:  # it has no such file: as transformers does
        with naming_place(name):
            return GenerationConfig.from_pretrained(name, config_file_name="config.json", _from_model_config=True)


def load_causal_lm(name: str, *, auto_class: Any = None, **options: Any) -> Any:
    """The model of a target, by the class that has its LM head.

    Args:
        auto_class: a class of transformers; None = as the config says.
        **options: of `from_pretrained`.

    Raises:
        ValueError: a folder, GGUF file or hub id that does not exist, or the package gguf is missing.
    """
    folder, more = _find(name)
    if more:
        auto_class = auto_class or AutoModelForCausalLM
        if (kind := getattr(transformers, "GgufConfig", None)) is not None:  # earlier releases only dequantize
            more["quantization_config"] = kind(dequantize=True)
    elif auto_class is None:
        try:
            auto_class = find_auto_class(read_config(name, trust_remote_code=options.get("trust_remote_code", False)))
        except (OSError, ValueError):
            auto_class = AutoModelForCausalLM  # it also loads folders of adapters, and its errors are the known ones
    with naming_place(name):
        model = auto_class.from_pretrained(folder, **more, **options)
    if more:
        model.config._name_or_path = model.name_or_path = name  # heads note the file, not its folder
    return model
