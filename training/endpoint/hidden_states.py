"""Hidden states from vLLM's server, which its method `extract_hidden_states` writes to a file for each prompt.

vLLM numbers the states as transformers does: state I is the input of layer I. State n, of n layers, is the output of
the last layer before the final norm. Server and program share a folder (flock has to work there).

Legend: T tokens of a prompt, L states of each token, D hidden size.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.training.endpoint.client import EndpointClient

FOLDER = "/dev/shm/draftsmith"  # in memory: a file is read once and deleted
FILE_TIMEOUT = 30.0  # seconds from the server's answer until its file is whole
_POLL = 0.01  # seconds between two looks at a file


@dataclass
class HiddenStates:
    """Asks a server for the states of prompts. Threads may share it.

    Attributes:
        url: of the server.
        target: the target as the server loads it.
        served_name: the server's name for it.
        layers: numbers of the states, ascending.
        hidden_size, dtype: D, and the dtype of the states.
        max_length: tokens of the longest prompt.
        length_limit: of the target, or None.
        folder: the folder that server and program share, as this machine sees it; None = as the server names it.

    Raises:
        ConnectionError: no server; says how to start it.
        ValueError: the server has another model, or takes no prompts of `max_length` tokens.
    """

    url: str
    target: str
    served_name: str
    layers: Sequence[int]
    hidden_size: int
    dtype: torch.dtype
    max_length: int
    length_limit: int | None
    folder: str | None = None

    def __post_init__(self) -> None:
        try:
            self.client = EndpointClient(self.url, self.served_name)
        except ConnectionError as error:
            raise ConnectionError(f"{error}. If no server runs, start one with: {self.serve_command()}") from error
        limit = self.client.entry.get("max_model_len")
        if isinstance(limit, int) and limit <= self.max_length:
            raise ValueError(self._too_long(self.max_length, f"{limit - 1}"))

    @property
    def subfolder(self) -> str:
        """The folder's name tells the layers, because neither vLLM's answers nor its files do."""
        return "-".join(("layers", *map(str, self.layers)))

    def serve_command(self) -> str:
        """Starts the server. Prefixes are not cached: every token of every prompt gets its state anew."""
        hf_config = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
        speculation = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": f"{self.folder or FOLDER}/{self.subfolder}"},
        }
        needed = self.max_length + 1  # one token is generated
        words = ["vllm", "serve", self.target, "--dtype", str(self.dtype).removeprefix("torch.")]
        if self.served_name != self.target:
            words += ["--served-model-name", self.served_name]
        words += ["--max-model-len", str(min(needed, self.length_limit or needed)), "--no-enable-prefix-caching"]
        words += ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
        return shlex.join(words)

    def ask(self, input_ids: Tensor, **options: Any) -> tuple[Path, dict[str, Any]]:
        """Asks for the states of a prompt's ids [T]; returns the file that `take` reads, and the server's answer.

        Args:
            options: more fields of the request.

        Raises:
            ConnectionError: see `EndpointClient.ask`.
            ValueError: the server gives no states, or others; says how to start it.
        """
        ids = input_ids.tolist()
        answer = self.client.ask("/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, **options})
        if answer is None:
            raise ValueError(self._too_long(len(ids), "fewer"))
        named = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(named, str):
            raise ValueError(f"{self.client.url} gives no hidden states. {self._cure()}")
        place = PurePosixPath(named)
        if place.parent.name != self.subfolder:
            raise ValueError(
                f"{self.client.url} writes hidden states into {place.parent}, and those that are needed belong in a "
                f"folder with the name {self.subfolder}. {self._cure()}"
            )
        shared = self.folder
        return Path(named) if shared is None else Path(shared, place.parent.name, place.name), answer

    def take(self, path: Path, input_ids: Tensor) -> Tensor:
        """Returns the states [T, L, D] of a prompt's ids [T] from the server's file, and deletes the file.

        Raises:
            ValueError: no file, or other states; says what to do.
        """
        return self._check(_take_file(path), input_ids.tolist())

    def _check(self, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        states, found_ids = tensors.get("hidden_states"), tensors.get("token_ids")
        url = self.client.url
        if states is None or found_ids is None or states.dim() != 3:
            found = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
            raise ValueError(f"{url} writes {found}, where hidden_states [T, L, D] and token_ids are expected")
        if found_ids.tolist() != ids:
            raise ValueError(f"{url} gives the states of other tokens than those of the request: please report this")
        if states.shape[2] != self.hidden_size:
            raise ValueError(
                f"{url} serves another model: its states have {states.shape[2]} numbers, and those of "
                f"{self.target} have {self.hidden_size}. {self._cure()}"
            )
        if states.shape[:2] != (len(ids), len(self.layers)):
            raise ValueError(
                f"{url} gives {states.shape[1]} states for each of {states.shape[0]} tokens, and {len(self.layers)} "
                f"for each of {len(ids)} are needed. {self._cure()}"
            )
        if states.dtype != self.dtype:
            found, needed = (str(dtype).removeprefix("torch.") for dtype in (states.dtype, self.dtype))
            raise ValueError(
                f"{url} computes in {found}, and the states are stored in {needed}: start the server with "
                f"--dtype {needed}, or give --target_dtype {found}"
            )
        if not states.isfinite().all():
            raise ValueError(
                f"{url} gives states that are not finite (a text of {len(ids)} tokens that begins with {ids[:8]}): "
                "start the server with another --dtype, and give the same --target_dtype"
            )
        return states

    def _cure(self) -> str:
        return f"Start it with: {self.serve_command()}"

    def _too_long(self, length: int, most: str) -> str:
        limit = self.length_limit
        cure = f"give a smaller --max_length here and in training (one token of {limit} is generated)"
        if limit is None or length < limit:
            cure = f"start it with --max-model-len {length + 1}, or give a smaller --max_length here and in training"
        return f"{self.client.url} takes prompts of {most} tokens at most, and the longest text has {length}: {cure}"


def discard_file(path: Path) -> None:
    """Deletes a file that nobody will read, and its lock, when the server has released the lock."""
    import fcntl  # which Windows does not have

    lock = Path(f"{path}.lock")
    with suppress(OSError), lock.open("rb") as file:  # no lock: no file, or a whole one
        fcntl.flock(file, fcntl.LOCK_SH)
    for part in (path, lock):
        with suppress(OSError):
            part.unlink()


def _take_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file when the server has released its lock, and deletes file and lock."""
    import fcntl  # which Windows does not have

    lock = Path(f"{path}.lock")  # is there before the answer
    end = time.monotonic() + FILE_TIMEOUT
    while True:
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                tensors = load_file(path)
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            return tensors
        except (FileNotFoundError, BlockingIOError) as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"{path} was not written within {FILE_TIMEOUT:g} seconds of the server's answer: name the folder "
                    "that server and program share, as this machine sees it, with --shared_folder, or look into the "
                    "server's log (a full disk)"
                ) from error
            time.sleep(_POLL)
        except PermissionError as error:
            raise ValueError(
                f"cannot read and delete {path} ({error.strerror}): vLLM lets only its own user read the file, so run "
                "this program as the server's user"
            ) from error
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"cannot read {path} ({error}): the folder that server and program share needs file locks, such as "
                "one on a local disk or in /dev/shm; name it with --shared_folder"
            ) from error
