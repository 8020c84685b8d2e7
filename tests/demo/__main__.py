"""`python -m tests.demo`: a cluster, the operator, a model, an answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from openai import OpenAIError

from tests.cluster.errors import ClusterError
from tests.demo import story
from tests.demo.installation import NoModel
from tests.demo.kube import CommandFailed
from tests.demo.progress import NotReady
from tests.images.errors import ImageError


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=4, help="Nodes of the cluster, each a real kubelet.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the cluster, for several demos side by side.")] = "demo",
) -> None:
    """Show the whole of it on this machine. Run it again: it goes on from where it was."""
    try:
        story.tell(name=name, nodes=nodes)
    except (ClusterError, ImageError, CommandFailed, NoModel, NotReady, OpenAIError, OSError) as error:
        print(f"\ndemo: {error}\n\nRun it again to go on from here, or `make down` to begin anew.", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("\ndemo: interrupted. Run it again to go on from here; `make down` ends the cluster.", file=sys.stderr)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(demo)
