"""GGUF, llama.cpp's file format: metadata and tensors in one file. Needs the package gguf."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INSTALL_HINT = "GGUF files need the package gguf: pip install 'draftsmith[gguf]'"


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a file, quantized ones as float32.

    Raises:
        ValueError: no GGUF file, a damaged one, or the package is not installed.
    """
    gguf = _import_gguf()
    reader = _open(gguf, file)
    tensors = {one.name: _to_torch(one.data, one.tensor_type, gguf) for one in reader.tensors}
    metadata = {name: _round(field.contents()) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, tensors


def _round(value: Any) -> Any:
    """1e-6 is not quite 1e-6 after it was stored in float32."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_metadata(file: Path) -> dict[str, Any]:
    """The metadata only."""
    gguf = _import_gguf()
    return {name: field.contents() for name, field in _open(gguf, file).fields.items()}


def write_gguf(file: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a file. Whole numbers become uint32, in lists int32; vectors are stored in float32, as llama.cpp needs."""
    gguf = _import_gguf()
    writer = gguf.GGUFWriter(file, metadata["general.architecture"])
    for name, value in metadata.items():
        if name == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](name, value)
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu().contiguous()
        if stored.is_floating_point() and stored.dim() == 1:
            stored = stored.float()
        if stored.dtype == torch.bfloat16:  # numpy has none
            writer.add_tensor(name, stored.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _open(gguf: Any, file: Path) -> Any:
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{file} is no GGUF file, or it is damaged or truncated ({error}): copy it again") from error


def _to_torch(data: Any, kind: Any, gguf: Any) -> Tensor:
    kinds = gguf.GGMLQuantizationType
    if kind == kinds.BF16:
        return torch.from_numpy(np.array(data)).view(torch.bfloat16)
    if data.dtype == np.uint8:
        data = gguf.dequantize(data, kind)
    return torch.from_numpy(np.array(data))


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(_INSTALL_HINT) from error
    return gguf
