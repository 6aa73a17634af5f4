"""The gateway's configuration: frozen models, a module for each part, and the only reader of files and environment.

Load, validate (also across fields), then never write again.
"""

from omni_proxy.config.discovery import Announcements, Discovery, Dns, Kubernetes
from omni_proxy.config.listen import Admin, Limits, Listen, Timeouts
from omni_proxy.config.models import KvCachePolicy, Model, ScheduleMode
from omni_proxy.config.observing import AccessLog, LogFormat
from omni_proxy.config.reading import ConfigError, load, parse, read_yaml, validated
from omni_proxy.config.scheduling import OrderName, Prewarm
from omni_proxy.config.shown import effective
from omni_proxy.config.whole import Config
from omni_proxy.config.workers import ConnectorName, Health, Worker, WorkerKvEvents, WorkerTls

__all__ = [
    "AccessLog",
    "Admin",
    "Announcements",
    "Config",
    "ConfigError",
    "ConnectorName",
    "Discovery",
    "Dns",
    "Health",
    "Kubernetes",
    "KvCachePolicy",
    "Limits",
    "Listen",
    "LogFormat",
    "Model",
    "OrderName",
    "Prewarm",
    "ScheduleMode",
    "Timeouts",
    "Worker",
    "WorkerKvEvents",
    "WorkerTls",
    "effective",
    "load",
    "parse",
    "read_yaml",
    "validated",
]
