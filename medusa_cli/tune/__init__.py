"""Tunes a model in a given time: measures the machine, distills, trains, calibrates, and chooses the fastest method."""
