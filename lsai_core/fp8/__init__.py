"""Matrix products in fp8: `recipes` says which there are, whether this machine has them, and how a
model is converted."""
