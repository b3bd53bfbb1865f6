"""The layer's Triton kernels, one launcher each.

A launcher issues one launch on the current stream of the current device and writes into the tensors it is given. It
reads nothing back, allocates nothing, and does nothing for T = 0. With `warmup=True` it compiles and loads every
variant that it could choose for these dtypes, sizes and strides at any T, and launches nothing.

A layer's launches are written down at the first call of a kind, and later calls of it run no launcher (`launch.py`). So
what a launcher hands to `launch` follows from shapes, strides, dtypes, alignment and the config alone; its tensors are
those that it was given, or tensor descriptors of them, and no views made inside.
"""

from dsmoe_op.kernels.coded import PLAIN, Coded, as_bytes, coded
from dsmoe_op.kernels.coded_persistent import takes as takes_ordered
from dsmoe_op.kernels.experts import experts, num_arrivals, num_parts
from dsmoe_op.kernels.finalize import finalize
from dsmoe_op.kernels.gate import shared_gate
from dsmoe_op.kernels.gemm import gemm1, gemm2
from dsmoe_op.kernels.launch import (
    INTERPRET,
    Bound,
    Direct,
    Recording,
    Table,
    compile_together,
    compiling_only,
    overlapping,
    row_stride,
)
from dsmoe_op.kernels.order import Rows, num_blocks, num_chunks, num_counters
from dsmoe_op.kernels.quantize import quantize_rows
from dsmoe_op.kernels.reorder import reorder_columns
from dsmoe_op.kernels.route import choose, order_rows, zero_counters
from dsmoe_op.kernels.router import router_logits, router_splits

__all__ = [
    "INTERPRET",
    "PLAIN",
    "Bound",
    "Coded",
    "Direct",
    "Recording",
    "Rows",
    "Table",
    "as_bytes",
    "choose",
    "coded",
    "compile_together",
    "compiling_only",
    "experts",
    "finalize",
    "gemm1",
    "gemm2",
    "num_arrivals",
    "num_blocks",
    "num_chunks",
    "num_counters",
    "num_parts",
    "order_rows",
    "overlapping",
    "quantize_rows",
    "reorder_columns",
    "router_logits",
    "router_splits",
    "row_stride",
    "shared_gate",
    "takes_ordered",
    "zero_counters",
]
