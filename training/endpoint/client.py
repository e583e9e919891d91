"""A client of servers with OpenAI's protocol (vLLM, SGLang, llama.cpp and others), on top of the `openai` package.

The key is read only from the environment variable OPENAI_API_KEY.
"""

import os
from collections.abc import Mapping
from typing import Any

TIMEOUT = 600.0  # seconds to wait for one answer
MAX_RETRIES = 8  # after timeouts, broken connections and status 408, 409, 429 or 5xx; waits of up to 8 seconds each
_TOO_LONG = ("context length", "maximum context", "context_length_exceeded", "too long", "max_model_len")
_KEY = "set the key that it accepts in the environment variable OPENAI_API_KEY"
_CURES = {
    400: "the server does not understand the request",
    401: _KEY,
    403: _KEY,
    404: "the endpoint's base URL usually ends in /v1, and --endpoint_model names the model",
}


class EndpointClient:
    """Asks one server for one model. Threads may share it.

    Args:
        url: the base URL, up to and with `/v1`.
        model: the name under which the server serves the target.

    Attributes:
        entry: what the server says of the model in `/models`.

    Raises:
        ValueError: not a URL, no `openai` package, or a model that the server does not serve.
        ConnectionError: as `ask`.
    """

    def __init__(self, url: str, model: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the endpoint is {url!r}: give its base URL, such as http://localhost:8000/v1")
        try:
            import openai
        except ImportError as error:
            raise ValueError("--endpoint needs the client of OpenAI: pip install 'draftsmith[endpoint]'") from error
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            timeout=TIMEOUT,
            max_retries=MAX_RETRIES,
        )
        self.url, self.model = url.rstrip("/"), model
        self.entry = self._find_model()

    def close(self) -> None:
        self._client.close()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Returns the server's answer to a POST of `body` and the model's name, or to a GET without a body; None when
        the prompt is too long.

        Raises:
            ConnectionError: no answer after all attempts, or the server rejects the key or the request.
            ValueError: an answer in another form.
        """
        try:
            answer: Any = (
                self._client.get(path, cast_to=object)
                if body is None
                else self._client.post(path, cast_to=object, body={"model": self.model, **body})
            )
        except self._openai.APIError as error:
            status = getattr(error, "status_code", None)
            if status in (400, 413, 422) and any(word in str(error).lower() for word in _TOO_LONG):
                return None
            cure = _CURES.get(status or 0, "check the server and run the same command again: finished work is kept")
            raise ConnectionError(f"{self.url}{path}: {' '.join(str(error).split())}; {cure}") from error
        if not isinstance(answer, dict):
            raise self.misread(answer)
        return answer

    def misread(self, answer: Any) -> ValueError:
        """The error for an answer in another form."""
        return ValueError(f"{self.url} does not answer in OpenAI's form: {str(answer)[:300]}")

    def _find_model(self) -> dict[str, Any]:
        answer = self.ask("/models")
        entries = {str(entry.get("id")): entry for entry in (answer or {}).get("data", [])}
        if self.model not in entries:
            raise ValueError(
                f"{self.url} does not serve {self.model!r}, but {', '.join(entries) or 'nothing'}: name one with "
                "--endpoint_model, or start the server with that name (vLLM: --served-model-name)"
            )
        found: dict[str, Any] = entries[self.model]
        return found
