"""`python -m vitascope.cli` is `vitascope`."""

import sys

from vitascope.cli import main

sys.exit(main())
