"""`python -m tests.models NAME DIR`: write a checkpoint into DIR. Safe to run again; never half a directory."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.models.smollm2 import smollm2
from tests.models.store import staged
from tests.models.tiny import FAMILIES, tiny
from tests.models.upcycled import smollm2_ernie_moe, smollm2_mixtral

CHECKPOINTS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2,
    "smollm2-fp32": partial(smollm2, "float32"),
    "smollm2-mixtral": smollm2_mixtral,
    "smollm2-ernie-moe": smollm2_ernie_moe,
    **{f"tiny-{family.replace('_', '-')}": partial(tiny, family) for family in FAMILIES},
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("name", choices=CHECKPOINTS)
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args(arguments)
    source, target = CHECKPOINTS[chosen.name](), chosen.directory.absolute()
    if target.is_dir() and any(target.iterdir()):
        if _same(source, target):
            print(f"{target} is complete")
            return 0
        print(
            f"{target} holds something else than {chosen.name}: name a directory that is new or empty", file=sys.stderr
        )
        return 2
    with staged(target) as directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
    print(f"{target} written")
    return 0


def _same(source: Path, target: Path) -> bool:
    """Whether every file of `source` is in `target` with its size: a copy is renamed into place whole."""
    return all(
        (target / file.name).is_file() and (target / file.name).stat().st_size == file.stat().st_size
        for file in source.iterdir()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
