"""Headline statements: how each is computed from the records, and how its result is told."""
