"""The `context` kind: attention alone over sequences that several processes share, every method at
every length."""
