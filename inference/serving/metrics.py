"""Prometheus metrics of a server. Acceptance is counted as vLLM counts it, under vLLM's names, which `vllm bench serve`
and AIPerf read."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.inference.learning import LearningProgress
from draftsmith.inference.serving.reply import Reply

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in a registry of their own. A reply is counted when it ends."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def add(kind: Any, name: str, text: str, labels: Sequence[str] = (), **options: Any) -> Any:
            prefix = "vllm" if name.startswith("spec_decode") else "draftsmith"
            return kind(f"{prefix}:{name}", text, labels, registry=self.registry, **options)

        self.running = add(Gauge, "num_requests_running", "Replies that are being decoded.")
        self.waiting = add(Gauge, "num_requests_waiting", "Replies that wait for a free row.")
        self.prompt_tokens = add(Counter, "prompt_tokens", "Tokens of prompts.")
        self.new_tokens = add(Counter, "generation_tokens", "Tokens of replies.")
        self.drafts = add(Counter, "spec_decode_num_drafts", "Verify steps with a draft; each row counts.")
        self.draft_tokens = add(Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted = add(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        text = "Drafted tokens that were accepted, by their depth in the tree (0 = first)."
        self.accepted_per_pos = add(Counter, "spec_decode_num_accepted_tokens_per_pos", text, ["position"])
        self.ended = add(Counter, "request_success", "Replies by the reason of their end.", ["finished_reason"])
        self.refused = add(Counter, "request_refused", "Requests that were refused, by HTTP status.", ["status"])
        names = "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"
        ends = "first token", "reply's end", "reading of the prompt"
        self.first_token_seconds, self.seconds, self.queue_seconds = (
            add(Histogram, name, f"From arrival to the {end}.", buckets=SECONDS)
            for name, end in zip(names, ends, strict=True)
        )

    def expect_positions(self, depth: int) -> None:
        """The counters of drafts up to this depth are there from now on, at 0."""
        for position in range(depth):
            self.accepted_per_pos.labels(position)

    def watch_learning(self, find_progress: Callable[[], LearningProgress]) -> None:
        """From now on the metrics tell what the server's heads have learned."""

        def add(name: str, text: str, read: Callable[[LearningProgress], float]) -> None:
            gauge = Gauge(f"draftsmith:learning_{name}", text, registry=self.registry)
            gauge.set_function(lambda: read(find_progress()))

        add("texts", "Replies that the heads could learn from.", lambda progress: progress.num_texts)
        add("learned_tokens", "Tokens of all steps of learning.", lambda progress: progress.num_learned)
        add("trials", "Comparisons of learned weights with those in use.", lambda progress: progress.num_trials)
        add("swaps", "Trials after which learned weights came into use.", lambda progress: progress.num_swaps)
        text = "Of the weights in use, in the last trial."
        add("acceptance_length", text, lambda found: found.trials[-1].length if found.trials else math.nan)

    def count_reply(self, reply: Reply) -> None:
        """Counts a reply that has ended."""
        self.ended.labels(reply.end_reason).inc()
        if reply.started is not None:
            self.prompt_tokens.inc(len(reply.prompt))
        self.new_tokens.inc(len(reply.row.new))
        self.drafts.inc(len(reply.drafts))
        self.draft_tokens.inc(reply.stats.num_drafted)
        for position, count in enumerate(reply.stats.accepted_per_depth):
            self.accepted.inc(count)
            self.accepted_per_pos.labels(position).inc(count)
        for histogram, moment in (
            (self.queue_seconds, reply.started),
            (self.first_token_seconds, reply.first_token),
            (self.seconds, reply.ended),
        ):
            if moment is not None:
                histogram.observe(moment - reply.arrived)

    def render(self) -> bytes:
        """In Prometheus' text format, without times of creation: programs that read vLLM's counters add up all lines
        that begin with a name."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)
