"""The picture of docs/distributed.md: the timeline of a real run, and where it is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.inference.distributed.timeline import Draft, Timeline, Verification
from draftsmith.scripts.measuring.plot import load_pyplot, save_figure

USED, DROPPED, PARTLY, WAITING = "#4878a8", "#d9d9d9", "#9dbbd6", "#d98c3f"
CHARACTERS = 200  # of the labels' font that fit into the timeline's width


def read_timeline(values: dict[str, Any]) -> Timeline:
    """A timeline from JSON, whose keys are strings."""
    drafts = [Draft(**one) for one in values["drafts"]]
    verifications = [Verification(**one) for one in values["verifications"]]
    return Timeline(drafts, verifications, {int(version): place for version, place in values["rounds"].items()})


def draw(path: Path, timeline: Timeline, rows: list[dict[str, Any]], *, title: str, seconds: float) -> None:
    """Draws the first `seconds` of the timeline, and speed over acceptance for a draft that takes a tenth of a pass."""
    plt = load_pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 6.4), height_ratios=(1.0, 1.5), layout="constrained")
    first = timeline.verifications[0].sent
    _draw_timeline(above, timeline, first, seconds)
    above.set_title(title, fontsize=9)
    _draw_speeds(below, rows)
    save_figure(figure, path)


def _draw_timeline(axis: Any, timeline: Timeline, first: float, seconds: float) -> None:
    axis.set_xlim(0, 1e3 * seconds)
    ranks = sorted({one.rank for one in timeline.verifications})
    for draft in timeline.drafts:
        colour = DROPPED if timeline.is_dropped(draft.version, draft.position) else WAITING
        _bar(axis, 0, draft.began - first, draft.ended - first, colour, str(draft.position))
    for one in timeline.verifications:
        if one.received is None:
            continue
        last = one.start + one.num_asked - 1
        is_lost = timeline.is_dropped(one.version, one.start)
        colour = DROPPED if is_lost else PARTLY if timeline.is_dropped(one.version, last) else USED
        text = f"{one.start}" if last == one.start else f"{one.start}-{last}"
        _bar(axis, ranks.index(one.rank) + 1, one.sent - first, one.received - first, colour, text)
    for version in timeline.rounds:
        ended = [one.received for one in timeline.verifications if one.version == version and one.received is not None]
        if ended:
            begun = min((one.sent for one in timeline.verifications if one.version == version + 1), default=None)
            if begun is not None:
                axis.axvline(1e3 * (begun - first), color="black", linewidth=0.6, linestyle=":")
    axis.set_ylim(len(ranks) + 0.5, -0.5)
    axis.set_yticks(range(len(ranks) + 1), ["rank 0 drafts", *(f"rank {rank} verifies" for rank in ranks)])
    axis.set_xlabel("milliseconds")
    axis.spines[["top", "right"]].set_visible(False)
    patches = load_pyplot().Rectangle
    legend = {"drafted, accepted": WAITING, "verified, used": USED, "partly used": PARTLY, "dropped": DROPPED}
    handles = [patches((0, 0), 1, 1, color=colour) for colour in legend.values()]
    axis.legend(handles, legend, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, fontsize=8, frameon=False)


def _bar(axis: Any, place: int, begin: float, end: float, colour: str, text: str) -> None:
    axis.barh(place, 1e3 * (end - begin), left=1e3 * begin, color=colour, edgecolor="white", height=0.8)
    if 1e3 * (end - begin) > axis.get_xlim()[1] * len(text) / CHARACTERS:
        axis.text(500 * (begin + end), place, text, ha="center", va="center", fontsize=6, clip_on=True)


def _draw_speeds(axis: Any, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["ratio"] == 0.1 and row["acceptance"] >= 0.5]
    gpus = sorted({row["gpus"] for row in rows})
    waiting = {row["acceptance"]: row["synchronous_over_plain"] for row in rows}
    axis.plot(list(waiting), list(waiting.values()), color="black", linestyle="--", label="1 GPU, drafts wait")
    for number, colour in zip(gpus, ("#d98c3f", "#6aa56a", "#4878a8"), strict=False):
        own = {row["acceptance"]: row["over_plain"] for row in rows if row["gpus"] == number}
        axis.plot(list(own), list(own.values()), marker="o", color=colour, label=f"{number} GPUs, distributed")
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xlabel("chance that a draft is right (a draft takes a tenth of a pass of the target; simulated)")
    axis.set_ylabel("speed against plain decoding")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
