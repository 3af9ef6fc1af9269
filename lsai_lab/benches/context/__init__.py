"""The `context` kind: attention alone over sequences that several processes share, every method at every length.

`config` says what is measured, `rank` is what one process does, `timing` how time and overlap are taken; `bench`
goes through the points, keeps each as soon as it is measured, and starts the processes anew after a point that ended them.
"""
