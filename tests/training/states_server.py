"""A local server that gives hidden states as vLLM's does: in files, which it writes after its answer."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.inference import Decoder
from tests.training.openai_server import Handler, OpenAIServer, answering

LAYERS = [1, 2, 3]  # that heads read; with the last one the server writes four
DELAY = 0.02  # seconds from an answer to its file


class StatesServer(OpenAIServer):
    """Serves a target under the name "tiny".

    Attributes:
        model: of the target, in float32.
        folder: where files are written.
        layers: the states that are written.
        max_length: the longest prompt and answer.
        is_extracting: whether it was started with the method.
        spoil: changes the tensors of every file; to nothing = no file is written.
    """

    def __init__(self, target_path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target_path).eval()
        super().__init__(Decoder(self.model), AutoTokenizer.from_pretrained(target_path), _StatesHandler)
        self.folder = Path()
        self.numbers = count()
        self.reset(Path(), [])

    def reset(self, folder: Path, layers: list[int]) -> None:
        """Starts the server anew."""
        self.layers, self.max_length, self.is_extracting = layers, 512, True
        self.folder = folder / "-".join(["layers", *map(str, layers)])
        self.spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
        self.faults.clear()
        self.bodies.clear()
        self.max_in_flight = 0

    @torch.no_grad()
    def extract(self, ids: list[int], num_best: int) -> dict[str, Any]:
        """The answer to a prompt; the file follows."""
        before_norm: list[Tensor] = []
        with self.lock:
            hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
            output = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
            hook.remove()
        scores = output.logits[0].log_softmax(-1)
        best = scores.topk(num_best).indices.tolist() if num_best else []
        tops = [{str(token): {"logprob": float(scores[t, token])} for token in at} for t, at in enumerate(best)]
        answer: dict[str, Any] = {"choices": [{"text": "", "prompt_logprobs": [None, *tops[:-1]] if tops else None}]}
        if self.is_extracting:
            states = [*output.hidden_states[:-1], before_norm[0]]
            chosen = torch.stack([states[layer][0] for layer in self.layers], dim=1)
            path = self.folder / f"{next(self.numbers)}.safetensors"
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
            self.write(path, {"hidden_states": chosen, "token_ids": torch.tensor(ids)})
        return answer

    def write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Writes the file after a while, and holds its lock until then."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            if spoilt := self.spoil(tensors):
                save_file(spoilt, path)
            os.close(lock)

        threading.Timer(DELAY, finish).start()


class _StatesHandler(Handler):
    server: StatesServer

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny", "max_model_len": self.server.max_length}]})

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.server.extract(body["prompt"], body.get("prompt_logprobs", 0))


@contextmanager
def serving_states(target_path: Path) -> Iterator[StatesServer]:
    with StatesServer(target_path) as server, answering(server):
        yield server
