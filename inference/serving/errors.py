"""Errors of requests, in OpenAI's shape."""

from typing import Any

RETRY_SECONDS = 5  # that clients are asked to wait when the server has too much to do; most replies end by then


class RequestError(ValueError):
    """A request that is refused, or that fails (status 500).

    Args:
        param: the field of the request that is wrong.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
