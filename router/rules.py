"""By what rules requests are served: what the operator has set, in the words of the machine.

Made once by RouterService from the configuration; each part of the dispatcher reads what concerns it.
"""

from dataclasses import dataclass

from pdserve.core.turns import Policy
from pdserve.router.placement import LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Rules:
    """max_attempts: tries of a request before it is given up; limits: how much a node is given at a time.

    policy: in what order nodes compute their prompts, and in what order they are given them.
    recovery_grace_s: how long queued requests wait for a node that can serve them to come back.
    ttft_slo_s: the promised time to first token, by which nodes order their prompts.
    cooperative: whether decode nodes compute prompts when their first token comes sooner that way.
    handoff_deadline_s: from the first token until the request must have its blocks on the decode node.
    """

    max_attempts: int = 3
    limits: Limits = LIMITS
    policy: Policy = Policy.SHORTEST
    recovery_grace_s: float = 60.0
    ttft_slo_s: float | None = None
    cooperative: bool = True
    handoff_deadline_s: float = 2.0

    @property
    def is_fcfs(self) -> bool:
        """Whether nodes compute prompts in the order in which they come."""
        # Where there is a promise, what has lost it lets others go first.
        return self.policy is Policy.FCFS and self.ttft_slo_s is None
