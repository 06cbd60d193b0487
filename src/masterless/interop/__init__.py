"""Checkpoints from and to other tools; what they need is imported when it is used."""

from masterless.interop.files import FileError, read_torch
from masterless.interop.optimizers import torch_state
from masterless.interop.safetensors import load_safetensors, save_safetensors

__all__ = ["FileError", "load_safetensors", "read_torch", "save_safetensors", "torch_state"]
