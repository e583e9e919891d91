"""What the files share that run a model and refuse it: the tokens it reads, its precision, and the errors."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.inference.targets.model_config import chooses_experts

logger = logging.getLogger(__name__)

# The errors of models that are called in a way they do not support.
MODEL_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, RuntimeError)
T = TypeVar("T")


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


def try_tokens(model: Any, firsts: Sequence[int], check: Callable[[int], T]) -> T:
    """What `check` returns for the last of these tokens. In models with experts a router can be at a near-tie, so their
    numbers are wrong only if they are wrong with all of the tokens."""
    for first in firsts[:-1] if chooses_experts(model) else ():
        try:
            return check(first)
        except WrongNumbersError as error:
            logger.info("%s: trying other tokens", error)
    return check(firsts[-1])


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
