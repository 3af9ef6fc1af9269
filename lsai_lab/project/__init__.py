"""Where a laboratory lies and how its files are read: YAML, names, settings, and the files that a
new one begins with."""
