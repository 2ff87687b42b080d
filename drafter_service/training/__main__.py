"""`python -m drafter_service.training`: the same as `outrider train`."""

import sys

from drafter_service.training.cli import main

sys.exit(main())
