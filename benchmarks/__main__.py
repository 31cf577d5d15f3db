"""`python -m benchmarks` is `benchmarks/run.py`."""

import sys

from benchmarks.run import main

sys.exit(main())
