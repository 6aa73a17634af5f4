"""The halves of a gateway, each with all that it is made of. They and `build.py` alone name concrete classes."""

from omni_proxy.halves.front import Front
from omni_proxy.halves.scheduling import Scheduling

__all__ = ["Front", "Scheduling"]
