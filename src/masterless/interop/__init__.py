"""Checkpoints from and to other tools; what they need is imported when it is used."""

from masterless.interop.safetensors import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
