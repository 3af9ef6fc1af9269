"""From executed notebooks to one report in HTML and PDF.

`show` and `style` are used inside notebooks; `build.build_report` binds executed notebooks (`bind`), checks every
reference (`check`), and renders (`render`) with Quarto, or with pandoc and typst where Quarto is not installed.
"""
