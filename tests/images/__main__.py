"""The command line of the images; see the package's first lines."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.errors import ClusterError
from tests.images.build import LOCAL_TARGETS, LOCKS, Bases, build
from tests.images.errors import ImageError
from tests.images.nodes import prepare
from tests.images.registry import push


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.images", description="Build and push the images.")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build what has changed")
    builder.add_argument("targets", nargs="*", default=LOCAL_TARGETS, metavar="TARGET", help=", ".join(LOCKS))
    builder.add_argument("--gaudi-base", default="", help="Intel's Gaudi PyTorch image, the base of engine-gaudi")
    builder.add_argument("--python-base", default="", help="a Python image in place of our own base")
    builder.add_argument("--for-nodes", action="store_true", help="also unpack them for the nodes of local clusters")
    pusher = commands.add_parser("push", help="push what was built last")
    pusher.add_argument("registry", metavar="HOST[:PORT][/PATH]")
    pusher.add_argument("targets", nargs="*", metavar="TARGET", help="all that were built, if not given")
    options = parser.parse_args(arguments)
    try:
        if options.command == "push":
            for pushed in push(options.registry, options.targets):
                print(f"{pushed.target} {pushed.reference}@{pushed.digest}")
            return 0
        if options.for_nodes:
            prepare()
            return 0
        bases = Bases(python=options.python_base, gaudi=options.gaudi_base)
        for image in build(options.targets, bases=bases).values():
            print(f"{image.target} {image.reference}")
    except (ImageError, ClusterError) as error:  # a ClusterError: the programs that unpack images for the nodes
        print(f"images: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"images: {error}\n  -> is there room in the cache, and may this user write there?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
