"""`python -m dsmoe_op families`: the Hugging Face blocks that can be swapped, as a Markdown table."""

from __future__ import annotations

import argparse
from typing import Any

from dsmoe_op.cli import output


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "families",
        help="print the Hugging Face model families that replace_moe_blocks takes, as a Markdown table",
        description="Prints the blocks of transformers that replace_moe_blocks swaps, as a Markdown table.",
    )
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    from dsmoe_op.hf import families

    print(output.markdown_table(("family", "block", "router", "notes"), families()))
    return output.OK
