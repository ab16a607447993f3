"""Liveness: the processes of a run enter phases together, hear of each other, and end together.

`PhaseBarrier` is all that the rest sees. Below it stand `heartbeats` (who is where, and who is silent) and
`failure_propagation` (how all end with one sentence).
"""

from jaxrl.runtime.hosts.liveness.heartbeats import PROGRAM
from jaxrl.runtime.hosts.liveness.phase_barrier import GRACE_S, STREAM, PhaseBarrier

__all__ = ["GRACE_S", "PROGRAM", "STREAM", "PhaseBarrier"]
