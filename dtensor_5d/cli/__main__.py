"""`python -m dtensor_5d.cli`: the same as `dtensor-5d`, where its script is not on the path."""

from __future__ import annotations

import sys

from dtensor_5d.cli import main

if __name__ == "__main__":
    sys.exit(main())
