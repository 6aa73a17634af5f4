"""The command line, a module for each family of commands."""

from omni_proxy.cli.command_line import main

__all__ = ["main"]
