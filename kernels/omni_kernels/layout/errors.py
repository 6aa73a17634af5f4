"""What is wrong with a question about layouts."""

from __future__ import annotations


class LayoutError(ValueError):
    """A model, device or limit that cannot be planned with; the text is one line that names the field."""
