"""MoE blocks of Hugging Face transformers: which are understood, and how they become `DualStreamMoE`.

Importing this imports no transformers: blocks are recognised by the names of their classes.
"""

from dsmoe_op.hf.families import families
from dsmoe_op.hf.swap import from_transformers, replace_moe_blocks

__all__ = ["families", "from_transformers", "replace_moe_blocks"]
