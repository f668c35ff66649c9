"""Quintain: online reinforcement learning of language models."""
