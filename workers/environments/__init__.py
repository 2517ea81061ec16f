"""Environments of several turns: tools and agents, played in processes that can be killed."""
