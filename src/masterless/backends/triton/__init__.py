"""Steps and decoding on GPUs, in Triton: one family of kernels, composed from codecs and rules at compile time."""
