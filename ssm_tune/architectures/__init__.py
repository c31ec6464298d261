"""Models from scratch: sizes and dimensions -> a config, and the papers' initialisation."""

from ssm_tune.architectures.dimensions import ARCHITECTURES, Architecture, plan_config
from ssm_tune.architectures.initialization import initialize

__all__ = ["ARCHITECTURES", "Architecture", "initialize", "plan_config"]
