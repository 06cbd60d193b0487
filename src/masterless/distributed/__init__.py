"""Beyond one process: quantized weights and low-bit states under PyTorch's own distributed engine."""
