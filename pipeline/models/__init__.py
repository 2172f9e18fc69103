"""How a transformers model is loaded, checked, and its attention replaced."""
