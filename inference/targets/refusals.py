"""What the files share that run a model and refuse it: the tokens it reads, its precision, and the errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The errors of models that are called in a way they do not support.
MODEL_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, RuntimeError)


class CannotRollBackError(ValueError):
    """A model's forward asked the cache for a state that is not keys and values."""


class WrongNumbersError(ValueError):
    """The model runs, but computes other numbers than a target must."""


@contextmanager
def refusing(complaint: str) -> Iterator[None]:
    """Turns a model's errors, except out-of-memory errors, into a ValueError that begins with `complaint`."""
    try:
        yield
    except (CannotRollBackError, torch.OutOfMemoryError):
        raise
    except MODEL_ERRORS as error:
        raise ValueError(f"{complaint}: {error}") from error


def draw_ids(model: Any, first: int, device: torch.device) -> Tensor:
    """[1, 4] token ids: a root, a child, another child, and the first child's twin."""
    ids = torch.tensor([[first, first + 1, first + 2, first + 1]], device=device)
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    return ids % vocab_size


def is_single(values: Tensor, model: Any) -> bool:
    """Whether the model computes these values in float32. Some models in half precision (Mamba) only add up their
    residuals, or give their logits, in float32."""
    return all(dtype in (torch.float32, torch.float64) for dtype in (values.dtype, model.dtype))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to that of `wanted`."""
    wanted = wanted.to(found.device).float()
    return float((found.float() - wanted).norm() / wanted.norm())
