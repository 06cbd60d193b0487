"""Parameters stored quantized: the tensor, how it computes, its pieces, and models made of it."""
