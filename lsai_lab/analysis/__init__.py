"""From frames to frames and numbers: summaries over repeats, the ideal step, many nodes."""
