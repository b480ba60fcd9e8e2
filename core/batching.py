"""When a request may join those that run on a decode node.

    continuous   whenever there is room: it takes part in the next step (iteration-level scheduling, Orca, Yu et al.,
                 OSDI 2022, section 3.2)
    static       when nothing runs: those that wait and fit begin together, and nobody joins until all have ended
                 (request-level scheduling, what Orca is compared with)

Who yields its blocks has left its batch. Asked by the decode node's Reservations; the router reads from it how much
may wait on a node.
"""

from enum import StrEnum


class Batching(StrEnum):
    CONTINUOUS = "continuous"
    STATIC = "static"

    def is_open(self, num_active: int) -> bool:
        """Whether those that wait may begin beside so many that hold blocks."""
        return self is Batching.CONTINUOUS or num_active == 0
