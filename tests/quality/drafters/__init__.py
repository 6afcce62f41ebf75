"""Experiments with drafters."""
