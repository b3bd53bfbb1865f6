"""What README says is so: its table is the code's, its example runs, its commands are the ones that CI knows."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import torch

from dsmoe_op.cli.output import markdown_table
from dsmoe_op.hf import families

README = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text()


def test_the_table_of_families_is_the_codes() -> None:
    shown = re.search(r"<!-- families: .*? -->\n(.*?)\n<!-- /families -->", README, re.S)
    assert shown is not None
    assert shown[1].strip() == markdown_table(("family", "block", "router", "notes"), families()).strip()


def test_the_example_of_use_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    scope: dict[str, object] = {}
    exec(blocks[0], scope)
    y = scope["y"]
    assert isinstance(y, torch.Tensor)
    assert y.shape == (16, 1024)
    assert y.isfinite().all()


@pytest.mark.parametrize("name", ["main", "test"])
def test_each_command_stands_once_and_installs_the_tested_versions(name: str) -> None:
    (command,) = re.findall(rf"<!-- {name} command -->\n```bash\n(.*?)\n```", README)
    assert command.startswith('pip install -c .ci/constraints.txt -e ".[')
    assert "\n" not in command


def test_the_commands_of_the_command_line_exist() -> None:
    shown = set(re.findall(r"python -m dsmoe_op (\w+)", README))
    text = subprocess.run(
        [sys.executable, "-m", "dsmoe_op", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert shown
    assert all(name in text for name in shown)
