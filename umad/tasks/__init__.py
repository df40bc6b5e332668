"""Where problems come from: local files, sets known by name on the Hub, the arithmetic generator."""

from umad.tasks.load import GoldCheck, Problems, load_problems

__all__ = ["GoldCheck", "Problems", "load_problems"]
