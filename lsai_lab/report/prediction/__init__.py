"""The chapter "Predicted and measured memory"."""
