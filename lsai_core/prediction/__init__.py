"""Memory and time of a training run, predicted without a GPU: see `memory`, `simulate`, `compiled`,
`roofline`."""
