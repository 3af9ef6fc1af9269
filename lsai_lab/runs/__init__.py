"""Runs: how a study is planned, executed in processes of their own, recorded and read again."""
