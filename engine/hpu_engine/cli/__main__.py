"""`python -m hpu_engine.cli`: the command for where no script is installed."""

from hpu_engine.cli import main

main(prog_name="hpu-engine")
