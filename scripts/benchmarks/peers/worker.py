"""A peer's code in a process and an environment of its own, which decodes one prompt at a time, and its texts."""

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Text:
    """tokens: after the prompt. lengths: tokens of each verify step, its bonus token or its root counted."""

    tokens: list[int]
    lengths: list[int]


class Worker:
    """A context in which the process runs.

    Args:
        script: `authors_worker.py`. checkout: the authors' code.
        folder: where the process runs, and what its job names lies.

    Attributes:
        header: the first line that the worker wrote.
    """

    def __init__(self, python: Path, script: Path, checkout: Path, folder: Path, job: dict[str, Any]) -> None:
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        self._command = [str(python), str(script), "job.json"]
        self._errors = folder / "errors.txt"
        with self._errors.open("w") as errors:  # a pipe that nobody reads would fill up
            self._process = subprocess.Popen(
                self._command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        self.header = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # the worker ends after its last prompt
        self._process.wait()
        self._process.stdout.close()

    def decode(self, prompt: list[int], seed: int) -> Text:
        """The text after the prompt.

        Raises:
            ValueError: the worker has ended; with the end of what it wrote to stderr.
        """
        self._process.stdin.write(json.dumps({"prompt": prompt, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return Text(**self._read())

    def _read(self) -> dict[str, Any]:
        """The next JSON line; libraries may print lines of their own."""
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        raise ValueError(f"{' '.join(self._command[:2])} failed: {self._errors.read_text().strip()[-500:]}")


def trim(text: Text, eos: int, max_new_tokens: int) -> Text:
    """A peer's text as this library ends it: at `max_new_tokens` or after the first EOS, without the steps after that.

    A peer's step appends its root and the drafts accepted after it; the bonus token is the next step's root. Here the
    root is known before the step:

    >>> trim(Text([5, 6, 2, 9, 9], [2, 1, 2]), eos=2, max_new_tokens=8)  # the first step's bonus token is EOS
    Text(tokens=[5, 6, 2], lengths=[2])
    """
    end = min(text.tokens.index(eos) + 1 if eos in text.tokens else max_new_tokens, max_new_tokens)
    lengths, known = [], 1
    for length in text.lengths:
        if known >= end:
            break
        lengths.append(length)
        known += length
    return replace(text, tokens=text.tokens[:end], lengths=lengths)


def mean_and_error(texts: Sequence[Text], num_seeds: int) -> tuple[float, float]:
    """Tokens per verify step of all texts together, and the standard error of this ratio over prompts.

    Args:
        texts: `num_seeds` of each prompt, one prompt after the other.
    """
    prompts = [texts[place : place + num_seeds] for place in range(0, len(texts), num_seeds)]
    lengths = [[length for text in own for length in text.lengths] for own in prompts]
    num_steps = sum(map(len, lengths))
    mean = sum(map(sum, lengths)) / num_steps
    if len(lengths) == 1:
        return mean, 0.0
    left = [sum(own) - mean * len(own) for own in lengths]  # of the ratio estimator, whose sum is 0
    return mean, statistics.stdev(left) * len(left) ** 0.5 / num_steps
