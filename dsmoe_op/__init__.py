"""A whole mixture-of-experts layer as one opaque dual-stream torch op."""

from dsmoe_op import streams
from dsmoe_op.config import MoEConfig
from dsmoe_op.hf import replace_moe_blocks
from dsmoe_op.loading import load_block
from dsmoe_op.module import DualStreamMoE
from dsmoe_op.ops import Unfinalized, dual_stream_moe, dual_stream_moe_unfinalized, finalize, prepare, route

__version__ = "0.1.0"
__all__ = [
    "DualStreamMoE",
    "MoEConfig",
    "Unfinalized",
    "dual_stream_moe",
    "dual_stream_moe_unfinalized",
    "finalize",
    "load_block",
    "prepare",
    "replace_moe_blocks",
    "route",
    "streams",
]
