"""Automatic prefix caching: who holds which prefix. Pure."""
