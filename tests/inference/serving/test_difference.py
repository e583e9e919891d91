"""What a server says where two replies differ."""

from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.inference import Target, generate
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import Running
from tests.inference.serving.test_replies import MESSAGES, chat_ids


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_fault(
    served: Running, served_target: Target, chat_tokenizer: PreTrainedTokenizerBase, temperature: float
) -> None:
    ids = chat_ids(chat_tokenizer)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = generate(served_target, None, torch.tensor([ids]), seed=5, max_new_tokens=8, **sampling)
    text = out.sequences[0, len(ids) :].tolist()
    body: dict[str, Any] = {"messages": MESSAGES, "temperature": temperature, "seed": 5}
    body["texts"] = [text, [*text[:4], (text[4] + 7) % 4096, *text[5:]]]
    with httpx.Client(base_url=served.url, timeout=SECONDS) as client:
        answer = client.post("/difference", json=body).json()
        assert not answer["is_near_tie"]
        assert "log-probabilities" in answer["text"]
        for texts in ([text, text[:3]], [text, text], [text, [4096]]):
            refused = client.post("/difference", json={**body, "texts": texts})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "texts"
