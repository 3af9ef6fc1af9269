"""The fp8 chapter: matrix products, training speed and memory, and the loss."""
