"""A whole mixture-of-experts layer as one opaque dual-stream torch op."""

from dsmoe_op.config import MoEConfig

__version__ = "0.1.0"
__all__ = ["MoEConfig"]
