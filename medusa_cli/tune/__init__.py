"""A drafter in a given time: measures the machine, distills, trains, calibrates, and chooses by measured speed."""
