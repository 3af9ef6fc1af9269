"""The chapter on sharding: the same loss, FSDP beside fused attention, scaling, and the largest model."""
