"""Runs an application with uvicorn, and ends it in bounded time."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from draftsmith.inference.serving.scheduler import Scheduler

# After the replies have ended, their last events travel to the clients.
LAST_EVENTS_SECONDS = 2


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT takes no more requests, lets running replies end for some seconds, and ends the others with
    an error event.

    Attributes:
        announce: called with the address when the server takes requests.
    """

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, drain_seconds: float) -> None:
        super().__init__(config)
        self._scheduler, self._drain_seconds = scheduler, drain_seconds
        self.announce: Callable[[str], None] = lambda address: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._scheduler.stop(self._drain_seconds)  # before the connections are waited for
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for `run(sockets=[...])`. Until then connections wait.

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


def new_server(app: FastAPI, *, drain_seconds: float = 10.0) -> DrainingServer:
    """A server of an application that `create_app` made; call its `run(sockets=[bind(host, port)])`."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=int(drain_seconds) + LAST_EVENTS_SECONDS,
        server_header=False,
    )
    return DrainingServer(config, app.state.server.scheduler, drain_seconds)
