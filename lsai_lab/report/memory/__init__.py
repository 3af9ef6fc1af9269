"""The memory study's chapter: from records to tables (table.py), figures (figures.py) and statements (analysis.py)."""
