"""A program for three ranks: rank 0 decodes and compares with plain decoding; the others serve a tiny target.

Every message is delayed by a random time. In the middle of two more texts the server of rank 2 dies.
"""

import os
import random
import signal
import time
from typing import Any

import torch

from draftsmith.inference import Decoder, DistributedDecoder, Target, serve_target
from draftsmith.inference.distributed.gloo_link import Channel
from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from draftsmith.inference.distributed.server import TargetServer
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import random_prompt, tiny_target

NUM_NEW = 16


def delay_messages(rank: int) -> None:
    generator, send = random.Random(rank), Channel.send

    def send_late(channel: Channel, to: int, message: Any) -> Any:
        time.sleep(0.004 * generator.random())
        return send(channel, to, message)

    Channel.send = send_late


def die_after(num_texts: int) -> None:
    """Lets this process's server die in the text after so many others."""
    begin, answer, begun = TargetServer.begin, TargetServer.answer, list[Prompt]()

    def begin_counted(server: TargetServer, prompt: Prompt) -> None:
        begun.append(prompt)
        begin(server, prompt)

    def answer_or_die(server: TargetServer, task: Task) -> Answer:
        if len(begun) > num_texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer(server, task)

    TargetServer.begin, TargetServer.answer = begin_counted, answer_or_die


def decode(num_texts: int) -> None:
    target = Target(tiny_target("llama"))
    plain, same, overtaken = Decoder(target, None), 0, 0
    script = ScriptedDrafter(
        [torch.zeros(1, dtype=torch.long)], target.vocab_size, ranks=(0, 0, 0, 0, 0, 1, 9), is_strict=False
    )
    with DistributedDecoder(target, script, lookahead=2, max_ahead=6) as decoder:
        for number in range(num_texts):
            prompt = random_prompt(4 + number % 9, number)
            call = {"do_sample": True, "top_k": 20, "seed": number} if number % 2 else {"do_sample": False}
            expected = plain.generate(prompt, max_new_tokens=NUM_NEW, **call).sequences
            script.texts = [expected[0]]
            output = decoder.generate(prompt, max_new_tokens=NUM_NEW, **call)
            same += torch.equal(output.sequences, expected)
            received = [one.received for one in decoder.timeline.verifications if one.received is not None]
            overtaken += received != sorted(received)
        print(f"{same} of {num_texts} texts are the same, and in {overtaken} answers overtook others", flush=True)
        for _ in range(2):  # the first text may not need rank 2; the second begins when all have answered
            decoder.generate(random_prompt(5), max_new_tokens=NUM_NEW)


def run(num_texts: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    delay_messages(rank)
    if rank == 0:
        decode(num_texts)
        return
    if rank == 2:
        die_after(num_texts)
    serve_target(tiny_target("llama"))
