"""Runs on disk: the directory, its files, its recipe."""
