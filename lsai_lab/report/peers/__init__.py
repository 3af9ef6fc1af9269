"""The chapter on other trainers: what may be compared, and what is shown of it."""
