"""The Ascend backend: torch_npu's own operators behind this package's names. Not run on hardware yet."""
