"""Benchmarks: questions, decoding methods, interleaved measurement, sweeps, a judge, and reports."""
