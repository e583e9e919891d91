"""Decodes a case with one decoder, in one or more calls, and compares every row with its reference text.

Legend: B batch, N tree nodes, P path length.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from draftsmith.inference import Decoder, GenerationStats, TreePolicy
from draftsmith.inference.step import Step, StepOutput
from draftsmith.inference.trees.token_tree import TokenTree
from tests.lossless.matrix.drafters import drafter_of, policy_of, script_of
from tests.lossless.matrix.references import PAD, SAMPLING, Row, do_sample, prompt_of, reference_of, target_of
from tests.lossless.near_tie import assert_same_text, picking_scores
from tests.lossless.restless import make_restless
from tests.tiny_targets import pad_prompts


@dataclass(frozen=True)
class Call:
    """A batch.

    ends: pairs (row, n): the n-th new token of that row is an EOS token for all rows. None: EOS is the token that ends
    most rows and costs no more than `MAX_LOSS` of all tokens.
    """

    rows: tuple[Row, ...]
    ends: tuple[tuple[int, int], ...] | None = ()
    max_new_tokens: int = 40


MAX_LOSS = 0.25


@dataclass(frozen=True)
class Case:
    """What to decode, and how.

    policy: a name of `drafters.POLICIES`, or a tree. acceptance: "exact" (coupled), "exact uncoupled", or a rule.
    text_length: length of the reference texts, at least the longest `max_new_tokens`. seed: of the target's weights.
    dtype: float32, or bfloat16 in batch-invariant mode, where no text may differ, near-tie or not.
    """

    family: str
    calls: tuple[Call, ...]
    attention: str = "sdpa"
    drafter: str = "scripted"
    policy: str | TreePolicy = "dynamic"
    acceptance: str = "exact"
    sampling: str = "greedy"
    padding: str = "left"
    prefill_chunk: int = 512
    ranks: tuple[int, ...] | None = None
    text_length: int = 40
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def source(self) -> tuple[str, str, int]:
        return self.family, self.attention, self.seed


@dataclass
class Commits:
    """What decoders keep of their trees: which branches were accepted, and not merely offered.

    paths: of each accepted drafted node, the ranks from the root to it (as in `StaticTree`), where a rank counts
    the siblings of the tree that the drafter finds likelier; num_moved: rows' steps whose accepted nodes did not stand
    in the first slots of the tree, so that keys and values were moved."""

    paths: set[tuple[int, ...]] = field(default_factory=set)
    num_moved: int = 0

    def add(self, tree: TokenTree, path: Tensor, counts: Tensor) -> None:
        """Notes the first counts[b] nodes of `path` [B, P], root first."""
        parents, scores = tree.parents.tolist(), tree.log_probs.tolist()
        for row, (nodes, count) in enumerate(zip(path.tolist(), counts.tolist(), strict=True)):
            ranks: list[int] = []
            for node in nodes[1:count]:
                siblings = [other for other, parent in enumerate(parents[row]) if parent == parents[row][node]]
                ranks.append(sum(scores[row][other] > scores[row][node] for other in siblings))
                self.paths.add(tuple(ranks))
            self.num_moved += nodes[:count] != list(range(count))


@contextmanager
def watch_commits(commits: Commits) -> Iterator[None]:
    """Inside the block, every step of every decoder is noted in `commits`."""
    plain = Step.__call__

    def call(step: Step, *args: Any, **kwargs: Any) -> StepOutput:
        output = plain(step, *args, **kwargs)
        path = output.accepted.path
        commits.add(output.tree, path, output.emitted[:, path.shape[1]])
        return output

    with patch.object(Step, "__call__", call):
        yield


@dataclass
class Outcome:
    """What a case showed. num_tokens: those that were found equal; trimmed: tokens accepted after the end of a row;
    by_eos, by_length: rows that ended so; eos_within_step: rows of a batch of 1 (a batch of more does not tell) whose
    EOS was not its step's last token; num_ends: the largest number of different lengths at which rows of one batch
    ended; commits: what was accepted."""

    stats: GenerationStats = field(default_factory=GenerationStats)
    num_tokens: int = 0
    num_rows: int = 0
    trimmed: int = 0
    by_eos: int = 0
    by_length: int = 0
    eos_within_step: int = 0
    num_ends: int = 0
    commits: Commits = field(default_factory=Commits)
    ties: list[str] = field(default_factory=list)


def run_case(case: Case) -> Outcome:
    """Decodes and compares.

    Raises:
        AssertionError: for a text that differs without a near-tie, and for anything else that is not as it must be.
    """
    target = target_of(*case.source, case.dtype)
    drafter = drafter_of(case.drafter, *case.source, case.dtype, ranks=case.ranks)
    tree: TreePolicy | str | None = case.policy
    if isinstance(tree, str):
        tree = policy_of(tree, None if drafter is None else drafter.max_depth)
    rule, _, uncoupled = case.acceptance.partition(" ")
    decoder = Decoder(target, drafter, tree=tree, acceptance=rule, is_coupled=not uncoupled)
    if decoder.planner is not None:
        make_restless(decoder)
    outcome = Outcome()
    for call in case.calls:
        _run_call(case, call, decoder, outcome)
    return outcome


def _run_call(case: Case, call: Call, decoder: Decoder, outcome: Outcome) -> None:
    prompts = [prompt_of(case.family, row) for row in call.rows]
    texts = [reference_of(*case.source, row, case.sampling, case.text_length, case.dtype) for row in call.rows]
    eos = _choose_eos(call, texts, prompts)
    expected = [_cut(text, len(prompt), call, eos) for text, prompt in zip(texts, prompts, strict=True)]

    script, within = script_of(decoder.drafter), []
    if script is not None:
        script.texts = texts
        script.strangers.clear()

    inputs = pad_prompts(prompts, case.padding)
    ids = inputs["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": call.max_new_tokens, "eos_token_id": eos or None, "pad_token_id": PAD}
    options |= SAMPLING[case.sampling]
    seed = [row.seed for row in call.rows] if do_sample(case.sampling) else None
    with patch("draftsmith.inference.prefill.PREFILL_CHUNK", case.prefill_chunk), watch_commits(outcome.commits):
        options |= {"do_sample": do_sample(case.sampling), "seed": seed}
        if len(prompts) > 1:
            output = decoder.generate(**inputs, **options)
        else:
            stream = decoder.stream(**inputs, **options)
            for kept in stream:  # nothing but drafts before the end: the step's own last token was cut off
                within += [kept] if kept[-1] in eos and kept.num_drafted == len(kept) else []
            output = stream.output

    assert torch.equal(output.sequences[:, : ids.shape[1]], ids), "the prompts came back changed"
    new = output.sequences[:, ids.shape[1] :]
    num_ties, num_equal = 0, 0
    for row, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
        own = torch.cat([prompt, new[row]])
        num_equal += _count_equal(text, own) - len(prompt)
        if not torch.equal(own[: len(text)], text):
            outcome.ties += _judge(case, call.rows[row], text, own[: len(text)], f"row {row}")
            num_ties += 1
        else:
            assert (own[len(text) :] == PAD).all(), f"row {row} goes on after its end: {own[len(text) :].tolist()}"
    lengths = [len(text) - len(prompt) for text, prompt in zip(expected, prompts, strict=True)]
    if not num_ties:
        assert new.shape[1] == max(lengths), f"{new.shape[1]} new tokens, the longest row has {max(lengths)}"
        assert output.stats.num_new_tokens == sum(lengths)
        assert script is None or not script.strangers, f"the drafter was given other tokens: {script.strangers}"
    outcome.num_tokens += num_equal
    _count(outcome, output.stats, lengths, [int(text[-1]) in eos for text in expected], len(within))


def _choose_eos(call: Call, texts: Sequence[Tensor], prompts: Sequence[Tensor]) -> list[int]:
    if call.ends is not None:
        return sorted({int(texts[row][len(prompts[row]) + place]) for row, place in call.ends})
    limit = call.max_new_tokens
    new = torch.stack([text[len(prompt) :][:limit] for text, prompt in zip(texts, prompts, strict=True)])
    best: tuple[int, list[int]] = (0, [])
    for token in new.unique().tolist():
        lengths = [row.index(token) + 1 if token in row else limit for row in new.tolist()]
        num_ended = sum(length < limit for length in lengths)
        if num_ended > best[0] and sum(lengths) > (1 - MAX_LOSS) * limit * len(lengths):
            best = num_ended, [token]
    return best[1]


def _cut(text: Tensor, num_prompt: int, call: Call, eos: list[int]) -> Tensor:
    """Cuts a text at its end: at EOS, or at the largest number of new tokens."""
    for end in range(num_prompt, num_prompt + call.max_new_tokens):
        if int(text[end]) in eos:
            return text[: end + 1]
    return text[: num_prompt + call.max_new_tokens]


def _count_equal(expected: Tensor, got: Tensor) -> int:
    """Counts the tokens before the first difference. Tokens after a near-tie have no reference."""
    shorter = min(len(expected), len(got))
    return int((expected[:shorter] == got[:shorter]).long().cumprod(0).sum())


def _judge(case: Case, row: Row, expected: Tensor, got: Tensor, name: str) -> list[str]:
    assert case.dtype == torch.float32, f"{name} ({row}): {got.tolist()}, and plain decoding's is {expected.tolist()}"
    model, scores = target_of(*case.source).model, None
    if case.sampling != "greedy":
        scores = picking_scores(
            model, row.seed, do_sample=do_sample(case.sampling), max_new_tokens=1, **SAMPLING[case.sampling]
        )
    try:
        return assert_same_text(model, expected[None], got[None], scores=scores)
    except AssertionError as error:
        raise AssertionError(f"{name} ({row}): {error}") from error


def _count(outcome: Outcome, stats: GenerationStats, lengths: list[int], is_eos: list[bool], within: int) -> None:
    outcome.stats += stats
    outcome.num_rows += len(lengths)
    emitted = sum((drafted + 1) * steps for drafted, steps in enumerate(stats.accepted_histogram))
    outcome.trimmed += len(lengths) + emitted - stats.num_new_tokens
    outcome.by_eos += sum(is_eos)
    outcome.by_length += len(is_eos) - sum(is_eos)
    outcome.eos_within_step += within
    outcome.num_ends = max(outcome.num_ends, len(set(lengths)))
