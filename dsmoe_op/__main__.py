"""`python -m dsmoe_op COMMAND`."""

import sys

from dsmoe_op.cli import main

if __name__ == "__main__":
    sys.exit(main())
