"""Runs an application with uvicorn, and ends it in bounded time."""

import asyncio
import socket
import time

import uvicorn
from fastapi import FastAPI

from draftsmith.inference.serving.app import LAST_STEP_SECONDS

# After the replies have ended, their last events travel to the clients.
LAST_EVENTS_SECONDS = 2
POLL_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT takes no more requests, lets running replies end for some seconds, and ends the others with
    an error event. Call its `run(sockets=[bind(host, port)])`.

    Args:
        app: that `create_app` made.
    """

    def __init__(self, app: FastAPI, *, drain_seconds: float = 10.0) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=LAST_EVENTS_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._scheduler, self._drain_seconds = app.state.server.scheduler, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._scheduler.stop(self._drain_seconds)
        end = time.perf_counter() + self._drain_seconds + LAST_STEP_SECONDS
        while self._scheduler.has_thread and not self.force_exit and time.perf_counter() < end:
            await asyncio.sleep(POLL_SECONDS)  # new requests get 503
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for `DrainingServer.run(sockets=[...])`. Until then connections wait.

    Raises:
        ValueError: there is no such address, or another program has the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # it listens: or another program could take the port, too
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"got --host {host} --port {port}: {error.strerror}; give another one (--port 0 = any free port)"
        ) from error


def address_of(bound: socket.socket) -> str:
    """The URL of a server on this socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
