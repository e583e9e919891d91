"""Messages over torch.distributed's gloo, on CPUs and beside GPUs: the number of bytes, then the bytes (`wire`)."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task
from draftsmith.inference.distributed.server import TargetServer
from draftsmith.inference.distributed.wire import MAX_BYTES, Message, decode, encode
from draftsmith.inference.targets.target import Target

IDLE = timedelta(days=365)  # servers wait for the next text: gloo's own timeout would end them
GOODBYE = 5.0  # seconds for servers to confirm the end


class Channel:
    """One process group for messages, on the host. Each process makes it once, at the same time."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise ValueError("this build of torch has no torch.distributed: decode in one process, with Decoder")
        self._is_own = not dist.is_initialized()
        if self._is_own:
            try:
                dist.init_process_group("gloo")
            except ValueError as error:
                raise ValueError(
                    f"the processes cannot find each other ({error}): start the program with torchrun "
                    "--nproc_per_node 2 PROGRAM, or accelerate launch"
                ) from error
        self._group = dist.new_group(backend="gloo", timeout=IDLE)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def send(self, rank: int, message: Message) -> list[tuple[Any, Tensor]]:
        """Begins to send. What is returned must be kept until the other side has received the message."""
        data = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        with self._naming(rank):
            return [(dist.isend(part, rank, group=self._group), part) for part in (torch.tensor([len(data)]), data)]

    def receive(self, rank: int) -> Message:
        """Waits for a message."""
        size = torch.zeros(1, dtype=torch.long)
        with self._naming(rank):
            dist.recv(size, rank, group=self._group)
        if not 0 < int(size) <= MAX_BYTES:
            raise RuntimeError(f"from rank {rank}: a message of {int(size)} bytes; it has at most {MAX_BYTES}")
        with self._naming(rank):
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        try:
            return decode(data.numpy().tobytes())
        except ValueError as error:
            raise RuntimeError(f"from rank {rank}: {error}") from error

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Gloo's errors name an address, not a rank."""
        try:
            yield
        except RuntimeError as error:
            name = "rank 0, which drafts," if rank == 0 else f"the target server of rank {rank}"
            raise RuntimeError(f"{name} has died or lost its connection: look at its output") from error

    def close(self) -> None:
        if self._is_own:
            dist.destroy_process_group()


class GlooLink:
    """Rank 0's link to the servers. A thread for each server waits for its messages.

    Args:
        own: what every server must greet with.

    Attributes:
        ranks: the servers' ranks.
        busy: the servers that have a task and have not answered.
        owner: the text that the servers hold.

    Raises:
        ValueError: there is no server, this is not rank 0, or a server has another model.
        RuntimeError: a server has died, or sent what cannot be read.
        TimeoutError: a server does not greet within `timeout` seconds.
    """

    def __init__(self, own: Greeting, *, timeout: float) -> None:
        self._channel = Channel()
        if self._channel.rank != 0 or self._channel.num_ranks < 2:
            raise ValueError(
                f"this is rank {self._channel.rank} of {self._channel.num_ranks}: rank 0 drafts and decides, and all "
                "other ranks call serve_target: start at least 2 processes, as torchrun --nproc_per_node 2 PROGRAM"
            )
        self.ranks = tuple(range(1, self._channel.num_ranks))
        self.busy: set[int] = set()
        self.owner: object = None
        self._death: RuntimeError | None = None  # of a server
        self._is_closed = False
        self._received: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._sending: dict[int, list[Any]] = {rank: [] for rank in self.ranks}
        self._threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in self._threads:
            thread.start()
        greeted: set[int] = set()
        while greeted != set(self.ranks):
            message = self.receive(timeout)
            if message is None:
                missing = sorted(set(self.ranks) - greeted)
                raise TimeoutError(f"no greeting for {timeout:g} seconds from ranks {missing}: they call serve_target")
            rank, greeting = message
            if greeting != own:
                raise ValueError(f"rank {rank} serves {greeting}, rank 0 has {own}: load the same target everywhere")
            greeted.add(rank)

    def _listen(self, rank: int) -> None:
        try:
            while (message := self._channel.receive(rank)) is not None:
                self._received.put((rank, message))
        except RuntimeError as error:
            self._received.put((rank, error))

    def send(self, rank: int, message: Prompt | Task | None) -> None:
        """Sends without waiting for the server, which handles its messages in order."""
        self._sending[rank] += self._channel.send(rank, message)
        if isinstance(message, Task):
            self.busy.add(rank)

    def receive(self, seconds: float) -> tuple[int, Any] | None:
        """An answer and its rank; None if none comes within `seconds`.

        Raises:
            RuntimeError: a server has died; the message names its rank.
        """
        if self._death is not None:
            raise self._death
        try:
            rank, message = self._received.get(timeout=seconds) if seconds else self._received.get_nowait()
        except queue.Empty:
            return None
        if isinstance(message, RuntimeError):
            self._death = message
            raise message
        if isinstance(message, Answer):  # so the server has everything that was sent to it
            self._sending[rank].clear()
            self.busy.discard(rank)
        return rank, message

    def now(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Ends the servers. Those that do not answer are left alone."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self.ranks:
            with suppress(RuntimeError):
                self.send(rank, None)
        until = self.now() + GOODBYE
        for thread in self._threads:
            thread.join(max(0.0, until - self.now()))
        if not any(thread.is_alive() for thread in self._threads):
            self._channel.close()


def serve_target(target: Target | Any) -> None:
    """Serves the target to rank 0's `DistributedDecoder` until that is closed. All ranks but 0 call it.

    Args:
        target: the same frozen model, in the same dtype, as rank 0's.

    Raises:
        ValueError: this is rank 0.
        RuntimeError: rank 0 has died, or sent what cannot be read.
    """
    server, channel = TargetServer(target), Channel()
    if channel.rank == 0:
        raise ValueError("this is rank 0, which drafts and decides: the other ranks call serve_target")
    sending = channel.send(0, Greeting.of_target(server.target))
    while (message := channel.receive(0)) is not None:
        if isinstance(message, Prompt):
            server.begin(message)
        else:
            assert isinstance(message, Task), "rank 0 sends prompts and tasks"
            sending = channel.send(0, server.answer(message))
    sending += channel.send(0, None)
    for work, _ in sending:
        work.wait()
    channel.close()
