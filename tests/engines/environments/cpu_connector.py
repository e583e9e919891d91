"""vLLM's connector of hidden states for a machine without an accelerator: no streams, events or pinned memory.

vLLM's server imports it (`kv_connector_module_path`).
"""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class _Done:
    """A stream or event on which nothing waits."""

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def query(self) -> bool:
        return True


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        empty_like = torch.empty_like
        with (
            patch("torch.cuda.Event", _Done),
            patch("torch.cuda.Stream", _Done),
            patch("torch.cuda.stream", lambda stream: nullcontext()),
            patch("torch.empty_like", lambda tensor, **options: empty_like(tensor)),
        ):
            super()._submit_async_write(pending)
