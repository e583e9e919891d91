"""transformers' text-generation pipeline, decoding with a drafter."""

import threading
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TextGenerationPipeline

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.generation import take_decoder_options
from draftsmith.inference.stats import GenerationStats


class DraftingPipeline(TextGenerationPipeline):
    """Returns what transformers' own pipeline returns, in fewer passes of the target.

    For an empty prompt the target reads BOS, even if BOS is the padding token, which transformers' pipeline masks.

    >>> pipe = pipeline(                                                                     # doctest: +SKIP
    ...     "text-generation", model=target, tokenizer=tokenizer, pipeline_class=DraftingPipeline, drafter=heads
    ... )
    >>> pipe([{"role": "user", "content": "Hi"}], max_new_tokens=64, do_sample=True, seed=0) # doctest: +SKIP

    Args:
        drafter: as `Decoder` takes it, and so are its other options (tree, acceptance, compile, ...).

    Attributes:
        decoder: the `Decoder` in use.
        stats: the sum over all calls.
    """

    def __init__(self, *args: Any, drafter: Drafter | None = None, **kwargs: Any) -> None:
        options = take_decoder_options(kwargs)
        super().__init__(*args, **kwargs)
        self.stats = GenerationStats()
        self._one_at_a_time = threading.Lock()
        self.decoder = Decoder(self.model, drafter, **options)

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:  # type: ignore[override]
        with self._one_at_a_time:
            model = self.model
            self.model = cast(Any, _DraftingModel(model, self))
            try:
                return super()._forward(model_inputs, **generate_kwargs)
            finally:
                self.model = model


class _DraftingModel:
    """The model with the decoder's `generate`, for transformers' pipeline."""

    def __init__(self, model: Any, pipeline: DraftingPipeline) -> None:
        self._model = model
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if input_ids is None:  # an empty prompt
            bos = self._model.generation_config.bos_token_id
            if bos is None:
                raise ValueError("the prompt is empty, and the model has no bos_token_id to begin with: give some text")
            input_ids = torch.tensor([[bos]], device=self._model.device)
            attention_mask = torch.ones_like(input_ids)  # BOS may also be the padding token
        kwargs = {"tokenizer": self._pipeline.tokenizer, **kwargs}  # for stop strings
        output = self._pipeline.decoder.generate(input_ids, attention_mask, **kwargs)
        self._pipeline.stats += output.stats
        # The pipeline of transformers 5.4 cannot split a batch of outputs that have other fields than tensors.
        return output.sequences if output.scores is None and output.logits is None else output
