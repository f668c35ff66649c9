"""The doctor's rules, by the stage of a step in which the fault lies."""

from quintain.monitor.rules.base import Action, Rule, Severity, Sighting, Stage
from quintain.monitor.rules.critic import CRITIC_RULES
from quintain.monitor.rules.optimisation import OPTIMISATION_RULES
from quintain.monitor.rules.reward import REWARD_RULES
from quintain.monitor.rules.rollout import ROLLOUT_RULES

RULES: tuple[Rule, ...] = ROLLOUT_RULES + REWARD_RULES + OPTIMISATION_RULES + CRITIC_RULES

__all__ = ["RULES", "Action", "Rule", "Severity", "Sighting", "Stage"]
