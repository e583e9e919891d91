"""The documents: commands have the options they use, files and sections exist, Python runs, sizes hold.

A block after `<!-- not tested: REASON -->` is left out.
"""

import contextlib
import io
import itertools
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

import draftsmith
from draftsmith.heads import HEAD_TYPES
from draftsmith.heads.formats.registry import serves
from draftsmith.scripts.cli import PROGRAMS
from draftsmith.training.options.choices import Choice, Choices
from draftsmith.training.options.command_line import parse_arguments
from tests.conftest import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
DOCUMENTS = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(DOCS.glob("**/*.md")),
    *sorted((REPOSITORY / "examples").glob("**/README.md")),
]
SMOLLM2 = "outputs/smollm2-135m"  # `make smollm2` makes it
MAX_README_LINES = 150
MAX_DATA_BYTES = 100_000  # larger files are raw results, not documentation
BLOCK = re.compile(r"^(?P<skip><!-- not tested: [^\n]+ -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#([^)]*))?\)")
# Files that a reader brings or makes with an earlier command; ids of the hub.
BROUGHT_ALONG = re.compile(r"^(outputs/|YOURS|https?://|meta-llama/|Qwen/)")


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def blocks(path: Path, language: str) -> list[str]:
    matches = BLOCK.finditer(path.read_text(encoding="utf-8"))
    return [match["code"] for match in matches if match["language"] == language and not match["skip"]]


def commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every command, comments left out and continued lines joined."""
    for path in DOCUMENTS:
        for block in blocks(path, "bash"):
            yield from ((name(path), words) for words in split_commands(block))


def split_commands(block: str) -> Iterator[list[str]]:
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


COMMANDS = list(commands())


@cache
def help_of(program: str) -> str:
    """Every option of a program, as `--help_all` (or else `--help`) prints them; in this process, to import once."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", [program, "--help_all", "--help"])
        patch.setattr(sys, "path", [str((REPOSITORY / program).parent), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REPOSITORY / program), run_name="__main__")
    signal.signal(signal.SIGTERM, before)
    assert not ended.value.code
    return printed.getvalue()


def check_paths(words: list[str]) -> None:
    for word in words:
        if "/" in word and not word.startswith("-") and not BROUGHT_ALONG.match(word):
            assert (REPOSITORY / word).exists(), f"{word} is not in the repository"


def check_options(program: str, words: list[str]) -> None:
    text = help_of(program)
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{program} has no option {option}"


@pytest.mark.parametrize("page", ["README.md", "docs/choosing-heads.md"])
def test_the_table_of_heads_says_which_engines_serve_them(page: str) -> None:
    engines = {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "llama.cpp"}
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if "| served by |" in line)
    table = [line.split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    column = table[0].index(" served by ")
    told = {
        kind: {place for name, place in engines.items() if name in row[column]}
        for row in table[2:]
        for kind in re.findall(r"`(\w+)`", row[1])
        if kind in HEAD_TYPES
    }
    assert told == {kind: {place for place in engines.values() if serves(place, kind)} for kind in HEAD_TYPES}


def choose_without_the_target(given: dict[str, list[str]], overrides: dict[str, object]) -> Choices:
    return Choices("", [] if "init_heads" in given else [Choice("head_type", "eagle3", "the target is not here")])


@pytest.mark.parametrize(("document", "words"), COMMANDS, ids=[f"{d}: {' '.join(w)}"[:70] for d, w in COMMANDS])
def test_command(document: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("draftsmith.training.options.command_line.choose_options", choose_without_the_target)
    match words:
        case ["make", target]:
            makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", makefile, re.M), f"the Makefile has no target {target}"
        case ["pip", "install", *rest]:
            assert rest[:2] == ["-c", "constraints.txt"]
        case ["git", "clone", *_] | ["cd", "draftsmith"]:
            pass
        case ["torchrun", "--nproc_per_node", _, "examples/distributed.py"]:  # tests/inference/distributed runs it
            pass
        case ["draftsmith", "train", *rest]:
            check_paths([word for word in rest if word.startswith("configs/")])
            parse_arguments([*rest, "--use_cpu", "true", "--bf16", "false"])
        case ["draftsmith", program, *rest] | ["torchrun", "--nproc_per_node", _, "-m", "draftsmith", program, *rest]:
            check_options(PROGRAMS[program][0].removeprefix("draftsmith.").replace(".", "/") + ".py", rest)
            check_paths(rest)
        case ["accelerate", "launch", *rest]:
            start = rest.index("draftsmith")
            check_paths(rest[:start])
            assert launch_command_parser().parse_args(rest).module
            test_command(document, rest[start:], monkeypatch)
        case ["python", program, *rest] | ["torchrun", "--nproc_per_node", _, program, *rest]:
            check_options(program, rest)
            check_paths(rest)
        case ["pytest", *rest]:
            check_paths(rest)
        case _:
            pytest.fail(f"{document} has a command that no test knows: {shlex.join(words)}")


def with_models_at_hand(code: str) -> str:
    """Code whose SmolLM2, where it is absent, is the embedded target."""
    if (REPOSITORY / SMOLLM2).is_dir():
        return code
    return code.replace("heads/smollm2-135m-eagle3", "heads/mtp").replace(SMOLLM2, "examples/chat-13m")


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python")], ids=name)
def test_python_runs_from_top_to_bottom(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer tokens; the README's as they are where SmolLM2 is, to print what it shows."""
    monkeypatch.chdir(REPOSITORY)
    is_shown = path == README and (REPOSITORY / SMOLLM2).is_dir()
    namespace: dict[str, object] = {}
    for code in map(with_models_at_hand, blocks(path, "python")):
        code = code if is_shown else re.sub(r"(max_new_tokens(=|\": ))\d+", r"\g<1>8", code)
        exec(compile(code, str(path), "exec"), namespace)
    if is_shown:
        assert capsys.readouterr().out.split() == blocks(README, "text")[0].split()  # its lines are wrapped


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for file, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        linked = path.parent / file
        assert linked.exists(), f"{file} is not there"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{file} has no section #{anchor}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    names = [f"draftsmith.{one}" for one in draftsmith.__all__ if one != "HEAD_TYPES"]
    names += [f"{kind.__module__}.{kind.config_class.__name__}" for kind in draftsmith.HEAD_TYPES.values()]
    documented = set(re.findall(r"^::: (\S+)$", page, re.M))
    assert not set(names) - documented


def test_no_raw_results_in_the_docs() -> None:
    large = [name(path) for path in DOCS.rglob("*.*") if path.suffix != ".md" and path.stat().st_size > MAX_DATA_BYTES]
    assert not set(large) - {"docs/images/demo.svg", "docs/images/demo.gif"}
