"""GGUF files as model folders: the small files that Hugging Face keeps beside the weights, written from the metadata.

Needs the extra `[gguf]` (numpy and the package `gguf`), never torch.
"""
