"""Tools that show two streams to be two, and safe: of this library's schedules, and of any callable.

- `assert_dual_stream` captures a callable and fails where routed and shared work are not on parallel branches.
- `check_schedule` says what is wrong with a schedule of this library's launches.
- `captured_graph` gives the kernels of a callable and what each waits for, for assertions of your own.
"""

from dsmoe_op.testing.dual_stream import assert_dual_stream
from dsmoe_op.testing.graphs import Graph, Node, captured_graph
from dsmoe_op.testing.schedules import check_schedule

__all__ = ["Graph", "Node", "assert_dual_stream", "captured_graph", "check_schedule"]
