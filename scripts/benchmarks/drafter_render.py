"""The table of all drafters as Markdown, and their acceptance by depth as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from scripts.benchmarks.drafter_published import PUBLISHED, find_ranked
from scripts.benchmarks.drafter_results import NONE, Cell, Results
from scripts.benchmarks.plot import load_pyplot, save_figure
from scripts.benchmarks.render import Grid, format_number

MEAN_PARTS = ("draft", "verify", "step")


def render_page(results: Results) -> str:
    """The whole Markdown file."""
    grids = [grid.to_markdown() for grid in make_grids(results) if grid.cells]
    return "\n".join(["# Drafters on one target", "", _describe_run(results), *grids])


def _describe_run(results: Results) -> str:
    environments = [report["environment"] for report in results.reports]
    one = environments[0]
    commands = "\n".join(dict.fromkeys(environment["command"] for environment in environments))
    commits = ", ".join(dict.fromkeys(environment["commit"] or "none" for environment in environments))
    flags = f" ({', '.join(one['cpu_flags'])})" if one["cpu_flags"] else ""
    machine = f"{one['gpu']}, " if one["gpu"] else ""
    numbers = ", ".join(dict.fromkeys(f"{Path(e['prompts']).name} {e['num_prompts']} prompts" for e in environments))
    return (
        f"```bash\n{commands}\n```\n\n"
        f"Target {one['target']}, {one['dtype']}, batch 1, tree {one['trees'][0]} (cut to what a drafter can draft), "
        f"drafters {'compiled' if one['conditions']['compile'] else 'eager'}; {numbers}; up to "
        f"{one['max_new_tokens']} tokens, {one['repeats']} repeats, {len(environments)} portions. {machine}{one['cpu']}"
        f"{flags}, {one['threads']} threads; torch {one['torch']}, transformers {one['transformers']}, Python "
        f"{one['python']}; commit {commits}.\n\n"
        "Acceptance length: tokens of verify steps / verify steps, the bonus token in, the prefill out. Speeds are "
        "medians of ratios, one for each prompt and repeat, all contenders of a portion interleaved.\n"
    )


def make_grids(results: Results) -> list[Grid]:
    return [
        _main_grid(results),
        mean_grid(results),
        *_speed_grids(results),
        _depth_grid(results),
        _text_grid(results),
        _papers(results),
    ]


def _main_grid(results: Results) -> Grid:
    def both(cell: Cell) -> str:
        return f"{cell.row.acceptance_length:.2f}, {format_number(cell.row.over_transformers)}×"

    cells = []
    for name, info in results.drafters.items():
        ranked = find_ranked(info["kind"])
        published = NONE
        if ranked is not None:
            published = f"{ranked.acceptance_length:.2f}, {ranked.speedup:.2f}× ({ranked.method})"
        measured = results.show(name, both)
        cells.append([name, *_describe_training(info), results.trees[name] or NONE, *measured, published])
    cells += [[name, *[NONE] * 4, *results.show(name, both), NONE] for name in results.others]
    columns = ["drafter", "parameters", "training tokens", "training time", "tree", *results.titles.values()]
    notes = [
        "Acceptance length, speed over transformers' eager `generate`; sorted by the mean acceptance length of all "
        "files at the lowest temperature. Parameters are a drafter's own, without what it borrows from the target.",
        *_problems(results),
    ]
    return Grid("Acceptance length and speed", [*columns, "published"], cells, notes)


def mean_grid(results: Results) -> Grid:
    """Over all files of prompts: acceptance length and speed at each temperature, a step's time at the lowest one."""
    temperatures = sorted({temperature for _, temperature in results.titles})
    cells = []
    for name in (*results.drafters, *results.others):
        texts = [results.show_mean(name, [w for w in results.titles if w[1] == t]) for t in temperatures]
        cold = [cell.row for (_, t), cell in results.cells[name].items() if t == results.lowest_temperature]
        steps = [row.step_milliseconds for row in cold if row.step_milliseconds is not None]
        times = [f"{statistics.fmean(step[part] for step in steps):.1f}" if steps else NONE for part in MEAN_PARTS]
        cells.append([name, *texts, *times])
    columns = ["", *(f"T={t:g}" for t in temperatures), *(f"{part}, ms" for part in MEAN_PARTS)]
    note = f"ms of a verify step at T={results.lowest_temperature:g}; step: all of it."
    return Grid("Means of all files: acceptance length and speed, as above", columns, cells, [note])


def _describe_training(info: dict[str, Any]) -> list[str]:
    """Parameters, tokens, time."""
    parameters, training = info["num_parameters"], info["training"]
    tokens, seconds, threads = (training.get(key) for key in ("tokens", "seconds", "threads"))
    return [
        f"{parameters / 1e6:.2f} M" if parameters else "none",
        f"{tokens / 1e6:.2f} M" if tokens else NONE,
        f"{seconds / 60:.0f} min, {threads} thread{'s' if threads != 1 else ''}" if seconds else NONE,
    ]


def _problems(results: Results) -> list[str]:
    found = {
        f"{name} did not run: {cell.row.problem}"
        for name, cells in results.cells.items()
        for cell in cells.values()
        if cell.row.problem
    }
    return sorted(found)


def _speed_grids(results: Results) -> list[Grid]:
    def over_transformers(cell: Cell) -> str:
        return _spread(cell.row.over_transformers, cell.row.over_transformers_quartiles)

    def over_plain(cell: Cell) -> str:
        return _spread(*cell.over_plain) if cell.over_plain is not None else NONE

    names = [*results.drafters, *results.others]
    columns = ["median (quartiles)", *results.titles.values()]
    return [
        Grid(title, columns, [[name, *results.show(name, text)] for name in names], notes)
        for title, text, notes in (
            ("Speed over transformers' generate, eager", over_transformers, []),
            (
                "Speed over our plain decoding",
                over_plain,
                ["Compiled drafters beside compiled plain decoding, whatever is eager beside the eager one."],
            ),
        )
    ]


def _spread(median: float | None, quartiles: tuple[float, float] | None) -> str:
    if median is None or quartiles is None:
        return NONE
    return f"{median:.2f} ({quartiles[0]:.2f}–{quartiles[1]:.2f})"


def _depth_grid(results: Results) -> Grid:
    counted = {name: results.count_accepted(name) for name in results.drafters}
    deepest = max((len(stats.acceptance_by_depth) for stats in counted.values()), default=0)
    cells = []
    for name, stats in counted.items():
        shares = [f"{share:.2f}" for share in stats.acceptance_by_depth]
        cells.append([name, str(sum(stats.accepted_histogram)), *shares, *[NONE] * (deepest - len(shares))])
    note = (
        "Of the verify steps that accepted depth d - 1, the share that accepted depth d; all prompt files together. A "
        "tree may hold no node there, so this is the drafter with its tree."
    )
    columns = ["accepted at depth", "verify steps", *(str(depth + 1) for depth in range(deepest))]
    return Grid(f"Acceptance by depth, T={results.lowest_temperature:g}", columns, cells, [note])


def _text_grid(results: Results) -> Grid:
    def same(cell: Cell) -> str:
        return f"{cell.row.num_identical}/{cell.row.num_compared}" if cell.row.num_identical is not None else NONE

    cells = [[name, *results.show(name, same)] for name in (*results.drafters, *results.others)]
    notes = ["T=0: equal to transformers' generate; above: to our plain decoding with the same seeds."]
    rows = [cell.row for own in results.cells.values() for cell in own.values()]
    gaps = [(abs(d.gap), abs(d.gap) / d.resolution) for row in rows for d in row.differences if d.gap and d.resolution]
    if gaps:
        notes.append(
            "Where texts leave transformers' at T=0, the target's two logits are at most "
            f"{max(gaps)[0]:.3g} apart, and at most {max(steps for _, steps in gaps):.3g} steps of its dtype at that "
            "size. Above T=0 gaps are not measured."
        )
    return Grid("Identical texts", ["", *results.titles.values()], cells, notes)


def _papers(results: Results) -> Grid:
    """Results of the kinds in the table; and the order of those that one paper compares, beside the order here."""
    kinds = {info["kind"] for info in results.drafters.values()}
    shown = [one for one in PUBLISHED if one.kind in kinds]
    cells = [
        [
            one.kind,
            one.method,
            one.setting,
            format_number(one.temperature, "g"),
            format_number(one.acceptance_length),
            f"{one.speedup:.2f}×" if one.speedup is not None else NONE,
            one.source,
        ]
        for one in shown
    ]
    ranked = sorted((one for one in shown if one.is_ranked), key=lambda one: -(one.acceptance_length or 0.0))
    here = [name for name, info in results.drafters.items() if find_ranked(info["kind"]) is not None]
    notes = ["Other targets, trees, training and hardware: what can be compared is the order."]
    if len(ranked) > 1:
        notes.append(
            f"Order by acceptance length, {ranked[0].setting} ({ranked[0].source}): "
            f"{', '.join(one.kind for one in ranked)}. Here: {', '.join(here)}."
        )
    columns = ["kind", "method", "target, task", "T", "acceptance length", "speed-up", "source"]
    return Grid("As published", columns, cells, notes)


def draw_depths(path: Path, results: Results) -> None:
    """Acceptance by depth at the lowest temperature: a panel for each file of prompts, a line for each drafter."""
    plt = load_pyplot()
    panels = {where: title for where, title in results.titles.items() if where[1] == results.lowest_temperature}
    figure, axes = plt.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=(2.5 + 4 * len(panels), 4.5), layout="constrained"
    )
    colours = plt.get_cmap("tab20")
    deepest = 1
    for axis, (where, title) in zip(axes[0], panels.items(), strict=True):
        for place, name in enumerate(results.drafters):
            if where in results.cells[name]:
                shares = results.cells[name][where].row.acceptance_by_depth
                deepest = max(deepest, len(shares))
                axis.plot(
                    range(1, len(shares) + 1), shares, marker="o", color=colours(place % 20), label=name, clip_on=False
                )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("depth")
        axis.set_ylim(0, 1)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[0]:
        axis.set_xticks(range(1, deepest + 1))
    axes[0][0].set_ylabel("accepted, given that the depth before was")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8, frameon=False)
    environment = results.reports[0]["environment"]
    figure.suptitle(f"{environment['target']}, {environment['dtype']}, tree {environment['trees'][0]}", fontsize=9)
    save_figure(figure, path)
