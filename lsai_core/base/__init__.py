"""What every room stands on: errors in words, files, plugins, the hash of the code, answers kept on
disk, the host's limits."""
