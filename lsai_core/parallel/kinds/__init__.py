"""The ways of sharing a model among processes that read batches of their own, a file each: what
`parallel.kind` can be."""
