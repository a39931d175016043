"""How is a step taken? Recipe, data, trainer, checkpoint."""
