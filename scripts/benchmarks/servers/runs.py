"""Real processes beside the simulation: emulated costs, and real models.

`message` in a run's costs is half of the time from a task to the arrival of its answer beyond the server's own time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder, DistributedDecoder, Drafter, DraftLogits, Target
from draftsmith.inference.distributed.coordinator import Link
from draftsmith.inference.distributed.messages import Answer, Greeting, Prompt, Task
from draftsmith.inference.distributed.timeline import Timeline
from draftsmith.scripts.benchmarks.scripted.counting import ScriptedChances
from draftsmith.scripts.benchmarks.servers.simulation import (
    Costs,
    Outcome,
    Setting,
    answer_rightly,
    best_synchronous,
    decode,
    make_draft,
    replay,
    simulate,
)

EMULATED = Greeting("emulated", 0, 2, "none")
SIMULATED_TOKENS = 4000
NUM_REPLAYS = 20  # of each real text, with costs that vary


class EmulatedServer:
    """Sleeps for the time of a pass, and answers zeros."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def begin(self, prompt: Prompt) -> None:
        """There is nothing to read."""

    def answer(self, task: Task) -> Answer:
        began = time.perf_counter()
        time.sleep(self.costs.verify)
        return answer_rightly(task, time.perf_counter() - began)


class SilentDrafter(Drafter):
    """Drafts nothing: the servers decode plainly."""

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None:
        return None

    def extend(
        self, state: None, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        return DraftLogits(torch.full((1, 1, 2), -torch.inf))

    def expand(self, state: None, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        raise AssertionError("nothing was drafted")


def read_costs(timelines: Sequence[Timeline]) -> Costs:
    """The typical costs of runs."""
    drafts = [one.ended - one.began for timeline in timelines for one in timeline.drafts]
    passes = [one.seconds for timeline in timelines for one in timeline.verifications if one.received is not None]
    messages = [
        (one.arrived - one.sent - one.seconds) / 2
        for timeline in timelines
        for one in timeline.verifications
        if one.arrived is not None
    ]
    spread = statistics.fmean(statistics.pstdev(times) / statistics.fmean(times) for times in (drafts, passes))
    return Costs(statistics.fmean(drafts), statistics.fmean(passes), max(0.0, statistics.fmean(messages)), spread)


def compare(outcome: Outcome, costs: Costs, setting: Setting, predicted: Outcome | None = None) -> dict[str, Any]:
    """A run beside what the simulation predicts from its costs and the share of its drafts that were right."""
    predicted = predicted or simulate(costs, setting, SIMULATED_TOKENS)
    ratio = predicted.tokens_per_second / outcome.tokens_per_second
    return {
        "setting": asdict(setting),
        "costs": asdict(costs),
        "real": outcome.to_dict(),
        "predicted": predicted.to_dict(),
        "error": ratio - 1,
        "over_plain": costs.verify * outcome.tokens_per_second,
        "synchronous_over_plain": costs.verify / best_synchronous(costs, setting.acceptance),
    }


def emulate(
    link: Link, costs: Costs, acceptances: Sequence[float], lookaheads: Sequence[int | None], num_tokens: int
) -> list[dict[str, Any]]:
    """Rank 0 with drafts that sleep; the other ranks serve an `EmulatedServer` of the same costs."""
    rows = []
    for acceptance in acceptances:
        for lookahead in lookaheads:
            setting = Setting(len(link.ranks), acceptance, lookahead)
            draft = make_draft(acceptance, len(rows), lambda: time.sleep(costs.draft))
            outcome, timeline = decode(link, setting, draft, num_tokens)
            # The drafts that a run really accepted: a short run has luck.
            setting = replace(setting, acceptance=timeline.acceptance)
            rows.append({"asked_acceptance": acceptance, **compare(outcome, read_costs([timeline]), setting)})
    return rows


def run_models(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    num_tokens: int,
    lengths: Sequence[int],
    acceptances: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """Real models: plain decoding and chains that wait, on rank 0, taking turns with the servers. The texts are
    compared. Rivals also run with as many threads as there are processes and cores.

    Args:
        acceptances: of a `ScriptedChances` drafter, one result for each; () = the drafter's own.
    """
    with DistributedDecoder(target, drafter) as decoder:
        num_threads = min(1 + len(decoder.link.ranks), os.cpu_count() or 1)
        silent = DistributedDecoder(target, SilentDrafter(), link=decoder.link)
        contenders: dict[str, Callable[..., Any]] = {"plain": Decoder(target).generate}
        contenders |= {f"chain:{n}": Decoder(target, drafter, tree=f"chain:{n}").generate for n in lengths}
        contenders |= {
            f"{name}, {num_threads} threads": partial(_with_threads, num_threads, generate)
            for name, generate in contenders.items()
        }
        contenders |= {"plain through a server": silent.generate, "distributed": decoder.generate}
        for generate in contenders.values():
            generate(prompts[0], max_new_tokens=8, do_sample=False)
        results = []
        for acceptance in acceptances or (None,):
            if acceptance is not None:
                assert isinstance(drafter, ScriptedChances)
                drafter.acceptance = acceptance
            results.append(_run_in_turns(decoder, contenders, prompts, num_tokens))
    return results


def _with_threads(number: int, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return generate(*args, **kwargs)
    finally:
        torch.set_num_threads(before)


def _run_in_turns(
    decoder: DistributedDecoder,
    contenders: dict[str, Callable[..., Any]],
    prompts: Sequence[Tensor],
    num_tokens: int,
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    timelines, outcomes, num_same = [], [], 0
    for prompt in prompts:
        texts = {}
        for name, generate in contenders.items():
            output = generate(prompt, max_new_tokens=num_tokens, do_sample=False)
            texts[name] = output.sequences
            decoding = output.stats.seconds["total"] - output.stats.seconds["prefill"]
            seconds[name].append(decoding / (output.stats.num_new_tokens - 1))
        num_same += torch.equal(texts["distributed"], texts["plain"])
        timelines.append(decoder.timeline)
        outcomes.append(Outcome.of_timeline(decoder.timeline, output.stats.num_new_tokens - 1, decoding))
    costs = read_costs(timelines)
    setting = Setting(len(decoder.link.ranks), statistics.fmean(one.acceptance for one in timelines))
    speeds = {name: 1 / statistics.fmean(values) for name, values in seconds.items()}
    replays = [
        replay(costs, setting, timeline, outcome.tokens, seed=seed)
        for timeline, outcome in zip(timelines, outcomes, strict=True)
        for seed in range(NUM_REPLAYS)
    ]
    plain = max(speed for name, speed in speeds.items() if name.partition(",")[0] == "plain")
    return {
        "tokens_per_second": speeds,
        "same_texts": num_same,
        "texts": len(prompts),
        **compare(add_up(outcomes), costs, setting, add_up(replays)),
        "over_plain": speeds["distributed"] / plain,
        "timeline": asdict(timelines[0]),
    }


def add_up(outcomes: Sequence[Outcome]) -> Outcome:
    """All texts as one."""
    shares = {
        name: statistics.fmean(getattr(one, name) for one in outcomes) for name in ("wasted", "dropped", "overlap")
    }
    return Outcome(sum(one.tokens for one in outcomes), sum(one.seconds for one in outcomes), **shares)
