"""`python -m cluster` is the command `chunkserve`."""

import sys

from cluster.cli import main

sys.exit(main())
