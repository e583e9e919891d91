"""Logits processors and stopping criteria that were made for a batch, called for one row at a time.

The rows of a step emit different numbers of tokens. So a processor that reads or remembers the text gets one copy per
row and is called for each row by itself. It may count rows (a grammar per row, a length per row): so it gets a batch of
the original size in which every row is this row, and its answer for this row is used.

Legend: B rows of the batch as it was given, L length of the row's text, V vocabulary.
"""

import copy
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

_Processor = Callable[[Tensor, Tensor], Tensor]
_SHARED = (nn.Module, PreTrainedTokenizerBase)
_NOT_COPIED = (type, types.FunctionType, types.ModuleType)  # by copy.deepcopy either


def processors_of_row(processors: Sequence[_Processor], index: int, num_rows: int) -> list[_Processor]:
    """Copies of the processors for row `index` of `num_rows`, to be called with [1, L] and [1, V]. The copies share
    state that the processors share."""
    copies = _copy_together(processors)
    return [own if _cut_context(own, index, num_rows) else _RowProcessor(own, index, num_rows) for own in copies]


def criteria_of_row(criteria: Sequence[Any]) -> list[Any]:
    """Copies of the criteria for one row; transformers' own keep no state and are not copied."""
    own = iter(_copy_together([one for one in criteria if not _is_transformers_own(one)]))
    return [one if _is_transformers_own(one) else next(own) for one in criteria]


def ask_criterion(
    criterion: Callable[[Tensor, Any], Any], text: Tensor, index: int, num_rows: int, device: torch.device
) -> bool:
    """Whether the row's copy of a stopping criterion ends row `index` of `num_rows`. It gets no scores.

    Args:
        text: [1, L], of the row, on the host. Only criteria that are not transformers' own get it on the device.
    """
    is_own = _is_transformers_own(criterion)
    if num_rows == 1 or is_own:
        return bool(torch.as_tensor(criterion(text if is_own else text.to(device), None)).all())
    answer = torch.as_tensor(criterion(text.to(device).repeat(num_rows, 1), None))
    if answer.numel() not in (1, num_rows):
        name = type(criterion).__name__
        raise ValueError(
            f"the stopping criterion {name} got {num_rows} rows and returned {answer.numel()} values: return a bool, "
            "or a tensor with one value per row"
        )
    return bool(answer.flatten()[index if answer.numel() > 1 else 0])


class _RowProcessor:
    """Shows a processor a batch in which every row is one row, and returns its answer for this row."""

    def __init__(self, processor: _Processor, index: int, num_rows: int) -> None:
        self.processor, self.index, self.num_rows = processor, index, num_rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shown = scores.repeat(self.num_rows, 1)  # it may write into them
        result = self.processor(input_ids.repeat(self.num_rows, 1), shown)
        if not isinstance(result, Tensor) or result.shape != shown.shape:
            got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"the logits processor {type(self.processor).__name__} got scores of shape {tuple(shown.shape)} and "
                f"returned {got}: return scores of the same shape"
            )
        return result[self.index : self.index + 1]


def _is_transformers_own(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "transformers"


def _copy_together(things: Sequence[Any]) -> list[Any]:
    """Deep copies of processors or criteria. Models and tokenizers that they hold are shared, not copied."""
    try:
        seen = set(map(id, things))  # the things themselves are copied, even if they are models
        shared = {id(held): held for part in gc.get_referents(*things) for held in _find_shared(part, seen)}
        return copy.deepcopy(list(things), shared)
    except Exception as error:
        names = ", ".join(type(one).__name__ for one in things)
        raise ValueError(
            f"{names} may keep a state, so each row of a batch needs a copy, and copying failed: {error!r}. Decode "
            "one row at a time, or give the class a __deepcopy__"
        ) from error


def _find_shared(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the models and tokenizers that an object holds, at any depth."""
    if id(value) in seen or isinstance(value, _NOT_COPIED):
        return
    seen.add(id(value))
    if isinstance(value, _SHARED):
        yield value
        return
    for part in gc.get_referents(value):
        yield from _find_shared(part, seen)


def _cut_context(processor: Any, index: int, batch_size: int) -> bool:
    """Cuts the texts of classifier-free guidance down to those of this row (`num_return_sequences` rows share one), so
    that the model reads no others. Whether the processor is of this kind."""
    context = getattr(processor, "unconditional_context", None)  # of UnbatchedClassifierFreeGuidanceLogitsProcessor
    if not isinstance(context, dict):
        return False
    for name in ("input_ids", "attention_mask"):
        if isinstance(texts := context.get(name), Tensor):
            context[name] = texts[index * len(texts) // batch_size][None]
    return True
