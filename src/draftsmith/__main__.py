"""`python -m draftsmith NAME ...`: the console command, for `accelerate launch -m` and `torchrun -m`."""

import sys

from draftsmith.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main())
