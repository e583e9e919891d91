"""The ablation's results as a page with tables and as pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.ablation_runs import LABELS, REFERENCE, TABLES, Run
from scripts.benchmarks.plot import load_pyplot, save_figure
from scripts.benchmarks.render import Grid
from scripts.benchmarks.report import write_text

Results = Mapping[str, dict[str, Any]]
NONE = "–"


def write_page(page: Path, data: dict[str, Any], results: Results, missing: Sequence[str]) -> None:
    """PAGE.md, PAGE.json and the pictures beside them.

    Args:
        page: their path without an ending.
        results: by run's name; those that are finished.
        missing: runs that are not.
    """
    write_text(page.with_name(f"{page.name}.md"), render_page(page.name, data, results, missing))
    write_text(
        page.with_name(f"{page.name}.json"),
        json.dumps({"data": data, "results": dict(results)}, indent=1, allow_nan=False) + "\n",
    )
    draw_lengths(page.with_name(f"{page.name}-lengths.png"), results)
    for what in AXES:
        draw_lines(page.with_name(f"{page.name}-{what}.png"), results, what)


def read_page(
    page: Path, data: dict[str, Any], runs: Mapping[str, Run], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The results that PAGE.json holds of runs with the settings they have now, of as many tokens, and measured with
    these options."""
    path = page.with_name(f"{page.name}.json")
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if any(found["data"][key] != data[key] for key in ("budget", "max_length", "target")):
        return {}
    results: dict[str, dict[str, Any]] = found["results"]
    return {
        name: result
        for name, result in results.items()
        if name in runs and (result["settings"], result["options"]) == (runs[name].settings(), options)
    }


def render_page(name: str, data: dict[str, Any], results: Results, missing: Sequence[str]) -> str:
    one = next(iter(results.values()))
    environment = one["environment"]
    flags = f" ({', '.join(environment['cpu_flags'])})" if environment["cpu_flags"] else ""
    commits = ", ".join(dict.fromkeys(str(result["environment"]["commit"]) for result in results.values()))
    sets = [
        f"{key}: {count['conversations']:,} conversations, {count['tokens']:,} tokens, {count['trained_tokens']:,} of "
        "them the assistant's"
        for key, count in data["sets"].items()
    ]
    parts = [
        "# What heads learn from: data, methods, losses",
        "Made by `make ablation CONVERSATIONS=FILE` (scripts/benchmarks/ablation.py) from configs/ablation. Every run "
        f"trains {one['settings']['num_train_epochs']:g} epochs of {data['budget'] / 1e6:g} million tokens, with one "
        "seed. A difference of less than about twice the standard errors says nothing, and one seed does not show what "
        "another would give.",
        f"{'; '.join(sets)}. The target's replies were drawn at temperature 1; both sets answer the same prompts, each "
        f"cut to {data['max_length']} tokens a conversation and to the budget in all.",
        f"Measured with {environment['target']} in {environment['dtype']}, batch 1, tree {environment['tree']}, "
        f"{environment['num_prompts']} prompts of {environment['prompts']}, up to {environment['max_new_tokens']} "
        f"tokens. {environment['cpu']}{flags}, {environment['threads']} thread(s); torch {environment['torch']}, "
        f"transformers {environment['transformers']}; commit {commits}.",
        "Acceptance length: tokens of verify steps / verify steps, the bonus token in, ± the standard error over "
        "prompts. At depth d: of the verify steps that accepted depth d - 1, the share that accepted depth d, T=0. "
        "Identical: texts equal to plain decoding's, at T=0 and at T=1 with the same seeds. Training: wall clock, "
        "whatever else ran on the machine.",
    ]
    if missing:
        parts.append(f"Not in these tables: {', '.join(missing)}.")
    for title, labels in shown_tables(results).items():
        parts.append(_make_grid(title, labels, results).to_markdown().rstrip())
    parts.append(
        "KL(p ‖ q) (`kl`) is not run: it is `distillation` less the target's entropy, a constant, so its gradients and "
        "its heads are those of EAGLE-3's row."
    )
    parts.append(
        f"Curves of training are means of {SMOOTH} logged points, since batches are grouped by length, and long and "
        "short ones come in turns."
    )
    for ending, title in (
        ("lengths", "Acceptance length"),
        ("depths", "Acceptance by depth, T=0"),
        ("training", "How often the best first draft is the target's own best token, while training"),
        ("losses", "Training losses, each as a share of the first one logged: they have different units"),
    ):
        parts.append(f"![{title}]({name}-{ending}.png)")
    return "\n\n".join(parts) + "\n"


def shown_tables(results: Results) -> dict[str, dict[str, str]]:
    """`TABLES` with the finished runs alone; those that stand alone in theirs share one."""
    tables = {title: {name: labels[name] for name in labels if name in results} for title, labels in TABLES.items()}
    comparisons = {title: labels for title, labels in tables.items() if len(labels) > 1}
    alone = [name for name in results if not any(name in labels for labels in comparisons.values())]
    return comparisons | ({"Nothing yet to compare with": {name: LABELS[name] for name in alone}} if alone else {})


def _make_grid(title: str, labels: Mapping[str, str], results: Results) -> Grid:
    deepest = max(len(at(results[name], "0")["acceptance_by_depth"]) for name in labels)
    cells = []
    for name, label in labels.items():
        result, greedy, sampled = results[name], at(results[name], "0"), at(results[name], "1")
        shares = [f"{share:.2f}" for share in greedy["acceptance_by_depth"]]
        training = result["training"]
        num_prompts = result["environment"]["num_prompts"]
        cells.append(
            [
                f"[{label}](../../configs/ablation/{name}.yaml)",
                f"{training['tokens'] / 1e6:.2f} M",
                f"{training['seconds'] / 60:.0f} min",
                _with_error(greedy),
                _with_error(sampled),
                *shares,
                *[NONE] * (deepest - len(shares)),
                f"{greedy['identical']}/{num_prompts}, {sampled['identical']}/{num_prompts}",
            ]
        )
    depths = [f"depth {depth + 1}" for depth in range(deepest)]
    return Grid(title, ["", "tokens", "training", "T=0", "T=1", *depths, "identical"], cells)


def at(result: dict[str, Any], temperature: str) -> dict[str, Any]:
    found: dict[str, Any] = result["temperatures"][temperature]
    return found


def _with_error(measured: dict[str, Any]) -> str:
    error = measured["standard_error"]
    return f"{measured['acceptance_length']:.2f}" + (f" ± {error:.2f}" if error is not None else "")


def draw_lengths(path: Path, results: Results) -> None:
    """Acceptance length of every run as bars, greedy and sampled, with standard errors."""
    plt = load_pyplot()
    names = [name for name in LABELS if name in results]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.5 * len(names)), layout="constrained")
    for place, (temperature, colour) in enumerate((("0", "#4878a8"), ("1", "#d98c3f"))):
        measured = [at(results[name], temperature) for name in names]
        lengths = [one["acceptance_length"] for one in measured]
        errors = [one["standard_error"] or 0.0 for one in measured]
        rows = [row + 0.38 * (place - 0.5) for row in range(len(names))]
        axis.barh(rows, lengths, 0.36, xerr=errors, color=colour, label=f"T={temperature}")
        for row, length, error in zip(rows, lengths, errors, strict=True):
            axis.text(length + error + 0.02, row, f"{length:.2f}", va="center", fontsize=8)
    if REFERENCE in results:
        axis.axvline(at(results[REFERENCE], "0")["acceptance_length"], color="black", linewidth=0.6, linestyle=":")
    axis.set_yticks(range(len(names)), [LABELS[name].replace("`", "") for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=1)  # plain decoding's
    axis.set_xlabel("acceptance length (tokens per verify step)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


SMOOTH = 4

# What a picture of lines shows: what is written below its axes, and at their side.
AXES = {
    "depths": ("depth", "accepted, given that the depth before was"),
    "training": ("million training tokens", "accuracy of the best first draft"),
    "losses": ("million training tokens", "loss, as a share of the first one logged"),
}


def draw_lines(path: Path, results: Results, what: str) -> None:
    """A panel for each table, a line for each run; `what` is a key of `AXES`."""
    plt = load_pyplot()
    tables = shown_tables(results)
    figure, axes = plt.subplots(
        1, len(tables), sharey=True, squeeze=False, figsize=(1 + 5 * len(tables), 5.2), layout="constrained"
    )
    colours = plt.get_cmap("tab10")
    for axis, (title, labels) in zip(axes[0], tables.items(), strict=True):
        for place, (name, label) in enumerate(labels.items()):
            x, y = points(results[name], what)
            marker = "o" if what == "depths" else None
            axis.plot(x, y, marker=marker, color=colours(place), label=label.replace("`", ""))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(AXES[what][0])
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
        if what == "depths":
            axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel(AXES[what][1])
    save_figure(figure, path)


def points(result: dict[str, Any], what: str) -> tuple[list[float], list[float]]:
    """x and y of one line."""
    if what == "depths":
        shares = at(result, "0")["acceptance_by_depth"]
        return [depth + 1.0 for depth in range(len(shares))], shares
    curve = result["curve"]
    name, unit = ("top1_depth1", 1.0) if what == "training" else ("loss", curve[0]["loss"] if curve else 1.0)
    values = [point[name] / unit for point in curve]
    means = [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - SMOOTH) : end])]
    return [point["tokens"] / 1e6 for point in curve], means
