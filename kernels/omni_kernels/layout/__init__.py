"""Which parallel layout serves a model on a set of devices: TP, DP, EP, and how many for prefill and for decode.

Pure arithmetic over published figures of chips and a checkpoint's config.json; nothing of torch. `choose` decides,
`cost` estimates memory and time, `sizes` reads models, `chips` knows devices, `report` prints.
"""

from omni_kernels.layout.chips import CHIPS, Chip, Devices, parse_devices
from omni_kernels.layout.choose import Pinned, Plan, choose
from omni_kernels.layout.cost import Estimate, Layout, Workload
from omni_kernels.layout.errors import LayoutError
from omni_kernels.layout.sizes import PRESETS, ModelSizes, model_sizes

__all__ = [
    "CHIPS",
    "PRESETS",
    "Chip",
    "Devices",
    "Estimate",
    "Layout",
    "LayoutError",
    "ModelSizes",
    "Pinned",
    "Plan",
    "Workload",
    "choose",
    "model_sizes",
    "parse_devices",
]
