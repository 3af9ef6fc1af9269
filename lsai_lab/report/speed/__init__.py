"""The chapter on the time of a training step: `results` (rows), `ideal` (the ceiling), `figures`, `analysis`, `chapter`."""
