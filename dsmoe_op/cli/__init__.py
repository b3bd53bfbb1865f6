"""The command line. Each command is a module with `add_parser`; what it needs beyond torch it imports when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import dsmoe_op
from dsmoe_op.cli import bench, doctor, families, hazard, run, trace, tune
from dsmoe_op.cli.output import NOT_RUN, OK, CommandError

COMMANDS = (run, bench, tune, hazard, trace, doctor, families)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit code. Bad arguments exit with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m dsmoe_op", description="A mixture-of-experts layer as one opaque dual-stream torch op."
    )
    parser.add_argument("--version", action="version", version=f"dsmoe_op {dsmoe_op.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    try:
        return options.command(options)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return NOT_RUN
    except BrokenPipeError:  # the reader, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
