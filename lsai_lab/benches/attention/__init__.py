"""The `attention` kind: every attention backend at one set of heads, over lengths and masks: time, memory, error.

`config` says what is measured, `clock` how time and memory are taken, `errors` what is exact; `bench` puts them together
and keeps every point as soon as it is measured.
"""
