"""Who may import what (see docs/development.md). Read from the source, so that a lazy import cannot hide."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "engine" / "hpu_engine"
OPERATOR = ROOT / "operator" / "hpu_operator"

TORCH_FREE = ("planning", "server", "scheduling", "wire", "text", "settings")
"""Rooms of the engine that start, plan, decide or speak; what computes stands elsewhere."""

PLANNING_MAY_IMPORT = {"pydantic", "pydantic_core", "hpu_engine", "matplotlib"}
"""matplotlib: only the picture of `hpu-engine plan --plot`, imported when it is drawn."""


def modules_imported_by(file: Path) -> Iterator[str]:
    """Full names of the modules and their members that a file imports at any depth, type-checking blocks excepted."""
    tree = ast.parse(file.read_text(), filename=str(file))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def offenders(files: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in modules_imported_by(file)
        if name.split(".")[0] in forbidden
    ]


def test_the_torch_free_rooms_import_no_torch() -> None:
    torch_free = [
        *[file for room in TORCH_FREE for file in files_below(ENGINE / room)],
        *files_below(OPERATOR),
        ENGINE / "contract.py",
        ENGINE / "step" / "shapes.py",
        ENGINE / "worker" / "threads.py",
        ENGINE / "__init__.py",
    ]
    assert offenders(torch_free, {"torch", "habana_frameworks"}) == []


MAKERS = {"tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "frombuffer"}
"""Functions of torch that make a tensor on the host unless they are told where."""


def test_models_and_steps_make_no_tensor_without_saying_where() -> None:
    """A device's own rooms may; what runs on every device may not."""
    silent = [
        f"{file.relative_to(ROOT)}:{call.lineno} torch.{call.func.attr}"
        for room in ("model", "step", "group")
        for file in files_below(ENGINE / room)
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in MAKERS) == ("torch", True)
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def test_only_the_hpu_device_imports_habana_frameworks() -> None:
    others = [file for file in files_below(ENGINE) if file != ENGINE / "device" / "hpu.py"]
    assert offenders(others, {"habana_frameworks"}) == []


def test_planning_stands_on_the_standard_library_and_pydantic() -> None:
    import sys

    allowed = set(sys.stdlib_module_names) | PLANNING_MAY_IMPORT
    strangers = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files_below(ENGINE / "planning")
        for name in modules_imported_by(file)
        if name.split(".")[0] not in allowed
        or (name.startswith("hpu_engine.") and not name.startswith(("hpu_engine.planning", "hpu_engine.contract")))
    ]
    assert strangers == []


def test_the_operators_domain_is_pure() -> None:
    impure = {"kopf", "kubernetes", "aiohttp", "asyncio", "socket", "time", "random"}
    assert offenders(files_below(OPERATOR / "domain"), impure) == []


def test_only_handlers_import_kopf() -> None:
    others = [file for file in files_below(OPERATOR) if file != OPERATOR / "handlers.py"]
    assert offenders(others, {"kopf"}) == []


def module_of(file: Path) -> str:
    parts = file.relative_to(OPERATOR.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_of_the_operator_import_each_other_in_a_circle() -> None:
    names_in = {module_of(file): file for file in files_below(OPERATOR)}
    left = {name: set(modules_imported_by(file)) & set(names_in) for name, file in names_in.items()}
    while free := {name for name, needs in left.items() if not needs & set(left)}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


def test_the_operator_knows_only_planning_and_contract_of_the_engine() -> None:
    reached = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files_below(OPERATOR)
        for name in modules_imported_by(file)
        if name.startswith("hpu_engine.") and not name.startswith(("hpu_engine.planning", "hpu_engine.contract"))
    ]
    assert reached == []


@pytest.mark.parametrize("folder", ["engine", "operator"])
def test_the_folders_that_hold_packages_are_not_packages(folder: str) -> None:
    """A package called `operator` would shadow the standard library's."""
    assert not (ROOT / folder / "__init__.py").exists()
