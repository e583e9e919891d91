"""The house rules that a reader can rely on: import direction, names, sizes, and one file per head kind."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from draftsmith.heads import HEAD_TYPES
from tests.conftest import REPOSITORY

# Each may import those to its left, and itself.
PACKAGES = ("inference", "heads", "training", "scripts")
# What `inference` and `heads` may need: the base dependencies of pyproject.toml and what those bring along.
BASE_DEPENDENCIES = {"torch", "transformers", "safetensors", "huggingface_hub", "numpy", "yaml", "jinja2"}
# What they import only inside a function, for users who have it.
OPTIONAL_DEPENDENCIES = {
    "heads/adapter.py": {"peft"},
    "heads/formats/gguf_file.py": {"gguf"},
    "inference/serving/grammar.py": {"xgrammar"},
}
# What the server needs: nothing else imports it.
SERVING_DEPENDENCIES = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
# Files that others import only inside a function: Triton's kernels are functions with decorators.
LATE_FILES = {f"inference/kernels/triton_{name}.py": {"triton"} for name in ("kernel", "linear")}
MAX_LINES = 500
MAX_FUNCTION_LINES = 60

MODULES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
PROGRAMS = [*MODULES, *sorted((REPOSITORY / "examples").glob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_packages(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Top-level names of everything a module imports, wherever in it."""
    module = parse(path)
    for node in module.body if top_level_only else ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (first_part(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield path.relative_to(REPOSITORY).parts[0] if node.level else first_part(node.module or "")


def first_part(module: str) -> str:
    """The package of ours, or the library, that a module belongs to."""
    return module.removeprefix("draftsmith.").split(".")[0]


def conditions(tree: ast.AST) -> Iterator[ast.AST]:
    """Every expression on which code branches, and every comparison."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.match_case):
            yield node.pattern
        elif isinstance(node, ast.Compare):
            yield node


def kinds_branched_on(tree: ast.AST) -> set[str]:
    """Head kinds that a condition names: as a string, by a class of theirs (`MedusaHeads`), or as
    `draftsmith.heads.kinds.medusa`. A kind's bare name may be an ordinary word ("block")."""
    classes = {kind + suffix: kind for kind in HEAD_TYPES for suffix in ("heads", "config")}
    found = set()
    for condition in conditions(tree):
        for node in ast.walk(condition):
            if isinstance(node, ast.Constant) and node.value in HEAD_TYPES:
                found.add(node.value)
            elif isinstance(node, ast.Name | ast.Attribute):
                word = node.id if isinstance(node, ast.Name) else node.attr
                is_module = isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("heads", "kinds"))
                if (
                    kind := classes.get(word.lower()) or (word if is_module and word in HEAD_TYPES else None)
                ) is not None:
                    found.add(kind)
    return found


def test_imports_point_one_way() -> None:
    for path in MODULES:
        package = path.relative_to(REPOSITORY).parts[0]
        forbidden = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests", "examples"}
        wrong = forbidden & set(imported_packages(path))
        assert not wrong, f"{name(path)} may import {PACKAGES[: PACKAGES.index(package)]}, not {sorted(wrong)}"


# The packages of a folder and the files beside them: a file imports from its own package and from earlier ones.
ORDERS = {
    "inference": (
        *("noise", "stats", "openmp", "shared_swaps", "cache_folder", "learning"),
        *("cache", "kernels", "targets", "drafters"),
        *("request", "state", "trees", "acceptance", "step", "planning", "prefix_cache", "prefill", "emitted_scores"),
        *("engine", "runners", "streaming", "decoder", "text_difference"),
        *("custom_generate", "generation", "pipeline", "pipelined", "serving", "distributed"),
    ),
    "inference/targets": (
        *(
            "forward_names",
            "copied_modules",
            "model_config",
            "files",
            "masks",
            "ragged",
            "refusals",
            "parts",
            "recurrent",
        ),
        *("encoder_decoder", "backbone", "probing", "target", "layer_groups", "multimodal", "media_proof"),
    ),
}
FOLDERS = sorted({path.parent for path in MODULES})


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(["draftsmith", *(parts[:-1] if parts[-1] == "__init__" else parts)])


NAMES = {module_name(path): path for path in MODULES}


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Files of the repository that a module imports, wherever in it: at the top, in a function, for types only."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in NAMES else node.module for module in modules}
    return frozenset(NAMES[module] for module in found if module in NAMES and NAMES[module] != path)


def part_of(path: Path, folder: Path) -> str:
    """The part of a folder that a file is in: a package below it, or the file itself."""
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else path.stem


def list_files(folder: Path) -> list[Path]:
    """Files in a folder and below it, except its front, which shows all parts."""
    return [path for path in MODULES if path.is_relative_to(folder) and path != folder / "__init__.py"]


def test_no_file_imports_itself_through_others() -> None:
    TopologicalSorter({path: imported_files(path) for path in MODULES}).prepare()  # its error names a circle


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_no_package_imports_itself_through_others(folder: Path) -> None:
    parts: dict[str, set[str]] = {}
    for path in list_files(folder):
        others = {part_of(other, folder) for other in imported_files(path) if other.is_relative_to(folder)}
        parts.setdefault(part_of(path, folder), set()).update(others - {part_of(path, folder)})
    TopologicalSorter(parts).prepare()  # its error names a circle


@pytest.mark.parametrize("folder", ORDERS)
def test_packages_import_from_earlier_packages(folder: str) -> None:
    order, root = ORDERS[folder], REPOSITORY / folder
    for path in list_files(root):
        later = order[order.index(part_of(path, root)) + 1 :]
        wrong = {
            name(other)
            for other in imported_files(path)
            if other.is_relative_to(root) and part_of(other, root) in later
        }
        assert not wrong, f"{name(path)}: {part_of(path, root)} comes before the packages of {sorted(wrong)}"


def test_decoding_needs_the_base_dependencies_only() -> None:
    own = {"inference", "heads"}
    for path in (path for path in MODULES if name(path).startswith(("inference", "heads"))):
        optional = OPTIONAL_DEPENDENCIES.get(name(path), set())
        at_once = optional & set(imported_packages(path, top_level_only=True))
        assert not at_once, f"{name(path)} needs {sorted(at_once)} as soon as it is imported"
        optional = optional | LATE_FILES.get(name(path), set())
        optional |= SERVING_DEPENDENCIES if name(path.parent) == "inference/serving" else set()
        foreign = set(imported_packages(path)) - sys.stdlib_module_names - own - BASE_DEPENDENCIES - optional
        assert not foreign, f"{name(path)} imports {sorted(foreign)} where only the base dependencies are"


def test_inference_reads_no_pickles() -> None:
    """What comes over a socket, or from a cache folder, is data."""
    for path in (path for path in MODULES if name(path).startswith("inference/")):
        assert "pickle" not in imported_packages(path), name(path)


def test_late_files_are_imported_in_functions_only() -> None:
    late = {Path(file).stem for file in LATE_FILES}
    for path in MODULES:
        for node in parse(path).body:
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            wrong = late & {part for each in names for part in each.split(".")}
            assert not wrong, f"{name(path)} imports {sorted(wrong)} as soon as it is imported"


def test_every_module_can_be_imported_on_windows() -> None:
    for path in PROGRAMS:
        absent = {"fcntl", "resource", "termios", "pwd", "grp"} & set(imported_packages(path, top_level_only=True))
        assert not absent, f"{name(path)} imports {sorted(absent)} at the top, which only Unix has"


def test_module_names_shadow_nothing() -> None:
    """`python DIR/program.py` puts DIR first on sys.path: a module or package there named like a library would replace
    it."""
    libraries = packages_distributions().keys() - {*PACKAGES}
    for path in PROGRAMS:
        module = path.parent.name if path.stem == "__init__" else path.stem
        assert module not in sys.stdlib_module_names, f"{name(path)}: a module of the standard library has that name"
        assert module not in libraries, f"{name(path)}: an installed library has that name"


def test_modules_are_one_concept_of_readable_size() -> None:
    for path in PROGRAMS:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, name(path)
        assert path.stem not in ("utils", "helpers", "common", "misc"), f"{name(path)}: name the concept"
        is_version = re.search(r"_(new|old|legacy|v\d+)$", path.stem)
        assert not is_version, f"{name(path)}: replace the old one; versions are git's business"


def test_functions_fit_a_screen() -> None:
    for path in PROGRAMS:
        functions = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        sizes = {one.name: one.end_lineno - one.lineno + 1 for one in functions if one.end_lineno is not None}
        long = {function: size for function, size in sizes.items() if size > MAX_FUNCTION_LINES}
        assert not long, f"{name(path)}: {long}"


def test_only_its_own_file_asks_for_a_kind_of_heads() -> None:
    for path in PROGRAMS:
        wrong = kinds_branched_on(parse(path)) - {path.stem}
        assert not wrong, f"{name(path)} branches on {sorted(wrong)}: let the kind answer, by a field of the contract"


def test_the_tour_names_every_package() -> None:
    """Every folder of code, and every file that stands in front of them."""
    tour = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {name(path.parent) + "/" for path in MODULES}
    missing = sorted(package for package in packages if f"`{package}`" not in tour)
    assert not missing, f"docs/architecture.md says nothing of {missing}"


def test_every_loop_runs_the_same_step() -> None:
    """A target verifies for `Step`, for a server of distributed decoding, and for the probes of its own package."""
    found = {
        (name(path), function.name)
        for path in PROGRAMS
        for function in ast.walk(parse(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and not name(path).startswith("inference/targets/")
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("target.verify")
    }
    assert found == {("inference/step.py", "verify"), ("inference/distributed/server.py", "_verify")}


def test_a_step_knows_nothing_of_how_it_runs() -> None:
    """`runners` wrap its functions, the policies and the drafters from outside. A staged drafter reads on the host, and
    says so to torch."""
    places = ("inference/state.py", "inference/step.py", "inference/trees/", "inference/drafters/")
    places += ("inference/acceptance/", "heads/kinds/")
    for path in (path for path in MODULES if name(path).startswith(places)):
        text = path.read_text(encoding="utf-8").replace("@torch.compiler.disable", "")
        words = re.findall(r"compil|captur|cuda|\bgraph|executor", text, re.I)
        assert not words, f"{name(path)}: {words}"
