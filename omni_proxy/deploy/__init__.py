"""Recipes of xPyD deployments, and what is rendered from them."""
