"""The chapter on distributed attention."""
