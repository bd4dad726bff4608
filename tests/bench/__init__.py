"""Measurements that make figures of the docs; targets of the Makefile run them."""
