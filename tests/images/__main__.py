"""The command line of the images; see the package's first lines."""

from __future__ import annotations

import argparse
import sys

from tests.images.build import LOCAL_TARGETS, LOCKS, build
from tests.images.errors import ImageError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.images", description="Build and push the images.")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build what has changed")
    builder.add_argument("targets", nargs="*", default=LOCAL_TARGETS, metavar="TARGET", help=", ".join(LOCKS))
    builder.add_argument("--gaudi-base", default="", help="Intel's Gaudi PyTorch image, the base of engine-gaudi")
    options = parser.parse_args(arguments)
    try:
        images = build(options.targets, gaudi_base=options.gaudi_base)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for image in images.values():
        print(f"{image.target} {image.reference}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
