"""By what rules requests are served: what the operator has set, in the words of the machine.

Made once by RouterService from the configuration; each part of the dispatcher reads what concerns it.
"""

import math
from dataclasses import dataclass, replace

from pdserve.cluster.config import Admission, Slo
from pdserve.core.batching import Batching
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

    @classmethod
    def of(cls, admission: Admission, slo: Slo, batching: Batching) -> "Rules":
        rules = cls(
            max_attempts=admission.recovery_attempts,
            limits=Limits(max_work_s=admission.max_prompt_work_s),
            policy=Policy(admission.prefill_policy),
            recovery_grace_s=admission.recovery_grace_s,
            ttft_slo_s=slo.ttft_s,
            cooperative=admission.cooperative_prefill == "on",
            handoff_deadline_s=admission.handoff_deadline_s,
        )
        return rules.under(batching)

    def under(self, batching: Batching) -> "Rules":
        """Where a batch runs to its end, the next one gathers on the node, and is not late however long that takes.

        Nor does a decode node compute prompts for others: they would wait there for its batch, and the first token of
        a split cluster would be worse than its prefill nodes make it.
        """
        if batching is Batching.CONTINUOUS:
            return self
        return replace(self, limits=Limits(math.inf, math.inf), handoff_deadline_s=math.inf, cooperative=False)

    @property
    def is_fcfs(self) -> bool:
        """Whether nodes compute prompts in the order in which they come."""
        # Where there is a promise, what has lost it lets others go first.
        return self.policy is Policy.FCFS and self.ttft_slo_s is None
