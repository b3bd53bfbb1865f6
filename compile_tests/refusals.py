"""Cases of bad input: one text refuses it eager, on fake tensors, and inside what the compiler raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def refused(text: str, call: Callable[..., Any], tensors: dict[str, Tensor | None], **others: Any) -> None:
    """call(**tensors, **others) raises exactly `text` eager and on fake tensors, and a text that holds it compiled."""
    refused_untraced(text, call, tensors, **others)
    compiled = torch.compile(lambda tensors: call(**tensors, **others), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape(text)):
        compiled(tensors)


def refused_untraced(text: str, call: Callable[..., Any], tensors: dict[str, Tensor | None], **others: Any) -> None:
    """The first two of them, which are much the faster."""
    exact = f"^{re.escape(text)}$"
    with pytest.raises(ValueError, match=exact):
        call(**tensors, **others)

    mode = FakeTensorMode()
    fakes = {name: t if t is None else mode.from_tensor(t) for name, t in tensors.items()}
    with mode, pytest.raises(ValueError, match=exact):
        call(**fakes, **others)


class Bad(NamedTuple):
    text: str
    changes: dict[str, Any]
    layer: dict[str, Any]

    def spoil(self, arguments: dict[str, Any]) -> dict[str, Any]:
        changed = {n: c(arguments[n]) if callable(c) else c for n, c in self.changes.items()}
        return {**arguments, **changed}


def bad(text: str, change: Callable[[Tensor], Tensor] | dict[str, Any], **layer: Any) -> Any:
    """A case: `text` is what a call is refused with.

    Args:
        change: spoils the argument that `text` names; or a dict of arguments to set or to spoil.
        layer: what the good layer has, as in make_layer.
    """
    changes = change if isinstance(change, dict) else {text.partition(":")[0]: change}
    return pytest.param(Bad(text, changes, layer), id=re.sub(r"[^\w.]+", "-", text)[:100])


def split(arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: a for name, a in arguments.items() if isinstance(a, Tensor)}
    return tensors, {name: a for name, a in arguments.items() if name not in tensors}
