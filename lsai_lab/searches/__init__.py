"""Searches for the largest batch and the largest model that really train, each try in a process of
its own."""
