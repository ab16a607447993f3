"""`jaxrl` whose single worker hears of commands as it would as one of several processes: what races ends alike."""

from __future__ import annotations

import sys

from jaxrl.__main__ import main
from jaxrl.runtime import rules

rules.lookahead = lambda config, ticks=None: 1  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main())
