"""The strategies of the papers, one file each. A new one is a new file here, and nothing else changes."""

import importlib
import pkgutil

from coserve.errors import ConfigError
from coserve.schedule.policies.base import POLICIES, Allowance, Policy, View, register

__all__ = ["POLICIES", "Allowance", "Policy", "View", "make_policy", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def make_policy(name: str, **options: object) -> Policy:
    """The policy registered as `name`, built with its own options."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy '{name}'; there are {', '.join(sorted(POLICIES))}")
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise ConfigError(f"policy '{name}' does not take these options: {error}") from error
