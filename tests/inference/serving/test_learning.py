"""A server whose heads learn from its replies."""

import time

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.training.learning.learner import OnlineLearner
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import MODEL, serve_in_thread
from tests.inference.serving.test_replies import PROMPT, texts_alone


def test_heads_learn_from_replies_and_texts_stay(
    served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    heads = create_heads("medusa", served_target)
    before = {name: parameter.clone() for name, parameter in heads.named_parameters()}
    learner = OnlineLearner(served_target, heads, share=0.5, trial_seconds=0.0, learning_rate=3e-3, tokens_per_step=64)
    limits = Limits(max_rows=4, max_length=200, max_waiting=12, max_lanes=2)
    scheduler = Scheduler(served_target, {"own": heads}, tree="chain:2", limits=limits, learner=learner)
    ids = chat_tokenizer(PROMPT)["input_ids"]
    wanted = texts_alone(served_target, chat_tokenizer, ids, max_new_tokens=40)[0]
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    with learner, serve_in_thread(scheduler, chat_tokenizer) as one, one.client() as client:
        client.completions.create(**options, extra_body={"learn": False})
        client.completions.create(**options, extra_body={"heads": "none"})
        assert learner.progress.num_texts == 0
        end = time.monotonic() + SECONDS
        while not any(trial.is_swapped for trial in learner.progress.trials):
            assert time.monotonic() < end, learner.progress
            assert client.completions.create(**options).choices[0].text == wanted
        assert client.completions.create(**options).choices[0].text == wanted
        assert any(not torch.equal(parameter, before[name]) for name, parameter in heads.named_parameters())
        progress = httpx.get(f"{one.url}/learning").json()["learning"]
        assert progress["num_texts"] > 8
        assert progress["trials"][0].keys() >= {"before", "after", "is_swapped", "num_tokens"}
        assert one.metric("learning_texts") >= progress["num_texts"]
        assert one.metric("learning_swaps") >= 1.0


def test_a_server_without_a_learner_says_so(served_target: Target, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    scheduler = Scheduler(served_target, {}, limits=Limits(max_rows=1, max_length=64))
    with serve_in_thread(scheduler, chat_tokenizer) as one:
        assert httpx.get(f"{one.url}/learning").json() == {"learning": None}
        assert one.metric("learning_texts") is None
