"""Runs on disk: the directory, its files and its recipe."""
