"""`python -m pstar_sim ...` is `pstar ...`."""

import sys

from pstar_sim.cli import main

sys.exit(main())
