"""A drafter in transformers' own `generate`, by its argument `custom_generate`."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.engine import GenerationOutput
from draftsmith.inference.request.generate_arguments import request_of_hook
from draftsmith.inference.stats import GenerationStats


class CustomGenerate:
    """Decodes inside `model.generate` with a drafter: the same text and the same output, in fewer passes.

    >>> method = CustomGenerate(heads)                                                       # doctest: +SKIP
    >>> model.generate(**inputs, custom_generate=method, max_new_tokens=64)                  # doctest: +SKIP

    transformers does not pass its streamer and its tokenizer to a custom method. So give the streamer here, and use
    `draftsmith.generate` for stop strings.

    Args:
        drafter: as `Decoder` takes it, and so are its other options (tree, acceptance, compile, ...).
        streamer: a transformers streamer (batch 1). Do not give it to `model.generate` as well.

    Attributes:
        stats: the sum over all calls.
    """

    def __init__(self, drafter: Drafter | None, *, streamer: Any = None, **options: Any) -> None:
        self.drafter = drafter
        self.streamer = streamer
        self.options = options
        self.stats = GenerationStats()
        self._model: Any = None
        self._decoder: Decoder | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls. `seed` is an argument of `model.generate`, as of `Decoder.generate`."""
        decoder = self._decoder
        if decoder is None or self._model is not model:  # the decoder's own may be a twin with packed weights
            self._decoder = decoder = None  # frees the old one first
            self._decoder = decoder = Decoder(model, self.drafter, **self.options)
            self._model = model
        request = request_of_hook(
            decoder.target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            self.streamer,
        )
        output = decoder.decode(request, seed=seed)
        self.stats += output.stats
        return as_transformers_returns(output, is_dict=bool(generation_config.return_dict_in_generate))


def as_transformers_returns(output: GenerationOutput, *, is_dict: bool) -> Any:
    """The sequences, or an output of transformers with them."""
    if not is_dict:
        return output.sequences
    make_output = cast(Any, GenerateDecoderOnlyOutput)
    return make_output(sequences=output.sequences, scores=output.scores, logits=output.logits)
