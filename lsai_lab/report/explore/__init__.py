"""Explorables: pictures with controls that a reader plays with. `memory`, `ring`, `roofline`,
`step`, `rounding`, `numbers` and `fits` each have a module of JavaScript and a Python module beside
it, which computes the data that it shows."""
