"""The Transformer, layer by layer, with its loss, what it keeps for the backward pass, and its
Hugging Face form."""
