"""From a recipe to a run: builds the parts, wires them, writes the run folder. Everything else knows only its own part."""
