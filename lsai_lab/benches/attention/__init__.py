"""The `attention` kind: every attention backend at one set of heads, over lengths and masks: time,
memory, error."""
