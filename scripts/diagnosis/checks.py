"""The checks of a diagnosis. Each knows one fault, says how it shows here, and what to do about it.

They run in this order, and the first that finds something names the cause: what breaks all drafts comes before what
costs some of them.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.heads import DraftHeads
from draftsmith.scripts.conversion.conventions import Convention, find_better
from draftsmith.scripts.diagnosis.breakdown import group
from draftsmith.scripts.diagnosis.evidence import Evidence
from draftsmith.scripts.diagnosis.speed import Speed
from draftsmith.scripts.diagnosis.training_data import TrainingData
from draftsmith.training.run.outcome import USUAL_TOKENS
from draftsmith.training.run.pace import CHAIN, describe_expected

MIN_AGREEMENT = 0.9  # of steps; near-ties of bfloat16 fall another way in some of them
MIN_STEPS = 20
MIN_COVERAGE = 0.97
UNTRAINED = 0.1  # right drafts of a depth that learned nothing
STRANGER = 0.1  # right drafts of depth 1 of heads that were trained for another target
OTHER_AUTHOR = 0.3  # nats a token above the target's own replies
MIN_TRAINED_SHARE = 0.1
MAX_DROPPED = 0.3
FALLS = 0.75  # accuracy beyond the trained length, as a share of the accuracy within it


@dataclass(frozen=True)
class Finding:
    """What is wrong, how it shows, what to do."""

    fault: str
    evidence: str
    cure: str


@dataclass(frozen=True)
class Case:
    """All that is known about heads and their target.

    Attributes:
        target_name, heads_name: as the user gave them.
        record: the heads' `training_record.json`; {} = there is none.
        chat_format: of the probe conversation (`render_probe`) here.
        conventions: of `compare_conventions`.
        scores_all: whether the heads have no draft vocabulary of their own.
        system: the system prompt of the prompts; "" = none.
        data: None = no training conversations were given or found.
        max_length: of a training row; None = not known.
        speed: None = not measured.
    """

    heads: DraftHeads
    target_name: str
    heads_name: str
    evidence: Evidence
    conventions: list[Convention]
    chat_format: str
    record: dict[str, Any]
    scores_all: bool
    system: str
    data: TrainingData | None
    max_length: int | None
    speed: Speed | None


def find_faults(case: Case) -> list[Finding]:
    checks = (
        check_paths,
        check_conventions,
        check_owner,
        check_depths,
        check_vocabulary,
        check_chat_format,
        check_system_prompt,
        check_author,
        check_loss_mask,
        check_length,
        check_tokens,
        check_speed,
    )
    return [finding for check in checks for finding in check(case)]


def check_paths(case: Case) -> Iterator[Finding]:
    share, steps = case.evidence.agreement
    chance = 2 * (MIN_AGREEMENT * (1 - MIN_AGREEMENT) / max(steps, 1)) ** 0.5  # two standard errors
    if steps >= MIN_STEPS and share < MIN_AGREEMENT - chance:
        yield Finding(
            "Training and decoding draft different tokens",
            f"in {1 - share:.0%} of {steps} steps the decoder accepted another number of drafts than the training "
            "forward has right on the same text",
            "a kind of heads whose unroll and expand differ (a shift, a position, a mask): compare them level by "
            "level; for a kind of this library, please report it",
        )


def check_conventions(case: Case) -> Iterator[Finding]:
    if (better := find_better(case.conventions)) is not None:
        changes = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in better.changes.items())
        yield Finding(
            f"A setting is wrong: the heads fit better where {better.name}",
            f"cross-entropy of the drafts {better.mean:.2f} nats then, {case.conventions[0].mean:.2f} as they are",
            f"write {changes} into the heads' config.json; for imported heads: draftsmith import --settings",
        )


def check_owner(case: Case) -> Iterator[Finding]:
    accuracy, known = case.evidence.accuracy(1)
    length = case.evidence.greedy.acceptance_length
    if find_better(case.conventions) is not None or known < MIN_STEPS or accuracy >= STRANGER:
        return
    owner = getattr(case.heads.config, "target_name_or_path", None)
    yield Finding(
        "The heads do not know this target's states",
        f"{accuracy:.0%} of the drafts of depth 1 are right, {length:.2f} tokens a pass, under every known setting"
        + (f"; they name {owner} as their target" if owner else ""),
        f"decode with the target they were trained for, or train them further: draftsmith train --target "
        f"{shlex.quote(case.target_name)} --init_heads {shlex.quote(case.heads_name)} --dataset YOURS.jsonl.gz",
    )


def check_depths(case: Case) -> Iterator[Finding]:
    before = 0.0
    for depth in range(1, case.evidence.num_depths + 1):
        accuracy, known = case.evidence.accuracy(depth)
        most = accuracy * known + 2 * (accuracy * known + 1) ** 0.5  # right drafts, if few were so by chance
        if known >= MIN_STEPS and accuracy < UNTRAINED and most < before * known / 2:
            yield Finding(
                f"Depth {depth} was not trained",
                f"{accuracy:.0%} of its drafts are right where those before it are, and {before:.0%} at depth "
                f"{depth - 1} ({known} places)",
                "train with more depths: num_heads, num_steps or ttt_steps in --head_overrides",
            )
            return
        before = accuracy


def check_vocabulary(case: Case) -> Iterator[Finding]:
    coverage, vocabulary = case.evidence.coverage, case.heads.draft_token_ids
    if vocabulary is not None and coverage < MIN_COVERAGE:
        yield Finding(
            "The draft vocabulary lacks tokens that the target writes",
            f"{1 - coverage:.1%} of the target's tokens are not among the {len(vocabulary):,} that the heads score; "
            "each of them ends a draft",
            "decode with a larger --draft_vocab_size, or count other conversations (--draft_vocab_data)"
            if case.scores_all
            else "train with a larger draft_vocab_size, or on conversations like yours, whose tokens are counted",
        )


def check_chat_format(case: Case) -> Iterator[Finding]:
    trained = case.record.get("chat_format")
    if not trained or trained == case.chat_format:
        return
    place = next((i for i, (a, b) in enumerate(zip(trained, case.chat_format, strict=False)) if a != b), None)
    start = max(0, (min(len(trained), len(case.chat_format)) if place is None else place) - 20)
    yield Finding(
        "Prompts are written in another chat format than in training",
        f"training wrote ...{trained[start : start + 60]!r}, this tokenizer writes ..."
        f"{case.chat_format[start : start + 60]!r}",
        "decode with the chat template, the default system prompt and the thinking mode of the training, or train "
        "with these",
    )


def check_system_prompt(case: Case) -> Iterator[Finding]:
    if case.data is None:
        return
    system, share = case.data.system
    if system != case.system and share > 0.5:
        yield Finding(
            "The training conversations have another system prompt",
            f"{share:.0%} of them begin with {_quote(system)}, your prompts with {_quote(case.system)}",
            "give both the same system prompt: draftsmith data --prompts with yours writes such replies",
        )


def _quote(system: str) -> str:
    return json.dumps(system if len(system) <= 60 else system[:57] + "...") if system else "none"


def check_author(case: Case) -> Iterator[Finding]:
    if case.data is None or not len(case.data.losses):
        return
    theirs, own = case.data.losses.nanmean(), case.evidence.own_losses.nanmean()
    spread = sum(
        float(losses[~losses.isnan()].var()) / len(losses)
        for losses in (case.data.losses, case.evidence.own_losses)
        if len(losses) > 1
    )
    if float(theirs - own) > max(OTHER_AUTHOR, 2 * spread**0.5):
        yield Finding(
            "Someone else wrote the training replies",
            f"under the target they have a perplexity of {theirs.exp():.1f}, its own samples {own.exp():.1f}",
            f"let the target answer your prompts: draftsmith data --target {shlex.quote(case.target_name)} --prompts "
            "YOURS.jsonl.gz --output outputs/replies.jsonl.gz",
        )


def check_loss_mask(case: Case) -> Iterator[Finding]:
    if case.data is None:
        return
    if case.data.trained_share < MIN_TRAINED_SHARE:
        yield Finding(
            "Few of the training tokens are learned",
            f"{case.data.trained_share:.0%} of the tokens have a loss",
            "see which: draftsmith inspect; the replies may be empty, or cut off by --max_length",
        )
    if (dropped := 1 - case.data.num_used / case.data.num_read) > MAX_DROPPED:
        yield Finding(
            "Many conversations are not used",
            f"training drops {dropped:.0%} of the first {case.data.num_read}",
            "see why: draftsmith inspect",
        )


def check_length(case: Case) -> Iterator[Finding]:
    longest = max(len(text.ids) for text in case.evidence.texts)
    config = case.heads.config
    has_positions = getattr(config, "use_prefix_attention", True)  # Hydra without its layer reads none
    limit = getattr(config, "max_position_embeddings", None) if has_positions else None
    if limit and longest > limit:
        yield Finding(
            "Texts are longer than the heads' positions",
            f"the heads have {limit} positions, and these texts have up to {longest} tokens",
            "train the heads with more positions and a larger --max_length",
        )
    if case.max_length is None:
        return
    names = ("in the first tokens", "after them")
    groups = group(case.evidence.texts, lambda text, place: names[place > case.max_length])
    shares = {name: share for name, share, count in groups if count >= MIN_STEPS}
    near, far = map(shares.get, names)
    if near is not None and far is not None and far < FALLS * near:
        yield Finding(
            "Acceptance falls in long texts",
            f"{near:.0%} of the drafts of depth 1 are right in the first {case.max_length} tokens, which training "
            f"saw, and {far:.0%} after them",
            "train with a larger --max_length on longer conversations",
        )


def check_tokens(case: Case) -> Iterator[Finding]:
    tokens, depth = case.record.get("training", {}).get("tokens"), case.evidence.depth
    if tokens and tokens < USUAL_TOKENS:
        yield Finding(
            "The heads have seen few tokens",
            f"{tokens:,}, and {USUAL_TOKENS / 1e6:.0f} million are usual; "
            f"{describe_expected(tokens, case.evidence.greedy.acceptance_length if depth == CHAIN else None)}",
            f"train on: draftsmith train --target {shlex.quote(case.target_name)} --init_heads "
            f"{shlex.quote(case.heads_name)} --dataset MORE.jsonl.gz",
        )


def check_speed(case: Case) -> Iterator[Finding]:
    if case.speed is None:
        return
    if case.speed.own_tree is not None and case.speed.own_tree < 0.95 * case.speed.auto:
        yield Finding(
            f"The tree {case.speed.tree} does not fit this machine",
            f"it decodes {case.speed.own_tree:.2f} times as fast as plain decoding, the default tree "
            f"{case.speed.auto:.2f} times",
            "leave tree out",
        )
    if case.speed.auto < 1.0:
        yield Finding(
            "Drafting gains nothing on this machine",
            f"the default tree decodes {case.speed.auto:.2f} times as fast as plain decoding: a pass over a few tokens "
            "takes too much longer than a pass over one",
            "compile, pack_weights=True, fewer rows; or heads that accept more",
        )
