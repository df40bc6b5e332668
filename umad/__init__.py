"""umad: train, run and measure language models that debate."""

__version__ = "0.1.0.dev0"
