"""Examination of a run: why is acceptance low, and which command helps?"""
