"""Prometheus metrics of a server. Acceptance is counted as vLLM counts it, under the same names after the prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.inference.learning import LearningProgress
from draftsmith.inference.serving.reply import Reply

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class VllmCounters(Collector):
    """The same counters under vLLM's names, which `vllm bench serve` and AIPerf read. Those programs add up all lines
    that begin with a name, so there are no lines with the time of a counter's creation."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        for counter in self._counters:
            for family in counter.collect():
                totals = [sample for sample in family.samples if sample.name.endswith("_total")]
                renamed = CounterMetricFamily(family.name.replace("draftsmith:", "vllm:"), family.documentation)
                for sample in totals:
                    renamed.add_sample(sample.name.replace("draftsmith:", "vllm:"), sample.labels, sample.value)
                yield renamed


class LearningCollector(Collector):
    """What heads that learn have learned."""

    def __init__(self, find_progress: Callable[[], LearningProgress]) -> None:
        self._find_progress = find_progress

    def collect(self) -> Iterator[Metric]:
        progress = self._find_progress()
        name = "draftsmith:learning_"
        yield CounterMetricFamily(name + "texts", "Replies that the heads could learn from.", progress.num_texts)
        yield CounterMetricFamily(name + "learned_tokens", "Tokens of all steps of learning.", progress.num_learned)
        yield CounterMetricFamily(
            name + "trials", "Comparisons of learned weights with those in use.", progress.num_trials
        )
        yield CounterMetricFamily(
            name + "swaps", "Trials after which learned weights came into use.", progress.num_swaps
        )
        if progress.trials:
            length = progress.trials[-1].length
            yield GaugeMetricFamily(name + "acceptance_length", "Of the weights in use, in the last trial.", length)


class Metrics:
    """The metrics of one server, in a registry of their own. A reply is counted when it ends."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def add(kind: Any, name: str, text: str, labels: Sequence[str] = (), **options: Any) -> Any:
            return kind(f"draftsmith:{name}", text, labels, registry=self.registry, **options)

        self.running = add(Gauge, "num_requests_running", "Replies that are being decoded.")
        self.waiting = add(Gauge, "num_requests_waiting", "Replies that wait for a free row.")
        self.cache_rows = add(Gauge, "cache_rows_used", "Rows of caches that hold a running reply.")
        self.prompt_tokens = add(Counter, "prompt_tokens", "Tokens of prompts.")
        self.new_tokens = add(Counter, "generation_tokens", "Tokens of replies.")
        self.drafts = add(Counter, "spec_decode_num_drafts", "Verify steps with a draft; each row counts.")
        self.draft_tokens = add(Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted = add(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        text = "Drafted tokens that were accepted, by their depth in the tree (0 = first)."
        self.accepted_per_pos = add(Counter, "spec_decode_num_accepted_tokens_per_pos", text, ["position"])
        self.registry.register(VllmCounters([self.drafts, self.draft_tokens, self.accepted, self.accepted_per_pos]))
        self.ended = add(Counter, "request_success", "Replies by the reason of their end.", ["finished_reason"])
        self.refused = add(Counter, "request_refused", "Requests that were refused, by HTTP status.", ["status"])
        names = "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"
        ends = "first token", "reply's end", "reading of the prompt"
        self.first_token_seconds, self.seconds, self.queue_seconds = (
            add(Histogram, name, f"From arrival to the {end}.", buckets=SECONDS)
            for name, end in zip(names, ends, strict=True)
        )

    def watch_learning(self, find_progress: Callable[[], LearningProgress]) -> None:
        """From now on the metrics tell what the server's heads have learned."""
        self.registry.register(LearningCollector(find_progress))

    def count_reply(self, reply: Reply) -> None:
        """Counts a reply that has ended."""
        self.ended.labels(reply.end_reason).inc()
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
        """In Prometheus' text format."""
        return generate_latest(self.registry)
