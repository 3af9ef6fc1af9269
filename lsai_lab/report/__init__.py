"""The report kit: records as frames (load), what a notebook shows (show), its style (style), and
the book made of it (to_markdown, render)."""
