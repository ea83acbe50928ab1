"""Names of the metrics that a training loop reports beside those of its train jobs (`core.training.metrics`).

Kept without torch, so that client and sinks can read them.
"""

from __future__ import annotations

METRICS: dict[str, str] = {
    "rollouts/reward_mean": "mean reward of the step's rollouts, as sampled before the update",
    "rollouts/reward_std": "standard deviation of the same rewards (population)",
    "rollouts/finished": "rollouts that gave a trajectory",
    "rollouts/failed": "rollouts that failed; they are in no mean",
    "seconds/rollouts": "seconds spent on rollouts, those of an interrupted attempt not included",
    "seconds/reward": "seconds spent in the reward function",
    "seconds/train": "seconds from sending the train job to its end",
    "policy_step": "weight updates of the policy after the step",
    "evaluation/mean": "mean reward on the evaluation scenarios",
    "evaluation/ci95_low": "lower end of its 95 % interval",
    "evaluation/ci95_high": "upper end of its 95 % interval",
    "evaluation/failed": "evaluation rollouts that failed",
}
"""Every metric of the loop. A metric is absent, not zero, where it does not apply; `rollout/<name>` are means of the rollouts' own."""

TOKENS_TRAINED = "tokens/trained"
"""The train job's metric that a budget in tokens counts."""
