"""Tokens per second of training online, from stored features, and while they are being stored, in one process.

    python scripts/benchmarks/feature_speed.py --config configs/train/eagle3-chat-13m-quick.yaml --max_steps 20

Options are those of training/train_heads.py and --repeats, --work_dir, --json. The modes take turns, so that a busy
machine slows all of them down; the median counts. Features are extracted first, which is timed as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    # Launched as a file, Python looks for packages in scripts/; ours stand beside it.
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each mode (3).")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/benchmark_features"), help="Emptied first.")
    parser.add_argument("--json", type=Path, help="Write every number here.")
    args, options = parser.parse_known_args()
    shutil.rmtree(args.work_dir, ignore_errors=True)
    try:
        report = measure(args, options)
    except (ValueError, OSError) as error:
        sys.exit(f"feature_speed.py: {error}")
    print(render(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    from scripts.benchmarks.environment import describe_environment

    speeds: dict[str, list[float]] = {"online": [], "offline": [], "hybrid, first epoch": []}
    store = args.work_dir / "features"
    seconds, num_tokens = extract(options, store)
    environment: dict[str, Any] = {}
    for repeat in range(args.repeats):
        for mode, found in speeds.items():
            chosen = {"online": [], "offline": ["--features", str(store)]}.get(
                mode, ["--features", str(args.work_dir / f"hybrid-{repeat}"), "--feature_mode", "hybrid"]
            )
            trainer = prepare([*options, *chosen, "--output_dir", str(args.work_dir / "heads")])
            begin = time.perf_counter()
            trainer.train()
            found.append(trainer.state.num_input_tokens_seen / (time.perf_counter() - begin))
            environment = environment or describe_environment(trainer.target, None)
    size = sum(file.stat().st_size for file in store.iterdir())
    return {
        "environment": environment,
        "extraction": {"tokens": num_tokens, "seconds": round(seconds, 2), "bytes": size},
        "tokens_per_second": speeds,
    }


def extract(options: list[str], folder: Path) -> tuple[float, int]:
    """Seconds and tokens of the whole extraction, loading included."""
    from training.features.extraction import extract_features
    from training.features.extraction_options import ExtractionArguments
    from training.features.target_options import PlacementArguments
    from training.options.command_line import parse_arguments

    model_args, data_args, *_ = parse_arguments(options)
    begin = time.perf_counter()
    args = ExtractionArguments(output_dir=str(folder))
    num_tokens = extract_features(model_args, data_args, PlacementArguments(), args)
    return time.perf_counter() - begin, num_tokens


def prepare(options: list[str]) -> Any:
    """The trainer of a run that neither evaluates nor saves."""
    from training.options.command_line import parse_arguments
    from training.run.run import prepare_run

    quiet = ["--num_eval_prompts", "0", "--eval_strategy", "no", "--save_strategy", "no", "--disable_tqdm", "true"]
    return prepare_run(*parse_arguments([*options, *quiet, "--logging_steps", "1000"])).trainer


def render(report: dict[str, Any]) -> str:
    extraction, speeds = report["extraction"], report["tokens_per_second"]
    lines = ["| | tokens/s, median (lowest to highest) |", "| --- | --- |"]
    rows = {"extraction, loading included": [extraction["tokens"] / extraction["seconds"]], **speeds}
    for name, found in rows.items():
        lines.append(f"| {name} | {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) |")
    lines.append(f"\n{extraction['tokens']} tokens take {extraction['bytes'] / 1e6:,.1f} MB on disk.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
